"""Forward passes of an evaluation, on any layout: scores of sequences, the held-out loss, and text after given prompts.

A score has the log-probabilities of a sequence's tokens, and the tokens that greedy decoding would choose.

Sequences are cut into micro-batches of the run's shape, in their order, and dealt to the data-parallel ranks in turn. What is summed
over ranks has one term that is not zero, so a score has the bits of the forward pass, whatever rank computed it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.reading.dataset import RunData
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.hardware.local.device import brought
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.reduction.data_parallel import DataParallel, reshard
from phalanx.run.spec import RunSpec
from phalanx.train.evaluation.tasks import Continuation, Prompt, ScoredSequence, SequenceScore
from phalanx.train.step.loss import IGNORE
from phalanx.train.step.slot import SlotRunner
from phalanx.train.step.state import Built

Batch = TypeVar("Batch")


class EvaluationStoppedError(Exception):
    """A rank received a request to stop during an evaluation. All ranks raise it after the same round of batches."""


def micro_batch_rows(spec: RunSpec) -> int:
    """Return the number of sequences in a micro-batch."""
    return spec.train.micro_batch_size or spec.train.batch_size // spec.train.slots


def rounds(
    model: DataParallel,
    batches: Sequence[Batch],
    on_progress: Callable[[int], None],
    stops: Callable[[], bool],
) -> Iterator[tuple[int | None, Batch]]:
    """Deal batches to the data-parallel ranks in turn. Yield this rank's batch of each round, with its number. At the
    end, reshard the weights that forward passes gathered.

    A rank without a batch gets the first again, numbered None: under FSDP every forward pass is a collective.
    ``on_progress`` is called after each round with the number of batches that all ranks have computed. If ``stops()``
    is then true on some rank, ``EvaluationStoppedError`` is raised on all.
    """
    mesh = model.mesh
    for first in range(0, len(batches), mesh.layout.data_ranks):
        number = first + mesh.data_rank
        is_own = number < len(batches)
        yield (number, batches[number]) if is_own else (None, batches[0])
        on_progress(min(first + mesh.layout.data_ranks, len(batches)))
        if any_rank(stops(), mesh):
            reshard(model.parts)
            raise EvaluationStoppedError
    # Leaves shards behind and not gathered weights, for the next forward pass and for everything that reads parameters.
    reshard(model.parts)


def micro_batch(sequences: Sequence[ScoredSequence], rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return samples ``(rows, seq_len + 1)`` and targets ``(rows, seq_len)`` of at most ``rows`` sequences. Only the
    scored tokens at a sequence's end are targets; padding and all other positions are ``IGNORE``.
    """
    samples = torch.zeros(rows, seq_len + 1, dtype=torch.int64)
    targets = torch.full((rows, seq_len), IGNORE)
    for row, sequence in enumerate(sequences):
        count = len(sequence.tokens)
        samples[row, :count] = torch.tensor(sequence.tokens)
        scored = slice(count - 1 - sequence.scored, count - 1)
        targets[row, scored] = samples[row, 1:][scored]
    return samples, targets


def scores_of_sequences(sequences: Sequence[ScoredSequence], scores: Tensor) -> list[SequenceScore]:
    """Return the score of each sequence. ``scores`` ``(2, tokens)`` has the loss and the most probable token of all
    scored tokens, sequence after sequence (``token_scores``). Losses become log-probabilities.
    """
    counts = [sequence.scored for sequence in sequences]
    losses, chosen = scores.double().cpu()
    # (scored tokens,) of each sequence
    pairs = zip(torch.split(losses, counts), torch.split(chosen.long(), counts), strict=True)
    return [
        SequenceScore(
            tuple((-loss).tolist()),
            tuple(tokens.tolist()),
            is_greedy=tuple(tokens.tolist()) == sequence.tokens[-sequence.scored :],
        )
        for sequence, (loss, tokens) in zip(sequences, pairs, strict=True)
    ]


