"""Opened models: an engine with its identity, spec and device; one for users' own models; one for a model in several
processes.

A user's own model has no KV cache. Its requests take turns of one token, each a pass over the full text by the
arithmetic of ``phalanx generate``. Nothing is batched, so it serves only a few clients. A text does not depend on the
others.

A model that is too large for one process or machine is divided by layers, or within each layer. The engine runs with
the first layers or shares. Every process reads its part of the same step. The hash of the weights is made of all
their digests, so it is that of the full model. Exact numerics need one id in all processes: then tokens have the bits
of one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.committed.digest import TensorDigest, combine
from phalanx.checkpoint.committed.restore import candidates
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.huggingface.folders import served_context
from phalanx.checkpoint.interop.huggingface.stored_folder import weights_tier
from phalanx.checkpoint.pack.reader import is_pack
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.hardware.local.device import gpus
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer, logits
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.kinds.block import without_predictions
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.wire.messages import WireError
from phalanx_serve.engine.engine import Engine as PagedEngine
from phalanx_serve.engine.sampler import draw, likeliest
from phalanx_serve.http.worker import EngineInterface, ModelIdentity, Streaming
from phalanx_serve.kv_cache.memory import KVFormatName
from phalanx_serve.numerics import bits_of, computing_on, device_named, numerics_id
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.stages import messages as m
from phalanx_serve.stages.door import Door, PartNotOpenedError, await_stages, opened_stages, start_stages
from phalanx_serve.stages.far_layers import FarShare, FarShares, FarStage, FarStages
from phalanx_serve.stages.messages import StageLink
from phalanx_serve.stages.shares import (
    Share,
    checkpoint_name,
    divided,
    require_shares,
    restored_part,
    restored_share,
)
from phalanx_serve.traffic import events

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OpenedEngine:
    """Engine of a run or a pack, with its identity."""

    engine: EngineInterface
    identity: ModelIdentity
    spec: ModelSpec
    step: int | None = None
    """Step of the weights; None for a pack."""
    note: str = ""
    """A note for the person who started the server."""
    streaming: Callable[[], Streaming] | None = None
    """Counts of streaming so far, if weights are streamed."""
    trouble: Callable[[], str] | None = None
    """Returns why the engine can no longer compute, or an empty string; set if it depends on other processes. Any
    thread may call it.
    """
    device: torch.device = _CPU
    """Device of the engine."""


def device_of(served: ServedRun, number: int = 0) -> torch.device:
    """Return the device of the serving process with this ``number`` on this machine. Raises ServeError."""
    return device_named(served.device, gpus(), only_cpu=served.only_cpu, number=number)


def context_of(served: ServedRun, run: RunSpec, folder: Path) -> int:
    """Return the most tokens of a request: the requested number, else that of the published model that the run in
    ``folder`` comes from, else the training sequence length.

    Streaming reserves memory for a full text, so its default is the sequence length. Raises HuggingFaceError for a
    damaged ``config.json``.
    """
    sequence = run.train.seq_len
    if served.context or served.stream:
        return served.context or sequence
    return served_context(RunDirectory(folder).published, run.model, sequence) or sequence


# The engine of turns.


class TurnsEngine:
    """Engine whose requests take turns of one token."""

    def __init__(self, model: Chain, context: int, *, kept: KVFormatName = "compute") -> None:
        """Begin without requests, with texts of at most ``context`` tokens.

        Raises ServeError if ``kept``, the requested format of keys and values, is another than that of the
        computation.
        """
        if kept != "compute":
            raise events.ServeError(
                f"--kv {kept}: a model of your own (model.factory) keeps no keys and values; leave it out"
            )
        self._model, self._context = model, context
        self._running: dict[str, Iterator[events.EngineOutput]] = {}
        self._cancelled: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._running or self._cancelled)

    def pages(self) -> tuple[int, int]:
        """Return (0, 0), the KV-cache pages in use and in all: this engine has no KV cache."""
        return 0, 0

    def drafts(self) -> tuple[int, int]:
        """Return (0, 0): a user's own model predicts one token."""
        return 0, 0

    def submit(self, request: events.Request) -> None:
        """Add a request. Raises GenerationRequestError for an id in use, or if prompt and new tokens exceed the context;
        nothing else is checked.
        """
        if request.id in self._running:
            raise events.GenerationRequestError(
                f"a request {request.id!r} is being computed: give each its own id", "id"
            )
        if len(request.prompt) + request.max_tokens > self._context:
            raise events.GenerationRequestError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones do not fit into the "
                f"context of {self._context}",
                "max_tokens",
            )
        self._running[request.id] = turns(self._model, request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is here; the next step returns its ``Ended``."""
        if self._running.pop(request_id, None) is not None:
            self._cancelled.append(request_id)

    def step(self) -> list[events.EngineOutput]:
        """Return the next output of each request, usually a token, after an ``Ended`` for each canceled one.

        A request that fails or ends has an ``Ended``, and is removed. Raises PartLostError if a GPU no longer
        answers.
        """
        outputs: list[events.EngineOutput] = [events.Ended(name, "cancelled") for name in self._cancelled]
        self._cancelled.clear()
        for name, text in list(self._running.items()):
            try:
                output = next(text)
            except events.PartLostError:
                raise
            except Exception as error:  # One request's failure is sent to its client, and ends no other.
                output = events.Ended(name, "error", str(error))
            outputs.append(output)
            if isinstance(output, events.Ended):
                del self._running[name]
        return outputs


def turns(model: Chain, request: events.Request) -> Iterator[events.EngineOutput]:
    """Yield the outputs of a request, with a pass over the full text for each token: scores of the prompt if
    requested, tokens up to a stop token or ``max_tokens``, and ``Ended``.
    """
    device, text = next(model.parameters()).device, list(request.prompt)
    for index in range(request.max_tokens):
        last_alone = index > 0 or not request.prompt_logprobs
        readout = partial(
            _scores, rows=slice(-1, None) if last_alone else slice(None), cap=model.spec.logit_cap
        )
        # Not around the loop: a generator would leave the mode switched on in its consumer.
        with computing_on(device, f"a pass over {len(text)} tokens"), torch.no_grad():
            scores = model(torch.tensor([text], device=device), readout=readout)[0]
            scored = None if last_alone else _scored(request, scores)
            token = draw(scores[-1], request.sampling, len(text))
            drawn = _token(request, index, token, scores[-1])
        if scored is not None:
            yield scored
        if token in request.stop_tokens:
            yield events.Ended(request.id, "stop")
            return
        yield drawn
        text.append(token)
    yield events.Ended(request.id, "length")


def _scores(hidden: torch.Tensor, weight: torch.Tensor, *, rows: slice, cap: float) -> torch.Tensor:
    """Return the logits of some ``rows`` of hidden states ``(1, rows, dim)``."""
    return logits(hidden[:, rows], weight, cap)


def _scored(request: events.Request, scores: torch.Tensor) -> events.PromptScored:
    """Return the log-probabilities of a prompt's tokens but the first, and the likeliest if requested.

    ``scores`` are its logits ``(prompt, vocab)``; those of each token score the next.
    """
    logprobs = scores[:-1].float().log_softmax(-1)  # (prompt - 1, vocab)
    of = torch.tensor(request.prompt[1:], device=scores.device)  # (prompt - 1,)
    scored = tuple(logprobs.gather(1, of[:, None])[:, 0].tolist())
    return events.PromptScored(
        request.id, scored, _tops(request, logprobs) if request.top_logprobs > 0 else ()
    )


def _tops(request: events.Request, logprobs: torch.Tensor) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return the likeliest tokens of each row, without ids that may not be drawn."""
    rows = logprobs[:, : request.sampling.vocab_size or None]
    return tuple(likeliest(row, request.top_logprobs) for row in rows)


def _token(request: events.Request, index: int, token: int, scores: torch.Tensor) -> events.Token:
    """Return a token; with its log-probability and the likeliest ones unless ``top_logprobs`` is below 0."""
    if request.top_logprobs < 0:
        return events.Token(request.id, index, token)
    logprobs = scores.float().log_softmax(-1)
    (top,) = _tops(request, logprobs[None])
    return events.Token(request.id, index, token, float(logprobs[token]), top)


# The engine of any model.


def engine_over(
    model: Transformer | Chain,
    spec: ModelSpec,
    served: ServedRun,
    run: RunSpec,
    context: int,
    digest: str,
    *,
    pages: int = 0,
    texts: int = 0,
    drafts: int = 0,
    far: FarStages | FarShares | None = None,
) -> tuple[EngineInterface, ModelIdentity]:
    """Return the engine that computes with the weights in ``model``, named ``digest``, as ``served`` describes; and its identity.

    ``pages``, ``texts``, ``drafts`` and ``far`` are those of ``PagedEngine``. Raises ServeError.
    """
    engine: EngineInterface
    if isinstance(model, Transformer):
        engine = paged = PagedEngine(
            model,
            spec,
            memory_bytes=served.memory_bytes,
            pages=pages,
            texts=texts,
            rows=served.rows,
            numerics=served.numerics,
            context=context,
            drafts=drafts,
            kept=served.kept,
            far=far,
            weights_id=digest,
        )
        computed = paged.numerics_id
    else:
        engine = TurnsEngine(model, context, kept=served.kept)
        computed = numerics_id("turns", getattr(torch, served.dtype), device=device_of(served))
    bits = bits_of(served.numerics, run, served.dtype, kept=served.kept)
    return engine, ModelIdentity(digest, computed, context, bits)


# A model divided over several processes.


def open_divided(served: ServedRun, tell: Callable[[str], None]) -> OpenedEngine:
    """Open the engine of a run whose layers are divided over several processes, or each layer is.

    Without a step, a damaged newest step is skipped and reported by ``tell``, as often as needed; a given step is
    not. Raises ServeError, and the errors of ``restored_part``.
    """
    run = read_resolved(RunDirectory(served.path))
    parts = _divided(served, run.model)
    step = newest_step(served.path) if served.step is None else served.step
    while True:
        try:
            return _opened_at(step, served, parts, run, tell)
        except (CheckpointError, PartNotOpenedError) as error:
            older = older_than_damaged(served.path, step) if served.step is None else None
            if older is None:
                raise
            tell(f"step {step} cannot be read and is skipped: {error}")
            step = older


def _opened_at(
    step: int, served: ServedRun, parts: _Stages | _Shares, run: RunSpec, tell: Callable[[str], None]
) -> OpenedEngine:
    """Start or await the other processes and open ``step`` with them.

    Closes them if that fails. Raises ServeError, and the errors of reading.
    """
    door: Door
    if served.stages_at:
        door = await_stages(served.stages_at, Path(served.token_file), parts.count - 1, tell)
    else:
        door = start_stages(parts.count - 1, _divided_threads(parts.count))
    try:
        return _opened(served, door, parts, step, run)
    except events.PartLostError as error:
        door.close()
        raise events.ServeError(str(error)) from error
    except BaseException:
        with suppress(OSError):
            door.close()
        raise


def require_divisible(served: ServedRun) -> None:
    """Raise ServeError, before any process starts, for a run whose model cannot be divided as requested."""
    if served.tensor > 1 or served.stages > 1:
        _divided(served, read_resolved(RunDirectory(served.path)).model)


def _divided(served: ServedRun, model: ModelSpec) -> _Stages | _Shares:
    """Return how the model is divided: by layers or within each. Raises ServeError for options or a model that cannot be."""
    _require_dividable(served)
    if model.factory:
        raise events.ServeError(
            "a model of your own (model.factory) cannot be divided: serve it without --pipeline and --tensor"
        )
    spec = resolve(without_predictions(model))
    if served.tensor > 1:
        require_shares(spec, served.tensor)
        return _Shares(served.tensor)
    return _Stages(divided(spec, served.stages))


@dataclass(frozen=True)
class _Stages:
    """Division by layers."""

    layers: list[range]

    @property
    def count(self) -> int:
        return len(self.layers)

    def opens(self, served: ServedRun, step: int) -> list[m.OpenStage]:
        """Return the message that opens each other stage with its layers; this process has stage 0."""
        return [
            m.OpenStage(served, step, stage, part.start, part.stop)
            for stage, part in enumerate(self.layers)
            if stage
        ]

    def own(self, run_dir: Path, step: int, dtype: torch.dtype) -> _Restored:
        return restored_part(run_dir, step, self.layers[0], dtype)

    def far(self, links: list[StageLink], spec: ModelSpec) -> tuple[FarStages, list[FarStage]]:
        pairs = zip(self.layers[1:], links, strict=True)
        stages = [FarStage(n, part, link) for n, (part, link) in enumerate(pairs, 1)]
        return FarStages(stages, spec, max(map(len, self.layers))), stages

    def note(self, far: Sequence[FarStage | FarShare]) -> str:
        own = f"layers {self.layers[0].start} to {self.layers[0].stop - 1} here"
        return f"{self.count} stages: {'; '.join([own, *map(str, far)])}"


@dataclass(frozen=True)
class _Shares:
    """Division within each layer."""

    count: int

    def opens(self, served: ServedRun, step: int) -> list[m.OpenStage]:
        return [m.OpenStage(served, step, number, 0, 0, self.count) for number in range(1, self.count)]

    def own(self, run_dir: Path, step: int, dtype: torch.dtype) -> _Restored:
        return restored_share(run_dir, step, Share(0, self.count), dtype)

    def far(self, links: list[StageLink], spec: ModelSpec) -> tuple[FarShares, list[FarShare]]:
        shares = [FarShare(Share(n, self.count), link) for n, link in enumerate(links, 1)]
        return FarShares(shares, spec), shares

    def note(self, far: Sequence[FarStage | FarShare]) -> str:
        return f"{self.count} shares of each layer: the first here; {'; '.join(map(str, far))}"


_Restored = tuple[Transformer, ModelSpec, dict[str, TensorDigest]]


def _opened(served: ServedRun, door: Door, parts: _Stages | _Shares, step: int, run: RunSpec) -> OpenedEngine:
    """Admit the other processes and open the engine over them. Closes their links if that fails."""
    links: list[StageLink] = door.admit(parts.count - 1)
    try:
        return _over(links, served, parts, step, run)
    except BaseException:
        for link in links:
            link.close()
        raise


def _over(
    links: list[StageLink], served: ServedRun, parts: _Stages | _Shares, step: int, run: RunSpec
) -> OpenedEngine:
    """Let each process read its layers of ``step``, and return the engine over all.

    Reads this process's own layers meanwhile. Raises PartNotOpenedError if another process cannot read its layers,
    ServeError if checkpoints, or exact numerics, differ, and the errors of reading.
    """
    dtype = getattr(torch, served.dtype)
    for link, opening in zip(links, parts.opens(served, step), strict=True):
        try:
            link.send(opening)  # all read at the same time
        except WireError as error:
            raise events.ServeError(
                f"the process at {link.peer} ended before it opened its layers: {error}"
            ) from error
        link.expect_life(served.silence_s)
    model, spec, own = parts.own(served.path, step, dtype)
    ready = opened_stages(links)
    digests = dict(own)
    for stage in ready:
        digests |= {name: TensorDigest(d.dtype, d.shape, d.sha256) for name, d in stage.digests.items()}
    layers, far = parts.far(links, spec)
    digest, context = combine(digests)[:16], context_of(served, run, served.path)
    engine, identity = engine_over(model, spec, served, run, context, digest, far=layers)
    checkpoint = checkpoint_name(served.path, step)
    for process, stage in zip(far, ready, strict=True):
        if stage.checkpoint != checkpoint:
            raise events.ServeError(
                f"{process} has another checkpoint of step {step} ({stage.checkpoint}) than this process ({checkpoint}): give every process the same run"
            )
        if served.numerics == "exact" and stage.numerics_id != identity.numerics_id:
            raise events.ServeError(
                f"{process} computes by numerics {stage.numerics_id}, and this process by {identity.numerics_id}: they would not give the bits of one; "
                "install the same release on all machines"
            )
    return OpenedEngine(engine, identity, spec, step=step, note=parts.note(far), trouble=layers.trouble)


def _divided_threads(processes: int) -> dict[str, str]:
    """Divide this machine's processors among ``processes``, of which this is one; return the environment of the
    others.

    Sets this process's number of threads. If ``OMP_NUM_THREADS`` is set, it holds for each process, and nothing is
    changed.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    threads = threads_of_each(processes)
    torch.set_num_threads(threads)
    return {"OMP_NUM_THREADS": str(threads)}


def threads_of_each(processes: int) -> int:
    """Return the number of threads with which so many processes have this machine's processors, one at least."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _require_dividable(served: ServedRun) -> None:
    """Raise ServeError if a divided model is to be streamed, a pack or drafting, or is divided both ways."""
    if served.tensor > 1 and served.stages > 1:
        raise events.ServeError("--tensor shares out each layer, and --pipeline the layers: give one of them")
    if served.stream or is_pack(served.path):
        raise events.ServeError(
            "--pipeline and --tensor divide the model of a run directory: give that, without --stream, and no pack"
        )
    if served.drafts:
        raise events.ServeError(
            f"--drafts {served.drafts}: a model that is divided over processes drafts nothing: leave it out"
        )


def newest_step(run_dir: Path) -> int:
    """Return the newest committed step.

    Raises RunDirectoryError if there is none. A running run may commit another one a moment later.
    """
    steps = candidates(weights_tier(RunDirectory(run_dir)))
    if not steps:
        raise RunDirectoryError(f"{run_dir}: no checkpoint is committed; let the run save one first")
    return steps[0]


def older_than_damaged(run_dir: Path, step: int) -> int | None:
    """Return the newest step before ``step`` if ``step`` is damaged or missing, which a full read detects.

    Return None if there is none, if the step is intact, or if the run has no folder of checkpoints.
    """
    root = RunDirectory(run_dir).checkpoints
    if not root.is_dir():  # a tier would make it
        return None
    steps = candidates(DiskTier(root))
    # Verification also fails if it was deleted meanwhile.
    if step in steps and not verify(root, step):
        return None
    return next((older for older in steps if older < step), None)
