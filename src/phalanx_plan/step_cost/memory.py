"""Memory of a rank, by kind, for arrays of layouts and for every kind of rank of a pipeline.

State is what the stack keeps for each parameter (``phalanx_plan.workload.stacks``), sharded by ZeRO stage. Activations are the kept
tensors of the layers' lists (``phalanx_plan.workload.architecture``), for the micro-batches that the schedule has in flight on the rank.
The worst rank decides, and it is not always the first: the last has the logits. Sources: ZeRO (arXiv 1910.02054), activations (arXiv
2205.05198), schedules (arXiv 2104.04473, 2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from phalanx.parallel.reduction.buckets import BUCKET_ELEMENTS
from phalanx.run.layout import SPLIT_BACKWARD
from phalanx.run.spec import OptimizerSpec
from phalanx_plan.step_cost.layer_costs import LayerCosts
from phalanx_plan.step_cost.pipeline import Pipelines, in_flight
from phalanx_plan.workload.candidates import PRECISIONS, SCHEDULES, Candidates, Floats, Ints, distinct
from phalanx_plan.workload.holdings import Holdings, PipelinePlaces, most_stages, owned_matrices, places
from phalanx_plan.workload.stacks import ParameterState, TrainingJob

_OFFLOADED_LAYERS = 2
"""Layers whose offloaded activations are on the accelerator at once: one being copied out and one in use."""
OVERHEADS = ("context", "communicators", "fragmentation")
"""Kinds of memory that an allocator does not count as allocated."""


@dataclass(frozen=True)
class PlaceCounts:
    """One kind of rank of each candidate: how much of each of ``KINDS`` it has, in the candidates' axes."""

    counts: tuple[Floats, Floats, Floats, Floats]
    rank: Ints
    """Rank in the pipeline."""


@dataclass(frozen=True)
class PlaceTable:
    """The places of every candidate."""

    table: PipelinePlaces
    row: Ints
    """Row of each candidate in ``table``."""

    def __len__(self) -> int:
        return self.table.kinds

    def __getitem__(self, kind: int | Ints) -> PlaceCounts:
        """Return the ``kind``-th place of each candidate; an array gives each candidate its own, and broadcasts."""
        table, row = self.table, self.row
        if not 0 <= np.max(kind) < table.kinds:
            raise IndexError(f"there are {table.kinds} places")
        place = row * table.kinds + kind
        dense, mixture, embedding, head = (column.take(place) for column in table.counts)
        return PlaceCounts((dense, mixture, embedding, head), table.rank.take(place))

    def each(self) -> tuple[Ints, Ints]:
        """Every place of every candidate of the last axis, as (candidate, kind); by kind."""
        number = self.table.number[self.row.ravel()]
        kind, candidate = np.nonzero(np.arange(len(self))[:, None] < number)
        return candidate, kind


def place_table(job: TrainingJob, candidates: Candidates) -> PlaceTable:
    """The kinds of ranks of all ``candidates``."""
    folded = np.logical_or.reduce([candidates.schedule == SCHEDULES.index(name) for name in SPLIT_BACKWARD])
    # Candidates with more stages than layers are not legal; they are looked up with one stage on a rank.
    enough = candidates.pipeline * candidates.stages_per_rank <= most_stages(job.workload, job.stack)
    per_rank = np.where(enough, candidates.stages_per_rank, 1)
    columns, row = distinct([candidates.pipeline, per_rank, folded.astype(np.int64)])
    pipelines = [
        (ranks, each, bool(turns)) for ranks, each, turns in zip(*(c.tolist() for c in columns), strict=True)
    ]
    wide = np.broadcast_to(row, (*row.shape[:-1], candidates.shape[-1]))
    return PlaceTable(places(job.workload, job.stack, pipelines), wide)


def pipelines_of(job: TrainingJob, candidates: Candidates) -> Pipelines:
    """The pipelines of candidates, with the micro-batches of one flush: all that a rank computes, or with GPipe a slot's."""
    each = micro_batches_per_slot(job, candidates)
    drains = candidates.schedule == SCHEDULES.index("gpipe")
    return Pipelines(
        candidates.schedule,
        candidates.pipeline,
        candidates.stages_per_rank,
        each * np.where(drains, 1, _rounds(job, candidates)),
    )


