"""Shares of a parameter: the names under which the lanes or the pieces of a sequence use one that is not divided.

Each of L lanes (or pieces) contributes to the gradient of a norm's weight, say. These contributions are the leaves of a
binary tree, added in fp32: first those of this rank, then across the ranks that have the others, in one collective for
each block and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function_of_many
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.parallel.tensor.tree_sums import add_in_tree

Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Adds several parameters' sums over this rank's leaves, fp32, to those of other ranks, in tree order: the gradients here."""


def total_over(comm: SequenceComm) -> Total:
    """Gives every rank the whole sums, by one collective for all."""

    def total(sums: Sequence[Tensor]) -> Sequence[Tensor]:
        flat = comm.total(torch.cat([node.flatten() for node in sums]))
        parts = torch.split(flat, [node.numel() for node in sums])
        return [part.view_as(node) for part, node in zip(parts, sums, strict=True)]

    return total


class _SharedContext(FunctionContext, Protocol):
    total: Total | None
    count: int


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SharedContext, total: Total | None, count: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.total, ctx.count = total, count
        return tuple(parameter.view_as(parameter) for parameter in parameters for _ in range(count))

    @staticmethod
    def backward(ctx: _SharedContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_parameter = [upstream[at : at + ctx.count] for at in range(0, len(upstream), ctx.count)]
        own = [add_in_tree(leaf.float() for leaf in leaves) for leaves in by_parameter]
        sums = own if ctx.total is None else ctx.total(own)
        pairs = zip(sums, by_parameter, strict=True)
        return None, None, *(total.to(leaves[0].dtype) for total, leaves in pairs)


class Shares:
    """Hooks of a module that FSDP treats as a unit: while it runs, there are ``count`` shares of its parameters ``names``.

    Outside, as when activations are computed again, a share is the parameter itself: no gradient reaches it there.
    """

    def __init__(self, names: Sequence[str], count: int, total: Total | None) -> None:
        """``total`` adds the ranks' sums; ``None`` if there is one rank."""
        self._names, self._count, self._total = tuple(names), count, total
        self._now: dict[str, tuple[Tensor, ...]] = {}

    def install(self, unit: nn.Module) -> None:
        """Lets there be shares from now on, whenever ``unit`` runs."""
        self._unit = unit
        unit.register_forward_pre_hook(self._enter)
        # Always, because recomputation of activations breaks off as soon as it has what it needs.
        unit.register_forward_hook(self._leave, always_call=True)

    def of(self, name: str) -> tuple[Tensor, ...]:
        """The shares of the parameter ``name`` of the unit."""
        return self._now.get(name) or (self._unit.get_parameter(name),) * self._count

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        parameters = [module.get_parameter(name) for name in self._names]
        shares = apply_function_of_many(_Shared, self._total, self._count, *parameters)
        self._now = {
            name: shares[at * self._count : (at + 1) * self._count] for at, name in enumerate(self._names)
        }

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


@contextmanager
def in_place_of(owners: Sequence[tuple[nn.Module, str]], tensors: Sequence[Tensor]) -> Iterator[None]:
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
