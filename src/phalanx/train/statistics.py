"""Measure a run's layers every ``statistics.every_steps`` steps, and in steps that are not finite.

A measured step, in order:

1. Before the step: a forward pass of the first slot's first micro-batch, for the statistics of activations (``forward_figures``).
2. Before the update: norms of gradients and weights. After it: norms of the change, which the optimizer leaves in the gradients' memory.
   They are exact sums of squares over the shards of all ranks.
3. After the step: loads of routers, by the tokens that the step counted anyway; the event.

If a step is not finite, steps 2 and 3 are done for it, and a forward pass of a slot that was not finite. Other steps do nothing here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.model.layers.attention.attend import Score
from phalanx.model.layers.attention.attention import CausalCore, Documents
from phalanx.model.layers.dense import FeedForward
from phalanx.model.transformer import Block
from phalanx.observe.events import LayerStatistics
from phalanx.observe.ledger import Bucket
from phalanx.parallel.context.exchange import GatherMethod, RingMethod
from phalanx.parallel.context.fixed_tiles import by_tile
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.reduction.data_parallel import gradients, local, named_parameters, reshard
from phalanx.parallel.reduction.reproducible_sums import norms
from phalanx.parallel.torch_compat import gather_along
from phalanx.run.kinds.operations import Parameter
from phalanx.train.lifecycle.progress import is_due
from phalanx.train.profile.instruments import replaced
from phalanx.train.step.slot import MicroBatch
from phalanx.train.step.state import Built
from phalanx.train.step.step import Stepper, StepReport, StepStatistics

# Layers and groups of parameters, by which norms are reported, and the figures of statistics.
#
# A layer is a block of the model, the embedding, the final norm, the output projection or a prediction ahead. A group is a part
# of a layer: "attention", "feed_forward", "experts", "router", "norms", or the layer's own name if it has one matrix.

RMS, KURTOSIS, LARGEST_LOGIT, DEAD_UNITS = (
    "residual.rms",
    "residual.kurtosis",
    "attention.largest_logit",
    "feed_forward.dead_units",
)
ACTIVATIONS = (RMS, KURTOSIS, LARGEST_LOGIT, DEAD_UNITS)
"""Figures of a forward pass."""
LARGEST_SHARE, ENTROPY, IDLE_EXPERTS = "router.largest_share", "router.entropy", "experts.idle"
"""Figures of the tokens of each expert."""

_GROUP_OF_PART = {"attention": "attention", "ffn": "feed_forward"}


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module by its name: "0" for ``blocks.0.ffn.up.weight``, "mtp.0" in a
    prediction ahead, else the name up to its first dot.
    """
    first, *rest = name.split(".")
    if first == "blocks":
        return rest[0]
    return f"mtp.{rest[0]}" if first == "mtp" else first


def layers_of(names: Iterable[str]) -> list[str]:
    """Return the layers of all parameters, in the order of the model: the embedding first, norm and head last."""
    layers = dict.fromkeys(map(layer_of, names))
    ends = [layer for layer in ("norm", "head") if layer in layers]
    return [*(layer for layer in layers if layer not in ends), *ends]