@torch.no_grad()
def score_sequences(
    model: DataParallel,
    runner: SlotRunner,
    spec: RunSpec,
    sequences: Sequence[ScoredSequence],
    on_progress: Callable[[int, int], None] = lambda _done, _sequences: None,
    stops: Callable[[], bool] = lambda: False,
    noise: Tensor | None = None,
) -> list[SequenceScore]:
    """Return the score of each sequence, the same on every rank. A collective.

    ``noise`` ``(sequences, vocab)``, fp32, on the host, is added to the logits before the most probable token is chosen.
    ``on_progress`` is called after each round of micro-batches with the number of sequences that all ranks have scored, and of all. If
    ``stops()`` is true on some rank after a round, ``EvaluationStoppedError`` is raised.
    """
    mesh, rows, seq_len = model.mesh, micro_batch_rows(spec), spec.train.seq_len
    batches = [sequences[first : first + rows] for first in range(0, len(sequences), rows)]
    begins = list(itertools.accumulate((sequence.scored for sequence in sequences), initial=0))
    results = torch.zeros(2, begins[-1], device=mesh.device)
    # Each sequence is one document, also if it contains end-of-document tokens.
    one_document = replace(spec.train, targets_within_documents=False, document_mask=False)
    losses = replace(runner.losses, spec=replace(runner.losses.spec, train=one_document))

    def report(computed: int) -> None:
        on_progress(min(computed * rows, len(sequences)), len(sequences))

    for number, own in rounds(model, batches, report, stops):
        samples, targets = micro_batch(own, rows, seq_len)
        batch = losses.cut(samples, targets)
        if noise is not None:
            added = padded_noise(noise, (number or 0) * rows, len(own), rows)
            batch = replace(batch, noise=brought(added, mesh.device))
        scores = runner.score(batch)  # (2, rows, this rank's part of the sequence)
        if number is not None and runner.reports:
            first = begins[number * rows]
            places = _places(targets, first)[:, batch.positions.cpu()].to(mesh.device)
            results[:, places[places >= 0]] = scores[:, places >= 0]
    dist.all_reduce(results)
    return scores_of_sequences(sequences, results)


def padded_noise(noise: Tensor, first: int, count: int, rows: int) -> Tensor:
    """Return ``count`` rows of ``noise`` ``(sequences, vocab)`` from ``first`` on, and zeros up to ``rows`` rows: those of one batch."""
    return F.pad(noise[first : first + count], (0, 0, 0, rows - count))


def _places(targets: Tensor, first: int) -> Tensor:
    """Number the scored tokens of a micro-batch ``(rows, seq)`` row by row, from ``first``; -1 for all others."""
    scored = targets != IGNORE
    places = torch.full_like(targets, -1)
    places[scored] = torch.arange(first, first + int(scored.sum()))
    return places


