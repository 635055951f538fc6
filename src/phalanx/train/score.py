"""Log-probabilities of given tokens, as the trainer computes them: the reference for a server's numbers.

A text is a row of a micro-batch of the run's own shape, padded to the training sequence, one document; it goes through the module
that the trainer builds and the arithmetic of the loss (``phalanx.train.step.loss``). On a CPU all is computed by portable kernels
(``phalanx.hardware.portable``), whatever the run was trained with, so a text's bits do not depend on the texts beside it. On a GPU, and for a model of
the user's own, each text has a micro-batch of its own, with padding in the other rows, and experts have independent rows
(``phalanx.model.layers.moe``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from phalanx.checkpoint.committed.restore import Rows, restore_weights
from phalanx.checkpoint.interop.huggingface.stored_folder import weights_tier
from phalanx.hardware.local.device import brought, fetched, on_gpu
from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.model.custom import Chain
from phalanx.model.layers.moe import make_rows_independent, routers
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import read_unchanged
from phalanx.run.kinds.block import without_predictions
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.rules import NotPortableError
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.compose import compute_dtype, whole_model
from phalanx.train.evaluation.scoring import micro_batch, micro_batch_rows, padded_noise, scores_of_sequences
from phalanx.train.evaluation.tasks import ScoredSequence, SequenceScore
from phalanx.train.step.loss import IGNORE, token_scores

# A run's model with the weights of a step, for code that computes with it without training.


def restored_model(
    run_dir: Path,
    step: int | None,
    *,
    seq_len: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ahead: bool = False,
    cut: Callable[[Transformer], Mapping[str, Rows]] | None = None,
) -> tuple[Transformer | Chain, ModelSpec, int]:
    """Return the model with the weights of ``step``, or of the newest step that can be read; its resolved description;
    and the step.

    Reads ``run.toml`` and of a checkpoint only the weights (fp32 there, ``dtype`` here; routers' biases stay fp32).
    Heads that predict further ahead are left out, unless ``ahead`` is set.

    ``seq_len`` is the length of the sequences that each call has a part of; 0 if a call has them from their beginning.
    ``cut`` removes parts of the model before anything is read, and returns the tensors of which it has left some rows.

    Raises RunDirectoryError if the run has no checkpoint, its run file was changed or has no vocabulary size, or its
    model cannot be cut; NoSuchStepError; and the errors of ``restore``.
    """
    # The checkpoint's names are the same without what predicts further ahead.
    directory = RunDirectory(run_dir)
    recorded = read_unchanged(directory)
    spec = resolve(recorded.model if ahead else without_predictions(recorded.model))
    if not spec.vocab_size:
        raise RunDirectoryError(
            f"{directory.run_file}: model.vocab_size is 0; give a run directory, whose run.toml has it filled in"
        )
    tier = weights_tier(directory)
    parts: Mapping[str, Rows] = {}
    with torch.device("meta"):
        model = whole_model(spec, seq_len)
        if cut is not None:
            if not isinstance(model, Transformer):
                raise RunDirectoryError(
                    f"{directory.run_file}: model.factory makes a model that cannot be cut"
                )
            parts = cut(model)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    for _, router in routers(model):
        # fp32, like all of the choice of experts, in every compute dtype.
        router.bias = None if router.bias is None else router.bias.float()
    return model, spec, restore_weights(tier, run_dir, model, step, parts)


Compute = Literal["fp32", "bf16"]
DTYPES: dict[Compute, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The formats that can be computed in."""


class ScoreError(ValueError):
    """A text that cannot be scored: which, why, and what to do."""


class Scorer:
    """A run's model, ready to score texts."""

    def __init__(self, spec: RunSpec, model: Transformer | Chain, step: int = 0) -> None:
        """Take a full ``model`` of a resolved ``spec``, in the format to compute in. Its gradients are switched off.

        A ``Transformer`` on a CPU switches the process to exact scoring; any other model's rows are made independent. Raises
        NotPortableError.
        """
        self.spec, self.step = spec, step
        self._model = model.requires_grad_(False).eval()
        self._compute: Compute = "bf16" if next(model.parameters()).dtype == torch.bfloat16 else "fp32"
        self.device = next(model.parameters()).device
        """Where it computes."""
        self.is_exact = isinstance(model, Transformer) and self.device.type == "cpu"
        """True if a text's bits depend on the text and the weights alone, as those of exact serving do."""
        if self.is_exact:
            begin_scoring()
        else:
            make_rows_independent(model)
        self.note = other_arithmetic(spec, self._compute, on_gpu=on_gpu(self.device))
        """One sentence if the run's own steps computed otherwise, else empty."""

    @classmethod
    def of_run(
        cls,
        run_dir: Path,
        step: int | None = None,
        dtype: Compute | None = None,
        device: torch.device | str = "cpu",
    ) -> Scorer:
        """Return a scorer with the model of a run and the weights of ``step``, else of the newest step that can be read, on
        ``device``.

        Raises RunDirectoryError where the run has no checkpoint, NoSuchStepError, NotPortableError, and the errors of ``restore``.
        """
        spec = read_resolved(RunDirectory(run_dir))
        computed = DTYPES[dtype] if dtype else compute_dtype(spec)
        model, _, restored = restored_model(
            run_dir, step, seq_len=spec.train.seq_len, device=device, dtype=computed
        )
        return cls(spec, model, restored)

    @property
    def dtype(self) -> torch.dtype:
        """The format computed in."""
        return DTYPES[self._compute]

    @property
    def length(self) -> int:
        """The most tokens of a text: as many as a training sequence reads."""
        return self.spec.train.seq_len

    def score(
        self, texts: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
    ) -> list[Tensor]:
        """Return for each text the log-probabilities ``(n - 1,)``, fp32, nats, of its tokens behind the first.
        ``progress`` receives the number of texts scored so far, after each micro-batch.

        Raises ScoreError before anything is computed for a text that cannot be scored, and afterwards for results
        that are not finite.
        """
        for number, text in enumerate(texts, 1):
            self._require(text, number)
        sequences = [
            ScoredSequence(tuple(text), len(text) - 1, number, 0) for number, text in enumerate(texts)
        ]
        scores = self.score_sequences(sequences, progress)
        return [torch.tensor(score.log_probabilities, dtype=torch.float32) for score in scores]

    def score_sequences(
        self,
        sequences: Sequence[ScoredSequence],
        progress: Callable[[int], None] | None = None,
        noise: Tensor | None = None,
    ) -> list[SequenceScore]:
        """Return the scores of sequences of at most ``length + 1`` tokens, as an evaluation of the run computes them.
        Exact scoring computes a micro-batch at once, any other one sequence at a time.

        ``progress`` is as for ``score``, and ``noise`` ``(sequences, vocab)`` as for ``token_scores``. Raises
        ScoreError for log-probabilities that are not finite.
        """
        rows = micro_batch_rows(self.spec)
        together = rows if self.is_exact else 1
        results: list[SequenceScore] = []
        with torch.no_grad(), _as_trained(self.spec):
            for first in range(0, len(sequences), together):
                own = sequences[first : first + together]
                samples, targets = micro_batch(own, rows, self.length)
                added = None if noise is None else padded_noise(noise, first, len(own), rows)
                scores = self._token_scores(samples[:, :-1], targets, added)  # (2, rows, seq)
                results += scores_of_sequences(own, scores[:, targets != IGNORE])
                if progress is not None:
                    progress(len(results))
        for number, values in enumerate(results, 1):
            if not all(map(math.isfinite, values.log_probabilities)):
                raise ScoreError(
                    f"text {number}: its log-probabilities are not finite (NaN or infinite): the weights are, or too large for the "
                    "format computed in; take an earlier step or --dtype float32"
                )
        return results

    def _token_scores(self, tokens: Tensor, targets: Tensor, noise: Tensor | None) -> Tensor:
        """Run the model on ``tokens`` ``(rows, seq)``. Return, on the host, ``(2, rows, seq)``: the loss of each of
        ``targets``, and the most probable token with ``noise`` ``(rows, vocab)`` added.
        """
        tokens, targets = brought(tokens, self.device), brought(targets, self.device)
        noise = None if noise is None else brought(noise, self.device)
        positions = torch.arange(self.length, device=self.device)
        cap, chunk = self.spec.model.logit_cap, self.spec.train.loss_chunk

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            return token_scores(hidden, weight, targets, chunk, cap=cap, noise=noise)

        return torch.from_numpy(fetched(self._model(tokens, readout, positions=positions)))

    def _require(self, text: Sequence[int], number: int) -> None:
        """Raise ScoreError if a text has fewer than two tokens, more than ``length``, or one outside the vocabulary. ``number``
        names it."""
        vocab = self.spec.model.vocab_size
        if len(text) < 2:
            finding = "is empty" if not text else "is one token, and nothing is before it"
            raise ScoreError(f"text {number} {finding}: a text needs at least two tokens")
        if len(text) > self.length:
            raise ScoreError(
                f"text {number} has {len(text)} tokens, and the run was trained on sequences of {self.length} (train.seq_len): "
                "cut it into shorter texts"
            )
        unknown = next((token for token in text if not 0 <= token < vocab), None)
        if unknown is not None:
            raise ScoreError(
                f"text {number}: token id {unknown} is outside the model's vocabulary of {vocab}: encode with the run's own tokenizer"
            )


def begin_scoring() -> None:
    """Switch this process to portable kernels. Raises NotPortableError, with scoring elsewhere as its remedy, if they
    are not possible here.
    """
    try:
        begin_portable()
    except NotPortableError as error:
        raise NotPortableError(
            error.reason, "score on another machine, or on a GPU (--device cuda)"
        ) from error


@contextmanager
def _as_trained(spec: RunSpec) -> Iterator[None]:
    """Context with the run's number of threads and deterministic kernels, and the settings of before afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(spec.runtime.threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# Reasons why scores differ by roundings from the numbers of the run's own steps, in one sentence.


def other_arithmetic(spec: RunSpec, compute: str, *, on_gpu: bool = False) -> str:
    """Return a sentence on why scores in the format ``compute`` may differ by roundings from the numbers that the
    run's steps computed; empty if they do not.
    """
    reasons = list(_reasons(spec, compute, on_gpu=on_gpu))
    if not reasons:
        return ""
    if on_gpu:
        where = "GPU, with rows that are independent of each other"
    else:
        where = "CPU" if spec.model.factory else "CPU with portable numerics"
    return (
        f"these are not bit by bit the numbers of the run's own steps, which computed {_joined(reasons)}: "
        f"scores come of the whole model, uncompiled, on one {where}"
    )


def _joined(words: list[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def _reasons(spec: RunSpec, compute: str, *, on_gpu: bool) -> Iterator[str]:
    """Yield a clause for each way in which the run's own steps computed otherwise: device, kernels, formats, experts'
    rows, compilation, document masks, sums over ranks, pieces.
    """
    model, parallel = spec.model, spec.parallel
    if spec.runtime.device == "cuda" and not on_gpu:
        yield "on GPUs (runtime.device)"
    elif spec.runtime.device == "cpu" and on_gpu:
        yield "on CPUs (runtime.device)"
    elif spec.runtime.numerics == "native" and not on_gpu and not model.factory:
        yield 'with kernels of their processor (runtime.numerics = "native")'
    if model.factory:
        yield "a module of the user's own (model.factory), whose rows may depend on those beside them"
    if spec.precision.compute != compute:
        yield f"in {spec.precision.compute} (precision.compute)"
    if spec.precision.matmul != "compute":
        yield f"products of 8-bit operands (precision.matmul = {spec.precision.matmul!r})"
    if model.moe is not None and spec.precision.rows == "any" and on_gpu:
        yield 'each expert\'s rows without padding (precision.rows = "any")'
    if spec.runtime.compile:
        yield "with compiled blocks (runtime.compile)"
    if spec.train.document_mask:
        yield "attention for each document by itself (train.document_mask)"
    for path, degree in (
        ("parallel.context", parallel.context),
        ("parallel.tensor", parallel.tensor),
        ("parallel.expert_tensor", parallel.expert_tensor),
    ):
        if degree > 1:
            yield f"sums over {degree} ranks ({path})"
    for path, count in (("model.lanes", model.lanes), ("model.context_tiles", model.context_tiles)):
        if count:
            yield f"in {count} pieces ({path})"
