"""A step of an optimizer that looks at whole matrices: what is common to Adafactor, Muon, Shampoo and SOAP.

Each of them is a ``MatrixRule``: how a gradient becomes a change. Here gradients are
brought to the owners of the matrices, who follow the rule, and the changes are brought back (``MatrixExchange``). The weights
then move as in AdamW: ``w = (1 - lr * decay) w - lr * change``. ``Holders`` lists which ranks hold which part of a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.model.facts.holdings import deal_matrices
from phalanx.model.facts.optimizer_state import matrix_state, matrix_work
from phalanx.parallel.divisions import LocalSlice, slices_in
from phalanx.parallel.reduction.data_parallel import local
from phalanx.parallel.torch_compat import all_gather_single, device_of_messages
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.optimizer import (
    Optimizer,
    StatePart,
    boxes_of,
    change_kept,
    decays,
    gradient_of,
)

# Complete matrices for optimizers that need them, although each rank has only a share of each.
#
# The orthogonalized matrix, or the roots of its statistics, cannot be computed from its shards, and a product that is computed
# in pieces rounds differently. So each matrix has one *owner* among the ranks that share it. In a step, all shares of its
# gradient are sent to the owner. The owner computes the change of the full matrix in a fixed order of operations, and sends
# each rank its share of the change. So a matrix is sent twice per step, and the result has the same bits on any number of
# ranks. Only the owner has the matrix's state, so the state is sharded like the gradients.
#
# Owners follow from costs (``phalanx.model.facts.holdings``). A matrix that is complete on some rank (usually an expert) stays
# there and is never sent. The others are assigned greedily, most expensive first, to the least loaded rank (Graham 1969). Of
# ranks with equal parts, one sends and all receive.

BATCH_ELEMENTS = 1 << 27
"""Elements of matrices that an owner receives at once: what bounds the buffers (512 MiB in fp32)."""


@dataclass(frozen=True)
class Leg:
    """A part of a matrix that crosses between its owner and a rank that holds it."""

    matrix: Matrix
    part: LocalSlice

    @property
    def numel(self) -> int:
        """Elements that cross."""
        _, shape = self.part
        return shape[-2] * shape[-1]


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices whose gradients cross together, as one rank sees it; what is listed by rank goes to or comes from it."""

    owned: list[Matrix]
    gradients_out: list[list[Leg]]
    gradients_in: list[list[Leg]]
    changes_out: list[list[Leg]]
    changes_in: list[list[Leg]]
    local: bool
    """True if every owner holds its matrices whole, so that nothing crosses."""