def group_of(name: str, kind: Parameter) -> str:
    """Return the group of a parameter: "norms", "router", "experts" (routed, shared and their gate), "attention",
    "feed_forward", "other", or outside of layers the name up to its first dot.
    """
    first, *rest = name.split(".")
    if kind.kind == "norm":
        return "norms"
    if kind.kind == "router" or ".router." in name:
        return "router"
    if first not in ("blocks", "mtp"):
        return first
    inside = [part for part in rest[1:] if part != "block"]
    if inside[:1] == ["ffn"] and len(inside) > 1 and inside[1] in ("experts", "shared", "shared_gate"):
        return "experts"
    return _GROUP_OF_PART.get(inside[0], "other")


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one group of one layer, over all ranks."""

    layer: str
    group: str
    names: tuple[str, ...]
    elements: int


def parameter_groups(kinds: Mapping[str, Parameter]) -> list[ParameterGroup]:
    """Return all parameters of a model by layer and group, with their elements, without the biases that balance experts."""
    members: dict[tuple[str, str], list[str]] = {}
    for name, kind in kinds.items():
        if kind.kind != "balance":
            members.setdefault((layer_of(name), group_of(name, kind)), []).append(name)
    return [
        ParameterGroup(layer, group, tuple(names), sum(kinds[name].numel for name in names))
        for (layer, group), names in members.items()
    ]


# Statistics of activations, from one forward pass of a micro-batch beside the training step.
#
# The pass evaluates the first micro-batch of a slot, with the weights before the update. So training's own passes have no
# hooks, are never recompiled, and need no more memory. Blocks run uncompiled here, and every layout measures the same numbers.
#
# Sums over the ranks that share a sequence are exact (``phalanx.parallel.reduction.reproducible_sums``), and all other figures
# are maxima, so they do not depend on the layout. For the largest attention logit, the ranks that share a sequence gather its
# keys once more. The queries of each tile are multiplied with them separately, so that these products have the same shapes on
# any number of ranks.

DEAD = 1e-6
"""A hidden unit is dead if its magnitude stays below this for every token of the micro-batch."""
_LOGITS_AT_ONCE = 1 << 24
"""Attention logits that are in memory at once, unless one query has more."""


@torch.no_grad()
def forward_figures(built: Built, batch: MicroBatch, layers: Sequence[str]) -> dict[str, list[float | None]]:
    """Run one forward pass of ``batch`` without gradients and uncompiled, and return the figures ``ACTIVATIONS`` of
    each of ``layers``, the same on every rank. A collective.

    A layer without a figure has ``None``; a figure that no layer has is left out. NaN becomes infinite.
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
    """Return by figure the largest value of each of ``layers`` over all ranks, from this rank's rows (layer, figure,
    value). A collective.

    NaN counts as infinite; a layer without a value has ``None``, and a figure without any is left out.
    """
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
        """Prepare to measure ``block``, called ``layer``, in a forward pass of ``batch``; no hook is installed yet."""
        self._layer, self._block, self._mesh = layer, block, built.model.mesh
        tiles, spec = built.runner.losses.tiles, built.spec
        context, rank = self._mesh.layout.context, self._mesh.context_rank
        self._tiles = range(rank, rank + 1) if tiles is None else tiles.tile_numbers
        """This rank's tiles. Without context tiles, the tokens of a rank are one."""
        count = context if tiles is None else tiles.count
        positions = torch.arange(spec.train.seq_len, device=self._mesh.device)
        # (tokens of a tile,) each
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
        """Context in which the block has hooks for its input, output, hidden units, and queries and keys. A custom
        block has only the first two.
        """
        with ExitStack() as attached:
            attached.callback(self._block.register_forward_pre_hook(self._begins).remove)
            attached.callback(self._block.register_forward_hook(self._ends).remove)
            if isinstance(self._block, Block):
                if isinstance(self._block.ffn, FeedForward):
                    attached.callback(self._block.ffn.down.register_forward_pre_hook(self._hidden).remove)
                attention = self._block.attention
                projected = partial(self._projected, attention.projected)
                attached.enter_context(replaced(attention, "projected", projected))
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
        """Add RMS and kurtosis of the residual stream after ``layer``, over the full sequence. A collective of the
        ranks that share it. With an RMS of 0 there is no kurtosis; with one that is not finite, neither is the
        kurtosis.

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
        """Return the largest logit of this rank's queries over the sequence's keys, infinite for NaN, and drop the
        queries and keys. A collective of the context ranks.
        """
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
                # (tokens of the tile,), (seq_len,)
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
        """Return the share of the layer's hidden units whose largest magnitude over the sequence is below ``DEAD``. A
        collective of the ranks that share a sequence.
        """
        # (units of a lane,) each
        by_lane = [
            torch.stack(self._units[first : first + len(self._tiles)]).amax(0)
            for first in range(0, len(self._units), len(self._tiles))
        ]
        own = torch.cat(by_lane)  # (units of this rank,)
        everywhere = own.new_zeros(self._mesh.layout.tensor, len(own))
        everywhere[self._mesh.tensor_rank] = own
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, self._mesh.sequence_group)
        return int((everywhere < DEAD).sum()) / everywhere.numel()


def largest_logit(
    query: Tensor,
    key: Tensor,
    score: Score,
    rows: Tensor,
    columns: Tensor,
    window: int = 0,
    documents: Documents | None = None,
) -> float:
    """Return the largest scaled product of a query and a key that it sees, before a soft cap; NaN if there is one.
    Computed in blocks of queries, in fp32.

    Shapes: ``query`` ``(b, h, q, e)``; ``key`` ``(b, k, s, e)``, where ``h / k`` query heads share a key head;
    ``rows`` and ``columns`` are positions of queries ``(q,)`` and keys ``(s,)``.

    ``window`` is the number of tokens that a token sees, including itself; 0 means all before it. Tokens of different
    ``documents`` do not see each other.
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


