"""``make_plan``: from a run file and a cluster to the layout chosen, what the search found, and the run as a whole.

The result is one value, ``Plan``, which tables, reports and JSON are made from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.whole_model import undivided
from phalanx.run.resolve import addresses
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
from phalanx_plan.search.alternatives import (
    PLACED,
    Idea,
    NetworkCost,
    Placer,
    ideas_of,
    ranked_on_network,
    with_uplinks,
)
from phalanx_plan.search.layout_text import (
    least_change,
    parallel_of,
    read_layout,
    replaced_sharding,
    what_would_fit,
)
from phalanx_plan.search.options import LEAST_ROOM, NO_ROOM, Options, free_share
from phalanx_plan.search.query import (
    OWN,
    Aim,
    RequestError,
    evidence_of,
    is_calibrated,
    job_of,
    options_of,
    problems_of,
    read_tokens,
    with_modes_asked,
)
from phalanx_plan.search.search import NothingFitsError, SearchResult, search
from phalanx_plan.step_cost.estimate import Estimate, estimate
from phalanx_plan.whole_run.assumptions import RunAssumptions, RunInputs, assumed
from phalanx_plan.whole_run.cost import Activity
from phalanx_plan.whole_run.data_reading import DataNeed, stored_sample_bytes
from phalanx_plan.whole_run.estimate import RunEstimate, estimate_run
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import Job

# Plausibility of a query and of its answer: what is refused, and what is said before anything else.
#
# The formulas of the planner hold for any numbers, so that a slip of a unit or of a power of ten gives an answer like any other. A query
# outside of what anybody has trained, by orders of magnitude, is refused with the plausible values; an answer that nobody would act upon
# is marked in the first lines of the plan.

_LARGEST_BATCH_TOKENS = 128e6
"""Tokens of the largest published step: MiniMax-01 (arXiv 2501.08313, section 4), recalled."""
_MOST_BATCH_TOKENS = 1e10
_LONGEST_SEQUENCE = 100_000_000
"""Tokens; models of up to ten million have been announced."""
_LONGEST_RUN_DAYS = 365.0
_USUAL_RUN_DAYS = 120.0
"""Days of the longest pre-training runs that are published: BLOOM's 117 (arXiv 2211.05100, section 3.2.4)."""


def refuse_implausible(spec: RunSpec) -> None:
    """Raises ``RequestError`` for a batch or a sequence that is orders of magnitude beyond any that was trained with."""
    train = spec.train
    if train.seq_len > _LONGEST_SEQUENCE:
        raise RequestError(
            f"train.seq_len: {train.seq_len:,} tokens: plausible is up to {_LONGEST_SEQUENCE:,}, usual 2,048 to 131,072"
        )
    if train.batch_size * train.seq_len > _MOST_BATCH_TOKENS:
        raise RequestError(
            f"train.batch_size: {train.batch_size:,} sequences of {train.seq_len:,} tokens are "
            f"{train.batch_size * train.seq_len:,} tokens a step: plausible are 1,000 to {_LARGEST_BATCH_TOKENS:,.0f}, the largest "
            f"that is published, and at most {_MOST_BATCH_TOKENS:,.0f} are planned"
        )


@dataclass(frozen=True)
class Caveat:
    """A sentence on why the answer may be worth nothing as it stands."""

    text: str
    decides: bool = False
    """True if nobody should go on as planned; otherwise it is something to find out first."""


def caveats(
    job: Job, chosen: Estimate, run: RunEstimate, tokens: float, roomy: Estimate | None = None
) -> Iterator[Caveat]:
    """Yields the caveats of an answer, the weightiest first; ``roomy`` is the best plan with room in memory."""
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
            f"({_LARGEST_BATCH_TOKENS / 1e6:.0f} M): that it learns as much from each token is not known"
        )
    if tokens < batch_tokens:
        text = f"{tokens:,.0f} tokens are less than one step of {batch_tokens:,}; one step is planned"
        yield Caveat(text, decides=True)
    if job.stack.name == OWN and chosen.layout.pipeline == 1:
        for axis, problem in undivided(job.workload.model):
            if axis == "pipeline":
                yield Caveat(f"no pipelines are possible: {problem}")


def _unmeasured_kind(job: Job) -> Iterator[Caveat]:
    """Yields a caveat where nobody published a run of such software on such hardware, so that a band can only be borrowed."""
    vendor, name = job.cluster.accelerator.vendor, job.stack.name
    if vendor == "any":
        if not is_calibrated(job.cluster):
            yield Caveat(
                f"no published run is on CPUs: P5-P95 is a factor of {UNKNOWN_MACHINE:.2g} either way, assumed; phalanx calibrate fits "
                "the constants to this machine"
            )
        if name != OWN:
            yield _no_device(name, "CPUs")
    elif (makers := makers_with_runs(learned(), name)) and vendor not in makers:
        yield Caveat(
            f"all published runs of {name} that this planner knows are on accelerators of {', '.join(sorted(makers))}: find out that it "
            f"runs on those of {vendor} at all before anything else"
        )
    elif not makers and vendor == "Google" and name != OWN:
        yield _no_device(name, "TPUs")


