"""Input and output of the rules: one observation of a run, the limits that it is compared with, and the reasons that result.

The rules read nothing else. The limits are chosen so that a healthy run has no reason in any second of it: a false alarm at night costs more
than an alarm a minute later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, TypeVar, get_args

from phalanx.fleet.control.fleet_file import FleetFile
from phalanx.launch.engines.engine import JobStanding
from phalanx.observe.events import (
    FROM_OUTSIDE,
    CheckpointSaved,
    Event,
    Finished,
    RanksChanged,
    Restored,
    RunStarted,
    Step,
    Stopped,
)
from phalanx.observe.record.notes import Throttling
from phalanx.run.spec import RunSpec

Code = Literal[
    "stalled",
    "waiting-for-nodes",
    "waiting-for-data",
    "events-unwritten",
    "job-held",
    "job-waiting",
    "gone",
    "silent",
    "failed",
    "not-finite",
    "loss-spike",
    "diverged",
    "other-data",
    "data-gone",
    "checkpoint-failed",
    "checkpoint-old",
    "disk-full",
    "disk-filling",
    "no-coordinator",
    "lost-node",
    "fewer-ranks",
    "no-spares",
    "hardware",
    "straggler",
    "throttled",
    "slow-data",
    "slower",
    "low-goodput",
    "expert-imbalance",
    "changed-libraries",
    "mixed-machines",
    "clock-skew",
]
CODES: tuple[Code, ...] = get_args(Code)
"""Every word by which a rule names what it has found; metrics have a series of each."""
Severity = Literal["critical", "warning", "info"]
"""Critical: training stands still or its result is in danger. Warning: it goes on, at a cost. Info: worth knowing, nothing to do."""


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong with a run."""

    code: Code
    """The rule that found it, such as ``stalled``: a word for programs."""
    severity: Severity
    title: str
    where: str
    """What of the fleet is concerned: a rank, node, folder or step; "" if it is the whole run."""
    since: float | None
    """When it began, in Unix seconds, if that is known."""
    evidence: tuple[str, ...]
    """The observations that the rule concludes it from, each with its numbers."""
    doing: str
    """What is being done about it without the user."""
    next: str
    """What the user should do, with a command."""


# Limits: from where on something is wrong.


STALL_STEPS = 10
"""Usual steps without a new one: the fleet's own diagnosis of a hang begins there too (``fleet.stall_s``)."""
STALL_LEAST_S = 30.0
"""A step of a tiny model takes milliseconds; a page fault, a slow disk or a busy neighbor takes seconds."""
START_PATIENCE_S = 900.0
"""From the start of an attempt to its first step: reading a large checkpoint and compiling take minutes."""
WORK_PATIENCE_S = 600.0
"""For an evaluation or the end of a run, whose usual time is not known yet: what a checkpoint's commit may take (``checkpoint.timeout_s``)."""
WORK_TIMES = 5
"""Times the usual seconds of an evaluation or a save, after which it counts as stuck."""
FLEET_PATIENCE_S = 60.0
"""For a fleet to form or to come together again: ten times its usual seconds."""
RECOVERING_S = 300.0
"""A loss of a node is over with when the fleet has trained that long without it, if a spare took its place."""
COORDINATOR_SILENT_S = 15.0
"""The coordinator writes fleet.json every second or two; a local launcher starts a lost one again within seconds."""
SILENT_ELSEWHERE_S = 300.0
"""Without a word from a run on another machine, of which nobody here can tell whether its processes are there."""
NEW_STEPS = 10
"""The first logged steps of an attempt are not judged: allocations, compilation and cold caches are in them."""
RECENT_STEPS = 20
"""Logged steps whose median is "now"."""
DATA_SHARE = 0.1
"""Part of the time of steps spent waiting for samples. A healthy loader is ahead and waits for none; `phalanx status` tells from 1 % on."""
SLOWER = 0.15
"""Part of the run's own earlier throughput that is lost. Clocks and networks move by a few percent."""
SLOWER_DEVIATIONS = 3.0
"""How many deviations of its own variation, from one stretch of steps to the next, it must have fallen as well."""
PAST_STEPS = 100
"""Logged steps that it takes to know what is usual, and how much it varies: five stretches."""
GOODPUT = 0.8
"""Llama 3 had 0.9 on 16,384 GPUs (arXiv 2407.21783, section 3.3.4); below this the cause is worth a look."""
GOODPUT_AFTER_S = 1800.0
"""Starting costs a short run most of its time, and is nothing wrong."""
DISK_NEXT = 1.1
"""Times the size of a checkpoint that must be free: the next one is written before the oldest goes."""
DISK_SHARE = 0.03
"""Free part of the disk below which it counts as filling, if that is also less than ten checkpoints."""
DISK_CHECKPOINTS = 10
CHECKPOINT_INTERVALS = 3
"""Intervals without a checkpoint: one is being written, one is due, and one is missing."""
CHECKPOINT_LEAST_S = 120.0
"""For checkpoints that are due every few seconds and written to a slow disk."""
SPIKE_WINDOWS = 1
"""A spike is news until as many windows (``train.spike_window``) of steps have been trained since."""
NEWS_S = 600.0
"""... and for ten minutes at least: a window of a small model is over in seconds, and nobody looks as soon as that. The alert lasts as long."""
BACK = 0.1
"""The loss is back if it is at most this part above what was usual before the spike."""
RISEN = 0.5
"""Part by which the loss must be above the run's best for a window of steps to count as diverged. Spikes of single steps are another rule's."""
SKEW_S = 5.0
"""Between two clocks that wrote one stream. With NTP machines are within milliseconds; leases and the order of logs suffer from seconds."""
IMBALANCE = 0.6
"""Part of the largest imbalance that a router can have (all tokens to the same experts), once it had time to learn."""
IMBALANCE_AFTER_STEPS = 200
BURST_WINDOWS = 0.3
"""Part of the windows in which a rank must be slower to be late in bursts, which a median over all windows does not show."""
BURST_ALONE = 3.0
"""Times the time that its peers wait for the next rank: on a machine with neighbors all ranks are late at times."""
SLOW_RANK = 0.2
"""Part by which a rank computes longer than its peers; noise of shared machines is below."""


