"""Memory of a rank, by kind, for arrays of layouts and for every kind of rank of a pipeline.

State is what the stack keeps for each parameter (``phalanx_plan.workload.stacks``), sharded by ZeRO stage. Activations are the kept
tensors of the layers' lists (``phalanx_plan.workload.architecture``), for the micro-batches that the schedule has in flight on the rank.
The worst rank decides, and it is not always the first: the last has the logits. Sources: ZeRO (arXiv 1910.02054), activations (arXiv
2205.05198), schedules (arXiv 2104.04473, 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from phalanx.model.facts.holdings import held_bytes
from phalanx.parallel.divisions import BUCKET_ELEMENTS
from phalanx.run.spec import OptimizerSpec
from phalanx_plan.step_cost.layer_costs import LayerCosts
from phalanx_plan.step_cost.pipeline import Pipelines, PlaceCounts, PlaceTable, in_flight
from phalanx_plan.workload.architecture import KINDS
from phalanx_plan.workload.candidates import PRECISIONS, SCHEDULES, Candidates, Floats, Ints
from phalanx_plan.workload.holdings import Holdings, owned_matrices
from phalanx_plan.workload.stacks import ParameterState, TrainingJob

_OFFLOADED_LAYERS = 2
"""Layers whose offloaded activations are on the accelerator at once: one being copied out and one in use."""
_GRADIENTS_OVER_KEPT = 1.7
"""Gradients in the backward pass of a gated layer over what it keeps: of its input, its product and both factors, over both factors."""
OVERHEADS = ("context", "communicators", "fragmentation")
"""Kinds of memory that an allocator does not count as allocated."""


@dataclass(frozen=True)
class CostInputs:
    """Inputs of the formulas of memory and time for some candidates, computed once."""

    job: TrainingJob
    candidates: Candidates
    holdings: Holdings
    costs: LayerCosts
    pipes: Pipelines
    table: PlaceTable


def pipelines_of(job: TrainingJob, candidates: Candidates) -> Pipelines:
    """The pipelines of candidates, with the micro-batches of one flush: all that a rank computes, or with GPipe a slot's."""
    each = micro_batches_per_slot(job, candidates)
    drains = candidates.schedule == SCHEDULES.index("gpipe")
    return Pipelines(
        candidates.schedule,
        candidates.pipeline,
        candidates.stages_per_rank,
        each * np.where(drains, 1, rounds(job, candidates)),
    )


