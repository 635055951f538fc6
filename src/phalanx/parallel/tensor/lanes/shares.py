"""Shares of a parameter that lanes or pieces of a sequence use undivided, and layers and routers computed by pieces.

Each of L lanes (or pieces) contributes to the gradient of a norm's weight, for example. These contributions are the leaves of a
binary tree, added in fp32. Those of this rank are added first, then across ranks, by one collective for each block and backward pass.

With context tiles, the leaves of a weight that lanes use are ordered by tile, then lane. A rank has some lanes of some tiles. So a
tile's lanes are added first, also across tensor ranks (``LaneLeaves.runs``), then the tiles, across context ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function_of_many
from phalanx.model.layers.dense import note_derived_weights
from phalanx.model.layers.moe import MoE, Router
from phalanx.model.transformer import Block, PredictionAhead, Transformer
from phalanx.parallel.tensor.sequence_comm import SequenceComm, add_in_tree, dense

Report = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function from several parameters' sums over a context rank's tiles, fp32, to this rank's report of the sums over all tiles."""


@dataclass(frozen=True)
class LaneLeaves:
    """This rank's leaves of the tree in which a parameter's gradient is added, and the ranks of the neighboring leaves."""

    count: int
    """Number of leaves on this rank."""
    comm: SequenceComm | None = None
    """Collectives over the ranks of the neighboring leaves; ``None`` if this rank has all leaves."""
    runs: int = 1
    """Number of equal runs of leaves. Each is added up, also over those ranks, before one run is added to the next."""