Samples = Callable[[int, int], NDArray[np.int64]]
"""Function that returns the samples ``(sequences, seq_len + 1)`` of a step's slot."""


class LayerMeter(StepStatistics):
    """Statistics of the layers of one run, on every rank."""

    def __init__(self, stepper: Stepper, samples: Samples, emit: Callable[[LayerStatistics], None]) -> None:
        """Meter the steps of ``stepper``. ``samples`` reads a slot of a step again, and ``emit`` receives the statistics."""
        self._stepper, self._samples, self._emit = stepper, samples, emit
        placement = stepper.built.placement
        self._every = stepper.built.spec.statistics.every_steps
        self._groups = parameter_groups(placement.kinds)
        self._layers = layers_of(placement.kinds)
        self._figures: dict[str, list[float | None]] = {}
        self._step, self._slot = 0, 0
        self._is_due = False
        self._spent_ns = 0

    def begin(self, step: int) -> None:
        """Prepare ``step``, from 1, before it is computed. If it is due, run a forward pass of slot 0 to measure
        activations; a collective then.
        """
        self._step, self._slot, self._figures, self._spent_ns = step, 0, {}, 0
        self._is_due = is_due(step, self._every)
        if self._is_due:
            self._measure_forward(0)

    def before_update(self, gradient_scale: float, *, finite: bool) -> bool:
        """Return True, which requests the update's change, if the step is due or not ``finite``; always False if
        statistics are off. If True, first add the norms of gradients and weights, a collective.
        """
        if not self._every or not (self._is_due or not finite):
            return False
        began_ns = time.perf_counter_ns()
        parts = self._stepper.built.model.parts
        weights = {name: local(parameter.detach()) for name, parameter in named_parameters(parts).items()}
        self._add_norms({"gradient_norm": gradients(parts), "weight_norm": weights}, gradient_scale)
        self._spent_ns += time.perf_counter_ns() - began_ns
        return True

    def after_update(self) -> None:
        """Add the norms of the updates, which are in the gradients, and their ratio to the weights' norms: None for
        zero weights, infinite for weights that are not finite. A collective.
        """
        began_ns = time.perf_counter_ns()
        self._add_norms({"update_norm": gradients(self._stepper.built.model.parts)}, 1.0)
        for figure in [name for name in self._figures if name.endswith(".update_norm")]:
            group = figure.removesuffix(".update_norm")
            pairs = zip(self._figures[figure], self._figures[f"{group}.weight_norm"], strict=True)
            self._figures[f"{group}.update_ratio"] = [
                None
                if update is None or not weight
                else update / weight
                if math.isfinite(weight)
                else math.inf
                for update, weight in pairs
            ]
        self._spent_ns += time.perf_counter_ns() - began_ns

    def end(self, report: StepReport) -> None:
        """Emit the statistics of the step, if it was measured. A collective then.

        If slots were not finite, or the step was not due, activations are computed again: of the first such slot, else
        of slot 0, up to the first micro-batch that is not finite.
        """
        if not self._figures:
            return
        if report.nonfinite_slots or not self._is_due:
            self._measure_forward(report.nonfinite_slots[0] if report.nonfinite_slots else 0, search=True)
        self._add_routers()
        # Rounded to seven significant digits, so that an event is half as long.
        self._emit(
            LayerStatistics(
                step=self._step,
                layers=self._layers,
                figures={
                    name: [(value if value is None else float(f"{value:.7g}")) for value in values]
                    for name, values in self._figures.items()
                },
                slot=self._slot,
                applied=report.applied,
                seconds=self._spent_ns / 1e9,
            )
        )

    def _measure_forward(self, slot: int, *, search: bool = False) -> None:
        """Measure activations in the first micro-batch of ``slot``; with ``search``, in each up to the first whose
        residual stream is not finite, keeping the figures of the last. A collective, booked as evaluation.
        """
        began_ns = time.perf_counter_ns()
        self._slot = slot
        with self._stepper.ledger.bucket(Bucket.EVAL):
            batches = self._stepper.micro_batches(torch.from_numpy(self._samples(self._step, slot)))
            for batch in batches if search else batches[:1]:
                figures = forward_figures(self._stepper.built, batch, self._layers)
                self._figures |= figures
                if not all(value is None or math.isfinite(value) for value in figures[RMS]):
                    break
            self._stepper.built.forget_waits()
        self._spent_ns += time.perf_counter_ns() - began_ns

    def _add_norms(self, tensors: Mapping[str, Mapping[str, Tensor]], gradient_scale: float) -> None:
        """Add the norm of each group of parameters for each figure of ``tensors``, which map names to this rank's
        parts. Gradient norms are times ``gradient_scale``. A collective.
        """
        placement = self._stepper.built.placement
        pairs = [(figure, by_name, group) for figure, by_name in tensors.items() for group in self._groups]
        own = [
            [by_name[name] for name in group.names if name in by_name and placement.owns(name)]
            for _, by_name, group in pairs
        ]
        elements = [group.elements for _, _, group in pairs]
        results = norms(own, elements, self._stepper.built.model.mesh.device)
        for (figure, _, group), result in zip(pairs, results, strict=True):
            value = result * gradient_scale if figure == "gradient_norm" else result
            self._set(f"{group.group}.{figure}", group.layer, value)

    def _add_routers(self) -> None:
        """Add each router's figures by the tokens of its experts in this step, if there are experts."""
        counts = self._stepper.expert_tokens
        if counts is None:
            return
        for name, tokens in zip(self._stepper.built.placement.routers, counts.tolist(), strict=True):
            for figure, value in router_figures(tokens).items():
                self._set(figure, layer_of(name), value)

    def _set(self, figure: str, layer: str, value: float) -> None:
        values = self._figures.setdefault(figure, [None] * len(self._layers))
        values[self._layers.index(layer)] = value


def router_figures(tokens: Sequence[int]) -> dict[str, float]:
    """Return the figures of a router by the tokens of each expert: largest share, entropy (1 if all have equally
    many), share of idle experts.

    The entropy is that of the experts' shares over its maximum, ``log(experts)``. Empty without tokens, or with one
    expert.
    """
    total, experts = sum(tokens), len(tokens)
    if not total or experts == 1:
        return {}
    shares = [count / total for count in tokens]
    entropy = -math.fsum(share * math.log(share) for share in shares if share) / math.log(experts)
    return {
        LARGEST_SHARE: max(shares),
        ENTROPY: max(0.0, entropy),
        IDLE_EXPERTS: sum(not count for count in tokens) / experts,
    }