def _no_device(stack: str, accelerators: str) -> Caveat:
    return Caveat(
        f"{stack} stands for software that is written for GPUs: no run of it on {accelerators} is known, and it may have no device "
        "for them; find out that it runs there at all before anything else"
    )


def without_room(chosen: Estimate, roomy: Estimate | None) -> Iterator[Caveat]:
    """Yields a caveat if ``chosen`` leaves less memory than its prediction may be off by, with the best plan that leaves more.

    It decides where even the software whose memory is predicted best leaves more in doubt.
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
    vendor = cluster.accelerator.vendor
    if stack == OWN and vendor not in ("NVIDIA", "any"):
        yield Caveat(
            f"this project's trainer has no device for {cluster.accelerator.name}: it trains on NVIDIA GPUs and on CPUs. This is what "
            "the hardware would do with such software, and nothing that can be started; --stack names other software",
            decides=True,
        )


@dataclass(frozen=True)
class Plan:
    """A layout that was chosen, or asked for, and what was found on the way."""

    name: str
    """The name of the run."""
    job: Job
    aim: Aim
    chosen: Estimate
    """The best layout, or the one that was asked for."""
    search_result: SearchResult | None
    """``None`` if only one layout was looked at."""
    tokens: float
    inputs: RunInputs
    assumptions: RunAssumptions
    run: RunEstimate
    evidence: Evidence
    """What published runs say of such predictions."""
    notes: tuple[str, ...] = ()
    """Notes on fields of the run file that are set and not modeled."""
    caveats: tuple[Caveat, ...] = ()
    """Why the answer may be worth nothing as it stands (``phalanx_plan.search.plan``); said before anything else."""
    ideas: tuple[Idea, ...] = ()
    """The best plans that divide the model differently, the best first; none without a search."""
    placements: Mapping[PlannedLayout, NetworkCost] | None = None
    """The layouts that were placed on a network, and what that costs each; ``None`` if no network was given."""

    @property
    def band(self) -> Band:
        """Measured over predicted time of a step: what was learned, or as the user said."""
        return self.assumptions.step_time_band

    def better_than_published(self, found: Estimate) -> BestRun | None:
        """The best published run on this accelerator in the layout's format, if the layout is said to make better use of it."""
        accelerator = self.job.cluster.accelerator.key
        best = learned().best_on(accelerator, found.layout.precision)
        return best if best is not None and found.mfu_causal > best.mfu else None

    @property
    def best(self) -> tuple[Estimate, ...]:
        """The layouts to list, best first."""
        return self.search_result.best if self.search_result else (self.chosen,)


