"""Restore and share plans: which bytes come from where, as pure functions of boxes.

Every rank knows from the run file which boxes it needs, and learns from each tier which boxes are held. The plan
covers each needed element exactly once from the nearest holder: what the holder has is cut out, the rest (at most
two boxes per dimension) is looked for further away. No rank plans for another one, so nothing grows with the world
size but the list of holders. ``share_of`` is the counterpart for saving: equal ranks divide what all of them hold.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.errors import MismatchError, NotCoveredError

OWN_MEMORY, NODE_AGENT, PEER, DISK, REMOTE = range(5)
"""Distances of tiers, nearest first: of several holders of an element, the nearest is read."""


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """Where boxes are: a tier by name, a holder within it (a rank, an address), and how far away that is."""

    tier: str
    holder: str
    distance: int


@dataclass(frozen=True, slots=True)
class Held:
    """A box, and where it is held."""

    box: Box
    location: BoxLocation


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """One read of a restore plan: ``part`` is taken from what ``source`` holds, and lies within ``source.box``."""

    source: Held
    part: Box


@dataclass(slots=True)
class _Shelf:
    """The holders of one tensor at one distance, sorted by their first row so that overlaps are found by bisection."""

    held: list[tuple[int, Held]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    longest: int = 0

    def sort(self) -> None:
        self.held.sort(key=lambda entry: (entry[1].box.offset[:1], entry[0]))
        self.starts = [_rows_of(held.box)[0] for _, held in self.held]
        self.longest = max(_rows_of(held.box)[1] for _, held in self.held)

    def near(self, box: Box) -> list[tuple[int, Held]]:
        start, size = _rows_of(box)
        return self.held[
            bisect_left(self.starts, start - self.longest + 1) : bisect_left(self.starts, start + size)
        ]


def _rows_of(box: Box) -> tuple[int, int]:
    return (box.offset[0], box.shape[0]) if box.shape else (0, 1)


def plan_restore(needed: Sequence[Box], held: Sequence[Held], *, reader: int = 0) -> tuple[PlannedRead, ...]:
    """The reads that cover each element of every needed box exactly once, nearest holders first.

    Reads come in the order in which ``held`` lists their sources, so that a file is read front to back. Where
    several equally near places hold the same elements, ``reader`` (say, the rank that restores) rotates the choice,
    so that equal ranks do not all ask the same holder.

    Raises MismatchError where a tensor is held with another global shape or dtype, NotCoveredError where elements
    are held nowhere; both name every tensor concerned.
    """
    shelves = _shelves(needed, held)
    reads: list[tuple[int, PlannedRead]] = []
    uncovered: list[Box] = []
    for box in needed:
        left = [box] if box.numel else []
        for shelf in shelves.get(box.name, ()):
            if not left:
                break
            candidates = shelf.near(box)
            turn = reader % len(candidates) if candidates else 0
            for index, source in candidates[turn:] + candidates[:turn]:
                left = _take(left, index, source, reads)
        uncovered += left
    if uncovered:
        raise NotCoveredError(_describe_uncovered(uncovered), sorted({box.name for box in uncovered}))
    # Parts are cut out of what is left of a box, so they are disjoint: equal counts mean that each element is read once.
    assert sum(read.part.numel for _, read in reads) == sum(box.numel for box in needed)
    reads.sort(key=lambda entry: (entry[0], entry[1].part.offset))
    return tuple(read for _, read in reads)


def require_complete(held: Sequence[Held], required: Sequence[Box] = ()) -> None:
    """Raises NotCoveredError where ``held`` does not cover ``required`` and every tensor that it names in full.

    MismatchError where holders disagree about a tensor's shape or dtype.
    """
    named = {entry.box.name: whole(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in held}
    plan_restore([*named.values(), *(box for box in required if box.name not in named)], held)


def _take(left: list[Box], index: int, source: Held, reads: list[tuple[int, PlannedRead]]) -> list[Box]:
    rest: list[Box] = []
    for piece in left:
        part = piece.intersection(source.box)
        if part is None:
            rest.append(piece)
        else:
            reads.append((index, PlannedRead(source, part)))
            rest += piece.minus(part)
    return rest


def _shelves(needed: Sequence[Box], held: Sequence[Held]) -> dict[str, list[_Shelf]]:
    wanted = {box.name: box for box in needed}
    by_distance: dict[str, dict[int, _Shelf]] = defaultdict(lambda: defaultdict(_Shelf))
    different: dict[str, Box] = {}
    for index, entry in enumerate(held):
        want = wanted.get(entry.box.name)
        if want is None:
            continue
        if (want.global_shape, want.dtype) != (entry.box.global_shape, entry.box.dtype):
            different.setdefault(want.name, entry.box)
        elif entry.box.numel:
            by_distance[want.name][entry.location.distance].held.append((index, entry))
    if different:
        raise MismatchError(_describe_mismatch(wanted, different), sorted(different))
    shelves = {name: [shelf for _, shelf in sorted(group.items())] for name, group in by_distance.items()}
    for group in shelves.values():
        for shelf in group:
            shelf.sort()
    return shelves


def _describe_mismatch(wanted: dict[str, Box], different: dict[str, Box]) -> str:
    lines = [
        f"  {name}: needed {wanted[name].dtype} {wanted[name].global_shape}, held {box.dtype} {box.global_shape}"
        for name, box in sorted(different.items())
    ]
    return (
        _listed("the checkpoint holds tensors of another shape or dtype than the model needs", lines)
        + "\nRestore with the run file the checkpoint was written with, or another checkpoint."
    )


def _describe_uncovered(uncovered: Iterable[Box]) -> str:
    lines = [f"  {box} ({box.numel} of its elements)" for box in sorted(uncovered)]
    return _listed("the checkpoint does not hold all that is needed; missing", lines) + (
        "\nRestore with the run file the checkpoint was written with, or say that these tensors may be missing."
    )


def _listed(head: str, lines: list[str], most: int = 20) -> str:
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"{head}:", *lines[:most], *more])


def share_of(boxes: Sequence[Box], replica: int, replicas: int) -> list[Box]:
    """The parts of ``boxes``, held alike by ``replicas`` equal ranks, that this replica writes.

    The boxes, sorted, are laid end to end and cut into ``replicas`` runs of equal bytes, each cut moved to the
    nearest row of the box it falls into: at most ``replicas - 1`` boxes are divided, and a share is within a row
    of the equal one. Deterministic; the shares are disjoint and together complete. Empty boxes are nobody's, but a tensor
    without elements is replica 0's, so that its name is kept.
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} is not one of {replicas}")
    total = sum(box.nbytes for box in boxes)
    low, high = total * replica // replicas, total * (replica + 1) // replicas
    share: list[Box] = []
    start = 0
    for box in sorted(boxes):
        if box.nbytes:
            rows = box.shape[0] if box.shape else 1
            first, last = (_nearest_row(cut - start, box.nbytes, rows) for cut in (low, high))
            assert 0 <= first <= last <= rows, "cuts lie in the box and in order"
            if (first, last) == (0, rows):
                share.append(box)
            elif last > first:
                share.append(box.rows(first, last))
            start += box.nbytes
        elif box.is_whole and replica == 0:
            share.append(box)
    return share


def _nearest_row(cut: int, nbytes: int, rows: int) -> int:
    row_bytes = nbytes // rows
    return min(max((cut + row_bytes // 2) // row_bytes, 0), rows)
