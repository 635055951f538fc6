"""Plausibility of a query and of its answer: what is refused, and what is said before anything else.

The formulas of the planner hold for any numbers, so that a slip of a unit or of a power of ten gives an answer like any other. A query
outside of what anybody has trained, by orders of magnitude, is refused with the plausible values; an answer that nobody would act upon
is marked in the first lines of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.hardware.cluster import Cluster
from phalanx.plan.evidence.learned import UNKNOWN_MACHINE, learned, makers_with_runs
from phalanx.plan.search.query import OWN, RequestError, is_calibrated
from phalanx.plan.search.room import LEAST_ROOM, NO_ROOM, free_share
from phalanx.plan.step_cost.estimate import Estimate
from phalanx.plan.whole_run.estimate import RunEstimate
from phalanx.plan.workload.stacks import Job
from phalanx.run.kinds.whole_model import undivided
from phalanx.run.spec import RunSpec

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