# Observations.


Body = TypeVar("Body")


@dataclass(frozen=True)
class FailureSeen:
    """Why a process of the run ended, as it has left it beside its log."""

    who: str
    kind: str
    message: str
    remedy: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class FirstFailureSeen:
    """The failure that came first in the newest start, by the logs of all processes (``phalanx logs``)."""

    who: str
    text: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class ProcessSeen:
    """A process of the run on this machine."""

    pid: int
    state: str
    """Its letter in /proc/PID/stat, such as T for stopped and D for waiting for a disk."""
    rank: int | None


@dataclass(frozen=True)
class DiskSeen:
    """The file system that holds the run directory, in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class SlowRankSeen:
    """A rank that computes longer than its peers, by the stream of ranks' numbers."""

    rank: int
    slowdown: float
    """Its computing time over that of its peers, less one."""
    compute_s: float
    windows: int
    """Windows that were looked at."""
    slower: int
    """Windows in which it was slower."""
    since: float | None
    node: str = ""
    late_share: float = 0.0
    """The time that its peers have waited for it, over their own time in these windows."""


@dataclass(frozen=True)
class Observed:
    """A run as it is at ``now``."""

    run: str
    """Its directory, as it stands in commands."""
    now: float
    spec: RunSpec | None = None
    """``None`` if its run file cannot be read."""
    events: tuple[Event, ...] = ()
    """The newest events, in the order written; all of them if the stream is short."""
    past: tuple[Event, ...] = ()
    """Samples of the stream before ``events``, among them the first start."""
    held: bool | None = None
    """True if a process holds the run directory, False if none does, ``None`` if that cannot be told from this machine."""
    starts: int = 0
    """Starts that have taken the run directory."""
    last_line: str = ""
    """The newest line of the logs of a run without events that no process holds."""
    finished: bool = False
    """There is a result."""
    fleet: FleetFile | None = None
    failures: tuple[FailureSeen, ...] = ()
    """The failures of the newest start, the first to fail first."""
    first_failure: FirstFailureSeen | None = None
    processes: tuple[ProcessSeen, ...] = ()
    """The processes of a run that this machine holds."""
    job: JobStanding | None = None
    """Its queued or running job, if the engine was asked."""
    checkpoints: tuple[tuple[int, float], ...] = ()
    """Step and time of each checkpoint on disk, the oldest first."""
    checkpoint_bytes: int = 0
    """Bytes of the newest checkpoint on disk, all ranks' images together."""
    disk: DiskSeen | None = None
    slow_ranks: tuple[SlowRankSeen, ...] = ()
    machines: tuple[str, ...] = ()
    """A sentence on each fact in which the nodes' machines differ."""
    throttled: tuple[Throttling, ...] = ()
    """The nodes that say that they are slowed down."""
    data_fingerprint: str = ""
    """The fingerprint of the data that the run was started with."""
    data_now: str = ""
    """The fingerprint of the data as they are now; empty if that is not known."""
    data_error: str = ""
    """Why the data cannot be opened now."""

    @cached_property
    def attempt(self) -> int:
        """The newest attempt (of a fleet: epoch) that a rank has written of; -1 if none has."""
        own = (event.attempt for event in self.events if not isinstance(event.body, FROM_OUTSIDE))
        return max(own, default=-1)

    @cached_property
    def mine(self) -> tuple[Event, ...]:
        """The newest attempt's events."""
        return tuple(event for event in self.events if event.attempt == self.attempt)

    @cached_property
    def steps(self) -> list[tuple[float, Step]]:
        """Time and content of the newest attempt's logged steps."""
        return [(event.t, event.body) for event in self.mine if isinstance(event.body, Step)]

    @cached_property
    def settled(self) -> list[tuple[float, Step]]:
        """Its steps without the first ones, in which it still warms up, since the number of ranks changed last."""
        changed = max((event.t for event in self.mine if isinstance(event.body, RanksChanged)), default=0.0)
        whole = any(isinstance(event.body, RunStarted) for event in self.mine)
        steps = [(t, step) for t, step in self.steps if t > changed]
        return steps[NEW_STEPS:] if whole or changed else steps

    @cached_property
    def recent(self) -> list[tuple[float, Step]]:
        """The newest of these."""
        return self.settled[-RECENT_STEPS:]

    @cached_property
    def last_step(self) -> tuple[float, Step] | None:
        """The newest step of any attempt."""
        return next(
            ((event.t, event.body) for event in reversed(self.events) if isinstance(event.body, Step)), None
        )

    @cached_property
    def last_t(self) -> float:
        """The time of the newest event that a rank wrote; 0 if there is none."""
        return max((event.t for event in self.mine), default=0.0)

    @cached_property
    def step_s(self) -> float:
        """Seconds from one logged step to the next, as is usual; 0 while that is not known."""
        took = [step.logged_s or step.step_s for _, step in self.steps[-RECENT_STEPS:]]
        return median(took) if took else 0.0

    @cached_property
    def over(self) -> bool:
        """True if the run has come to an end that it told of: it is finished, or it was stopped."""
        if self.finished or (self.fleet is not None and self.fleet.over):
            return True
        return bool(self.mine) and isinstance(self.mine[-1].body, Stopped | Finished)

    @cached_property
    def running(self) -> bool:
        """True if the run should make progress now: it has begun, it has not ended, and its processes are there as far as is known."""
        return bool(self.events) and not self.over and self.held is not False

    @cached_property
    def after_end(self) -> str:
        """Remainder of the run once it has ended."""
        if self.finished:
            return "nothing: it has finished"
        step = self.saved_step
        kept = f"step {step:,} is saved, and it goes on from there" if step else "no checkpoint was saved"
        return f"nothing: it has ended; {kept}"

    def doing(self, while_running: str) -> str:
        """Return ``while_running``, or ``after_end`` for a run that has ended."""
        return while_running if self.running else self.after_end

    def newest(self, kind: type[Body]) -> tuple[float, Body] | None:
        """Time and content of the newest event of a kind, of any attempt."""
        return next(
            ((event.t, event.body) for event in reversed(self.events) if isinstance(event.body, kind)), None
        )

    @cached_property
    def started(self) -> RunStarted | None:
        """The newest start."""
        found = self.newest(RunStarted) or self._first_start
        return found[1] if found else None

    @cached_property
    def first_started(self) -> RunStarted | None:
        """The first start."""
        return self._first_start[1] if self._first_start else None

    @cached_property
    def _first_start(self) -> tuple[float, RunStarted] | None:
        starts = (
            (event.t, event.body)
            for event in (*self.past, *self.events)
            if isinstance(event.body, RunStarted)
        )
        return next(starts, None)

    @cached_property
    def saved_step(self) -> int:
        """The newest step that is durable on disk; 0 if there is none."""
        saved = self.newest(CheckpointSaved)
        steps = [step for step, _ in self.checkpoints]
        return max([*steps, saved[1].step if saved else 0])

    @cached_property
    def began_at(self) -> float | None:
        """The time at which the newest attempt began or restored its state."""
        found = [event.t for event in self.mine if isinstance(event.body, RunStarted | Restored)]
        return max(found, default=None)
