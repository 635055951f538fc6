"""Bytes that every rank sends in one optimizer step, by axis, and the ranks of its group that receive them.

``phalanx.launch.placing`` prices the placement of a run in a network with these flows. They follow from the same
operations, holdings and formats as the planner's times (``layer_costs``, ``step_time``), for one layout. Volumes are
those of ring algorithms: (n - 1)/n of a tensor for an all-gather or reduce-scatter, and of a rank's data for an
all-to-all (Thakur et al., IJHPCA 2005). In-switch reduction and trees send less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.model.facts.holdings import exchanged
from phalanx.run.kinds.operations import LayerExchange
from phalanx_plan.step_cost.estimate import Evaluation, prepare
from phalanx_plan.step_cost.memory import exchanged_bytes, micro_batches_per_slot, times
from phalanx_plan.step_cost.step_time import slowest_place
from phalanx_plan.workload.architecture import KINDS, layers
from phalanx_plan.workload.candidates import PRECISIONS, PlannedLayout, candidates_of
from phalanx_plan.workload.stacks import TrainingJob

Pattern = Literal["ring", "all_to_all", "chain"]


@dataclass(frozen=True)
class Flow:
    """Traffic of one axis in one step: equal groups of ``size`` ranks that are ``stride`` apart in rank order."""

    axis: str
    pattern: Pattern
    """``ring``: each sends to the next one; ``all_to_all``: evenly to all others; ``chain``: to the next and to the one before."""
    size: int
    stride: int
    sent_bytes: float
    """Sent by each rank; in a chain, to each of its two neighbors."""


def flows(job: TrainingJob, layout: PlannedLayout, *, spread_sums: bool = True) -> tuple[Flow, ...]:
    """Return the flows of one step of ``layout``, with the bytes that each rank sends; axes of one rank have none.

    Flows of equal axis, pattern, size and stride are joined.

    Args:
        job: The work, the software and the cluster (only formats and volumes are read).
        layout: A layout that is legal for the job.
        spread_sums: True if gradients go to their owners by all-to-all, as in reproducible sums; else by rings.
    """
    evaluation = prepare(job, candidates_of([layout], job.modes))
    all_flows = [
        *_exchanges(evaluation, layout),
        *_pipeline(job, layout),
        *_weights(evaluation, layout, spread_sums=spread_sums),
    ]
    return tuple(_joined(all_flows))


def _joined(all_flows: list[Flow]) -> Iterator[Flow]:
    """Yield one flow for each axis, pattern, size and stride, with the sum of its bytes, without those that carry nothing."""
    sums: dict[tuple[str, Pattern, int, int], float] = {}
    for flow in all_flows:
        key = flow.axis, flow.pattern, flow.size, flow.stride
        sums[key] = sums.get(key, 0.0) + flow.sent_bytes
    for (axis, pattern, size, stride), sent in sums.items():
        if size > 1 and sent > 0:
            yield Flow(axis, pattern, size, stride, sent)


def _passes(job: TrainingJob, layout: PlannedLayout) -> float:
    """Micro-batches that a rank computes in a step."""
    return job.workload.batch / (layout.data * layout.micro_batch)


def _exchanges(evaluation: Evaluation, layout: PlannedLayout) -> Iterator[Flow]:
    """Yield the flows of the layers' own collectives, on the rank that the others wait for."""
    job = evaluation.job
    counts = evaluation.table[slowest_place(evaluation.passes, evaluation.table)].counts
    operations = layers(job.workload, job.stack)
    for number, kind in enumerate(KINDS):
        count = float(counts[number].ravel()[0]) * _passes(job, layout)
        for operation in operations[kind].operations:
            if count and isinstance(operation, LayerExchange):
                yield from _exchange(job, layout, operation, count)


