"""The samples of a rank's slots, step after step: which they are, and how far ahead they are read."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from phalanx.data.reading.prefetch import Prefetch
from phalanx.observe.events import IncidentKind
from phalanx.train.assembly.assemble import Training
from phalanx.train.lifecycle.guardian import Samples
from phalanx.train.lifecycle.progress import TrainProgress


def prefetch(training: Training, begun: TrainProgress, samples: Samples) -> Prefetch[NDArray[np.int64]]:
    """The samples of this rank's slots, step after step, each read while the one before is computed."""
    data, spec, rounds = training.data, training.inputs.spec, training.built.rounds
    numbers = range(begun.step * len(rounds), spec.train.steps * len(rounds))
    depth = _rounds_ahead(training)
    next_ahead = numbers.start

    def of_round(number: int) -> NDArray[np.int64]:
        nonlocal next_ahead
        while next_ahead < min(number + depth, numbers.stop):
            step, turn = divmod(next_ahead, len(rounds))
            data.read_ahead(*_numbers(training, begun, step + 1, rounds[turn].slot))
            next_ahead += 1
        step, turn = divmod(number, len(rounds))
        return samples(step + 1, rounds[turn].slot)

    return Prefetch(
        of_round,
        numbers,
        give_up=data.give_up,
        on_wait=partial(_tell_of_long_wait, training) if data.cached else None,
        # Of several ranks the others may be in a collective, and cannot save; agents call their workers back themselves.
        enough=(lambda: training.inputs.stop.made)
        if data.cached and training.mesh.ranks == 1 and training.inputs.warm is None
        else None,
    )


def _tell_of_long_wait(training: Training, waited_s: float) -> None:
    patience_s, rank = training.inputs.spec.data.timeout_s, training.mesh.rank
    training.reporter.warn(
        f"rank {rank} has waited {waited_s:.0f} s for samples from {', '.join(one.url for one in training.data.cached)}; the run waits "
        f"until data.timeout_s = {patience_s:g} s are over and ends with its last checkpoint then (asked to stop twice, at once)",
        IncidentKind.DATA_WAIT,
    )


def _rounds_ahead(training: Training) -> int:
    """The rounds of samples that are fetched ahead of the one that is asked for; none if all data lie in folders."""
    spec, cached = training.inputs.spec, training.data.cached
    if not cached:
        return 0
    token_bytes = max(one.index.item_bytes for one in cached)
    round_bytes = spec.train.batch_size // spec.train.slots * (spec.train.seq_len + 1) * token_bytes
    return int(spec.data.read_ahead_mib * (1 << 20) / round_bytes)


def samples_of(training: Training, begun: TrainProgress, step: int, slot: int) -> NDArray[np.int64]:
    """The samples ``(sequences, seq_len + 1)`` of slot ``slot`` in step ``step`` (from 1)."""
    return training.data.train_samples(*_numbers(training, begun, step, slot))


def _numbers(training: Training, begun: TrainProgress, step: int, slot: int) -> tuple[int, int]:
    """The first sample of slot ``slot`` in step ``step`` (from 1), and how many there are.

    Counted from where this attempt began: before, the run's parent may have had another batch size.
    """
    train = training.inputs.spec.train
    per_slot = train.batch_size // train.slots
    first = begun.next_sample + (step - 1 - begun.step) * train.batch_size
    return first + slot * per_slot, per_slot
