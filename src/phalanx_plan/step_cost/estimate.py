"""Estimate of one layout: memory by kind on the worst rank, and time by term, with the exact schedule of the pipeline.

``phalanx plan layout --explain``, validation against published runs and calibration against measured ones use ``estimate``.
It uses the same array formulas as the search, with arrays of length one. The two differ only in the bubble: the search
approximates it, and here it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx_plan.step_cost import memory as rank_memory
from phalanx_plan.step_cost import pipeline, step_time
from phalanx_plan.step_cost.layer_costs import layer_costs
from phalanx_plan.step_cost.memory import CostInputs
from phalanx_plan.workload.candidates import (
    SCHEDULES,
    Candidates,
    Floats,
    Ints,
    PlannedLayout,
    at_last,
    candidates_of,
    occurrences,
)
from phalanx_plan.workload.holdings import holdings, most_stages, split
from phalanx_plan.workload.stacks import TrainingJob


@dataclass(frozen=True)
class LastingBytes:
    """Bytes of state and overheads of each place, a column for each combination of the fields that they depend on."""

    by_place: tuple[Floats, ...]
    row: Ints
    """Column of each candidate."""

    def of(self, place: int) -> Floats:
        """Bytes of each candidate's ranks at the ``place``-th place; -inf where it has fewer places."""
        return self.by_place[place].take(self.row.ravel(), axis=-1)

    def leanest(self) -> LastingBytes:
        """Return a copy with only the last choice on each axis before the geometry."""
        return LastingBytes(tuple(each[..., -1:, -1:, -1:, -1:, :] for each in self.by_place), self.row)


@dataclass(frozen=True)
class Evaluation(CostInputs):
    """Memory and time of some candidates."""

    lasting: LastingBytes | None = None
    """Bytes of state and overheads, if they were computed for all candidates at once."""

    def memory(self, kind: int) -> dict[str, Floats]:
        """Bytes by kind on the ranks of the ``kind``-th place."""
        return rank_memory.memory_at(self, self.table[kind])

    def most_memory(self, more: Floats | float = 0.0) -> Floats:
        """Return the bytes of the worst rank of each candidate.

        ``more`` bytes, which broadcast, are added on the first kind of rank only.
        """
        lasting = self.lasting or self.with_lasting().lasting
        assert lasting is not None, "it was computed just now"
        each, place, candidate, kind = self._each_place()
        activations = _by_kind(rank_memory.passing_bytes(each, place), candidate, kind)
        most = (lasting.of(0) + more) + activations[0]
        place_bytes = np.empty_like(most)
        for number in range(1, len(activations)):
            np.add(lasting.of(number), activations[number], out=place_bytes)
            np.maximum(most, place_bytes, out=most)
        return most

    def _each_place(self) -> tuple[Evaluation, pipeline.PlaceCounts, Ints, Ints]:
        """Every place of every candidate as candidates of their own, with the candidate and the number of each."""
        candidate, kind = self.table.each()
        each = self.rows(candidate)
        return each, each.table[kind.reshape(each.table.row.shape)], candidate, kind

    def with_lasting(self) -> Evaluation:
        """Return the evaluation with the bytes of state and overheads, computed once for all candidates that share them."""
        length = self.candidates.shape[-1]
        columns = rank_memory.state_columns(self)
        # Choices with an axis of their own stay on it.
        first, row = occurrences([column for column in columns if column.size == column.shape[-1] == length])
        each, place, candidate, kind = self.rows(first)._each_place()
        bytes_ = rank_memory.lasting_bytes(each, place)
        wide = np.broadcast_to(bytes_, (*bytes_.shape[:-1], len(candidate)))
        lasting = LastingBytes(tuple(_by_kind(wide, candidate, kind)), row)
        return replace(self, lasting=lasting)

    def rows(self, index: slice | Ints) -> Evaluation:
        """The evaluation of the candidates at ``index`` of the last axis."""
        length = self.candidates.shape[-1]
        return Evaluation(
            self.job,
            self.candidates.rows(index),
            self.holdings.rows(index, length),
            replace(self.costs, row=at_last(self.costs.row, index, length)),
            pipeline.Pipelines(
                *(
                    at_last(getattr(self.pipes, field.name), index, length)
                    for field in fields(pipeline.Pipelines)
                )
            ),
            replace(self.table, row=at_last(self.table.row, index, length)),
            self.lasting and LastingBytes(self.lasting.by_place, at_last(self.lasting.row, index, length)),
        )

    def leanest(self) -> Evaluation:
        """The evaluation of the last of each free choice only, which takes the least memory (``phalanx_plan.search.space``)."""
        candidates = replace(
            self.candidates,
            recompute=self.candidates.recompute[-1:],
            zero=self.candidates.zero[:, -1:],
            offload_optimizer=self.candidates.offload_optimizer[:, :, -1:],
            offload_activations=self.candidates.offload_activations[:, :, :, -1:],
        )
        return replace(self, candidates=candidates, lasting=self.lasting and self.lasting.leanest())

    def seconds(self) -> Floats:
        """Seconds of a step: the sum of ``time``, with most of the work done on few axes.

        The slowest rank of a geometry's first choice serves all its choices; geometries where it differs are computed
        again.
        """
        place = step_time.slowest_place(self.passes, self.table)
        first = place[(0,) * (place.ndim - 1)].reshape((1,) * (place.ndim - 1) + (-1,))
        seconds = self._seconds(first)
        # If a free choice decides which rank is slowest, more terms depend on it.
        (torn,) = np.nonzero((place != first).any(axis=tuple(range(place.ndim - 1))))
        if len(torn):
            seconds[..., torn] = self.rows(torn)._seconds(place[..., torn])
        return seconds

    def _seconds(self, place: Ints) -> Floats:
        """Seconds of a step in closed form, if the ranks at ``place`` are the slowest."""
        return step_time.step_s(self, step_time.slowest(self, self.passes, place))

    def time(self) -> dict[str, Floats]:
        """Seconds of a step by term, the bubble in closed form."""
        return step_time.step_terms(self, self.slowest)

    @cached_property
    def passes(self) -> step_time.PassTimes:
        """Seconds of one micro-batch in a layer."""
        return step_time.pass_times(self)

    @cached_property
    def slowest(self) -> step_time.Slowest:
        """The rank of each candidate that the others wait for."""
        place = step_time.slowest_place(self.passes, self.table)
        return step_time.slowest(self, self.passes, place)


