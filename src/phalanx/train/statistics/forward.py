"""Statistics of activations, from one forward pass of a micro-batch beside the training step.

The pass is an evaluation of the first micro-batch of a slot, with the weights before the update. So training's own passes have no hook, are
never recompiled, and keep their memory. Blocks run uncompiled here; every layout measures the same numbers.

Sums over the ranks that share a sequence are exact (``phalanx.parallel.reduction.exact_sum``), and all else is a maximum, so the figures do not
depend on the layout. For the largest attention logit the ranks that share a sequence gather its keys once more. Each tile's queries
are multiplied with them alone, so that these products have the same shapes on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.layers.attention.attend import Score
from phalanx.model.layers.attention.attention import CausalCore, Documents
from phalanx.model.layers.dense import FeedForward
from phalanx.model.transformer import Block
from phalanx.parallel.context.exchange import GatherMethod, RingMethod
from phalanx.parallel.context.rank_tiles import by_tile
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.mesh.torch_compat import gather_along
from phalanx.parallel.reduction.data_parallel import reshard
from phalanx.parallel.reduction.exact_sum import norms
from phalanx.train.statistics.groups import ACTIVATIONS, DEAD_UNITS, KURTOSIS, LARGEST_LOGIT, RMS
from phalanx.train.step.slot import MicroBatch
from phalanx.train.step.state import Built

DEAD = 1e-6
"""A hidden unit is dead if its magnitude stays below this for every token of the micro-batch."""
_LOGITS_AT_ONCE = 1 << 24
"""Attention logits that are in memory at once, unless one query has more."""


@torch.no_grad()
def forward_figures(built: Built, batch: MicroBatch, layers: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the figures ``ACTIVATIONS`` of each of ``layers``, the same on every rank. A collective.

    A layer without a figure has ``None``; a figure that no layer has is left out. What is not finite is infinite.
    """
    probes = [
        _LayerProbe(built, name, block, batch)
        for part in built.model.parts
        for name, block in cast(nn.ModuleDict, part.blocks).items()
    ]
    with ExitStack() as attached:
        for probe in probes:
            attached.enter_context(probe.attached())
        if built.spec.runtime.compile:
            attached.enter_context(torch.compiler.set_stance("force_eager"))
        built.runner.evaluate(batch)
    # Leaves shards behind and not gathered weights, for the training step.
    reshard(built.model.parts)
    return _on_all_ranks([row for probe in probes for row in probe.rows()], layers, built.model.mesh.device)


def _on_all_ranks(
    rows: Sequence[tuple[str, str, float]], layers: Sequence[str], device: torch.device
) -> dict[str, list[float | None]]:
    """Return the largest value of each layer and figure over all ranks, from this rank's rows (layer, figure, value). A collective."""
    table = torch.full((len(ACTIVATIONS), len(layers)), -math.inf, dtype=torch.float64)
    for layer, figure, value in rows:
        table[ACTIVATIONS.index(figure), layers.index(layer)] = math.inf if math.isnan(value) else value
    table = table.to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {
        figure: [None if value == -math.inf else value for value in values]
        for figure, values in zip(ACTIVATIONS, table.tolist(), strict=True)
        if any(value != -math.inf for value in values)
    }


