"""``make_plan``: from a run file and a cluster to the chosen layout, the search result, and the run as a whole.

The result is one value, ``Plan``; tables, reports and JSON are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.whole_model import undivided
from phalanx.run.read import addresses
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import is_remote
from phalanx_plan.evidence import (
    UNKNOWN_MACHINE,
    Band,
    BestRun,
    Evidence,
    learned,
    makers_with_runs,
    normal_band,
)
from phalanx_plan.planner import lost_node_notes
from phalanx_plan.run_fields import notes_of
from phalanx_plan.search import alternatives, layout_text, query
from phalanx_plan.search.options import Options
from phalanx_plan.search.ranking import LEAST_ROOM, NO_ROOM, free_share
from phalanx_plan.search.search import NothingFitsError, SearchResult, search
from phalanx_plan.step_cost.estimate import Estimate, estimate
from phalanx_plan.whole_run.assumptions import RunAssumptions, RunInputs, assumed
from phalanx_plan.whole_run.estimate import RunEstimate, estimate_run
from phalanx_plan.whole_run.resources import Activity, DataNeed, stored_sample_bytes
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import TrainingJob

# Plausibility of a query and of its answer: refused queries, and caveats before the answer.
#
# The formulas of the planner accept any numbers, so that a wrong unit or power of ten still gives an answer. A query that exceeds
# all published training by orders of magnitude is refused with the plausible values. An answer that is not usable is marked in the first
# lines of the plan.

_LARGEST_BATCH_TOKENS = 128e6
"""Tokens of the largest published step: MiniMax-01 (arXiv 2501.08313, section 4), recalled."""
_MOST_BATCH_TOKENS = 1e10
_LONGEST_SEQUENCE = 100_000_000
"""Tokens; models of up to ten million have been announced."""
_LONGEST_RUN_DAYS = 365.0
_USUAL_RUN_DAYS = 120.0
"""Days of the longest pre-training runs that are published: BLOOM's 117 (arXiv 2211.05100, section 3.2.4)."""


def refuse_implausible(spec: RunSpec) -> None:
    """Raise ``PlanRequestError`` for a sequence or a batch, in tokens, that exceeds all published training by orders of magnitude."""
    train = spec.train
    if train.seq_len > _LONGEST_SEQUENCE:
        raise query.PlanRequestError(
            f"train.seq_len: {train.seq_len:,} tokens: plausible is up to {_LONGEST_SEQUENCE:,}, usual 2,048 to 131,072"
        )
    if train.batch_size * train.seq_len > _MOST_BATCH_TOKENS:
        raise query.PlanRequestError(
            f"train.batch_size: {train.batch_size:,} sequences of {train.seq_len:,} tokens are "
            f"{train.batch_size * train.seq_len:,} tokens a step: plausible are 1,000 to {_LARGEST_BATCH_TOKENS:,.0f}, the largest "
            f"that is published, and at most {_MOST_BATCH_TOKENS:,.0f} are planned"
        )


@dataclass(frozen=True)
class Caveat:
    """A reason why the answer may not be usable, as a sentence."""

    text: str
    decides: bool = False
    """True if the plan must not be run as it is; otherwise a point to check first."""


def caveats(
    job: TrainingJob, chosen: Estimate, run: RunEstimate, tokens: float, roomy: Estimate | None = None
) -> Iterator[Caveat]:
    """Yield the caveats of an answer, the weightiest first: device, evidence, room, endless or long runs, batch,
    pipelines.

    ``roomy`` is the best plan with room in memory; None if no plan has it.
    """
    yield from _without_device(job.stack.name, job.cluster)
    yield from _unmeasured_kind(job)
    yield from without_room(chosen, roomy)
    if math.isinf(run.days):
        yield Caveat(
            "this never ends: machines fail so often, or take so long to come back, that the run loses work faster than it does any (see "
            "failures_per_1000_node_days, repair_s and recovery of --assume)",
            decides=True,
        )
    elif run.days > _LONGEST_RUN_DAYS:
        enough = chosen.ranks * run.days / _USUAL_RUN_DAYS
        yield Caveat(
            f"this takes {run.days / 365.25:,.1f} years; the longest published runs took about {_USUAL_RUN_DAYS:.0f} days, for which "
            f"some {enough:,.0f} accelerators are needed (--optimize time, or --require 'gpus>=N' with a cluster that large)",
            decides=True,
        )
    batch_tokens = job.workload.tokens
    if batch_tokens > _LARGEST_BATCH_TOKENS:
        yield Caveat(
            f"a step of {batch_tokens / 1e6:,.0f} M tokens is larger than any that is published "
            f"({_LARGEST_BATCH_TOKENS / 1e6:.0f} M): it may learn less from each token"
        )
    if tokens < batch_tokens:
        text = f"{tokens:,.0f} tokens are less than one step of {batch_tokens:,}; one step is planned"
        yield Caveat(text, decides=True)
    if job.stack.name == query.OWN and chosen.layout.pipeline == 1:
        for axis, problem in undivided(job.workload.model):
            if axis == "pipeline":
                yield Caveat(f"no pipelines are possible: {problem}")