@dataclass
class MatrixExchange:
    """Moves matrices between the ranks of ``group``, which hold each parameter between them.

    Args:
        parameters: Shapes of the whole parameters, in the same order on all ranks.
        boxes: What this rank holds of each (a parameter that it holds nothing of may be left out).
        holders: What all ranks hold of each.
        cost: What a matrix of some rows and columns costs its owner, in any unit.
        group: ``None`` where this rank holds everything.
        batch_elements: Elements of matrices that an owner receives at once, or one matrix if that has more.
    """

    parameters: Mapping[str, tuple[int, ...]]
    boxes: Mapping[str, LocalSlice]
    holders: Mapping[str, Holders]
    cost: Callable[[int, int], float]
    group: dist.ProcessGroup | None = None
    batch_elements: int = BATCH_ELEMENTS
    batches: list[MatrixBatch] = field(init=False)

    def __post_init__(self) -> None:
        """Choose the owner of every matrix by cost, and divide the matrices into batches; the same on all ranks."""
        self._ranks = self.group.size() if self.group else 1
        self._rank = self.group.rank() if self.group else 0
        matrices = [m for name, shape in self.parameters.items() for m in matrices_of(name, shape)]
        costs = [self.cost(matrix.rows, matrix.columns) for matrix in matrices]
        owners = owners_of(matrices, self.holders, costs, self._ranks)
        self.batches = [
            self._batch([(matrices[n], owners[n]) for n in numbers])
            for numbers in _batches(matrices, owners, self._ranks, self.batch_elements)
        ]

    @property
    def owned(self) -> list[Matrix]:
        """The matrices that this rank owns; those of one parameter in the order of the stack."""
        order = {name: place for place, name in enumerate(self.parameters)}
        owned = [matrix for batch in self.batches for matrix in batch.owned]
        return sorted(owned, key=lambda matrix: (order[matrix.parameter], matrix.index or 0))

    def collect(self, batch: MatrixBatch, shares: Mapping[str, Tensor]) -> dict[Matrix, Tensor]:
        """Return the full matrices ``(rows, columns)`` that this rank owns, assembled from all ranks' ``shares`` in
        fresh memory. A collective unless the batch is local.
        """
        # Fresh memory for each matrix: kernels may round as their operands are aligned.
        matrices = {m: torch.empty(m.rows, m.columns, device=_device(shares)) for m in batch.owned}
        sent = [[self.of_share(shares, leg) for leg in legs] for legs in batch.gradients_out]
        received = self._swap(sent, batch.gradients_in, batch.local, _device(shares))
        for legs, pieces in zip(batch.gradients_in, received, strict=True):
            for leg, piece in zip(legs, pieces, strict=True):
                _of_whole(matrices, leg).copy_(piece)
        return matrices

    def hand_back(
        self, batch: MatrixBatch, changes: Mapping[Matrix, Tensor], shares: Mapping[str, Tensor]
    ) -> Iterator[tuple[Leg, Tensor]]:
        """Yield each leg of this rank's shares of the batch's matrices, with its part of the owner's ``changes``. A
        collective unless the batch is local.
        """
        sent = [[_of_whole(changes, leg) for leg in legs] for legs in batch.changes_out]
        received = self._swap(sent, batch.changes_in, batch.local, _device(shares))
        for legs, pieces in zip(batch.changes_in, received, strict=True):
            yield from zip(legs, pieces, strict=True)

    def _batch(self, matrices: Sequence[tuple[Matrix, int]]) -> MatrixBatch:
        """Return the legs that this rank sends and receives for ``matrices``, each with its owner. The batch is local if no matrix
        leaves its owner."""
        lists: list[list[list[Leg]]] = [[[] for _ in range(self._ranks)] for _ in range(4)]
        gradients_out, gradients_in, changes_out, changes_in = lists
        crosses = False
        for matrix, owner in matrices:
            holders = self.holders[matrix.parameter]
            ranks = holders.of(matrix)
            crosses |= bool((ranks != owner).any())
            if self._rank in ranks:
                leg = Leg(matrix, holders.part(matrix, self._rank))
                changes_in[owner].append(leg)
                if holders.sends(matrix, self._rank, owner):
                    gradients_out[owner].append(leg)
            if owner == self._rank:
                for rank in ranks.tolist():
                    changes_out[rank].append(Leg(matrix, holders.part(matrix, rank)))
                for rank in holders.senders(matrix, owner).tolist():
                    gradients_in[rank].append(Leg(matrix, holders.part(matrix, rank)))
        owned = [matrix for matrix, owner in matrices if owner == self._rank]
        return MatrixBatch(owned, gradients_out, gradients_in, changes_out, changes_in, local=not crosses)

    def of_share(self, shares: Mapping[str, Tensor], leg: Leg) -> Tensor:
        """The part of what this rank holds that a leg speaks of: ``(rows, columns)``, a view."""
        begin, _ = self.boxes[leg.matrix.parameter]
        view = shares[leg.matrix.parameter][slices_in(leg.part, begin)]
        return view if leg.matrix.index is None else view[0]

    def _swap(
        self, sent: list[list[Tensor]], legs_in: list[list[Leg]], local: bool, device: torch.device
    ) -> list[list[Tensor]]:
        """Send ``sent[r]`` to each rank r; return for each rank the pieces that it sent here, in the shapes of
        ``legs_in``. One all-to-all; with ``local``, return ``sent``.
        """
        if local:
            return sent
        outgoing = [piece.reshape(-1) for pieces in sent for piece in pieces]  # (elements of a piece,) each
        counts = [sum(leg.numel for leg in legs) for legs in legs_in]
        received = torch.empty(sum(counts), device=device)
        # (received elements,), (sent elements,)
        dist.all_to_all_single(
            received,
            torch.cat(outgoing) if outgoing else torch.empty(0, device=device),
            counts,
            [sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self.group,
        )
        # (elements of a leg,) each
        pieces = iter(torch.split(received, [leg.numel for legs in legs_in for leg in legs]))
        # (rows, columns) each
        return [[next(pieces).view(leg.part[1][-2:]) for leg in legs] for legs in legs_in]


def _batches(
    matrices: Sequence[Matrix], owners: Sequence[int], ranks: int, max_elements: int
) -> list[list[int]]:
    """Divide the matrices into batches, as lists of their numbers, in which no owner has more than ``max_elements``
    elements, or only one larger matrix. Each owner's matrices stay in order.
    """
    batches: list[list[int]] = []
    place, filled = [0] * ranks, [0] * ranks
    for number, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        if filled[owner] and filled[owner] + matrix.numel > max_elements:
            place[owner], filled[owner] = place[owner] + 1, 0
        filled[owner] += matrix.numel
        if place[owner] == len(batches):
            batches.append([])
        batches[place[owner]].append(number)
    return batches


def _of_whole(matrices: Mapping[Matrix, Tensor], leg: Leg) -> Tensor:
    begin, _ = leg.matrix.box
    return matrices[leg.matrix][slices_in(leg.part, begin)[-2:]]


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device


class MatrixRule(ABC):
    """The update rule of one whole matrix.

    What it keeps between steps, and what a step costs, is listed in ``phalanx.model.facts.optimizer_state``.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """The change per unit of learning rate, ``(rows, columns)``, after taking ``gradient`` of step ``number`` in.

        ``gradient`` is fp32 and may be overwritten. ``state`` has what ``matrix_state`` lists, zero before step 1.
        """


class MatrixOptimizer(Optimizer):
    """Follows a rule for each matrix of ``parameters``, which have two dimensions, or three if they are stacks."""

    def __init__(
        self,
        spec: OptimizerSpec,
        rule: MatrixRule,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, Parameter],
        boxes: Mapping[str, LocalSlice] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Find the holders of all parameters, choose the matrices that this rank owns, and allocate their state as
        zeros. A collective of ``group``.
        """
        self.spec, self.rule, self.parameters, self.kinds = spec, rule, parameters, kinds
        shapes = {name: kinds[name].shape for name in parameters}
        local_boxes = boxes_of(parameters, boxes)
        holders = gather_holders(shapes, local_boxes, group)
        self.exchange = MatrixExchange(
            shapes, local_boxes, holders, lambda rows, columns: matrix_work(spec, rows, columns).flops, group
        )
        self._parts: dict[str, list[StatePart]] = {}
        self._state: dict[Matrix, dict[str, Tensor]] = {}
        for run in _runs(self.exchange.owned):
            self._allocate(run)

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float, *, keep_change: bool = False) -> None:
        """Gather the matrices that this rank owns batch by batch, compute their changes by the rule, and apply this
        rank's parts of all changes after weight decay.
        """
        weights = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        gradients = {name: gradient_of(name, parameter) for name, parameter in self.parameters.items()}
        for batch in self.exchange.batches:
            matrices = self.exchange.collect(batch, gradients)
            changes = {
                matrix: self.rule.change(gradient.mul_(gradient_scale), self._state[matrix], number)
                for matrix, gradient in matrices.items()
            }
            for leg, change in self.exchange.hand_back(batch, changes, weights):
                weight = self.exchange.of_share(weights, leg)
                with change_kept([weight], [self.exchange.of_share(gradients, leg)], keep=keep_change):
                    # Each operation a single rounding, as in AdamW: shares of any shape get the same bits.
                    if decays(self.kinds[leg.matrix.parameter], self.spec):
                        weight.mul_(1.0 - lr * self.spec.weight_decay)
                    weight.sub_(change.mul_(lr))

    def state(self) -> dict[str, list[StatePart]]:
        return self._parts

    def _allocate(self, run: list[Matrix]) -> None:
        """Allocate zeros for the state of ``run``, consecutive matrices of a stack, in one tensor per kind of state.
        Register it as this rank's part of the stacked state.
        """
        first = run[0]
        device = local(self.parameters[first.parameter].detach()).device
        for kept in matrix_state(self.spec, first.rows, first.columns):
            name, shape = kept.name, kept.shape
            tensor = torch.zeros((len(run), *shape), device=device)
            for matrix, state in zip(run, tensor, strict=True):
                self._state.setdefault(matrix, {})[name] = state
            if first.index is None:
                part = StatePart(tensor[0], shape, (0,) * len(shape))
            else:
                full_shape = (self.kinds[first.parameter].shape[0], *shape)
                part = StatePart(tensor, full_shape, (first.index, *(0,) * len(shape)))
            self._parts.setdefault(f"{name}/{first.parameter}", []).append(part)


