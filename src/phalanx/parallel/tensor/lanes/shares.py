"""Shares of a parameter: the names under which the lanes or the pieces of a sequence use one that is not divided.

Each of L lanes (or pieces) contributes to the gradient of a norm's weight, say. These contributions are the leaves of a
binary tree, added in fp32: first those of this rank, then across the ranks that have the others, in one collective for
each block and backward pass.

Where a sequence is in context tiles too, the leaves of a weight that lanes use are ordered by tile, then lane. A rank has some lanes
of some tiles, so a tile's lanes are added first, across tensor ranks too (``Leaves.runs``), then the tiles, across context ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function_of_many
from phalanx.model.layers.dense import note_derived_weights
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.parallel.tensor.tree_sums import add_in_tree

Report = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Makes of several parameters' sums over a context rank's tiles, fp32, what this rank reports of the sums over all tiles."""


@dataclass(frozen=True)
class Leaves:
    """The leaves that this rank has of the tree in which the gradient of a parameter is added, and who has their neighbors."""

    count: int
    """Leaves of this rank."""
    comm: SequenceComm | None = None
    """Collectives over the ranks that have the leaves beside them; ``None`` if this rank has them all."""
    runs: int = 1
    """Equal runs of leaves that are each added up, over those ranks too, before one run is added to the next."""


def _totals(comm: SequenceComm, nodes: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gives every rank the sums of the ranks' ``nodes``, by one collective for all."""
    flat = comm.total(torch.cat([node.flatten() for node in nodes]))
    parts = torch.split(flat, [node.numel() for node in nodes])
    return [part.view_as(node) for part, node in zip(parts, nodes, strict=True)]


def _added(leaves: Sequence[Leaves], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each parameter's leaves, which ``upstream`` has one parameter after the other; fp32."""
    gradients = iter(upstream)
    # 1. Each run of leaves on this rank.
    nodes = [
        [
            add_in_tree(next(gradients).float() for _ in range(part.count // part.runs))
            for _ in range(part.runs)
        ]
        for part in leaves
    ]
    # 2. Each run over the ranks that have leaves of it.
    for comm in {id(part.comm): part.comm for part in leaves if part.comm is not None}.values():
        members = [runs for runs, part in zip(nodes, leaves, strict=True) if part.comm is comm]
        totals = iter(_totals(comm, [node for runs in members for node in runs]))
        for runs in members:
            runs[:] = [next(totals) for _ in runs]
    # 3. The runs.
    return [add_in_tree(runs) for runs in nodes]


class _SharedContext(FunctionContext, Protocol):
    leaves: Sequence[Leaves]
    report: Report | None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SharedContext, leaves: Sequence[Leaves], report: Report | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.leaves, ctx.report = leaves, report
        pairs = zip(parameters, leaves, strict=True)
        return tuple(parameter.view_as(parameter) for parameter, part in pairs for _ in range(part.count))

    @staticmethod
    def backward(ctx: _SharedContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        own = _added(ctx.leaves, upstream)
        sums = own if ctx.report is None else ctx.report(own)
        firsts = itertools.accumulate((part.count for part in ctx.leaves), initial=0)
        return None, None, *(total.to(upstream[at].dtype) for total, at in zip(sums, firsts, strict=False))


class Shares:
    """Hooks of a module that FSDP treats as a unit: while it runs, there are as many shares of its parameters as there are leaves.

    Outside, as when activations are computed again, a share is the parameter itself: no gradient reaches it there.
    """

    def __init__(self, leaves: Mapping[str, Leaves], report: Report | None = None) -> None:
        """Takes the leaves of each parameter by its name in the module; without ``report`` each rank has the whole sum."""
        self._leaves, self._report = dict(leaves), report
        self._now: dict[str, tuple[Tensor, ...]] = {}

    def install(self, unit: nn.Module) -> None:
        """Lets there be shares from now on, whenever ``unit`` runs."""
        self._unit = unit
        note_derived_weights(unit, self._leaves)
        unit.register_forward_pre_hook(self._enter)
        # Always, because recomputation of activations breaks off as soon as it has what it needs.
        unit.register_forward_hook(self._leave, always_call=True)

    def of(self, name: str) -> tuple[Tensor, ...]:
        """The shares of the parameter ``name`` of the unit."""
        return self._now.get(name) or (self._unit.get_parameter(name),) * self._leaves[name].count

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        parameters = [module.get_parameter(name) for name in self._leaves]
        shares = iter(
            apply_function_of_many(_Shared, tuple(self._leaves.values()), self._report, *parameters)
        )
        self._now = {name: tuple(itertools.islice(shares, part.count)) for name, part in self._leaves.items()}

    def _leave(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        self._now = {}


@dataclass(frozen=True)
class SharedParameter:
    """A parameter and where its shares are found."""

    owner: nn.Module
    attribute: str
    shares: Shares
    name: str
    """Its name in the unit."""

    def now(self) -> tuple[Tensor, ...]:
        """Its shares."""
        return self.shares.of(self.name)


Owners = Sequence[tuple[nn.Module, str]]
"""Parameters as the modules that own them and the names that they have there."""


@contextmanager
def in_place_of(owners: Owners, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Lets modules see ``tensors`` where they have the parameters ``owners``."""
    tables: list[dict[str, Any]] = [owner._parameters for owner, _ in owners]
    kept = [table[name] for table, (_, name) in zip(tables, owners, strict=True)]
    for table, (_, name), tensor in zip(tables, owners, tensors, strict=True):
        table[name] = tensor
    try:
        yield
    finally:
        for table, (_, name), tensor in zip(tables, owners, kept, strict=True):
            table[name] = tensor