def _unmeasured_kind(job: TrainingJob) -> Iterator[Caveat]:
    """Yield a caveat if no published run is of such software on such hardware: uncalibrated CPUs, or another vendor.

    On CPUs and TPUs, other software also gets one that it may not run there.
    """
    vendor, name = job.cluster.accelerator.vendor, job.stack.name
    if vendor == "any":
        if not query.is_calibrated(job.cluster):
            yield Caveat(
                f"no published run is on CPUs: P5-P95 is a factor of {UNKNOWN_MACHINE:.2g} either way, assumed; phalanx calibrate fits "
                "the constants to this machine"
            )
        if name != query.OWN:
            yield _no_device(name, "CPUs")
    elif (makers := makers_with_runs(learned(), name)) and vendor not in makers:
        yield Caveat(
            f"all published runs of {name} that this planner knows are on accelerators of {', '.join(sorted(makers))}: find out that it "
            f"runs on those of {vendor} at all before anything else"
        )
    elif not makers and vendor == "Google" and name != query.OWN:
        yield _no_device(name, "TPUs")


def _no_device(stack: str, accelerators: str) -> Caveat:
    """Return the caveat that a stack may not run on these accelerators."""
    return Caveat(
        f"{stack} is software for GPUs: no run of it on {accelerators} is known, and it may have no device "
        "for them; find out that it runs there at all before anything else"
    )


def without_room(chosen: Estimate, roomy: Estimate | None) -> Iterator[Caveat]:
    """Yield a caveat if ``chosen`` fits but leaves less memory than its prediction may be off by (``LEAST_ROOM``).

    It names ``roomy``, the best plan that leaves more, or for ``None`` other ways to make room. It decides if the free memory is below the
    error of even the best predicted software (``NO_ROOM``).
    """
    room = free_share(chosen)
    if 0 <= room < LEAST_ROOM:
        instead = (
            "divide the model further, recompute more or take a smaller micro-batch"
            if roomy is None
            else f"take --layout {roomy.layout}, which leaves {free_share(roomy):.0%} (step {roomy.step_s / chosen.step_s - 1:+.1%})"
        )
        yield Caveat(
            f"{room:.1%} of the memory is free, less than the prediction may be off by ({LEAST_ROOM:.0%}): try this layout on one replica "
            f"first, or {instead}",
            decides=room < NO_ROOM,
        )


def _without_device(stack: str, cluster: Cluster) -> Iterator[Caveat]:
    """Yield a caveat, which decides, if the stack is this project's trainer and the accelerator is neither NVIDIA's nor a CPU."""
    vendor = cluster.accelerator.vendor
    if stack == query.OWN and vendor not in ("NVIDIA", "any"):
        yield Caveat(
            f"this project's trainer has no device for {cluster.accelerator.name}: it trains on NVIDIA GPUs and on CPUs. This is what "
            "the hardware would do with such software, and nothing that can be started; --stack names other software",
            decides=True,
        )


