"""Seconds of an optimizer step, term by term, for arrays of layouts.

The slowest rank decides: the one whose stages take longest. Its work is counted once for each micro-batch. Its waits are added:
the pipeline (``phalanx_plan.step_cost.pipeline``), the part of each exchange that computation does not hide, the update, and the
scale tax. Every term is an array of its own, in seconds, over just the axes it depends on; their sum is the step.

Overlap is a bound, not a promise: a fraction of the time of a backward pass (``Overlap.data``) can hide the reduction of
gradients. At least one block's share, the last, is always exposed (Rashidi et al., arXiv 2305.18169 and Calculon, arXiv
2305.18176, model the tail in the same way). Hidden communication is not free: it slows the computation beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from phalanx.model.facts.holdings import exchanged
from phalanx.model.facts.optimizer_state import UPDATE_BYTES
from phalanx.run.spec import OptimizerSpec
from phalanx_plan.step_cost import hardware_times
from phalanx_plan.step_cost.layer_costs import CATEGORIES, PHASES
from phalanx_plan.step_cost.memory import (
    CostInputs,
    exchanged_bytes,
    micro_batches_per_slot,
    of_each,
    times,
    total,
)
from phalanx_plan.step_cost.pipeline import Pipelines, PlaceTable, exposed_hops, idle_s, in_flight
from phalanx_plan.workload.architecture import KINDS
from phalanx_plan.workload.candidates import PRECISIONS, SCHEDULES, Candidates, Floats, Ints
from phalanx_plan.workload.holdings import owned_matrices
from phalanx_plan.workload.stacks import TrainingJob

_SLOWED = {"NVIDIA": 0.189, "AMD": 0.189}
"""Fraction by which computing slows while a collective runs beside it, by vendor: collectives are kernels that take processors,
cache and memory bandwidth. The mean over GPT and LLaMA models on four A100, H100, MI210 and MI250 (arXiv 2507.03114). A TPU's
transfers are its DMA engines'."""
_ADAM_BYTES = UPDATE_BYTES + 2 * 8
"""Read and written for each parameter by Adam with fp32 moments."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch in one layer of each of ``KINDS``."""

    forward_s: tuple[Floats, ...]
    input_gradient_s: tuple[Floats, ...]
    """Recomputation included."""
    weight_gradient_s: tuple[Floats, ...]
    hidden_s: tuple[Floats, ...]
    """Exchange of tokens that another micro-batch's computing hides, where there is one."""

    @cached_property
    def backward_s(self) -> tuple[Floats, ...]:
        """Both gradients."""
        return tuple(i + w for i, w in zip(self.input_gradient_s, self.weight_gradient_s, strict=True))

    @cached_property
    def layer_s(self) -> tuple[Floats, ...]:
        """Forward and backward."""
        each = zip(self.forward_s, self.input_gradient_s, self.weight_gradient_s, strict=True)
        return tuple(f + i + w for f, i, w in each)


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of each candidate, which the others wait for."""

    counts: tuple[Floats, ...]
    forward_s: Floats
    """Seconds of one micro-batch in all stages of the rank."""
    backward_s: Floats
    mean_stage_s: tuple[Floats, Floats, Floats]
    """Forward, gradient of the input and of the weights in the mean stage of the pipeline."""
    sum_s: Floats
    """Seconds of one micro-batch on all ranks of the pipeline together."""
    hidden_s: Floats
    """Exchange of tokens of one micro-batch on the rank that another one's computing hides, where there is one."""


def pass_times(inputs: CostInputs) -> PassTimes:
    """Times of one micro-batch in each kind of layer.

    Waits for offloaded activations are included; forward recomputation counts to the input's gradient.
    """
    kinds, costs = range(len(KINDS)), inputs.costs
    forward, to_inputs, weights = (
        tuple(costs.of(costs.by_phase, kind, phase) for kind in kinds) for phase in range(len(PHASES))
    )
    again = tuple(costs.by_mode(costs.recompute_s, kind, inputs.candidates.recompute) for kind in kinds)
    waits = [offload_waits(inputs, kind) for kind in kinds]
    return PassTimes(
        tuple(f + wait[0] for f, wait in zip(forward, waits, strict=True)),
        tuple(i + a + wait[1] for i, a, wait in zip(to_inputs, again, waits, strict=True)),
        weights,
        tuple(costs.of(costs.hidden_s, kind) for kind in kinds),
    )