def micro_batches_per_slot(job: TrainingJob, candidates: Candidates) -> Ints:
    """Micro-batches whose gradients are reduced together: of a slot, or all that a rank computes."""
    slots = job.workload.slots or candidates.data
    each: Ints = np.maximum(job.workload.batch // (slots * candidates.micro_batch), 1)
    return each


def state_bytes(
    job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts
) -> dict[str, Floats]:
    """Bytes of weights, gradients and optimizer state, by kind."""
    stack = job.stack
    full, share = (
        times(place.counts, holdings.dense) + times(place.counts, holdings.experts),
        times(place.counts, holdings.dense_share) + times(place.counts, holdings.experts_share),
    )
    kinds = {state.kind: _state(state, candidates, full, share) for state in stack.states.kept}
    if stack.states.optimizer is not None:
        kinds["moments"] = _moments(stack.states.optimizer, job, candidates, holdings, place)
    kinds["compute copy"] = stack.states.copy_bytes * _gathered(job, candidates, holdings, place)
    if stack.states.slot_gradient_bytes:
        adds_up = micro_batches_per_slot(job, candidates) > 1
        if stack.data.reduces_once and not stack.states.slot_bin_bytes:
            adds_up = adds_up | ((candidates.zero < 3) & (_rounds(job, candidates) > 1))
        kinds["slot gradients"] = stack.states.slot_gradient_bytes * full * adds_up
    if stack.states.slot_tree:
        kinds["open sums"] = (_open_sums(job, candidates) - 1) * kinds["gradients"]
    if stack.states.slot_bin_bytes:
        elements: Floats = np.where(candidates.zero < 3, full, share)
        kept = (candidates.zero < 1) | (_rounds(job, candidates) > 1)
        kinds["integer sums"] = stack.states.slot_bin_bytes * elements * kept
    if stack.states.unit_gradient_bytes:
        kinds["gradient buffers"] = _unit_gradients(job, candidates, holdings, place)
    if stack.states.embedding_gradient_bytes:
        ends = np.maximum(place.counts[2], place.counts[3])
        kinds["gradient of the embedding"] = stack.states.embedding_gradient_bytes * ends * holdings.dense[2]
    return kinds


def _unit_gradients(
    job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts
) -> Floats:
    """Bytes of the gradient of the largest block, whole, while its shares are exchanged."""
    blocks = [
        (count, block) for count, block in zip(place.counts, holdings.block, strict=True) if block.any()
    ]
    largest = reduce(np.maximum, [(count > 0) * block for count, block in blocks])
    gradient_bytes: Floats = job.stack.states.unit_gradient_bytes * largest * (candidates.zero >= 2)
    return gradient_bytes


def _moments(
    optimizer: OptimizerSpec, job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts
) -> Floats:
    """Bytes of this project's optimizers: AdamW's moments of a rank's shares, and the state of the matrices that it owns."""
    moments = times(place.counts, holdings.moment_bytes_share)
    if optimizer.name != "adamw":
        owned = owned_matrices(optimizer, job.workload.model, candidates, place.counts)
        moments = moments + owned.state_bytes
    return moments * (1 - candidates.offload_optimizer)


def _state(state: ParameterState, candidates: Candidates, full: Floats, share: Floats) -> Floats:
    elements = np.where(candidates.zero >= state.sharded_from, share, full)
    on_accelerator = 1 - candidates.offload_optimizer if state.optimizer else 1
    return state.bytes * elements * on_accelerator


def times(counts: tuple[Floats, ...], values: tuple[Floats, ...]) -> Floats:
    """The sum of counts x values over kinds; kinds that occur nowhere, or of which there is nothing to count, are skipped."""
    pairs = zip(counts, values, strict=True)
    terms = [count * value for count, value in pairs if count.any() and value.any()]
    return reduce(np.add, terms) if terms else np.zeros(1)


def _open_sums(job: TrainingJob, candidates: Candidates) -> Floats:
    """Sums that a binary tree holds at once while a rank's last slot is computed, at least one: a branch for each level."""
    return np.maximum(np.floor(np.log2(_rounds(job, candidates))), 1.0)


def _rounds(job: TrainingJob, candidates: Candidates) -> Ints:
    """Slots that a rank computes in a step, at least one."""
    return np.maximum(job.workload.slots // candidates.data, 1)


def _gathered(job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts) -> Floats:
    """Elements held in the format of computing: all, or with ZeRO-3 two blocks and everything outside blocks."""
    # If nothing is divided and formats agree, the weights themselves are used to compute.
    always = job.stack.states.copies_unsharded
    dense_in, experts_in = (
        np.asarray((ranks > 1) & (candidates.zero > 0) | always, dtype=np.float64)
        for ranks in (candidates.dense_shard, candidates.expert_shard)
    )
    everything = (
        times(place.counts, holdings.dense) * dense_in + times(place.counts, holdings.experts) * experts_in
    )
    if not (candidates.zero >= 3).any():
        return everything
    first = second = in_blocks = np.zeros(1)
    for count, block, experts in zip(place.counts, holdings.block, holdings.experts, strict=True):
        size = (block - experts) * dense_in + experts * experts_in
        in_blocks = in_blocks + count * size
        size_of_one, size_of_second = size * (count > 0), size * (count > 1)
        second = np.maximum(np.maximum(second, size_of_second), np.minimum(first, size_of_one))
        first = np.maximum(first, size_of_one)
    return np.where(candidates.zero >= 3, first + second + everything - in_blocks, everything)


def activation_bytes(
    job: TrainingJob,
    candidates: Candidates,
    holdings: Holdings,
    costs: LayerCosts,
    pipes: Pipelines,
    place: PlaceCounts,
) -> dict[str, Floats]:
    """Bytes of activations kept for backward, and of temporary buffers of a pass, by kind."""
    layers = [kind for kind in (0, 1) if place.counts[kind].any()]  # the kinds that some rank has
    per_layer = {kind: costs.by_mode(costs.kept_bytes, kind, candidates.recompute) for kind in (*layers, 3)}
    kept = times(tuple(place.counts[kind] for kind in layers), tuple(per_layer[kind] for kind in layers))
    if job.stack.activations.stage_outputs:
        kept = kept + _boundary(job, candidates) * candidates.stages_per_rank
    if job.stack.activations.dropout:
        # The embedding's dropout is not part of a recomputed layer (arXiv 2205.05198, section 4.3).
        kept = kept + place.counts[2] * costs.of(costs.kept_bytes, 2, 0)
    kept = kept * in_flight(pipes, place.rank)
    # The end of the model is computed backward right after its forward.
    kept = kept + place.counts[3] * per_layer[3]
    if candidates.offload_activations.any():
        window = np.zeros(1)
        for kind in layers:
            window = np.maximum(window, _OFFLOADED_LAYERS * per_layer[kind] * (place.counts[kind] > 0))
        kept = np.where(candidates.offload_activations > 0, np.minimum(kept, window), kept)
    recomputed_layer, widest = np.zeros(1), np.zeros(1)
    for kind in layers:
        present = place.counts[kind] > 0
        full = costs.of(costs.kept_bytes, kind, 0)
        recomputed_layer = np.maximum(recomputed_layer, (full - per_layer[kind]) * present)
        widest = np.maximum(widest, costs.of(costs.widest_bytes, kind) * present)
    # The loss's arrays are freed before the layers' backward pass, so the larger of the two counts.
    later = recomputed_layer + widest
    if job.stack.states.unit_gradient_bytes:
        later = later + _unit_gradients(job, candidates, holdings, place)
    loss = np.maximum(place.counts[3] * _logits(job, candidates) - later, 0.0)
    kinds = {
        "activations": kept,
        "recomputed layer": recomputed_layer,
        "gradients of activations": widest,
        "logits": loss,
    }
    if job.stack.states.slot_tree and (candidates.dense_shard == 1).any():
        # The activations are freed after the last backward pass, so the larger of the two counts.
        kinds["exchange between replicas"] = np.maximum(
            _replica_exchange(job, candidates, holdings, place) - total(kinds), 0.0
        )
    return kinds


def _replica_exchange(
    job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts
) -> Floats:
    """Bytes in addition to full gradient sums while replicas exchange them: one bucket being sent and one being received.

    If the memory of spent sums is kept, the totals of all previous buckets are added (``phalanx.parallel.reduction.summation``).
    """
    gradients = 4.0 * (times(place.counts, holdings.dense) + times(place.counts, holdings.experts))
    bucket = np.minimum(gradients, 4.0 * BUCKET_ELEMENTS)
    totals = np.floor(gradients / np.maximum(bucket, 1.0)) * bucket * job.stack.states.keeps_spent_sums
    divided = (candidates.dense_shard == 1) & (candidates.data > 1)
    exchange_bytes: Floats = (2 * bucket + totals) * divided
    return exchange_bytes


def _boundary(job: TrainingJob, candidates: Candidates) -> Floats:
    """Bytes of a micro-batch that a stage sends to the next; none where there is one stage."""
    tokens = candidates.micro_batch * job.workload.seq_len / candidates.context
    rows = tokens / np.where(candidates.sequence_parallel > 0, candidates.tensor, 1)
    width = np.array([precision.activation_bytes for precision in PRECISIONS])[candidates.precision]
    bytes_: Floats = rows * job.workload.model.dim * width * (candidates.pipeline > 1)
    return bytes_


def _logits(job: TrainingJob, candidates: Candidates) -> Floats:
    tokens = candidates.micro_batch * job.workload.seq_len / candidates.context
    at_once = np.minimum(tokens, job.stack.loss.chunk or np.inf)
    width = np.array([precision.activation_bytes for precision in PRECISIONS])[candidates.precision]
    # The figure of a stack is for two bytes in the format of activations, beside fp32.
    bytes_each = job.stack.loss.logit_bytes + 2.0 * (width - 2)
    return at_once * job.workload.model.vocab_size / candidates.tensor * bytes_each


def overhead_bytes(job: TrainingJob, candidates: Candidates) -> dict[str, Floats]:
    """Bytes that software holds independent of the model."""
    groups = (candidates.tensor, candidates.context, candidates.pipeline, candidates.data, candidates.expert)
    count = (
        sum((degree > 1).astype(np.float64) for degree in groups) + job.stack.allocator.further_communicators
    )
    return {
        "context": np.full(1, job.stack.allocator.context_bytes + job.stack.allocator.buffer_bytes),
        "communicators": job.stack.allocator.communicator_bytes * np.asarray(count),
    }


def memory_at(
    job: TrainingJob,
    candidates: Candidates,
    holdings: Holdings,
    costs: LayerCosts,
    pipes: Pipelines,
    place: PlaceCounts,
) -> dict[str, Floats]:
    """Bytes by kind of the ranks at ``place``; their sum is the total."""
    kinds = state_bytes(job, candidates, holdings, place)
    kinds |= activation_bytes(job, candidates, holdings, costs, pipes, place)
    return (
        kinds
        | {"fragmentation": job.stack.allocator.fragmentation * total(kinds)}
        | overhead_bytes(job, candidates)
    )


def lasting_bytes(job: TrainingJob, candidates: Candidates, holdings: Holdings, place: PlaceCounts) -> Floats:
    """The part of ``memory_at`` that no pass changes: state and overheads."""
    state = total(state_bytes(job, candidates, holdings, place))
    return (1 + job.stack.allocator.fragmentation) * state + total(overhead_bytes(job, candidates))


def passing_bytes(
    job: TrainingJob,
    candidates: Candidates,
    holdings: Holdings,
    costs: LayerCosts,
    pipes: Pipelines,
    place: PlaceCounts,
) -> Floats:
    """The rest of ``memory_at``: activations and temporary buffers."""
    activations = total(activation_bytes(job, candidates, holdings, costs, pipes, place))
    return (1 + job.stack.allocator.fragmentation) * activations


def state_columns(job: TrainingJob, candidates: Candidates, table: PlaceTable) -> tuple[Ints, ...]:
    """All that ``lasting_bytes`` depends on beside the choices that have axes of their own."""
    each = candidates
    columns = (each.tensor, each.context, each.shard, each.replicate, each.expert, each.expert_tensor)
    adds_up = np.minimum(micro_batches_per_slot(job, candidates), 2)
    return *columns, each.pipeline, each.zero, each.offload_optimizer, adds_up, table.row


def total(terms: dict[str, Floats]) -> Floats:
    """The sum of terms that broadcast."""
    # Sorted by size, so that most of the work is done on small arrays.
    result = np.zeros(1)
    for term in sorted(terms.values(), key=np.size):
        result = result + term
    return result