def _totals(comm: SequenceComm, nodes: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return, on every rank, the sums of the ranks' ``nodes``, by one collective for all."""
    flat = comm.total(torch.cat([node.flatten() for node in nodes]))  # (elements of all nodes,)
    parts = torch.split(flat, [node.numel() for node in nodes])  # (elements of a node,) each
    return [part.view_as(node) for part, node in zip(parts, nodes, strict=True)]


def _added(leaves: Sequence[LaneLeaves], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of each parameter's leaves, fp32, in tree order over this rank and its ``comm``. ``upstream``
    has the leaves of one parameter after the other. A collective if there is a ``comm``.
    """
    gradients = iter(upstream)
    # 1. Add each run of leaves on this rank.
    nodes = [
        [
            add_in_tree(next(gradients).float() for _ in range(part.count // part.runs))
            for _ in range(part.runs)
        ]
        for part in leaves
    ]
    # 2. Add each run over the ranks that have leaves of it.
    for comm in {id(part.comm): part.comm for part in leaves if part.comm is not None}.values():
        members = [runs for runs, part in zip(nodes, leaves, strict=True) if part.comm is comm]
        totals = iter(_totals(comm, [node for runs in members for node in runs]))
        for runs in members:
            runs[:] = [next(totals) for _ in runs]
    # 3. Add the runs.
    return [add_in_tree(runs) for runs in nodes]


class _SharedContext(FunctionContext, Protocol):
    leaves: Sequence[LaneLeaves]
    report: Report | None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SharedContext, leaves: Sequence[LaneLeaves], report: Report | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return as many views of each parameter as it has leaves, one parameter after the other."""
        ctx.leaves, ctx.report = leaves, report
        pairs = zip(parameters, leaves, strict=True)
        return tuple(parameter.view_as(parameter) for parameter, part in pairs for _ in range(part.count))

    @staticmethod
    def backward(ctx: _SharedContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Sum each parameter's leaves in a tree and over its ranks (by ``ctx.report``, if there is one), and return one
        gradient in the leaves' dtype.
        """
        own = _added(ctx.leaves, upstream)
        sums = own if ctx.report is None else ctx.report(own)
        firsts = itertools.accumulate((part.count for part in ctx.leaves), initial=0)
        return None, None, *(total.to(upstream[at].dtype) for total, at in zip(sums, firsts, strict=False))


class Shares:
    """Hooks of an FSDP unit: while it runs, each of its parameters has as many shares as leaves.

    Outside, for example when activations are recomputed, a share is the parameter itself: no gradient reaches it there.
    """

    def __init__(self, leaves: Mapping[str, LaneLeaves], report: Report | None = None) -> None:
        """Take the leaves of each parameter by its name in the module. Without ``report`` each rank gets the full sum."""
        self._leaves, self._report = dict(leaves), report
        self._current: dict[str, tuple[Tensor, ...]] = {}

    def install(self, unit: nn.Module) -> None:
        """Register the hooks on ``unit``, so that there are shares whenever it runs. Hooks remove them after each run."""
        self._unit = unit
        note_derived_weights(unit, self._leaves)
        unit.register_forward_pre_hook(self._enter)
        # always_call, because activation recomputation stops with an exception as soon as it has the tensors it needs.
        unit.register_forward_hook(self._leave, always_call=True)

    def of(self, name: str) -> tuple[Tensor, ...]:
        """Return the shares of the parameter ``name`` of the unit."""
        return self._current.get(name) or (self._unit.get_parameter(name),) * self._leaves[name].count

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        """Make the views of the module's parameters for each leaf, for the pass that begins."""
        parameters = [module.get_parameter(name) for name in self._leaves]
        shares = iter(
            apply_function_of_many(_Shared, tuple(self._leaves.values()), self._report, *parameters)
        )
        self._current = {
            name: tuple(itertools.islice(shares, part.count)) for name, part in self._leaves.items()
        }

    def _leave(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        self._current = {}


@dataclass(frozen=True)
class SharedParameter:
    """A parameter and the source of its shares."""

    owner: nn.Module
    attribute: str
    shares: Shares
    name: str
    """Its name in the unit."""

    def now(self) -> tuple[Tensor, ...]:
        """Return its current shares."""
        return self.shares.of(self.name)


def shared_parameters(
    unit: nn.Module, leaves: Mapping[str, LaneLeaves], report: Report | None
) -> dict[str, SharedParameter]:
    """Give parameters of an FSDP unit, by their names in it, as many shares as leaves whenever it runs."""
    shares = Shares(leaves, report)
    shares.install(unit)
    parameters = {}
    for name in leaves:
        owner, _, attribute = name.rpartition(".")
        parameters[name] = SharedParameter(unit.get_submodule(owner), attribute, shares, name)
    return parameters


def by_unit(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield each module that FSDP may treat as a unit with those of ``names`` that are in it and in no nested unit,
    relative to the module, and the prefix that makes them names in ``module``. Modules without any are left out.
    """
    units = {
        f"{name}." if name else "": part
        for name, part in module.named_modules()
        if isinstance(part, (Transformer, PredictionAhead, Block))
    }
    inside: dict[str, list[str]] = defaultdict(list)
    for name in names:
        prefix = max((prefix for prefix in units if name.startswith(prefix)), key=len)
        inside[prefix].append(name.removeprefix(prefix))
    return ((prefix, units[prefix], tuple(own_names)) for prefix, own_names in inside.items())


Owners = Sequence[tuple[nn.Module, str]]
"""Parameters as pairs of the owning module and the attribute name."""


@contextmanager
def in_place_of(owners: Owners, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context in which modules see ``tensors`` instead of the parameters ``owners``. They are restored also after an error."""
    tables: list[dict[str, Any]] = [owner._parameters for owner, _ in owners]
    saved = [table[name] for table, (_, name) in zip(tables, owners, strict=True)]
    for table, (_, name), tensor in zip(tables, owners, tensors, strict=True):
        table[name] = tensor
    try:
        yield
    finally:
        for table, (_, name), tensor in zip(tables, owners, saved, strict=True):
            table[name] = tensor


# Token-wise layers, computed by fixed pieces of the sequence.
#
# Norms, routers, the projections into latents and biases that are added after a sum are not divided. Each tensor rank computes them
# for its part of the sequence (``phalanx.parallel.tensor.sequence_comm``). With lanes the sequence is cut into as many pieces as there
# are lanes, for any number of ranks. Each piece is computed separately, so it has the same shape everywhere, and contributes a leaf
# to the gradient of the weights.


def replace_method(module: nn.Module, name: str, method: Callable[..., object]) -> None:
    """Make ``module`` call ``method`` wherever it, or its owner, calls its method ``name``."""
    if not callable(getattr(module, name)):
        raise TypeError(f"{type(module).__name__}.{name} is no method")
    setattr(module, name, method)


class InPieces:
    """Replacement for a module's ``forward``: computes one piece after the other, each with its share of the parameters."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        parameters: Sequence[SharedParameter],
        count: int,
        dim: int = 1,
    ) -> None:
        """Cut the argument of ``forward`` into ``count`` pieces along ``dim``."""
        self._forward, self._count, self._dim = forward, count, dim
        self._parameters = tuple(parameters)
        self._owners = [(parameter.owner, parameter.attribute) for parameter in parameters]

    def __call__(self, x: Tensor) -> Tensor:
        """Run the layer on pieces along the tokens, each with its share of the parameters: ``(b, s, d)`` to ``(b, s,
        ...)``; other shapes have their tokens along ``dim``.
        """
        shares = zip(*(parameter.now() for parameter in self._parameters), strict=True)
        results = []
        # piece: (b, s / count, d), or (n / count, d) along dimension 0
        for piece, own in zip(x.chunk(self._count, self._dim), shares, strict=True):
            with in_place_of(self._owners, own):
                results.append(dense(self._forward(dense(piece))))
        return results[0] if self._count == 1 else torch.cat(results, self._dim)  # (b, s, ...), or (n, ...)


# A mixture of experts with lanes: tokens in the order of the pieces of the sequence, the router one piece at a time.
#
# Routed experts are not cut into lanes: the rows of one expert and one micro-batch are computed together. So all tokens of a slot must
# reach the expert in one order. That order is by piece, then sequence of the micro-batch, then position. Tensor ranks, each with a run
# of pieces, send their tokens in this order.


class RoutedInPieces:
    """Replacement for ``MoE.routed``."""

    def __init__(self, moe: MoE, count: int) -> None:
        """Route ``count`` pieces on this rank."""
        self._moe, self._count = moe, count

    def __call__(self, x: Tensor) -> Tensor:
        """Route the tokens piece after piece, in one exchange: ``(b, s, d)`` to the same."""
        batch, seq, dim = x.shape
        pieces = x.view(batch, self._count, seq // self._count, dim)  # (b, pieces, s / pieces, d)
        tokens = pieces.transpose(0, 1).reshape(-1, dim)  # by piece, sequence, position: (b s, d)
        mixed = self._moe.exchange(tokens, self._moe.router(tokens), self._moe.experts)
        by_piece = mixed.view(self._count, batch, seq // self._count, dim)  # (pieces, b, s / pieces, d)
        return by_piece.transpose(0, 1).reshape(x.shape)  # (b, s, d)


class ScoresInPieces:
    """Replacement for ``Router.scores``."""

    def __init__(self, router: Router, parameters: Sequence[SharedParameter], count: int) -> None:
        """Score ``count`` pieces on this rank."""
        scores = router.scores

        def scores_and_logits(tokens: Tensor) -> Tensor:
            return torch.cat(scores(tokens), dim=1)  # (n, 2 experts)

        self._scores_and_logits = InPieces(scores_and_logits, parameters, count, dim=0)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and logits, ``(n, experts)`` each, fp32, of tokens ``(n, d)`` in the order of pieces."""
        scores, logits = self._scores_and_logits(tokens).chunk(2, dim=1)  # (n, experts) each
        return scores, logits