def any_rank(here: bool, mesh: Mesh) -> bool:
    """Return True on every rank if ``here`` is true on one. A collective."""
    if mesh.ranks == 1:
        return here
    flag = torch.tensor(float(here), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


# The loss on held-out text, the same number on any fleet.
#
# The held-out sequences are cut into batches of a fixed shape, each from one source of a mixture. Data-parallel ranks take
# batches in turn. Losses are added in the order of batches, and of context ranks within a batch.


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out text."""

    loss: float
    """Mean cross-entropy in nats a token."""
    bits_per_byte: float
    """Bits needed for a byte of the text, as a compressor counts."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """The loss on the text of each of several sources by its name, if any of it was scored."""


def _batch(data: RunData, numbers: NDArray[np.int64], size: int) -> tuple[Tensor, Tensor]:
    """Return held-out samples ``(size, seq_len + 1)`` and their targets ``(size, seq_len)``, padded with ignored
    rows.

    So every batch has the same shape: another shape would make some ranks compile the blocks again.
    """
    held_out = np.concatenate([data.held_out_samples(int(number), 1) for number in numbers])
    samples = F.pad(torch.from_numpy(held_out), (0, 0, 0, size - len(numbers)))
    targets = samples[:, 1:].clone()
    targets[len(numbers) :] = IGNORE
    return samples, targets


def _batches(data: RunData, numbers: NDArray[np.int64], size: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield the held-out ``numbers`` in batches of at most ``size``, each of one source, with its name. Sources come one after another."""
    for name, part in data.held_out_parts.items():
        chosen = numbers[(numbers >= part.start) & (numbers < part.stop)]
        for first in range(0, len(chosen), size):
            yield name, chosen[first : first + size]


def _targets(data: RunData, numbers: NDArray[np.int64]) -> int:
    """The targets in these held-out samples; at least 1, of the many zeros of a record of padding alone."""
    return max(1, int(data.held_out_targets(numbers).sum()))


@torch.no_grad()
def evaluate(
    built: Built,
    data: RunData,
    most: int,
    on_progress: Callable[[int, int], None] = lambda _done, _sequences: None,
    stops: Callable[[], bool] = lambda: False,
) -> HeldOutLoss | None:
    """Return loss, bits per byte and loss by source on ``most`` held-out sequences (0: all), evenly spaced; ``None`` if there are
    none.

    A collective; the same on every rank. ``on_progress`` is called after each round of batches with the number of
    sequences that all ranks have scored, and of all. If ``stops()`` is true on some rank after a round,
    ``EvaluationStoppedError`` is raised.
    """
    sequences = min(most or data.held_out_len, data.held_out_len)
    if sequences == 0:
        return None
    numbers = np.arange(sequences) * data.held_out_len // sequences
    runner, mesh = built.runner, built.model.mesh
    size = micro_batch_rows(built.spec)
    dealt = list(_batches(data, numbers, size))
    batches = len(dealt)
    context = mesh.layout.context
    losses = torch.zeros(batches * context, dtype=torch.float64, device=mesh.device)

    def report(computed: int) -> None:
        on_progress(min(computed * size, sequences), sequences)

    for batch, (_, chosen) in rounds(built.model, dealt, report, stops):
        samples, targets = _batch(data, chosen, size)
        loss = runner.evaluate(runner.losses.cut(samples, targets))
        if batch is not None and runner.reports:
            losses[batch * context + mesh.context_rank] = loss.double()
    dist.all_reduce(losses)
    nats = math.fsum(losses.tolist())
    text_bytes = int(data.held_out_bytes(numbers).sum())
    by_batch = losses.view(batches, context).tolist()  # (batches, context)
    by_source = {
        name: math.fsum(
            loss for (part, _), row in zip(dealt, by_batch, strict=True) if part == name for loss in row
        )
        / sum(_targets(data, chosen) for part, chosen in dealt if part == name)
        for name in dict.fromkeys(name for name, _ in dealt if name)
    }
    bits_per_byte = nats / math.log(2) / max(1, text_bytes)
    return HeldOutLoss(nats / _targets(data, numbers), bits_per_byte, by_source)


# Generate text after given prompts by the run's own forward pass, token by token.
#
# Each token costs one forward pass over all unfinished texts, as sequences whose last token is to be determined
# (``score_sequences``). So tokens follow from the same bits as scores: layouts with one hash of the weights generate the same
# text. There is no KV cache, because its products have other shapes and other bits.
#
# A sample at temperature T is the token with the largest sum of its logit and T times Gumbel noise (Maddison et al., arXiv
# 1411.0030). The noise depends only on the prompt's seed, so texts of different steps differ only by the weights.

Score = Callable[[Sequence[ScoredSequence], Tensor | None], Sequence[SequenceScore]]
"""Scores sequences with noise ``(sequences, vocab)`` on the logits, or none, as ``phalanx.train.evaluation.scoring.score_sequences`` does."""


def continue_prompts(
    prompts: Sequence[Prompt],
    score: Score,
    tokenizer: Tokenizer,
    seq_len: int,
    vocabulary: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Continuation]:
    """Return the tokens after each prompt, up to its ``most`` tokens, the end of the document, or a string of
    ``until``, each included. The model reads the last ``seq_len`` tokens.

    ``vocabulary`` is the size of the model's; tokens that the tokenizer lacks are never chosen. Temperature 0 is
    greedy. ``on_progress`` is called after each forward pass with the number of tokens written and the most there can
    be. A text with a log-probability that is not finite is marked.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    broken: set[int] = set()
    generators = [np.random.default_rng(prompt.seed) for prompt in prompts]
    running, most = list(range(len(prompts))), sum(prompt.most for prompt in prompts)
    while running:
        sequences = [
            ScoredSequence((*prompts[n].tokens, *texts[n], 0)[-seq_len - 1 :], 1, n, 0) for n in running
        ]
        noise = None
        if any(prompts[n].temperature for n in running):
            rows = [_noise(generators[n], prompts[n].temperature, vocabulary) for n in running]
            noise = torch.stack(rows)  # (running texts, vocab)
            noise[:, tokenizer.vocab_size :] = -torch.inf
        elif vocabulary > tokenizer.vocab_size:
            row = torch.zeros(vocabulary)
            row[tokenizer.vocab_size :] = -torch.inf
            noise = row.expand(len(running), -1)  # (running texts, vocab), one row in memory
        for n, scores in zip(running, score(sequences, noise), strict=True):
            texts[n].append(scores.greedy_tokens[-1])
            if not math.isfinite(scores.log_probabilities[-1]):
                broken.add(n)
        running = [
            n
            for n in running
            if len(texts[n]) < prompts[n].most
            and texts[n][-1] != tokenizer.end_of_document
            and not _has_stop(prompts[n], texts[n], tokenizer)
        ]
        on_progress(sum(map(len, texts)), most)
    return [Continuation(tokens, n not in broken) for n, tokens in enumerate(texts)]


def _has_stop(prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return True if the decoded ``tokens`` contain a string of ``prompt.until``."""
    if not prompt.until:
        return False
    text = tokenizer.decode(
        tokens, at_start=False
    )  # in full, because a string may begin in one token and end in another
    return any(stop in text for stop in prompt.until)


def _noise(generator: np.random.Generator, temperature: float, vocabulary: int) -> Tensor:
    """Return Gumbel noise times the temperature, ``(vocab,)``, fp32; zeros at temperature 0."""
    if not temperature:
        return torch.zeros(vocabulary)
    # Computed in fp64, so that the roundings of a processor's logarithms are seldom seen in fp32.
    return torch.from_numpy((temperature * generator.gumbel(size=vocabulary)).astype(np.float32))