@dataclass(frozen=True)
class Plan:
    """The chosen or requested layout, with the search result and the run as a whole."""

    name: str
    """The name of the run."""
    job: TrainingJob
    aim: query.Aim
    chosen: Estimate
    """The best layout, or the requested one."""
    search_result: SearchResult | None
    """``None`` if only one layout was estimated."""
    tokens: float
    inputs: RunInputs
    assumptions: RunAssumptions
    run: RunEstimate
    evidence: Evidence
    """Evidence from published runs for such predictions."""
    notes: tuple[str, ...] = ()
    """Notes on fields of the run file that are set and not modeled."""
    caveats: tuple[Caveat, ...] = ()
    """Reasons why the answer may not be usable, printed first."""
    ideas: tuple[alternatives.Idea, ...] = ()
    """The best plans that divide the model differently, best first; empty without a search."""
    placements: Mapping[PlannedLayout, alternatives.NetworkCost] | None = None
    """Layouts that were placed on a network, with their cost; ``None`` without a network."""

    @property
    def band(self) -> Band:
        """Band of measured over predicted time of a step: learned from runs, or set by the user."""
        return self.assumptions.step_time_band

    def failure_free(self, prediction: Estimate) -> tuple[float, float]:
        """Return the days and the dollars of the run in a layout, without failures."""
        days = self.tokens / prediction.tokens_per_s / 86_400
        return days, prediction.price_per_hour * prediction.ranks * days * 24

    def better_than_published(self, prediction: Estimate) -> BestRun | None:
        """Return the best published run on this accelerator and format, if the predicted utilization is higher; else ``None``."""
        accelerator = self.job.cluster.accelerator.key
        best = learned().best_on(accelerator, prediction.layout.precision)
        return best if best is not None and prediction.mfu_causal > best.mfu else None

    @property
    def best(self) -> tuple[Estimate, ...]:
        """The layouts to list, best first."""
        return self.search_result.best if self.search_result else (self.chosen,)


def make_plan(
    spec: RunSpec,
    cluster: Cluster,
    aim: query.Aim,
    *,
    stated: Collection[str] | None = None,
    searching: bool = True,
    placer: alternatives.Placer | None = None,
) -> Plan:
    """Search layouts, estimate the requested layout, or both; then estimate the run as a whole.

    ``stated`` are the fields that the user set beside a known model. If slots, checkpoints and fleet are not among
    them, the layout and the assumptions choose them. ``None`` means all fields, those of a run file. With a
    ``placer``, the ranking includes the seconds that a placement on its network adds to a step. Raises ``ValueError``
    with the cause and the remedy, also if ``aim`` has conditions and no search is made. A search of all layouts takes
    seconds.
    """
    if aim.require and not searching:
        raise query.PlanRequestError(
            f"{', '.join(aim.require)}: a condition is for a search, and one layout was requested: leave the layout out "
            "to search, or the condition; --explain does both and compares"
        )
    from_file = stated is None
    refuse_implausible(spec)
    job = query.job_of(spec, cluster, stack=aim.stack, keep_slots=stated is None or "train.slots" in stated)
    job = query.with_requested_modes(job, aim)
    # For a known model, --layout without mbs means the smallest micro-batch, not all of a rank's samples at once.
    keeps_micro_batch = stated is None or "train.micro_batch_size" in stated
    layout_spec = spec if keeps_micro_batch else replace(spec, train=replace(spec.train, micro_batch_size=1))
    requested = None if aim.layout is None else _requested_estimate(layout_spec, job, aim.layout)
    placements: dict[PlannedLayout, alternatives.NetworkCost] = {}
    if requested is not None and placer is not None:
        placements[requested.layout] = placer(job, requested.layout)
        requested = alternatives.with_uplinks(requested, placements[requested.layout])
    result = None
    if searching:
        top = aim.top if placer is None else max(aim.top, alternatives.PLACED)
        options = query.options_of(spec, job, optimize=aim.optimize, require=aim.require, top=top)
        result = _search(job, options)
        if placer is not None:
            result, costs = alternatives.ranked_on_network(job, result, aim.optimize, aim.top, placer)
            placements.update(costs)
    chosen = requested or (result.best[0] if result else None)
    if chosen is None:
        raise query.PlanRequestError("neither a layout nor a search was requested")
    tokens = query.read_tokens(aim.tokens) if aim.tokens else float(spec.train.steps * job.workload.tokens)
    inputs = replace(run_inputs(job, chosen, tokens), data=data_need(spec))
    # A run file, or such a field that the user set beside a model, describes how the fleet saves and recovers.
    describes = stated is None or any(path.startswith(("fleet", "checkpoint")) for path in stated)
    described = spec if describes else None
    steps = round(tokens / job.workload.tokens)
    evidence = query.evidence_of(job)
    band = evidence.band if aim.step_error is None else normal_band(aim.step_error)
    own = job.stack.name == query.OWN
    assumptions = assumed(aim.assume, band, described, chosen.step_s, steps, recovers_in_memory=own)
    run = estimate_run(inputs, assumptions)
    other_stack = "" if own else job.stack.name
    offload = query.options_of(spec, job, optimize=aim.optimize, require=(), top=1).offload
    notes: tuple[str, ...] = (
        () if chosen.fits else (layout_text.least_change(job, chosen.layout, offload=offload),)
    )
    notes += notes_of(spec, cluster, other_stack, stated)
    if (
        from_file
        and aim.layout is not None
        and (note := layout_text.replaced_sharding(aim.layout, spec, job))
    ):
        notes = (*notes, note)
    if own and job.workload.slots:
        micro_batches = job.workload.batch // chosen.layout.micro_batch
        notes += lost_node_notes(chosen.layout.mesh, cluster.per_node, job.workload.slots, micro_batches)
    doubts = tuple(caveats(job, chosen, run, tokens, result.roomy if result else None))
    used_placements = None if placer is None else placements
    ideas = alternatives.ideas_of(job, result, aim.optimize, used_placements) if result else ()
    plan = Plan(
        spec.name,
        job,
        aim,
        chosen,
        result,
        tokens,
        inputs,
        assumptions,
        run,
        evidence,
        notes,
        doubts,
        ideas,
        used_placements,
    )
    if best := plan.better_than_published(chosen):
        better = Caveat(
            f"MFU {chosen.mfu_causal:.1%} (causal attention) is more than any published run reached on {cluster.accelerator.name} in "
            f"{best.precision}: the best is {best.mfu:.1%} ({best.run})"
        )
        return replace(plan, caveats=(*doubts, better))
    return plan