def slowest_place(passes: PassTimes, table: PlaceTable) -> Ints:
    """Index in ``table`` of each candidate's kind of rank with the longest micro-batch; the first among equals."""
    layer = passes.layer_s
    longest = times(table[0].counts, layer)
    slow = np.zeros(longest.shape, dtype=np.int64)
    for kind in range(1, len(table)):
        seconds = times(table[kind].counts, layer)
        slow[seconds > longest] = kind
        longest = np.maximum(longest, seconds)
    return slow


def slowest(inputs: CostInputs, passes: PassTimes, place: Ints) -> Slowest:
    """Sum a micro-batch's seconds on the rank at ``place`` (from ``slowest_place``), and over all ranks and the mean stage."""
    counts = inputs.table[place].counts
    everything = tuple(np.asarray(n, dtype=np.float64) for n in (*inputs.table.table.layers, 1, 1))
    stages = inputs.candidates.pipeline * inputs.candidates.stages_per_rank
    return Slowest(
        counts,
        times(counts, passes.forward_s),
        times(counts, passes.backward_s),
        (
            times(everything, passes.forward_s) / stages,
            times(everything, passes.input_gradient_s) / stages,
            times(everything, passes.weight_gradient_s) / stages,
        ),
        times(everything, passes.layer_s),
        times(counts, passes.hidden_s),
    )


def step_terms(inputs: CostInputs, rank: Slowest) -> dict[str, Floats]:
    """Seconds of a step by term, taxes included; their sum is the step. The bubble is in closed form."""
    passes = _passes(inputs.job, inputs.candidates)
    terms = compute_terms(inputs, rank, passes) | waiting_terms(inputs, rank)
    waits = (offload_waits(inputs, kind) for kind in range(len(KINDS)))
    terms["activation_offload"] = passes * times(rank.counts, tuple(f + b for f, b in waits))
    terms["optimizer_offload"] = state_copy_s(inputs, rank.counts)
    return with_tax(inputs.job, inputs.candidates, terms)


def step_s(inputs: CostInputs, rank: Slowest) -> Floats:
    """Return each candidate's seconds per step, of which ``step_terms`` is the breakdown.

    ``rank`` has the slowest rank's computing and activation copies in one figure, so this needs no layer costs.
    """
    job, candidates = inputs.job, inputs.candidates
    terms = waiting_terms(inputs, rank)
    terms["busy"] = _passes(job, candidates) * (rank.forward_s + rank.backward_s)
    terms["optimizer_offload"] = state_copy_s(inputs, rank.counts)
    factor = (1 + scale_tax(job, candidates.ranks)) * job.stack.time_scalar
    return total({term: factor * seconds for term, seconds in terms.items()})


def _passes(job: TrainingJob, candidates: Candidates) -> Floats:
    """Micro-batches that a rank computes in a step."""
    return np.asarray(job.workload.batch / (candidates.data * candidates.micro_batch))


def waiting_terms(inputs: CostInputs, rank: Slowest) -> dict[str, Floats]:
    """Seconds by term in which the slowest rank waits in all its micro-batches: bubble, hops, exposed exchange; and
    those of the update.
    """
    job, candidates, pipes = inputs.job, inputs.candidates, inputs.pipes
    passes = _passes(job, candidates)
    flushes, reductions = passes / pipes.micro_batches, passes / micro_batches_per_slot(job, candidates)
    idle = idle_s(pipes, rank.forward_s + rank.backward_s, rank.sum_s, *rank.mean_stage_s)
    hops = np.maximum(exposed_hops(pipes), blocked_hops(job, pipes))
    # Waits for the host can hide the network meanwhile.
    windows = (rank.forward_s, rank.backward_s)
    unpaired = {"unpaired_exchange": flushes * unpaired_s(pipes, rank)} if job.stack.overlap.expert else {}
    return unpaired | {
        "bubble": flushes * idle,
        "pipeline_comm": flushes * hops * hop_s(job, candidates),
        **data_terms(inputs, rank.counts, windows, passes, reductions),
        "optimizer": optimizer_s(inputs, rank.counts),
    }


def unpaired_s(pipes: Pipelines, rank: Slowest) -> Floats:
    """Seconds of a flush in which no other micro-batch hides the exchange of tokens.

    The backward pass of an earlier micro-batch or the forward pass of a later one hides it (arXiv 2412.19437, figure 4). Before
    a rank's first backward pass, and after its last forward pass, there is none. That concerns all micro-batches in flight on a rank,
    which are most on the first rank.
    """
    alone = np.minimum(in_flight(pipes, np.zeros(1, dtype=np.int64)), pipes.micro_batches)
    return np.asarray(alone * rank.hidden_s)