def micro_batches_per_slot(job: TrainingJob, candidates: Candidates) -> Ints:
    """Micro-batches whose gradients are reduced together: of a slot, or all that a rank computes."""
    slots = job.workload.slots or candidates.data
    each: Ints = np.maximum(job.workload.batch // (slots * candidates.micro_batch), 1)
    return each


def state_bytes(inputs: CostInputs, place: PlaceCounts) -> dict[str, Floats]:
    """Bytes of weights, gradients, sums over slots and optimizer state on the ranks at ``place``, by kind.

    What the stack does not hold has no entry. Offloaded moments take none. Kinds that only some candidates have are 0
    for the others.
    """
    job, candidates, holdings = inputs.job, inputs.candidates, inputs.holdings
    stack = job.stack
    full, share = (
        times(place.counts, holdings.dense) + times(place.counts, holdings.experts),
        times(place.counts, holdings.dense_share) + times(place.counts, holdings.experts_share),
    )
    kinds = {state.kind: _state(state, candidates, full, share) for state in stack.states.kept}
    if stack.states.optimizer is not None:
        kinds["moments"] = _moments(stack.states.optimizer, inputs, place)
    kinds["compute copy"] = stack.states.copy_bytes * _gathered(inputs, place)
    if stack.states.frees_gradients:
        # Before the last backward pass; ``_moments_of_a_pass`` has what it makes.
        sums = _whole_sums(job, candidates)
        kinds["gradients"] = kinds["gradients"] * np.minimum(sums, 1.0)
        if stack.states.slot_tree:
            kinds["open sums"] = np.maximum(sums - 1.0, 0.0) * kinds["gradients"]
            # The leaves among ZeRO-1's complete sums are stored in the dtype in which they are sent.
            adds_own, leaf = candidates.zero == 1, _slot_bytes(job, candidates)
            slots = rounds(job, candidates)
            sum_bytes = np.where(
                leaf == 2, *(of_each(partial(held_bytes, leaf_bytes=b), slots) for b in (2, 4))
            )
            lowest = leaf * np.minimum(sums, 1.0)
            kinds["gradients"] = np.where(adds_own, full * lowest, kinds["gradients"])
            kinds["open sums"] = np.where(adds_own, full * (sum_bytes - lowest), kinds["open sums"])
    elif stack.states.slot_tree:
        kinds["open sums"] = (np.maximum(_whole_sums(job, candidates), 1.0) - 1) * kinds["gradients"]
    if stack.states.slot_gradient_bytes:
        adds_up = micro_batches_per_slot(job, candidates) > 1
        if stack.data.reduces_once and not stack.states.slot_bin_bytes:
            adds_up = adds_up | ((candidates.zero < 3) & (rounds(job, candidates) > 1))
        kinds["slot gradients"] = stack.states.slot_gradient_bytes * full * adds_up
    if stack.states.slot_bin_bytes:
        elements: Floats = np.where(candidates.zero < 3, full, share)
        kept = (candidates.zero < 1) | (rounds(job, candidates) > 1)
        kinds["integer sums"] = stack.states.slot_bin_bytes * elements * kept
    if stack.states.unit_gradient_bytes and not stack.states.frees_gradients:
        kinds["gradient buffers"] = _unit_gradients(inputs, place)
    if stack.states.embedding_gradient_bytes:
        ends = np.maximum(place.counts[2], place.counts[3])
        kinds["gradient of the embedding"] = stack.states.embedding_gradient_bytes * ends * holdings.dense[2]
    return kinds


def _unit_gradients(inputs: CostInputs, place: PlaceCounts) -> Floats:
    """Bytes of the gradient of the largest block, in full, while its shares are exchanged; 0 below ZeRO-2."""
    largest = _largest_block(inputs.holdings, place, len(KINDS))
    unit_bytes = inputs.job.stack.states.unit_gradient_bytes
    gradient_bytes: Floats = unit_bytes * largest * (inputs.candidates.zero >= 2)
    return gradient_bytes


def _moments(optimizer: OptimizerSpec, inputs: CostInputs, place: PlaceCounts) -> Floats:
    """Bytes of this project's optimizers on a rank: AdamW's moments of its shares and, of other optimizers, the state of the matrices that it
    owns; 0 where they are offloaded."""
    moments = times(place.counts, inputs.holdings.moment_bytes_share)
    if optimizer.name != "adamw":
        owned = owned_matrices(optimizer, inputs.job.workload.model, inputs.candidates, place.counts)
        moments = moments + owned.state_bytes
    return moments * (1 - inputs.candidates.offload_optimizer)


def _state(state: ParameterState, candidates: Candidates, full: Floats, share: Floats) -> Floats:
    """Bytes of one kind of state of a rank: sharded from its ZeRO stage on, and none if offloaded."""
    elements = np.where(candidates.zero >= state.sharded_from, share, full)
    on_accelerator = 1 - candidates.offload_optimizer if state.optimizer else 1
    return state.bytes * elements * on_accelerator


def times(counts: tuple[Floats, ...], values: tuple[Floats, ...]) -> Floats:
    """The sum of counts x values over kinds; kinds that occur nowhere, or of which there is nothing to count, are skipped."""
    pairs = zip(counts, values, strict=True)
    terms = [count * value for count, value in pairs if count.any() and value.any()]
    return reduce(np.add, terms) if terms else np.zeros(1)


def _whole_sums(job: TrainingJob, candidates: Candidates) -> Floats:
    """Sums of a rank's share of all gradients that are held while its last slot is computed; 0 if that is its only slot.

    A binary tree holds one for each level. Without a tree there is one with ZeRO-3, unless sums are of integers.
    """
    levels = np.floor(np.log2(rounds(job, candidates)))
    if job.stack.states.slot_tree:
        return levels
    sums: Floats = np.minimum(levels, 1.0) * ((candidates.zero >= 3) & (job.stack.states.slot_bin_bytes == 0))
    return sums


def rounds(job: TrainingJob, candidates: Candidates) -> Ints:
    """Slots that a rank computes in a step, at least one."""
    return np.maximum(job.workload.slots // candidates.data, 1)


def of_each(function: Callable[[int], int], slots: Ints | Floats) -> Floats:
    """Return the values of a function of a rank's slots, in the shape of ``slots``."""
    numbers, places = np.unique(slots, return_inverse=True)
    values = np.array([function(max(1, int(number))) for number in numbers], dtype=np.float64)
    return values[places].reshape(np.shape(slots))


def _gathered(inputs: CostInputs, place: PlaceCounts) -> Floats:
    """Elements held in the format of computing: all, or with ZeRO-3 the two largest blocks and everything outside
    blocks.

    Unsharded weights have no copy, unless the stack copies them too.
    """
    candidates, holdings = inputs.candidates, inputs.holdings
    # If nothing is divided and formats agree, the weights themselves are used to compute.
    always = inputs.job.stack.states.copies_unsharded
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


def activation_bytes(inputs: CostInputs, place: PlaceCounts) -> dict[str, Floats]:
    """Bytes of activations kept for backward, and of temporary buffers of a pass, by kind.

    Activations are those of all micro-batches in flight, or of ``_OFFLOADED_LAYERS`` layers if offloaded. Temporary
    buffers are those of the worst layer.
    """
    job, candidates, costs = inputs.job, inputs.candidates, inputs.costs
    layers = [kind for kind in (0, 1) if place.counts[kind].any()]  # kinds of layers that some rank has
    per_layer = {kind: costs.by_mode(costs.kept_bytes, kind, candidates.recompute) for kind in (*layers, 3)}
    kept = times(tuple(place.counts[kind] for kind in layers), tuple(per_layer[kind] for kind in layers))
    if job.stack.activations.stage_outputs:
        kept = kept + _boundary(job, candidates) * candidates.stages_per_rank
    if job.stack.activations.dropout:
        # The embedding's dropout is not part of a recomputed layer (arXiv 2205.05198, section 4.3).
        kept = kept + place.counts[2] * costs.of(costs.kept_bytes, 2, 0)
    kept = kept * in_flight(inputs.pipes, place.rank)
    # The end of the model is computed backward right after its forward.
    kept = kept + place.counts[3] * per_layer[3]
    if candidates.offload_activations.any():
        window = np.zeros(1)
        for kind in layers:
            window = np.maximum(window, _OFFLOADED_LAYERS * per_layer[kind] * (place.counts[kind] > 0))
        kept = np.where(candidates.offload_activations > 0, np.minimum(kept, window), kept)
    recomputed_layer, widest, full_layer = np.zeros(1), np.zeros(1), np.zeros(1)
    for kind in layers:
        present = place.counts[kind] > 0
        in_full = costs.of(costs.kept_bytes, kind, 0)
        recomputed_layer = np.maximum(recomputed_layer, (in_full - per_layer[kind]) * present)
        widest = np.maximum(widest, costs.of(costs.widest_bytes, kind) * present)
        full_layer = np.maximum(full_layer, in_full * present)
    if job.stack.states.frees_gradients:
        layer = LayerBytes(recomputed_layer, full_layer, widest)
        return _moments_of_a_pass(inputs, place, kept, layer)
    # The loss's arrays are freed before the layers' backward pass, so the larger of the two counts.
    later = recomputed_layer + widest
    if job.stack.states.unit_gradient_bytes:
        later = later + _unit_gradients(inputs, place)
    loss = np.maximum(place.counts[3] * _logits(job, candidates) - later, 0.0)
    kinds = {
        "activations": kept,
        "recomputed layer": recomputed_layer,
        "gradients of activations": widest,
        "logits": loss,
    }
    if job.stack.states.slot_tree and (candidates.dense_shard == 1).any():
        # The activations are freed after the last backward pass, so the larger of the two counts.
        kinds["exchange between replicas"] = np.maximum(_replica_exchange(inputs, place) - total(kinds), 0.0)
    return kinds


class LayerBytes(NamedTuple):
    """Activations of one micro-batch in the layer that has most of them, in bytes."""

    recomputed: Floats
    """Activations that a recomputation makes again."""
    full: Floats
    """All that is kept without recomputation."""
    widest: Floats
    """Activations of the part that keeps most."""


def _moments_of_a_pass(
    inputs: CostInputs, place: PlaceCounts, kept: Floats, layer: LayerBytes
) -> dict[str, Floats]:
    """Bytes beside state of this project's trainer on GPUs, by kind.

    All kinds are present. Their sum is the most of five moments of a forward and backward pass:

    1. The loss of the last chunk, with the projection's gradient in fp32.
    2. The exchange of the projection's gradient.
    3. The backward pass of the last layer, and the exchange of its gradient.
    4. The backward pass of the first layer, with all later gradients and without the activations and weights of later layers.
    5. The exchange of the embedding's gradient, with all gradients.
    """
    job, candidates, holdings = inputs.job, inputs.candidates, inputs.holdings
    tied, copy_bytes = job.workload.model.tie_embeddings, job.stack.states.copy_bytes
    embedding = place.counts[2] * holdings.dense[2]
    projection = place.counts[3] * (holdings.dense[2] if tied else holdings.dense[3])
    exchanged = _exchange_bytes(job, candidates)
    unit = exchanged * _largest_block(holdings, place, 2)
    # With tied embeddings, the projection's gradient waits for the embedding's.
    waiting = copy_bytes * projection * tied
    own = projection * (not tied)
    first = (rounds(job, candidates) == 1) & (micro_batches_per_slot(job, candidates) == 1)
    share = times(place.counts, holdings.dense_share) + times(place.counts, holdings.experts_share)
    copy = copy_bytes * _gathered(inputs, place)
    loss = place.counts[3] * _logits(job, candidates) + 4.0 * projection
    head = (copy_bytes + exchanged) * own
    # The last sent buffer is freed when the next exchange begins; the sum of a first pass stays.
    buffers = np.maximum(unit, 4.0 * own) + waiting
    gradients = _GRADIENTS_OVER_KEPT * layer.widest
    last_layer = layer.recomputed + gradients + buffers + first * 4.0 * own / candidates.dense_shard
    # Weights of layers whose backward pass is over are freed in the step's last pass.
    passed = first * (4.0 * share - np.maximum(copy - copy_bytes * embedding, 0.0))
    first_layer = passed - first * 4.0 * embedding / candidates.dense_shard + layer.full + gradients + unit
    ends = (
        passed
        - first * copy_bytes * embedding
        + np.where(embedding > 0, exchanged * embedding + waiting, unit)
    )
    early = np.maximum(np.maximum(loss, head), last_layer)
    late = np.maximum(first_layer, ends)
    return {
        "activations": kept,
        "recomputed layer": layer.recomputed,
        "gradients of activations": gradients,
        "gradient buffers": buffers,
        "logits": np.maximum(early - layer.recomputed - gradients - buffers, 0.0),
        "gradients after backward": np.maximum(late - kept - early, 0.0),
    }


def _exchange_bytes(job: TrainingJob, candidates: Candidates) -> Floats:
    """Bytes per element to exchange a unit's gradient, beside the gradient itself.

    A flat copy in fp32 is sent to the ranks that share the weights, in the tree's wire format: what is received is widened to fp32.
    Replicas send and receive the shares of sums.
    """
    alone = np.asarray(candidates.dense_shard == 1, dtype=np.float64)
    received = np.where(_slot_bytes(job, candidates) == 4, 4.0, 2.0 + 4.0)
    if not job.stack.states.slot_tree:
        received = np.asarray(job.stack.states.slot_bin_bytes)
    between_replicas = 2 * 4.0 * (candidates.data > candidates.dense_shard) / candidates.dense_shard
    return 4.0 + (1.0 - alone) * received + between_replicas


def _slot_bytes(job: TrainingJob, candidates: Candidates) -> Floats:
    """Bytes of each element of a slot's gradient in the tree's wire format."""
    several = (micro_batches_per_slot(job, candidates) > 1) | (job.stack.states.copy_bytes > 2)
    return np.where(several, 4.0, 2.0)


def exchanged_bytes(job: TrainingJob, candidates: Candidates) -> Floats:
    """Return the bytes of each element that ranks exchange which share the weights: of a slot's gradient, or of a sum."""
    if not job.stack.states.slot_tree:
        return np.full(1, job.stack.data.reduce_bytes)
    adds_own = (candidates.zero == 1) & (rounds(job, candidates) > 1)
    return np.where(adds_own, 4.0, _slot_bytes(job, candidates))


def _largest_block(holdings: Holdings, place: PlaceCounts, kinds: int) -> Floats:
    """Elements of the largest block that a rank has, of the first ``kinds`` of ``KINDS``: 2 are the layers."""
    blocks = zip(place.counts[:kinds], holdings.block[:kinds], strict=True)
    return reduce(np.maximum, [(count > 0) * block for count, block in blocks if block.any()])


def _replica_exchange(inputs: CostInputs, place: PlaceCounts) -> Floats:
    """Bytes on CPUs in addition to full gradient sums while replicas exchange them: one bucket being sent, one being received.

    The totals of all previous buckets are added, as the memory of spent sums is kept (``phalanx.parallel.reduction.summation``).
    """
    candidates, holdings = inputs.candidates, inputs.holdings
    gradients = 4.0 * (times(place.counts, holdings.dense) + times(place.counts, holdings.experts))
    bucket = np.minimum(gradients, 4.0 * BUCKET_ELEMENTS)
    totals = np.floor(gradients / np.maximum(bucket, 1.0)) * bucket
    divided = (candidates.dense_shard == 1) & (candidates.data > 1)
    exchange_bytes: Floats = (2 * bucket + totals) * divided
    return exchange_bytes


def _boundary(job: TrainingJob, candidates: Candidates) -> Floats:
    """Bytes of a micro-batch that a stage sends to the next; 0 without a pipeline."""
    tokens = candidates.micro_batch * job.workload.seq_len / candidates.context
    rows = tokens / np.where(candidates.sequence_parallel > 0, candidates.tensor, 1)
    width = np.array([precision.activation_bytes for precision in PRECISIONS])[candidates.precision]
    bytes_: Floats = rows * job.workload.model.dim * width * (candidates.pipeline > 1)
    return bytes_


def _logits(job: TrainingJob, candidates: Candidates) -> Floats:
    """Bytes of the logits of the tokens in one chunk of the loss (all tokens if unchunked), on one tensor rank."""
    tokens = candidates.micro_batch * job.workload.seq_len / candidates.context
    at_once = np.minimum(tokens, job.stack.loss.chunk or np.inf)
    width = np.array([precision.activation_bytes for precision in PRECISIONS])[candidates.precision]
    # The figure of a stack is for two bytes in the format of activations, beside fp32.
    bytes_each = job.stack.loss.logit_bytes + 2.0 * (width - 2)
    return at_once * job.workload.model.vocab_size / candidates.tensor * bytes_each


def overhead_bytes(job: TrainingJob, candidates: Candidates) -> dict[str, Floats]:
    """Bytes that software holds independent of the model: context with buffers, and communicators.

    Each axis with several ranks has one communicator; the stack may have further ones.
    """
    groups = (candidates.tensor, candidates.context, candidates.pipeline, candidates.data, candidates.expert)
    count = (
        sum((degree > 1).astype(np.float64) for degree in groups) + job.stack.allocator.further_communicators
    )
    return {
        "context": np.full(1, job.stack.allocator.context_bytes + job.stack.allocator.buffer_bytes),
        "communicators": job.stack.allocator.communicator_bytes * np.asarray(count),
    }


def memory_at(inputs: CostInputs, place: PlaceCounts) -> dict[str, Floats]:
    """Bytes by kind of the ranks at ``place``; their sum is the total. Fragmentation is a share of state and activations."""
    kinds = state_bytes(inputs, place) | activation_bytes(inputs, place)
    fragmentation = inputs.job.stack.allocator.fragmentation * total(kinds)
    return kinds | {"fragmentation": fragmentation} | overhead_bytes(inputs.job, inputs.candidates)


def lasting_bytes(inputs: CostInputs, place: PlaceCounts) -> Floats:
    """The part of ``memory_at`` that no pass changes: state and overheads."""
    state = (1 + inputs.job.stack.allocator.fragmentation) * total(state_bytes(inputs, place))
    return state + total(overhead_bytes(inputs.job, inputs.candidates))


def passing_bytes(inputs: CostInputs, place: PlaceCounts) -> Floats:
    """Bytes of activations and temporary buffers with their fragmentation: ``memory_at`` without ``lasting_bytes``."""
    activations = total(activation_bytes(inputs, place))
    return (1 + inputs.job.stack.allocator.fragmentation) * activations


def state_columns(inputs: CostInputs) -> tuple[Ints, ...]:
    """Return the columns that ``lasting_bytes`` depends on, but for the choices that have axes of their own."""
    each = inputs.candidates
    columns = (each.tensor, each.context, each.shard, each.replicate, each.expert, each.expert_tensor)
    adds_up = np.minimum(micro_batches_per_slot(inputs.job, each), 2)
    return *columns, each.pipeline, each.zero, each.offload_optimizer, adds_up, inputs.table.row


def total(terms: dict[str, Floats]) -> Floats:
    """Return the sum of terms that broadcast; shape (1,) and 0 if there are none."""
    # Sorted by size, so that most of the work is done on small arrays.
    result = np.zeros(1)
    for term in sorted(terms.values(), key=np.size):
        result = result + term
    return result