def _requested_estimate(spec: RunSpec, job: TrainingJob, text: str) -> Estimate:
    """Estimate the layout of ``text``; raises ``PlanRequestError`` if it is malformed, or this project's trainer cannot run it."""
    layout = layout_text.read_layout(text, spec, job)
    if job.stack.name == query.OWN:
        slots = job.workload.slots or layout.data
        train = replace(spec.train, micro_batch_size=layout.micro_batch, slots=slots)
        changed = replace(spec, parallel=layout_text.parallel_of(spec, layout), train=train)
        problems = query.problems_of(changed, layout.ranks)
        if problems:
            raise query.PlanRequestError(f"--layout {text} is not possible:\n{problems}")
    return estimate(job, layout)


def _search(job: TrainingJob, options: Options) -> SearchResult:
    """Search layouts. If nothing fits, raises ``PlanRequestError`` with the accelerators or memory that would suffice."""
    try:
        return search(job, options)
    except NothingFitsError as error:
        helps = layout_text.what_would_fit(job, options)
        raise query.PlanRequestError(f"{error}\n{helps}" if helps else str(error)) from error


_ACTIVITY: Mapping[str, Activity] = {
    "matmul": "compute",
    "attention": "compute",
    "recompute": "compute",
    "pointwise": "memory",
    "optimizer": "memory",
    "bubble": "idle",
    "scale_tax": "idle",
}
"""The accelerator's activity in each term of a step. Terms that are not listed are communication; a stack's scalar is left out."""


def activities(chosen: Estimate) -> dict[Activity, float]:
    """Return the shares of a step by the accelerator's activity; they sum to 1. The stack's scalar is left out."""
    shares: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
    terms = {name: seconds for name, seconds in chosen.time.items() if name != "stack_scalar"}
    step_s = sum(terms.values())
    for name, seconds in terms.items():
        shares[_ACTIVITY.get(name, "communication")] += seconds / step_s
    return shares


def run_inputs(job: TrainingJob, chosen: Estimate, tokens: float) -> RunInputs:
    """Return the inputs of the whole run in the layout ``chosen``: at least one step, and a checkpoint without gradients."""
    saved = sum(state.bytes for state in job.stack.states.kept if state.kind != "gradients")
    return RunInputs(
        cluster=job.cluster,
        step_s=chosen.step_s,
        tokens_per_step=chosen.tokens,
        tokens=max(tokens, float(chosen.tokens)),
        checkpoint_bytes=saved * job.workload.counts.parameters,
        accelerators=chosen.ranks,
        replicas=chosen.layout.data,
        activities=activities(chosen),
    )


def data_need(spec: RunSpec) -> DataNeed:
    """Return the number of sequences that a step reads, the stored bytes of one, and whether any of the data is remote."""
    vocabulary = spec.model.vocab_size or spec.data.vocab_size
    return DataNeed(
        spec.train.batch_size,
        stored_sample_bytes(spec.train.seq_len, vocabulary),
        remote=any(map(is_remote, addresses(spec.data).values())),
    )