def compute_terms(inputs: CostInputs, rank: Slowest, passes: Floats) -> dict[str, Floats]:
    """Seconds that the slowest rank computes in all its micro-batches, by category; recomputation is a term of its own."""
    costs, terms = inputs.costs, {}
    for number, category in enumerate(CATEGORIES):
        each = tuple(costs.of(costs.by_category, kind, number) for kind in range(len(KINDS)))
        terms[category] = passes * times(rank.counts, each)
    mode = inputs.candidates.recompute
    again = tuple(costs.by_mode(costs.recompute_s, kind, mode) for kind in range(len(KINDS)))
    terms["recompute"] = passes * times(rank.counts, again)
    return terms


def blocked_hops(job: TrainingJob, pipes: Pipelines) -> Floats:
    """Transfers of a flush during which a rank is blocked: one each way for every micro-batch, where sends block."""
    each = 2.0 * pipes.micro_batches * pipes.per_rank * (pipes.ranks > 1)
    return np.asarray(each if job.stack.overlap.blocking_sends else 0 * each)


def hop_s(job: TrainingJob, candidates: Candidates) -> Floats:
    """Seconds to carry a micro-batch's hidden states from one stage to the next, as far as no pairing hides them.

    Sequence parallelism or scattered sends divide them over tensor ranks; scattered ones are gathered again.
    """
    width = np.array([precision.activation_bytes for precision in PRECISIONS])[candidates.precision]
    rows = candidates.micro_batch * job.workload.seq_len / candidates.context
    carried = rows * job.workload.model.dim * width
    scatters = job.stack.overlap.scattered_sends
    pieces = np.where((candidates.sequence_parallel > 0) | scatters, candidates.tensor, 1)
    stride = candidates.tensor * candidates.context * candidates.data
    seconds = hardware_times.point_to_point_s(job.cluster, stride, carried / pieces, candidates.pipeline)
    if scatters:
        gathers = (candidates.sequence_parallel == 0) & (candidates.tensor > 1)
        gather_s = hardware_times.all_gather_s(job.cluster, candidates.tensor, 1, carried)
        seconds = seconds + np.where(gathers, gather_s, 0.0)
    paired = np.where(candidates.schedule == SCHEDULES.index("dualpipev"), job.stack.overlap.paired, 0)
    exposed: Floats = np.asarray(seconds) * (1 - paired)
    return exposed


def data_terms(
    inputs: CostInputs,
    counts: tuple[Floats, ...],
    windows: tuple[Floats, Floats],
    passes: Floats,
    reductions: Floats,
) -> dict[str, Floats]:
    """Exposed seconds of a step for gathering weights and for reducing gradients, as ``weight_gather`` and
    ``gradient_reduce``.

    ``windows`` are the seconds of one forward and backward that can hide them, ``passes`` a rank's micro-batches,
    ``reductions`` its slots. ZeRO-3 gathers twice in each pass, lower stages once a step, unsharded ranks never.
    """
    job, holdings = inputs.job, inputs.holdings
    stack, zero = job.stack, inputs.candidates.zero
    gather, scatter, among = _weights_s(inputs, counts)
    blocks = np.maximum(counts[0] + counts[1], 1)
    forward, backward = (stack.overlap.data * seconds for seconds in windows)
    sharded = zero >= 3
    exposed = partial(_exposed, blocks=blocks, slowed=_SLOWED.get(job.cluster.accelerator.vendor, 0.0))
    gathered = exposed(gather, forward)
    # After an update, the next step's first forward pass hides the gathering of new weights.
    weights_s = np.where(zero >= 1, gathered, 0.0)
    window = backward
    if sharded.any():
        weights_s = np.where(sharded, passes * (gathered + exposed(gather, backward)), weights_s)
        window = np.maximum(backward - np.where(sharded, gather, 0.0), 0.0)
    # Sums over shards are all-reduced over replicas once, with the last micro-batch of a slot.
    if stack.states.slot_tree:
        # ZeRO-1 adds a rank's slots first.
        reductions = np.where(zero == 1, of_each(exchanged, reductions), reductions)
    gradients_s = reductions * exposed(scatter + among, window)
    if stack.data.reduces_once:
        last_s = exposed(scatter + among, window)
        further_s = np.where(sharded, (reductions - 1) * exposed(scatter, window), 0.0)
        gradients_s = last_s + further_s
    if stack.data.add_bytes:
        elements = times(counts, holdings.dense) + times(counts, holdings.experts)
        gradients_s = gradients_s + reductions * hardware_times.memory_bound_s(
            job.profile, stack.data.add_bytes * elements
        )
    if stack.data.reduces_each_micro_batch:
        further = np.where(zero >= 2, passes - reductions, 0.0)
        gradients_s = gradients_s + further * exposed(scatter, window)
    return {"weight_gather": weights_s, "gradient_reduce": gradients_s}


