"""Observations of a replayed step, the first difference between two replays, and the files of a replay.

An *observation* is the checksum of one tensor that a rank held at one moment of a step: a parameter before the step, the output of a
module in the forward pass of a micro-batch, the gradient of that output, a parameter's gradient of the micro-batch and after the sum over
slots, a parameter after the update. Checksums of pieces add up to that of the whole tensor (``phalanx.parallel.reduction.checksum``), so layouts that cut a tensor
differently can be compared. Everything here is a function on values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Moment = Literal["weight", "forward", "backward", "slot gradient", "gradient", "updated"]
_STAGES: dict[Moment, tuple[int, int]] = {
    "weight": (0, 0),
    "forward": (1, 0),  # with backward, micro-batch by micro-batch
    "backward": (1, 1),
    "slot gradient": (1, 1),
    "gradient": (2, 0),
    "updated": (3, 0),
}
_WORDS: dict[Moment, str] = {
    "weight": "before the step, weight {}",
    "forward": "forward of {}",
    "backward": "gradient of the output of {}",
    "slot gradient": "gradient of weight {}",
    "gradient": "gradient of {}, summed over slots",
    "updated": "updated weight {}",
}
_NO_SLOT = -1
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Observation:
    """The checksum of a tensor, or of a piece of one, on one rank."""

    step: int
    moment: Moment
    name: str
    """The name of the module or parameter."""
    sum: int
    """Modulo 2^64."""
    slot: int = _NO_SLOT
    micro_batch: int = _NO_SLOT
    piece: str = ""
    """Which piece of the tensor it is: equal for ranks that hold the same."""
    adds_up: bool = True
    """True if the sums of all pieces add up to the checksum of a tensor that every layout has."""
    stage: int = 0
    """The pipeline stage of the module."""


@dataclass(frozen=True)
class StepMeasures:
    """Figures of a replayed step, the same on every rank and layout."""

    lr: float
    slot_losses: tuple[float, ...]
    """The mean loss of each slot, in nats a token."""
    layer_norms: dict[str, float]
    """The gradient norm of each layer, before clipping; the first part of the parameters' names, a block with its number."""
    is_applied: bool
    """True if the weights were updated."""


@dataclass(frozen=True)
class BatchScores:
    """Losses of batches under the weights before the last replayed step, by a forward pass alone."""

    first_sample: int
    """The first sample of the last step, in the run's order."""
    tokens: dict[int, tuple[float | None, ...]]
    """By position in the last step's batch: the loss of each token behind the first, ``None`` for a token that is no target. Only sequences of
    the slots with the largest losses."""
    sequences: tuple[float, ...]
    """The mean loss of each sequence of the last step's batch."""
    batch_before: float | None
    """The mean loss of the batch of the step before; ``None`` if there is no such batch."""
    history: list[list[float]]
    """Loss and gradient norm of each of the steps before, by which the run judges spikes; the oldest first."""


@dataclass(frozen=True)
class Replay:
    """Observations of all ranks of a run, and the numbers that the run would have logged."""

    layout: Mapping[str, int]
    """The degree of each axis."""
    observed: Sequence[Sequence[Observation]]
    """By rank, in the order in which the rank saw them."""
    numbers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Loss and gradient norm, by step."""
    measures: Mapping[int, StepMeasures] = field(default_factory=dict)
    """By step, if the steps were measured."""
    scores: BatchScores | None = None


@dataclass(frozen=True)
class Parting:
    """The first thing in which two replays differ."""

    step: int
    moment: Moment
    name: str
    slot: int
    micro_batch: int
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    """The ranks of either replay that hold what differs."""
    odd: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The ranks of either replay whose copy differs from most of the other ranks' copies of the same."""

    def __str__(self) -> str:
        """Return a phrase with the step, slot and tensor at which replays A and B part, and the ranks that differ.
        Ranks that differ from their own replay's other ranks are listed instead, if there are any.
        """
        where = "" if self.slot == _NO_SLOT else f"slot {self.slot}, micro-batch {self.micro_batch}, "
        sides = [f"{_ranks(ranks)} of {side}" for ranks, side in zip(self.ranks, "AB", strict=True) if ranks]
        alone = [
            f"{_ranks(ranks)} of {side} not as its other ranks"
            for ranks, side in zip(self.odd, "AB", strict=True)
            if ranks
        ]
        return (
            f"step {self.step}, {where}{_WORDS[self.moment].format(self.name)}: {', '.join(alone or sides)}"
        )