def _exchange(
    job: TrainingJob, layout: PlannedLayout, exchange: LayerExchange, count: float
) -> Iterator[Flow]:
    """Yield the flow of ``count`` passes of one exchange, forward and backward; full recomputation repeats the forward one."""
    precision = next(number_format for number_format in PRECISIONS if number_format.name == layout.precision)
    wide, narrow = precision.activation_bytes, precision.operand_bytes
    tokens = layout.micro_batch * job.workload.seq_len / layout.context
    again = 1 if layout.recompute == "full" else 0
    if exchange.kind in ("dispatch", "combine"):
        per_token = job.workload.model.moe.per_token if job.workload.model.moe else 0
        copies = tokens / layout.tensor * job.workload.imbalance * per_token * exchange.width
        each = narrow if exchange.kind == "dispatch" and job.stack.experts.narrow_dispatch else wide
        sent = (2 + again) * copies * each * (layout.expert - 1) / layout.expert
        yield Flow("expert", "all_to_all", layout.expert, layout.expert_tensor, count * sent)
    elif exchange.kind == "context":
        over = min(layout.tensor, job.workload.model.kv_heads) if exchange.over == "key_heads" else 1
        over = layout.tensor if exchange.over == "tensor" else over
        block = tokens * exchange.width / over * wide
        # Forward fetches keys and values; backward fetches them again and sends their gradients home.
        sent = (3 + again) * block * (layout.context - 1)
        yield Flow("context", "ring", layout.context, layout.tensor, count * sent)
    else:
        dense = exchange.kind in ("gather", "scatter")
        size = layout.tensor if dense else layout.expert_tensor
        rows = tokens
        if not dense:
            per_token = job.workload.model.moe.per_token if job.workload.model.moe else 0
            rows = tokens / layout.tensor * layout.expert_tensor * per_token * job.workload.imbalance
        elements = rows * exchange.width * (size - 1) / size
        gathers = "gather" in exchange.kind
        # The mirror image of a gather is a scatter; gathered inputs that are not kept are gathered once more.
        more = exchange.kind == "gather" and not job.stack.activations.gathered_inputs
        forward = narrow if gathers else wide
        sent = elements * (narrow + wide + (narrow if more else 0) + again * forward)
        yield Flow("tensor" if dense else "expert_tensor", "ring", size, 1, count * sent)


def _pipeline(job: TrainingJob, layout: PlannedLayout) -> Iterator[Flow]:
    """Yield the flow of hidden states to the next stage, once for each stage and micro-batch.

    Gradients send as many bytes back, which are not added.
    """
    precision = next(number_format for number_format in PRECISIONS if number_format.name == layout.precision)
    rows = layout.micro_batch * job.workload.seq_len / layout.context
    rows /= layout.tensor if layout.sequence_parallel else 1
    sent = _passes(job, layout) * layout.stages_per_rank * rows * job.workload.model.dim
    stride = layout.ranks // layout.pipeline
    yield Flow("pipeline", "chain", layout.pipeline, stride, sent * precision.activation_bytes)


def _weights(evaluation: Evaluation, layout: PlannedLayout, *, spread_sums: bool) -> Iterator[Flow]:
    """Yield the flows of gathers of weights, and of exchanges of gradients over shards and over replicas.

    ``spread_sums``: they are sent from everyone to everyone, not around a ring.
    """
    job, candidates, holdings = evaluation.job, evaluation.candidates, evaluation.holdings
    data = job.stack.data
    counts = evaluation.table[slowest_place(evaluation.passes, evaluation.table)].counts
    passes = _passes(job, layout)
    slots = passes / float(micro_batches_per_slot(job, candidates).ravel()[0])
    reductions = passes if data.reduces_each_micro_batch and layout.zero >= 2 else slots
    if job.stack.states.slot_tree and layout.zero == 1:
        reductions = exchanged(max(1, int(slots)))
    gathers = 2 * passes if layout.zero >= 3 else 1.0 if layout.zero else 0.0
    inside = layout.tensor * layout.context * layout.shard
    for axis, elements, size, stride in (
        ("shard", holdings.dense, int(candidates.dense_shard[0]), layout.tensor),
        (
            "expert_shard",
            holdings.experts,
            int(candidates.expert_shard[0]),
            layout.expert * layout.expert_tensor,
        ),
    ):
        parameters = float(times(counts, elements).ravel()[0])
        share = (size - 1) / size if size else 0.0
        yield Flow(axis, "ring", size, stride, gathers * data.gather_bytes * parameters * share)
        sums = reductions * float(exchanged_bytes(job, candidates).ravel()[0]) * parameters
        yield Flow(axis, "all_to_all" if spread_sums else "ring", size, stride, sums * share)
        if layout.replicate > 1:
            # An all-reduce is a reduce-scatter and an all-gather.
            among = 2 * data.reduce_bytes * parameters / max(size, 1) * (1 if data.reduces_once else slots)
            among *= (layout.replicate - 1) / layout.replicate
            pattern: Pattern = "all_to_all" if spread_sums else "ring"
            yield Flow("replicate", pattern, layout.replicate, inside, among)