def _exposed(seconds: Floats, window: Floats, *, blocks: Ints, slowed: float) -> Floats:
    """Seconds that a collective adds: what exceeds its window, and the fraction ``slowed`` of what computing hides.

    At least one of ``blocks`` equal parts is always exposed.
    """
    beyond = np.maximum(seconds - window, seconds / blocks)
    return beyond + slowed * (seconds - beyond)


def _weights_s(inputs: CostInputs, counts: tuple[Floats, ...]) -> tuple[Floats, Floats, Floats]:
    """Seconds to gather all weights of a rank's stages, to reduce all their gradients over shards, and then over replicas.

    What overlaps with computing goes block by block, and each block pays the latency of its collectives.
    """
    job, candidates, holdings = inputs.job, inputs.candidates, inputs.holdings
    cluster, stack = job.cluster, job.stack
    gather = scatter = among = np.zeros(1)
    inside = candidates.tensor * candidates.context * candidates.shard
    divided = candidates.zero >= 1
    pieces = stack.data.gathers_per_block * np.maximum(counts[0] + counts[1], 1) if stack.overlap.data else 1
    for elements, size, stride in (
        (holdings.dense, candidates.dense_shard, candidates.tensor),
        (holdings.experts, candidates.expert_shard, candidates.expert * candidates.expert_tensor),
    ):
        if not any(each.any() for each in elements):
            continue
        each = times(counts, elements) / pieces
        bytes_ = stack.data.reduce_bytes * each
        gather = gather + pieces * hardware_times.all_gather_s(
            cluster, size, stride, stack.data.gather_bytes * each
        )
        reduce_s = hardware_times.reduce_scatter_s(
            cluster, size, stride, exchanged_bytes(job, candidates) * each
        )
        if not divided.all():
            everyone = hardware_times.all_reduce_s(cluster, size * candidates.replicate, stride, bytes_)
            reduce_s = np.where(divided, reduce_s, everyone)
        scatter = scatter + pieces * reduce_s
        if (candidates.replicate > 1).any():
            replicas_s = hardware_times.all_reduce_s(
                cluster, candidates.replicate, inside, bytes_ / np.maximum(size, 1)
            )
            among = among + pieces * np.where(divided, replicas_s, 0.0)
    return gather, scatter, among


def optimizer_s(inputs: CostInputs, counts: tuple[Floats, ...]) -> Floats:
    """Seconds of the update of a rank's share, and of the whole matrices that the busiest rank owns."""
    job, optimizer = inputs.job, inputs.job.stack.states.optimizer
    if optimizer is None:
        elements = _updated(inputs, counts)
        return np.asarray(hardware_times.memory_bound_s(job.profile, _ADAM_BYTES * elements))
    moments = times(counts, inputs.holdings.moment_bytes_share)
    if optimizer.name == "adamw":
        moved = UPDATE_BYTES * _updated(inputs, counts) + 2 * moments
        return np.asarray(hardware_times.memory_bound_s(job.profile, moved))
    # The parameters that a matrix optimizer leaves to AdamW have fp32 moments: eight bytes an element.
    rest_s = hardware_times.memory_bound_s(job.profile, (UPDATE_BYTES / 8 + 2) * moments)
    return np.asarray(rest_s + _owners_s(optimizer, job, inputs.candidates, counts))