def _by_kind(values: Floats, candidate: Ints, kind: Ints) -> list[Floats]:
    """Values in the order of ``PlaceTable.each`` as arrays over candidates, one for each kind; -inf where a candidate has fewer."""
    first, *ends = np.searchsorted(kind, np.arange(1, kind[-1] + 2)).tolist()
    columns = [values[..., :first]]
    for begin, end in pairwise((first, *ends)):
        wide = np.full((*values.shape[:-1], first), -np.inf)
        wide[..., candidate[begin:end]] = values[..., begin:end]
        columns.append(wide)
    return columns


def prepare(job: TrainingJob, candidates: Candidates) -> Evaluation:
    """Compute holdings, layer costs, pipelines and kinds of ranks of ``candidates``, the tables that all estimates share.

    Does not check that the candidates are legal.
    """
    return Evaluation(
        job,
        candidates,
        holdings(job.workload.model, candidates, job.stack.states.shards, job.stack.states.optimizer),
        layer_costs(job, candidates),
        rank_memory.pipelines_of(job, candidates),
        pipeline.place_table(job, candidates),
    )


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one layout: bytes of the worst rank, seconds of one optimizer step."""

    layout: PlannedLayout
    tokens: int
    """Tokens of a step."""
    memory: Mapping[str, float]
    """Bytes by kind."""
    worst_rank: int
    """The earliest of the pipeline ranks that hold most."""
    capacity_bytes: float
    time: Mapping[str, float]
    """Seconds by term."""
    closed_form_s: float
    """The step by the closed form of the search, for comparison with the schedule."""
    flops_per_token: int
    """FLOP of the model with attention counted in full and no recomputation, as in most published MFU figures."""
    causal_share: float
    """FLOP with only the scores of a causal mask, over ``flops_per_token``."""
    peak_flops: float
    """Dense FLOP/s of one accelerator in the layout's format; over the peak of a wider format a utilization may exceed one."""
    price_per_hour: float

    @property
    def ranks(self) -> int:
        """Ranks of the layout."""
        return self.layout.ranks

    @property
    def memory_bytes(self) -> float:
        """The sum of ``memory``."""
        return sum(self.memory.values())

    @property
    def allocated_bytes(self) -> float:
        """Bytes that an allocator reports as allocated: without contexts, communicators and fragmentation."""
        return sum(size for kind, size in self.memory.items() if kind not in rank_memory.OVERHEADS)

    @property
    def fits(self) -> bool:
        """True if the worst rank's memory holds it."""
        return self.memory_bytes <= self.capacity_bytes

    @property
    def step_s(self) -> float:
        """The sum of ``time``."""
        return sum(self.time.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole fleet."""
        return self.tokens / self.step_s

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s per accelerator."""
        return self.flops_per_token * self.tokens_per_s / self.ranks

    @property
    def mfu(self) -> float:
        """``flops_per_s`` over the dense peak of the format."""
        return self.flops_per_s / self.peak_flops

    @property
    def mfu_causal(self) -> float:
        """MFU by the FLOP that a causal mask needs; unlike ``mfu``, it cannot exceed one for long sequences."""
        return self.mfu * self.causal_share


def estimate(job: TrainingJob, layout: PlannedLayout) -> Estimate:
    """Estimate memory and time of one layout.

    Raises ``ValueError`` if the layout cannot do this work: a batch that does not divide, or too few layers or micro-batches.
    """
    return estimates(job, [layout])[0]


def estimates(
    job: TrainingJob, layouts: Sequence[PlannedLayout], *, exact: bool = True
) -> tuple[Estimate, ...]:
    """``estimate`` of several layouts at once; if not ``exact``, with the bubble in closed form."""
    for layout in layouts:
        _check(job, candidates_of([layout], job.modes))
    return estimated(prepare(job, candidates_of(layouts, job.modes)), layouts, exact=exact)


def estimated(
    evaluation: Evaluation, layouts: Sequence[PlannedLayout], *, exact: bool
) -> tuple[Estimate, ...]:
    """Return ``estimates`` of ``layouts``, which are legal and the candidates of ``evaluation``, along one axis.

    ``exact`` replaces the bubble by that of the exact schedule. The rank of each is its worst in memory.
    """
    job, length = evaluation.job, len(layouts)
    memory = [_columns(evaluation.memory(kind), length) for kind in range(len(evaluation.table))]
    closed = evaluation.time()
    terms = _columns(_with_exact_schedule(evaluation, closed) if exact else closed, length)
    closed_s = np.broadcast_to(rank_memory.total(closed), length)
    accelerator = job.cluster.accelerator
    flops = accelerator.flops
    results = []
    for place, layout in enumerate(layouts):
        worst = max(range(len(memory)), key=lambda kind: sum(memory[kind][place].values()))
        rank = int(evaluation.table[worst].rank[place])
        results.append(
            Estimate(
                layout=layout,
                tokens=job.workload.tokens,
                memory=memory[worst][place],
                worst_rank=rank,
                capacity_bytes=accelerator.memory_bytes.value,
                time=terms[place],
                closed_form_s=float(closed_s[place]),
                flops_per_token=job.workload.counts.flops_per_token,
                causal_share=job.workload.counts.flops_per_token_causal / job.workload.counts.flops_per_token,
                peak_flops=next(
                    flops[name].value for name in (layout.precision, "bf16", "fp16", *flops) if name in flops
                ),
                price_per_hour=accelerator.price_per_hour.value,
            )
        )
    return tuple(results)


def _columns(terms: Mapping[str, Floats], length: int) -> list[dict[str, float]]:
    """The terms of each layout by name."""
    wide = {name: np.broadcast_to(term, length) for name, term in terms.items()}
    return [{name: float(term[place]) for name, term in wide.items()} for place in range(length)]


def _check(job: TrainingJob, candidates: Candidates) -> None:
    """Raise ``ValueError`` if the first layout divides the batch or the layers wrongly, or its schedule cannot run."""
    slots = job.workload.slots or int(candidates.data[0])
    each = int(slots * candidates.micro_batch[0])
    if job.workload.batch % each or slots % int(candidates.data[0]):
        raise ValueError(
            f"a batch of {job.workload.batch} sequences cannot be divided into {slots} slots on {candidates.data[0]} "
            f"data-parallel ranks of micro-batches of {candidates.micro_batch[0]}: change batch_size, slots, "
            "micro_batch or the data-parallel degree"
        )
    pipes = rank_memory.pipelines_of(job, candidates)
    if not pipeline.legal(pipes, with_gaps=job.stack.any_micro_batches)[0]:
        raise ValueError(
            f"{SCHEDULES[int(candidates.schedule[0])]} with {candidates.stages_per_rank[0]} stages on each of "
            f"{candidates.pipeline[0]} ranks cannot run {pipes.micro_batches[0]} micro-batches: gpipe and 1f1b take one "
            "stage, interleaved several, zbv and dualpipev two; in other software than this project's, interleaved takes a "
            "multiple of the ranks, zbv and dualpipev twice the ranks or more"
        )
    if int((candidates.pipeline * candidates.stages_per_rank)[0]) > most_stages(job.workload, job.stack):
        raise ValueError(
            f"{candidates.pipeline[0]} x {candidates.stages_per_rank[0]} stages for {job.workload.model.layers} "
            "layers: take a smaller pipeline or fewer stages"
        )


def stage_times(evaluation: Evaluation, index: Ints) -> pipeline.StageTimes:
    """Seconds of each stage of the layouts at ``index``, which have equal pipelines: forward, input and weight
    gradients, each of shape (layouts, stages).

    A stage sums its dense and mixture layers; the first adds the embedding, the last the output.
    """
    candidates, workload = evaluation.candidates, evaluation.job.workload
    stages = int((candidates.pipeline * candidates.stages_per_rank)[index[0]])
    sizes = split(workload, evaluation.job.stack, stages)
    mixture = [is_mixture(workload.model, layer) for layer in range(workload.model.layers)]
    counts = np.zeros((4, stages))
    layer = 0
    for stage, size in enumerate(sizes):
        mixtures = sum(mixture[layer : layer + size])
        counts[:2, stage] = size - mixtures, mixtures
        layer += size
    counts[2, 0] = counts[3, -1] = 1
    passes = evaluation.passes

    def of(seconds: tuple[Floats, ...]) -> Floats:
        each: Floats = np.stack([term[index] for term in seconds], axis=1) @ counts  # (layouts, stages)
        return each

    return pipeline.StageTimes(
        of(passes.forward_s), of(passes.input_gradient_s), of(passes.weight_gradient_s)
    )


def _with_exact_schedule(evaluation: Evaluation, terms: dict[str, Floats]) -> dict[str, Floats]:
    """Replace the bubble and the waits between stages by those of the exact schedule, and derive scale tax and scalar
    again.

    Layouts without a pipeline keep a bubble of 0.
    """
    job, candidates, pipes = evaluation.job, evaluation.candidates, evaluation.pipes
    hop = np.broadcast_to(step_time.hop_s(job, candidates), candidates.shape)
    still, moving = np.zeros((2, *candidates.shape))
    for size, index in _alike(pipes):
        times = stage_times(evaluation, index)
        twice = pipeline.StageTimes(*(np.concatenate([seconds, seconds]) for seconds in vars(times).values()))
        hops = np.concatenate([np.zeros(len(index)), hop[index]])
        still[index], moving[index] = pipeline.flush_s(*size, twice, hops).reshape(2, -1)
    flushes = job.workload.batch / (candidates.data * candidates.micro_batch * pipes.micro_batches)
    busy = pipes.micro_batches * (evaluation.slowest.forward_s + evaluation.slowest.backward_s)
    changed = {
        "bubble": flushes * np.maximum(still - busy, 0.0),
        "pipeline_comm": flushes * np.maximum(moving - still, step_time.blocked_hops(job, pipes) * hop),
    }
    kept = {term: seconds for term, seconds in terms.items() if term not in ("scale_tax", "stack_scalar")}
    return step_time.with_tax(job, candidates, kept | changed)


def _alike(pipes: pipeline.Pipelines) -> Iterator[tuple[tuple[ScheduleName, int, int, int], Ints]]:
    """Yield (schedule, ranks, stages a rank, micro-batches) and the indices of the layouts that have it, for more than one rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    columns = (pipes.schedule, pipes.ranks, pipes.per_rank, pipes.micro_batches)
    for place, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if key[1] > 1:
            groups.setdefault(key, []).append(place)
    for (code, ranks, per_rank, micro_batches), places in groups.items():
        yield (SCHEDULES[code], ranks, per_rank, micro_batches), np.array(places)