def _runs(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """Return runs of consecutive matrices that are neighbors in one stack. A matrix outside of stacks is a run of its own."""

    def run_of(numbered: tuple[int, Matrix]) -> tuple[str, int]:
        """Return what the matrices of a run have in common: in it, the place in the stack grows as the number does."""
        number, matrix = numbered
        return matrix.parameter, (matrix.index or 0) - number

    return ([matrix for _, matrix in run] for _, run in groupby(enumerate(matrices), run_of))


# The holders of every matrix, as arrays over ranks instead of objects.
#
# A stage of a mixture has tens of thousands of matrices and can have thousands of ranks, so nothing is stored for each pair of
# them. A parameter has one table with a row for every rank: the begin and extent of its part. The ranks with a part of one
# matrix of a stack are found by sorting the existing pairs of rank and matrix, instead of testing every rank for every matrix.


Ranks = NDArray[np.int64]
_GATHERED_BYTES = 1 << 26
"""Bytes of tables that are gathered at once."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that is a matrix, or one matrix of a stack ``(matrices, rows, columns)``."""

    parameter: str
    rows: int
    columns: int
    index: int | None = None
    """Place in the stack."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def box(self) -> LocalSlice:
        """Where it lies in the parameter."""
        if self.index is None:
            return LocalSlice((0, 0), (self.rows, self.columns))
        return LocalSlice((self.index, 0, 0), (1, self.rows, self.columns))


def matrices_of(parameter: str, shape: tuple[int, ...]) -> list[Matrix]:
    """Return the matrices of a parameter: itself if it has two dimensions, the members of a stack ``(count, rows,
    columns)`` if it has three.
    """
    if len(shape) == 2:
        return [Matrix(parameter, *shape)]
    count, rows, columns = shape
    return [Matrix(parameter, rows, columns, index) for index in range(count)]


class Holders:
    """The holders of one parameter's matrices.

    Args:
        shape: Of the parameter.
        table: ``(ranks, 2, dims)``, int: the first element of each rank's part, and its extent in each dimension.
    """

    def __init__(self, shape: tuple[int, ...], table: NDArray[np.int64]) -> None:
        """Index the holders of a parameter of ``shape`` by matrix. ``table`` ``(ranks, 2, dimensions)`` has the
        offset and extent of each rank's part; an empty part holds nothing.
        """
        self._stacked = len(shape) == 3
        count = shape[0] if self._stacked else 1
        begin, extent = table[:, 0], table[:, 1]
        # ``(ranks, 4)``: first row and column of each rank's part of any matrix, and how many it has of both.
        self._parts = np.concatenate([begin[:, -2:], extent[:, -2:]], 1)
        first = begin[:, 0] if self._stacked else np.zeros(len(table), np.int64)
        length = np.where((extent > 0).all(1), extent[:, 0] if self._stacked else 1, 0)
        # One entry for each rank and matrix that it has a part of, sorted by matrix; the sort is stable, so ranks ascend.
        ranks = np.repeat(np.arange(len(table)), length)
        within = np.arange(len(ranks)) - np.repeat(np.cumsum(length) - length, length)
        matrices = np.repeat(first, length) + within
        order = np.argsort(matrices, kind="stable")
        self._ranks = ranks[order]
        self._bounds = np.searchsorted(matrices[order], np.arange(count + 1))
        self._is_complete = (self._parts == (0, 0, *shape[-2:])).all(1)

    def of(self, matrix: Matrix) -> Ranks:
        """The ranks that hold a part of ``matrix``, ascending."""
        at = matrix.index or 0
        return self._ranks[self._bounds[at] : self._bounds[at + 1]]

    def whole_on(self, matrix: Matrix) -> list[int]:
        """The ranks that hold all of ``matrix``, ascending."""
        ranks = self.of(matrix)
        matching: list[int] = ranks[self._is_complete[ranks]].tolist()
        return matching

    def part(self, matrix: Matrix, rank: int) -> LocalSlice:
        """Return the slice, in the parameter, of the part of ``matrix`` that ``rank`` holds. All parts of a rank have
        the same rows and columns in each matrix.
        """
        row, column, rows, columns = self._parts[rank].tolist()
        if matrix.index is None:
            return LocalSlice((row, column), (rows, columns))
        return LocalSlice((matrix.index, row, column), (1, rows, columns))

    def senders(self, matrix: Matrix, owner: int) -> Ranks:
        """Return one holder for each distinct part of ``matrix``, ascending: the owner for a part that it has, else the first rank."""
        ranks = self.of(matrix)
        _, first = np.unique(self._parts[ranks], axis=0, return_index=True)
        chosen = ranks[first]
        if owner in ranks:
            chosen = np.append(chosen[(self._parts[chosen] != self._parts[owner]).any(1)], owner)
        return np.sort(chosen)

    def sends(self, matrix: Matrix, rank: int, owner: int) -> bool:
        """True if ``rank``, a holder, is one of the senders."""
        ranks = self.of(matrix)
        alike = ranks[(self._parts[ranks] == self._parts[rank]).all(1)]
        return rank == (owner if owner in alike else alike[0])


def gather_holders(
    shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, LocalSlice], group: dist.ProcessGroup | None
) -> dict[str, Holders]:
    """Return the holders of every parameter in ``shapes``, from the boxes of each rank of ``group``. A collective call,
    in chunks of bounded memory.

    ``shapes`` are of the whole parameters, of at most three dimensions, in the same order on all ranks. ``boxes`` are
    this rank's parts; a parameter of which it has nothing may be left out. ``group`` is ``None`` if this rank has
    everything.
    """
    ranks = group.size() if group else 1
    names, holders = list(shapes), {}
    at_once = max(1, _GATHERED_BYTES // (ranks * 6 * 8))
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        rows = torch.zeros(len(some), 2, 3, dtype=torch.int64)
        for row, name in zip(rows, some, strict=True):
            if name in boxes:
                offset, shape = boxes[name]
                row[0, -len(offset) :], row[1, -len(shape) :] = torch.tensor(offset), torch.tensor(shape)
        tables = _gathered(rows, group).numpy()  # (ranks, parameters, 2, 3)
        for number, name in enumerate(some):
            holders[name] = Holders(shapes[name], tables[:, number, :, 3 - len(shapes[name]) :])
    return holders


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return every rank's ``mine``, of equal shapes, with a new first dimension for the ranks.

    A collective, with the result on the CPU. Without ``group``, only a view of ``mine``.
    """
    if group is None:
        return mine[None]
    device = device_of_messages(group)
    gathered = torch.empty(group.size() * mine.numel(), dtype=mine.dtype, device=device)
    all_gather_single(gathered, mine.flatten().to(device), group)  # (ranks elements,), (elements,)
    return gathered.cpu().view(group.size(), *mine.shape)  # (ranks, ...)


def owners_of(
    matrices: Sequence[Matrix], holders: Mapping[str, Holders], costs: Sequence[float], ranks: int
) -> list[int]:
    """Return the owner rank of each matrix: work is balanced by ``costs``, and a rank that holds a full matrix is
    preferred (``phalanx.model.facts.holdings.deal_matrices``).
    """
    whole_on = [holders[matrix.parameter].whole_on(matrix) for matrix in matrices]
    return deal_matrices(costs, whole_on, [0.0] * ranks)
