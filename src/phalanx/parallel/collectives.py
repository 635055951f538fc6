"""Number of collectives that a rank calls in one optimizer step, in closed form: no torch, nothing is run.

The counts follow from the schedule of each axis. The tensor axis communicates around every pair of matrices, the context axis in
every attention, the expert axis around every mixture, and the pipeline between stages. FSDP gathers weights before they are needed
and reduces gradients after each slot. A few scalars are reduced once per step. ``phalanx show --ranks`` prints the counts. The dry
run (``phalanx.train.measure.dry_run``) counts the trainer's calls and compares.

Not counted: activation recomputation, which repeats the collectives of a block's forward pass, and collectives of an optimizer
(AdamW has none).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from phalanx.model.facts.holdings import HeldParameter, Holding
from phalanx.model.facts.shape import stage_layers
from phalanx.parallel.divisions import Deal, in_buckets
from phalanx.parallel.pipeline_schedules import Action, Schedule
from phalanx.run.kinds.block import prediction_depths
from phalanx.run.kinds.operations import HEAD_UNIT, Parameter
from phalanx.run.layout import Layout, micro_batches_per_slot
from phalanx.run.spec import RunSpec

Calls = Counter[tuple[str, str]]
"""Number of calls by axis and kind, such as ``("tensor", "all_gather")``; the axis ``all`` spans all ranks."""

_EXCHANGES = {
    "reproducible": (("all_to_all",), ("all_to_all", "all_gather")),
    # First the exponents, then the integers.
    "integer": (("all_reduce", "reduce_scatter"), ("all_reduce", "all_reduce")),
    "fast": (("reduce_scatter",), ("all_reduce",)),
}
"""For each ``train.reduction``: the collectives that reduce gradients over shards, and those over replicas."""


def rounds_per_step(spec: RunSpec, layout: Layout) -> int:
    """Largest number of slots that any rank computes in a step."""
    return Deal(spec.train.slots, layout.replicate, layout.shard, layout.team).most_rounds


def collectives(spec: RunSpec, layout: Layout, holding: Holding) -> Calls:
    """Count the collectives of the rank with ``holding`` in one optimizer step of a resolved ``spec``; the same on CPU and GPU."""
    return _RankStep(spec, layout, holding).step()


@dataclass(frozen=True)
class _RankStep:
    spec: RunSpec
    layout: Layout
    holding: Holding

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.of(self.spec.parallel)

    @cached_property
    def actions(self) -> list[Action]:
        """Return this rank's pipeline actions in one slot, in order; without a pipeline forward and backward of each micro-batch."""
        micro_batches = micro_batches_per_slot(self.spec)
        if self.schedule.pipeline > 1:
            return self.schedule.actions(self.holding.place.pipeline, micro_batches)
        return [Action(kind, 0, number) for number in range(micro_batches) for kind in ("F", "B")]

    @cached_property
    def pieces(self) -> dict[int, list[HeldParameter]]:
        """Return this rank's shares of parameters by stage; parameters after the blocks belong to the last stage."""
        stages = {layer: stage for stage, layers in enumerate(stage_layers(self.spec)) for layer in layers}
        by_stage: dict[int, list[HeldParameter]] = {stage: [] for stage in self.holding.stages}
        for share in self.holding.pieces:
            param = share.parameter
            if param.section == "block":
                by_stage[stages[param.layer]].append(share)
            else:
                by_stage[0 if param.section == "embedding" else self.schedule.stages - 1].append(share)
        return by_stage

    def step(self) -> Calls:
        """Count all collectives of this rank in one optimizer step, by (axis, kind)."""
        rounds = rounds_per_step(self.spec, self.layout)
        slot: Calls = Counter()
        for stage in self.holding.stages:
            passes = sum(action.kind == "F" and action.stage == stage for action in self.actions)
            slot += _times(self._tensor(stage) + self._context(stage) + self._experts(stage), passes)
        slot += self._pipeline()
        calls = _times(slot, rounds) + self._weights(rounds) + self._reduction(rounds)
        calls["all", "all_reduce"] += 3 + (self.spec.model.moe is not None)
        return +calls

    def _parts(self, stage: int) -> list[Parameter]:
        return [piece.parameter for piece in self.pieces[stage]]

    def _blocks(self, stage: int) -> int:
        """Count the blocks of a stage, including those of predictions ahead."""
        return len({part.unit for part in self._parts(stage) if part.in_block and not part.stacked})

    def _mixtures(self, stage: int) -> int:
        return sum(part.kind == "router" for part in self._parts(stage))

    def _tensor(self, stage: int) -> Calls:
        """Return the number of collectives of the tensor axis by kind, and of copied key heads, for one micro-batch
        of ``stage``, forward and backward. Empty if the axis has one rank.
        """
        calls: Calls = Counter()
        if self.layout.tensor == 1:
            return calls
        train, blocks = self.spec.train, self._blocks(stage)
        # Each prediction has an embedding lookup and its own scores.
        predictions = 1 + prediction_depths(self.spec.model)
        # A pair of divided matrices ends with a row-parallel one, whose partial results are summed.
        parts = self._parts(stage)
        pairs = sum(part.tensor_dim == 1 and not part.stacked for part in parts)
        # Norms are replicated, so each block all-reduces their gradients. Each gather becomes a scatter in backward.
        gathers, scatters, sums = pairs, pairs, blocks
        if stage == 0:
            scatters += predictions
        if stage == self.schedule.stages - 1:
            gathers, sums = gathers + predictions, sums + predictions
            tokens = max(1, train.micro_batch_size or train.batch_size // train.slots) * train.seq_len
            # The loss is computed for each tile separately.
            tiles = max(1, self.spec.model.context_tiles // self.layout.context)
            chunks = -(-tokens // self.layout.context // tiles // train.loss_chunk)
            calls["tensor", "all_gather"] += predictions * tiles * chunks
        calls["tensor", "all_gather"] += gathers + scatters
        # With lanes, the receiver of an all-to-all adds the parts in tree order.
        lanes = self.spec.model.lanes > 0
        calls["tensor", "all_to_all" if lanes else "reduce_scatter"] += gathers + scatters
        calls["tensor", "all_gather" if lanes else "all_reduce"] += sums
        copied = {part.unit for part in parts if 1 < part.parts_over(self.layout.tensor) < self.layout.tensor}
        # One for each block whose key and value heads are on several ranks.
        calls["key_copies", "all_gather"] += len({unit for unit in copied if unit})
        return calls

    def _context(self, stage: int) -> Calls:
        """Count the collectives of the context axis for one micro-batch of ``stage``, forward and backward:
        all-gathers and sums of tiles, or hops of the ring.
        """
        ranks, layers = self.layout.context, self._blocks(stage)
        if ranks == 1:
            return Counter()
        if self.spec.parallel.context_mode == "allgather":
            layers *= max(1, self.spec.model.lanes // self.layout.tensor)  # each lane runs its own attention
            calls = Counter({("context", "all_gather"): 2 * layers, ("context", "all_to_all"): layers})
            return calls + self._tile_sums(stage)
        # Keys and values take ranks - 1 hops in forward and again in backward; their gradients take ranks hops.
        messages = (3 * ranks - 2) * layers
        return Counter({("context", "send"): messages, ("context", "recv"): messages})

    def _tile_sums(self, stage: int) -> Calls:
        """Count the sums over context tiles for one micro-batch: weight gradients by unit, the losses, and their
        projection's gradient. Empty without context tiles.
        """
        if not self.spec.model.context_tiles:
            return Counter()
        ahead = prediction_depths(
            self.spec.model
        )  # each prediction ahead has some weights outside of its block
        losses = 1 + ahead if stage == self.schedule.stages - 1 else 0
        # The head's gradient is summed with the loss.
        units = {part.unit if part.in_block else "" for part in self._parts(stage) if not part.stacked}
        sums = len(units) + (ahead if losses else 0)
        return Counter({("context", "all_to_all"): sums + losses, ("context", "all_gather"): losses})

    def _experts(self, stage: int) -> Calls:
        """Count the collectives of the expert axes for one micro-batch of ``stage``, forward and backward, and the
        sum of the auxiliary loss.
        """
        calls: Calls = Counter()
        moe, layout, mixtures = self.spec.model.moe, self.layout, self._mixtures(stage)
        if layout.expert > 1:
            calls["expert", "all_to_all"] += 5 * mixtures
        if layout.expert_tensor > 1:
            calls["expert_tensor", "all_gather"] += 4 * mixtures
            calls["expert_tensor", "reduce_scatter"] += 3 * mixtures
        if moe is not None and moe.aux_loss and layout.model_ranks > 1:
            calls["sequence", "all_reduce"] += mixtures
        return calls

    def _pipeline(self) -> Calls:
        """Count the sends and receives of one slot: stage inputs and output gradients, if the neighboring stage is on another rank."""
        calls: Calls = Counter()
        rank, schedule = self.holding.place.pipeline, self.schedule
        for action in self.actions:
            neighbors = (action.stage - 1, action.stage + 1)
            before, after = neighbors if action.kind == "F" else reversed(neighbors)
            for stage, kind in ((before, "recv"), (after, "send")):
                exists = 0 <= stage < schedule.stages
                if exists and schedule.rank_of(stage) != rank and action.kind != "W":
                    calls["pipeline", kind] += 1
        return calls

    def _weights(self, rounds: int) -> Calls:
        """Count the all-gathers of weights in one step of ``rounds`` slots: each pass with ZeRO-3, also unused
        prefetches, else once for each sharded unit.
        """
        calls: Calls = Counter()
        for stage in self.holding.stages:
            kinds = [action.kind for action in self.actions if action.stage == stage]
            for unit, axis in self._units(stage).items():
                again = rounds * _gathers(kinds, is_kept=unit in ("", HEAD_UNIT))
                calls[axis, "all_gather"] += again if self.spec.parallel.sharding == "zero3" else 1
            if self.spec.parallel.sharding == "zero3" and self.layout.shard * self.layout.context > 1:
                calls["fsdp", "all_gather"] += rounds * self._wasted_prefetches(stage, kinds)
        return calls

    def _wasted_prefetches(self, stage: int, kinds: Iterable[str]) -> int:
        """Number of FSDP2 all-gathers of a stage in one slot whose result is not used.

        At the end of a backward pass, FSDP2 prefetches the unit that ran before it. After two forward passes in a row, that is the last
        block of the earlier pass, which PyTorch frees at once. In a stage with a root unit the root ran last. It is still gathered, so
        nothing is prefetched.
        """
        blocks = {part.unit for part in self._parts(stage) if not part.stacked}
        if "" in blocks or len(blocks) == 1:
            return 0
        count = forwards = 0
        for kind in kinds:
            if kind in ("B", "I") and forwards > 1:
                count += 1
            forwards = forwards + 1 if kind == "F" else 0
        return count

    def _units(self, stage: int) -> Mapping[str, str]:
        """Return the FSDP units of ``stage`` that are sharded over several ranks, each with its axis, "fsdp" or "expert_shard"."""
        axes = {False: "fsdp", True: "expert_shard"}
        ranks = {False: self.layout.shard * self.layout.context, True: self.layout.expert_shard}
        stacked = {part.unit: part.stacked for part in self._parts(stage)}
        return {unit: axes[experts] for unit, experts in stacked.items() if ranks[experts] > 1}

    def _reduction(self, rounds: int) -> Calls:
        """Return the number of gradient reductions over shards and replicas, by axis and kind, in one step of
        ``rounds`` slots.

        Shards reduce once for each slot with ZeRO-3, and with ZeRO-2 if the reduction is reproducible; otherwise once.
        """
        calls: Calls = Counter()
        reduction, sharding = self.spec.train.reduction, self.spec.parallel.sharding
        # ZeRO-1 adds a rank's slots before it exchanges them.
        by_slot = sharding == "zero3" or (reduction == "reproducible" and sharding != "zero1")
        times = rounds if by_slot else 1
        over_shards, over_replicas = _EXCHANGES[reduction]
        for stage in self.holding.stages:
            for axis in self._units(stage).values():
                for kind in over_shards:
                    calls[axis, kind] += times
        if self.layout.replicate > 1:
            for kind in over_replicas:
                calls["replicate", kind] += self._exchanges()
        return calls

    def _exchanges(self) -> int:
        """Exchanges between replicas in a step: one for each FSDP unit, or for each bucket if FSDP is not used."""
        if self._sharded():
            return sum(len({piece.parameter.unit for piece in self.pieces[n]}) for n in self.holding.stages)
        return len(list(in_buckets(self.holding.pieces, lambda share: share.elements)))

    def _sharded(self) -> bool:
        """Return True if FSDP wraps the model: its state is sharded, or its compute dtype differs from that of the weights."""
        ranks = self.layout.shard * self.layout.context
        experts = self.layout.expert_shard if self.spec.model.moe else 1
        return ranks > 1 or experts > 1 or self.spec.precision.compute != "fp32"


def _gathers(kinds: Iterable[str], *, is_kept: bool) -> int:
    """Return the number of ZeRO-3 all-gathers of a unit in one slot, one for each pass; postponed weight gradients
    (W) need none.

    If ``is_kept`` (root and head), the weights stay gathered from F to the next pass.
    """
    count, gathered = 0, False
    for kind in kinds:
        if kind == "W":
            continue
        if not gathered:
            count += 1
        gathered = is_kept and kind == "F"
    return count


def _times(calls: Calls, factor: int) -> Calls:
    return Counter({key: count * factor for key, count in calls.items()})