class _LayerProbe:
    """Hooks of one block, and its figures on this rank after the forward pass."""

    def __init__(self, built: Built, layer: str, block: nn.Module, batch: MicroBatch) -> None:
        self._layer, self._block, self._mesh = layer, block, built.model.mesh
        tiles, spec = built.runner.losses.tiles, built.spec
        context, rank = self._mesh.layout.context, self._mesh.context_rank
        self._tiles = range(rank, rank + 1) if tiles is None else tiles.tile_numbers
        """This rank's tiles. Without context tiles, the tokens of a rank are one."""
        count = context if tiles is None else tiles.count
        positions = torch.arange(spec.train.seq_len, device=self._mesh.device)
        self._positions = by_tile(positions, count, 0).chunk(count) if count > 1 else (positions,)
        self._elements = len(batch.tokens) * spec.train.seq_len * spec.model.dim
        self._documents: Documents | None = None
        self._heads: list[tuple[Tensor, Tensor]] = []
        """Queries and keys, for each lane and then tile."""
        self._units: list[Tensor] = []
        """The largest magnitude of each hidden unit, for each lane and then tile."""
        self._rows: list[tuple[str, str, float]] = []

    def rows(self) -> list[tuple[str, str, float]]:
        """Return layer, figure and value of what was measured."""
        return self._rows

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the block is measured."""
        with ExitStack() as attached:
            attached.callback(self._block.register_forward_pre_hook(self._begins).remove)
            attached.callback(self._block.register_forward_hook(self._ends).remove)
            if isinstance(self._block, Block):
                if isinstance(self._block.ffn, FeedForward):
                    attached.callback(self._block.ffn.down.register_forward_pre_hook(self._hidden).remove)
                attached.enter_context(_method(self._block.attention, "projected", self._projected))
            yield

    def _begins(self, _block: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the documents of a block's call, and measure the embedding before the first."""
        if isinstance(self._block, Block):
            self._documents = args[3]
        if self._layer == "0":
            self._measure_residual("embedding", args[0])

    def _ends(self, _block: nn.Module, _args: object, output: Tensor) -> None:
        """Measure the block's output, and its largest logit and dead units if they were seen."""
        self._measure_residual(self._layer, output)
        if self._heads:
            self._rows.append((self._layer, LARGEST_LOGIT, self._largest_logit()))
        if self._units:
            self._rows.append((self._layer, DEAD_UNITS, self._dead_share()))

    def _measure_residual(self, layer: str, stream: Tensor) -> None:
        """Add RMS and kurtosis of the residual stream after ``layer``. A collective of the ranks that share a sequence.

        If the fourth powers overflow, the stream is scaled down first.
        """
        wide, count = stream.float(), self._elements
        device, ranks = self._mesh.device, self._mesh.sequence_group
        groups = [[wide.contiguous()], [wide.square().contiguous()]]
        first, second = norms(groups, [count, count], device, ranks)
        rms = first / math.sqrt(count)
        self._rows.append((layer, RMS, rms))
        if math.isinf(second) and math.isfinite(first):  # Squares of large finite values overflow in fp32.
            scale = math.ldexp(1.0, -math.frexp(rms)[1])
            first *= scale
            (second,) = norms([[(wide * scale).square().contiguous()]], [count], device, ranks)
        if first:
            kurtosis = math.inf if math.isinf(second) else count * (second / first**2) ** 2
            self._rows.append((layer, KURTOSIS, kurtosis))

    def _projected(self, projected: Callable[..., tuple[Tensor, Tensor, Tensor]], *args: Any) -> Any:
        query, key, value = projected(*args)
        self._heads.append((query, key))
        return query, key, value

    def _largest_logit(self) -> float:
        """Return the largest logit of this rank's queries. A collective of the context ranks."""
        core = cast(Block, self._block).attention.core
        if isinstance(core, DividedCore):
            causal: CausalCore | GatherMethod | RingMethod = cast(GatherMethod | RingMethod, core.method)
        else:
            causal = cast(CausalCore, core)
        largest = []
        for first in range(0, len(self._heads), len(self._tiles)):
            queries, keys = zip(*self._heads[first : first + len(self._tiles)], strict=True)
            key = torch.cat(keys, 2)  # (b, k, s of this rank, e)
            if self._mesh.layout.context > 1:
                key = gather_along(key, 2, self._mesh.context_group)  # (b, k, s, e), by tile
            for tile, query in zip(self._tiles, queries, strict=True):
                positions = self._positions[tile], torch.cat(self._positions)
                largest.append(
                    largest_logit(query, key, causal.score, *positions, causal.window, self._documents)
                )
        self._heads.clear()
        return max(math.inf if math.isnan(value) else value for value in largest)

    def _hidden(self, _down: nn.Module, args: tuple[Tensor, ...]) -> None:
        units = args[0].abs().flatten(0, -2).amax(0).float()  # (units of this lane,)
        self._units.append(units.nan_to_num(nan=math.inf, posinf=math.inf))

    def _dead_share(self) -> float:
        """Return the share of the layer's hidden units that are dead. A collective of the ranks that share a sequence."""
        by_lane = [
            torch.stack(self._units[first : first + len(self._tiles)]).amax(0)
            for first in range(0, len(self._units), len(self._tiles))
        ]
        own = torch.cat(by_lane)  # (units of this rank,)
        everywhere = own.new_zeros(self._mesh.layout.tensor, len(own))
        everywhere[self._mesh.tensor_rank] = own
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, self._mesh.sequence_group)
        return int((everywhere < DEAD).sum()) / everywhere.numel()


@contextmanager
def _method(module: nn.Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``module`` calls ``replacement(method, ...)`` in place of its method ``name``."""
    method = getattr(module, name)
    setattr(module, name, lambda *args: replacement(method, *args))
    try:
        yield
    finally:
        delattr(module, name)


def largest_logit(
    query: Tensor,
    key: Tensor,
    score: Score,
    rows: Tensor,
    columns: Tensor,
    window: int = 0,
    documents: Documents | None = None,
) -> float:
    """Return the largest scaled product of a query and a key that it sees, before a soft cap. Computed in blocks of queries, in fp32.

    Args:
        query: ``(b, h, q, e)``.
        key: ``(b, k, s, e)``; ``h / k`` query heads share a key head.
        score: The scale.
        rows: Positions of the queries, ``(q,)``.
        columns: Positions of the keys, ``(s,)``.
        window: Number of tokens that a token sees, including itself; 0 means all before it.
        documents: The documents of the sequences; tokens of different ones do not see each other.
    """
    batch, heads, _, _ = query.shape
    grouped = query.float().reshape(batch, key.shape[1], -1, *query.shape[2:])  # (b, k, h / k, q, e)
    keys = key.float().unsqueeze(2).transpose(3, 4).contiguous()  # (b, k, 1, e, s)
    at_once = max(1, min(len(rows), _LOGITS_AT_ONCE // (batch * heads * len(columns))))
    largest = -math.inf
    for first in range(0, len(rows), at_once):
        own = rows[first : first + at_once]  # (q,)
        hidden = columns > own[:, None]  # (q, s)
        if window:
            hidden = hidden | (columns <= own[:, None] - window)
        if documents is not None:
            ids = documents.ids
            hidden = hidden | (ids[:, own, None] != ids[:, None, columns])  # (b, q, s)
            hidden = hidden[:, None, None]
        logits = torch.matmul(
            grouped[:, :, :, first : first + at_once].contiguous(), keys
        )  # (b, k, h / k, q, s)
        block_largest = logits.masked_fill_(hidden, -math.inf).amax().item()
        if math.isnan(block_largest):
            return math.nan
        largest = max(largest, block_largest)
    return largest * score.factor(query)
