"""Scores of sequences on any layout: log-probabilities of their tokens, and the tokens that greedy decoding would choose.

Sequences are cut into micro-batches of the run's shape, in their order, and dealt to the data-parallel ranks in turn. What is summed
over ranks has one term that is not zero, so a score has the bits of the forward pass, whatever rank computed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.reduction.data_parallel import DataParallel, reshard
from phalanx.run.spec import RunSpec
from phalanx.train.evaluation.tasks import ScoredSequence, SequenceScore
from phalanx.train.step.loss import IGNORE
from phalanx.train.step.slot import SlotRunner

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
    """Deal batches to the data-parallel ranks in turn. Yield this rank's batch of each round, with its number.

    A rank without a batch gets the first again, without a number: under FSDP every forward pass is a collective. ``on_progress`` is called
    after each round with the number of batches that all ranks have computed. If ``stops()`` is true on some rank then,
    ``EvaluationStoppedError`` is raised.
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
    """Return samples ``(rows, seq_len + 1)`` and targets ``(rows, seq_len)`` of at most ``rows`` sequences, padded with ignored rows."""
    samples = torch.zeros(rows, seq_len + 1, dtype=torch.int64)
    targets = torch.full((rows, seq_len), IGNORE)
    for row, sequence in enumerate(sequences):
        count = len(sequence.tokens)
        samples[row, :count] = torch.tensor(sequence.tokens)
        scored = slice(count - 1 - sequence.scored, count - 1)
        targets[row, scored] = samples[row, 1:][scored]
    return samples, targets


def scores_of_sequences(sequences: Sequence[ScoredSequence], scores: Tensor) -> list[SequenceScore]:
    """Return the scores of each sequence from those of all scored tokens, ``(2, tokens)``, in the order of sequences (``token_scores``)."""
    counts = [sequence.scored for sequence in sequences]
    losses, chosen = scores.double().cpu()
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
    # Each sequence is one document, whatever tokens it has.
    one_document = replace(spec.train, targets_within_documents=False, document_mask=False)
    losses = replace(runner.losses, spec=replace(runner.losses.spec, train=one_document))

    def report(computed: int) -> None:
        on_progress(min(computed * rows, len(sequences)), len(sequences))

    for number, own in rounds(model, batches, report, stops):
        samples, targets = micro_batch(own, rows, seq_len)
        batch = losses.cut(samples, targets)
        if noise is not None:
            first = (number or 0) * rows
            full = torch.zeros(rows, noise.shape[1])  # a batch of few sequences is padded
            full[: len(own)] = noise[first : first + len(own)]
            batch = replace(batch, noise=brought(full, mesh.device))
        scores = runner.score(batch)  # (2, rows, this rank's part of the sequence)
        if number is not None and runner.reports:
            first = begins[number * rows]
            places = _places(targets, first)[:, batch.positions.cpu()].to(mesh.device)
            results[:, places[places >= 0]] = scores[:, places >= 0]
    dist.all_reduce(results)
    return scores_of_sequences(sequences, results)


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