def _owners_s(
    optimizer: OptimizerSpec, job: TrainingJob, candidates: Candidates, counts: tuple[Floats, ...]
) -> Floats:
    """Seconds in which the busiest owner updates its complete matrices, with their way to it and back.

    Eigenvalues and QR decompositions are counted at the rate of matrix products, which they do not reach: at least so
    long.
    """
    owned = owned_matrices(optimizer, job.workload.model, candidates, counts)
    format_flops = job.profile.accelerator.flops
    # Muon's iterations are in bf16 on every GPU, for every precision.compute (phalanx.train.optimizers.matrix_rules).
    narrow = optimizer.name == "muon" and job.cluster.accelerator.vendor != "any"
    formats = ("bf16", "fp32", "tf32") if narrow else ("fp32", "tf32", "bf16")
    rate = hardware_times.sustained_flops(
        job.profile, next(name for name in (*formats, *format_flops) if name in format_flops)
    )
    products = (owned.product_flops + owned.decomposition_flops) / rate
    ranks = candidates.dense_shard * candidates.tensor
    way = hardware_times.all_to_all_s(job.cluster, ranks, 1, owned.crossing_bytes)
    updates = hardware_times.memory_bound_s(job.profile, owned.moved_bytes)
    return np.asarray(updates + products + 2 * np.where(ranks > 1, way, 0.0))


def _updated(inputs: CostInputs, counts: tuple[Floats, ...]) -> Floats:
    """Number of parameters that a rank updates: its share if moments are sharded at this ZeRO stage, else all that it holds."""
    holdings, kept = inputs.holdings, inputs.job.stack.states.kept
    sharded_from = min(state.sharded_from for state in kept if state.kind == "moments")
    parameters = times(counts, holdings.dense) + times(counts, holdings.experts)
    share = times(counts, holdings.dense_share) + times(counts, holdings.experts_share)
    return np.where(inputs.candidates.zero >= sharded_from, share, parameters)


def offload_waits(inputs: CostInputs, kind: int) -> tuple[Floats, Floats]:
    """Seconds that copies of a layer's activations to and from the host's memory add to its forward and its backward.

    That is what outlasts them; and of what they hide, the time in which the accelerator's memory serves the copy and
    no kernel. 0 without offload.
    """
    job, candidates, costs = inputs.job, inputs.candidates, inputs.costs
    if not candidates.offload_activations.any() or not costs.kept_bytes[kind].any():
        return np.zeros(1), np.zeros(1)
    forward, to_inputs, weights = (costs.of(costs.by_phase, kind, phase) for phase in range(3))
    again = costs.by_mode(costs.recompute_s, kind, candidates.recompute)
    copy = hardware_times.host_copy_s(
        job.profile, costs.by_mode(costs.kept_bytes, kind, candidates.recompute)
    )
    copy = copy * candidates.offload_activations
    accelerator = job.cluster.accelerator
    taken = min(1.0, accelerator.host_bytes_per_s.value / accelerator.memory_bytes_per_s.value)
    ahead, back = (np.maximum(copy - window, 0) for window in (forward, to_inputs + again + weights))
    return ahead + taken * (copy - ahead), back + taken * (copy - back)


def state_copy_s(inputs: CostInputs, counts: tuple[Floats, ...]) -> Floats:
    """Seconds to fetch the optimizer's state from the host's memory for the update, and to put it back; 0 without offload."""
    moved = sum(state.bytes for state in inputs.job.stack.states.kept if state.optimizer)
    seconds = 2 * hardware_times.host_copy_s(inputs.job.profile, moved * _updated(inputs, counts))
    return np.asarray(inputs.candidates.offload_optimizer * seconds)


def scale_tax(job: TrainingJob, ranks: Ints) -> Floats:
    """The fraction by which a step grows because ``ranks`` ranks wait for the slowest of them, and share the fabric.

    ``tax_per_doubling x log2(ranks / ranks of a node)``: logarithmic, as the largest of many delays with an exponential tail
    is (Gumbel); one constant, fitted to runs of one model on growing fleets (MegaScale, arXiv 2402.15627, table 2).
    """
    doublings = np.log2(np.maximum(ranks / job.cluster.per_node, 1))
    return np.asarray(job.stack.tax_per_doubling * doublings)


def with_tax(job: TrainingJob, candidates: Candidates, terms: dict[str, Floats]) -> dict[str, Floats]:
    """Return ``terms`` with the term ``scale_tax`` and, if the stack's ``time_scalar`` is not 1, the term ``stack_scalar``: its effect on the
    total with the tax."""
    tax = scale_tax(job, candidates.ranks)
    clean = total(terms)
    terms = terms | {"scale_tax": clean * tax}
    if job.stack.time_scalar != 1:
        terms["stack_scalar"] = clean * (1 + tax) * (job.stack.time_scalar - 1)
    return terms