def make_plan(
    spec: RunSpec,
    cluster: Cluster,
    aim: Aim,
    *,
    stated: Collection[str] | None = None,
    searching: bool = True,
    placer: Placer | None = None,
) -> Plan:
    """Searches, or estimates the layout that was asked for, or both; then the run as a whole.

    ``stated`` are the fields that the user gave of a run of a known model: slots, checkpoints and fleet that are not among them are
    as the layout and the assumptions like them. ``None`` means all fields, those of a run file. With a ``placer``, layouts are ranked with
    what their placement on its network adds to a step. Raises ``ValueError`` with what is in the way, and the remedy.
    """
    if aim.require and not searching:
        raise RequestError(
            f"{', '.join(aim.require)}: a condition is for a search, and one layout was asked for: leave the layout out "
            "to search, or the condition; --explain does both and compares"
        )
    from_file = stated is None
    refuse_implausible(spec)
    job = job_of(spec, cluster, stack=aim.stack, keep_slots=stated is None or "train.slots" in stated)
    job = with_modes_asked(job, aim)
    # Of a run of a known model, what --layout leaves out is as small as it can be, rather than a rank's whole share at once.
    whole = stated is None or "train.micro_batch_size" in stated
    one = spec if whole else replace(spec, train=replace(spec.train, micro_batch_size=1))
    asked = None if aim.layout is None else _asked(one, job, aim.layout)
    placements: dict[PlannedLayout, NetworkCost] = {}
    if asked is not None and placer is not None:
        placements[asked.layout] = placer(job, asked.layout)
        asked = with_uplinks(asked, placements[asked.layout])
    found = None
    if searching:
        top = aim.top if placer is None else max(aim.top, PLACED)
        options = options_of(spec, job, optimize=aim.optimize, require=aim.require, top=top)
        found = _search(job, options)
        if placer is not None:
            found, costs = ranked_on_network(job, found, aim.optimize, aim.top, placer)
            placements.update(costs)
    chosen = asked or (found.best[0] if found else None)
    if chosen is None:
        raise RequestError("neither a layout nor a search was asked for")
    tokens = read_tokens(aim.tokens) if aim.tokens else float(spec.train.steps * job.workload.tokens)
    inputs = replace(run_inputs(job, chosen, tokens), data=data_need(spec))
    # A run file, or a field that was given beside a model, describes how the fleet saves and recovers.
    describes = stated is None or any(path.startswith(("fleet", "checkpoint")) for path in stated)
    described = spec if describes else None
    steps = round(tokens / job.workload.tokens)
    evidence = evidence_of(job)
    band = evidence.band if aim.step_error is None else normal_band(aim.step_error)
    own = job.stack.name == OWN
    assumptions = assumed(aim.assume, band, described, chosen.step_s, steps, recovers_in_memory=own)
    run = estimate_run(inputs, assumptions)
    other_stack = "" if own else job.stack.name
    offload = options_of(spec, job, optimize=aim.optimize, require=(), top=1).offload
    notes: tuple[str, ...] = () if chosen.fits else (least_change(job, chosen.layout, offload=offload),)
    notes += notes_of(spec, cluster, other_stack, stated)
    if from_file and aim.layout is not None and (note := replaced_sharding(aim.layout, spec, job)):
        notes = (*notes, note)
    if own and job.workload.slots:
        micro_batches = job.workload.batch // chosen.layout.micro_batch
        notes += lost_node_notes(chosen.layout.mesh, cluster.per_node, job.workload.slots, micro_batches)
    doubts = tuple(caveats(job, chosen, run, tokens, found.roomy if found else None))
    known = None if placer is None else placements
    ideas = ideas_of(job, found, aim.optimize, known) if found else ()
    plan = Plan(
        spec.name,
        job,
        aim,
        chosen,
        found,
        tokens,
        inputs,
        assumptions,
        run,
        evidence,
        notes,
        doubts,
        ideas,
        known,
    )
    if best := plan.better_than_published(chosen):
        better = Caveat(
            f"MFU {chosen.mfu_causal:.1%} (causal attention) is more than any published run reached on {cluster.accelerator.name} in "
            f"{best.precision}: the best is {best.mfu:.1%} ({best.run})"
        )
        return replace(plan, caveats=(*doubts, better))
    return plan


def _asked(spec: RunSpec, job: Job, text: str) -> Estimate:
    layout = read_layout(text, spec, job)
    if job.stack.name == OWN:
        slots = job.workload.slots or layout.data
        train = replace(spec.train, micro_batch_size=layout.micro_batch, slots=slots)
        changed = replace(spec, parallel=parallel_of(spec, layout), train=train)
        problems = problems_of(changed, layout.ranks)
        if problems:
            raise RequestError(f"--layout {text} is not possible:\n{problems}")
    return estimate(job, layout)


def _search(job: Job, options: Options) -> SearchResult:
    try:
        return search(job, options)
    except NothingFitsError as error:
        helps = what_would_fit(job, options)
        raise RequestError(f"{error}\n{helps}" if helps else str(error)) from error


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


def activities(found: Estimate) -> dict[Activity, float]:
    """Shares of a step by what the accelerator does meanwhile; they sum to 1."""
    shares: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
    terms = {name: seconds for name, seconds in found.time.items() if name != "stack_scalar"}
    whole = sum(terms.values())
    for name, seconds in terms.items():
        shares[_ACTIVITY.get(name, "communication")] += seconds / whole
    return shares


def run_inputs(job: Job, found: Estimate, tokens: float) -> RunInputs:
    """The run of ``tokens`` tokens with the layout that was estimated."""
    saved = sum(state.bytes for state in job.stack.states.kept if state.kind != "gradients")
    return RunInputs(
        cluster=job.cluster,
        step_s=found.step_s,
        tokens_per_step=found.tokens,
        tokens=max(tokens, float(found.tokens)),
        checkpoint_bytes=saved * job.workload.counts.parameters,
        accelerators=found.ranks,
        replicas=found.layout.data,
        activities=activities(found),
    )


def data_need(spec: RunSpec) -> DataNeed:
    """What a step of the run reads."""
    vocabulary = spec.model.vocab_size or spec.data.vocab_size
    return DataNeed(
        spec.train.batch_size,
        stored_sample_bytes(spec.train.seq_len, vocabulary),
        remote=any(map(is_remote, addresses(spec.data).values())),
    )
