"""The loss on held-out text, the same number on any fleet.

The held-out sequences are cut into batches of a fixed shape, each of one source where the run has several. Batches are dealt to the
data-parallel ranks in turn. The losses are added in the order of batches, and of context ranks within a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.reading.dataset import RunData
from phalanx.parallel.reduction.data_parallel import DataParallel
from phalanx.run.spec import RunSpec
from phalanx.train.evaluation.scoring import micro_batch_rows, rounds
from phalanx.train.step.loss import IGNORE
from phalanx.train.step.slot import SlotRunner


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
    """Held-out samples ``(size, seq + 1)`` and their targets ``(size, seq)``, padded with ignored rows.

    So every batch has the same shape: another one would make some ranks compile the blocks again.
    """
    held_out = np.concatenate([data.held_out_samples(int(number), 1) for number in numbers])
    samples = F.pad(torch.from_numpy(held_out), (0, 0, 0, size - len(numbers)))
    targets = samples[:, 1:].clone()
    targets[len(numbers) :] = IGNORE
    return samples, targets


def _batches(data: RunData, numbers: NDArray[np.int64], size: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """The held-out ``numbers`` in batches of at most ``size``, each of one source, with its name."""
    for name, part in data.held_out_parts.items():
        chosen = numbers[(numbers >= part.start) & (numbers < part.stop)]
        for first in range(0, len(chosen), size):
            yield name, chosen[first : first + size]


def _targets(data: RunData, numbers: NDArray[np.int64]) -> int:
    """The targets in these held-out samples; at least 1, of the many zeros of a record of padding alone."""
    return max(1, int(data.held_out_targets(numbers).sum()))


@torch.no_grad()
def evaluate(
    model: DataParallel,
    runner: SlotRunner,
    data: RunData,
    spec: RunSpec,
    most: int,
    on_progress: Callable[[int, int], None] = lambda _done, _sequences: None,
    stops: Callable[[], bool] = lambda: False,
) -> HeldOutLoss | None:
    """Return loss, bits per byte and loss by source on ``most`` held-out sequences (0: all), evenly spaced; ``None`` if there are
    none.

    A collective; the same on every rank. ``on_progress`` is called after each round of batches with the number of sequences that
    all ranks
    have scored, and of all. If ``stops()`` is true on some rank after a round, ``EvaluationStoppedError`` is raised.
    """
    sequences = min(most or data.held_out_len, data.held_out_len)
    if sequences == 0:
        return None
    numbers = np.arange(sequences) * data.held_out_len // sequences
    mesh = model.mesh
    size = micro_batch_rows(spec)
    dealt = list(_batches(data, numbers, size))
    batches = len(dealt)
    context = mesh.layout.context
    losses = torch.zeros(batches * context, dtype=torch.float64, device=mesh.device)

    def report(computed: int) -> None:
        on_progress(min(computed * size, sequences), sequences)

    for batch, (_, chosen) in rounds(model, dealt, report, stops):
        samples, targets = _batch(data, chosen, size)
        loss = runner.evaluate(runner.losses.cut(samples, targets))
        if batch is not None and runner.reports:
            losses[batch * context + mesh.context_rank] = loss.double()
    dist.all_reduce(losses)
    nats = math.fsum(losses.tolist())
    text_bytes = int(data.held_out_bytes(numbers).sum())
    by_batch = losses.view(batches, context).tolist()
    by_source = {
        name: math.fsum(
            loss for (part, _), row in zip(dealt, by_batch, strict=True) if part == name for loss in row
        )
        / sum(_targets(data, chosen) for part, chosen in dealt if part == name)
        for name in dict.fromkeys(name for name, _ in dealt if name)
    }
    bits_per_byte = nats / math.log(2) / max(1, text_bytes)
    return HeldOutLoss(nats / _targets(data, numbers), bits_per_byte, by_source)