@dataclass(frozen=True)
class Compared:
    """The result of comparing two replays."""

    parting: Parting | None
    """``None``: everything that could be compared is equal."""
    observations: int
    """Number of tensors that were compared."""
    left_out: tuple[str, ...]
    """Modules and parameters that could not be compared, because only one replay has them, or the layouts cut them differently."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


_Key = tuple[int, Moment, int, int, str]


@dataclass
class _Tensor:
    """All that a replay has seen of one tensor: by piece, the sum on each rank."""

    pieces: dict[str, dict[int, int]] = field(default_factory=dict)
    adds_up: bool = True

    @property
    def total(self) -> int:
        """The checksum of the whole tensor, of one copy of each piece."""
        return sum(next(iter(copies.values())) for copies in self.pieces.values()) & _WORD

    def odd(self, other: _Tensor) -> tuple[int, ...]:
        """Return the ranks whose copy of a piece differs from other ranks' copies. The right copy is the one that the
        ``other`` replay has too; if none or several are, the most frequent one.
        """
        differing = []
        for piece, copies in self.pieces.items():
            sums = list(copies.values())
            theirs = {value for value in other.pieces.get(piece, {}).values() if value in sums}
            usual = theirs.pop() if len(theirs) == 1 else max(sums, key=sums.count)
            differing += (
                [rank for rank, value in copies.items() if value != usual] if len(set(sums)) > 1 else []
            )
        return tuple(sorted(differing))

    def ranks(self, pieces: Iterable[str]) -> tuple[int, ...]:
        """The ranks that hold any of these pieces."""
        return tuple(sorted({rank for piece in pieces for rank in self.pieces.get(piece, ())}))


def compare_replays(first: Replay, other: Replay) -> Compared:
    """Return the first tensor, in the order in which a step computes them, whose bits differ between two replays or
    between ranks of one.

    If both cut a tensor in the same way, the pieces are compared and the ranks that differ are named. Otherwise the
    totals of the pieces are compared, if they add up. Tensors that cannot be compared, or are in one replay only, are
    listed by name. Counts and names reach up to the first difference.
    """
    tables = [_table(replay) for replay in (first, other)]
    places = _places(min(first, other, key=lambda replay: replay.layout.get("pipeline", 1)))
    keys = sorted(tables[0].keys() | tables[1].keys(), key=lambda key: _place(key, places))
    left_out: dict[str, None] = {}
    compared = 0
    for key in keys:
        left, right = (table.get(key) for table in tables)
        if left is None or right is None:
            left_out[key[4]] = None
            continue
        odd = left.odd(right), right.odd(left)
        if left.pieces.keys() == right.pieces.keys():
            pieces = [
                piece
                for piece in left.pieces
                if set(left.pieces[piece].values()) != set(right.pieces[piece].values())
            ]
            differs = bool(pieces)
            ranks = left.ranks(pieces), right.ranks(pieces)
        elif left.adds_up and right.adds_up:
            differs = left.total != right.total
            ranks = left.ranks(left.pieces), right.ranks(right.pieces)
        else:
            left_out[key[4]] = None
            continue
        compared += 1
        if differs or any(odd):
            step, moment, slot, micro_batch, name = key
            parting = Parting(step, moment, name, slot, micro_batch, ranks, odd)
            return Compared(parting, compared, tuple(left_out))
    return Compared(None, compared, tuple(left_out))


def _key(observation: Observation) -> _Key:
    return observation.step, observation.moment, observation.slot, observation.micro_batch, observation.name


def _table(replay: Replay) -> dict[_Key, _Tensor]:
    """Return the observations of all ranks by tensor. A tensor adds up only if each of its observations does."""
    table: dict[_Key, _Tensor] = {}
    for rank, seen in enumerate(replay.observed):
        for observation in seen:
            tensor = table.setdefault(_key(observation), _Tensor())
            tensor.pieces.setdefault(observation.piece, {})[rank] = observation.sum
            tensor.adds_up &= observation.adds_up
    return table


def _places(replay: Replay) -> dict[_Key, tuple[int, int]]:
    """Return for each tensor a sort key within its micro-batch: its stage (negative in backward, so that the last
    comes first), then its number on the rank.
    """
    places: dict[_Key, tuple[int, int]] = {}
    for seen in replay.observed:
        for number, observation in enumerate(seen):
            places.setdefault(
                _key(observation),
                (
                    -observation.stage
                    if _STAGES[observation.moment] == _STAGES["backward"]
                    else observation.stage,
                    number,
                ),
            )
    return places


def _place(key: _Key, places: Mapping[_Key, tuple[int, int]]) -> tuple[int, ...]:
    """The place of a tensor in a step, whose slots are put one after the other."""
    step, moment, slot, micro_batch, _ = key
    stage, direction = _STAGES[moment]
    return (step, stage, slot, micro_batch, direction, *places.get(key, (0, 0)))


# The files through which a replay's launcher and its ranks communicate, in the replay's own directory.


@dataclass(frozen=True)
class ReplayOrder:
    """Which steps of a run are to be computed again, and where from."""

    to_step: int
    from_step: int = 0
    """The step whose state is restored; 0 is the beginning."""
    checkpoints: str = ""
    """The folder of the run's checkpoints; not needed from the beginning."""
    is_measured: bool = False
    """Measure the steps (``StepMeasures``, ``BatchScores``) and take no checksums of tensors."""


@dataclass(frozen=True)
class RankReplay:
    """Observations of one rank."""

    layout: dict[str, int]
    """The degree of each axis."""
    observed: list[Observation]
    numbers: dict[int, dict[str, float]]
    """Loss and gradient norm of each step."""
    measures: dict[int, StepMeasures] = field(default_factory=dict)
    """By step, if the steps are measured."""
    scores: BatchScores | None = None


def order_file(folder: Path) -> Path:
    """The file with the ``ReplayOrder``."""
    return folder / "replay.json"


def reached_file(folder: Path) -> Path:
    """The file with the number of the step that is being computed."""
    return folder / "replay-step"


def seen_file(folder: Path, rank: int) -> Path:
    """The file with the ``RankReplay`` of a rank."""
    return folder / f"replay-rank-{rank:05d}.msgpack"
