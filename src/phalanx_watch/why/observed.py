"""Input and output of the rules: one observation of a run, the limits, and the resulting reasons.

The rules read nothing else. The limits are chosen so that a healthy run never has a reason: a false alarm at night
costs more than an alarm a minute later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Literal, TypeVar, get_args

from phalanx.fleet.control.fleet_file import FleetFile
from phalanx.launch.engines.engine import JobStanding
from phalanx.observe import events as run_events
from phalanx.observe.record.notes import Throttling
from phalanx.run.directory.paths import newest_in_words
from phalanx.run.spec import RunSpec

Code = Literal[
    "stalled",
    "waiting-for-nodes",
    "waiting-for-data",
    "events-unwritten",
    "events-unreadable",
    "job-held",
    "job-waiting",
    "gone",
    "stopped",
    "ended-early",
    "silent",
    "failed",
    "not-finite",
    "skipped-steps",
    "loss-spike",
    "diverged",
    "raised-loss",
    "worse-than-parent",
    "rate-jumps",
    "read-again",
    "not-learning",
    "endless-warmup",
    "held-out-rises",
    "loss-too-low",
    "unusual-fields",
    "unusual-text",
    "growing-norm",
    "growing-layer",
    "saturated-layer",
    "collapsed-router",
    "dead-units",
    "wrong-gradients",
    "changed-run-file",
    "other-data",
    "data-gone",
    "held-out-leak",
    "twin-sources",
    "repeated-text",
    "other-ruler",
    "checkpoint-failed",
    "checkpoint-old",
    "slow-checkpoints",
    "checkpoint-damaged",
    "disk-full",
    "disk-filling",
    "no-coordinator",
    "lost-node",
    "fewer-ranks",
    "no-spares",
    "hardware",
    "straggler",
    "slow-link",
    "growing-memory",
    "throttled",
    "metrics-elsewhere",
    "too-many-threads",
    "uneven-slots",
    "slow-data",
    "slower",
    "low-goodput",
    "expert-imbalance",
    "changed-libraries",
    "debugging-on",
    "mixed-machines",
    "clock-skew",
]
CODES: tuple[Code, ...] = get_args(Code)
"""All codes of reasons; metrics have a series for each."""
Severity = Literal["critical", "warning", "info"]
"""Critical: training stands still or its result is in danger. Warning: it continues, at a cost. Info: nothing to
do.
"""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One thing that is wrong with a run."""

    code: Code
    """Machine-readable name of the rule, such as ``stalled``."""
    severity: Severity = "warning"
    title: str
    where: str
    """Affected part of the fleet: a rank, node, folder or step; "" for the full run."""
    since: float | None = None
    """Start of the problem in Unix seconds, if known."""
    evidence: tuple[str, ...]
    """Observations that support the reason, with their numbers."""
    doing: str
    """Automatic response that is under way."""
    next: str
    """Recommended next step, with a command."""


# Thresholds of the rules.


STALL_STEPS = 10
"""Usual step times without a new step; the fleet's own hang detection starts there too (``fleet.stall_s``)."""
RETRANSMISSIONS = 5
"""Number for one segment without an answer: they take six seconds and more (RFC 6298), and a link that loses packets delivers one of them."""
ADDRESS_SPACE = 0.95
"""Used share of a process's limit of address space from which a thread, whose stack takes megabytes, may find no room."""
STALL_LEAST_S = 30.0
"""A step of a tiny model takes milliseconds; a page fault, a slow disk or a busy neighbor takes seconds."""
START_PATIENCE_S = 900.0
"""From the start of an attempt to its first step: reading a large checkpoint and compiling take minutes."""
WORK_PATIENCE_S = 600.0
"""For an evaluation or the end of a run without a known duration: the timeout of a checkpoint's commit
(``checkpoint.timeout_s``).
"""
WORK_TIMES = 5
"""Factor on the usual duration of an evaluation or a save, after which it counts as stuck."""
FLEET_PATIENCE_S = 60.0
"""For a fleet to form or regroup: ten times its usual seconds."""
RECOVERING_S = 300.0
"""A node loss is over after this much training without it, if a spare took its place."""
COORDINATOR_SILENT_S = 15.0
"""The coordinator writes fleet.json every second or two; a local launcher restarts a lost one within seconds."""
SILENT_ELSEWHERE_S = 300.0
"""Seconds without an event from a run on another machine, whose processes cannot be checked from here."""
NEW_STEPS = 10
"""The first logged steps of an attempt are not judged: allocations, compilation and cold caches are in them."""
RECENT_STEPS = 20
"""Logged steps whose median is "now"."""
RECENT_LEAST_S = 5.0
"""Least time that "now" covers: twenty steps of a tiny model are over in a moment, which any other process can spoil."""
DATA_SHARE = 0.1
"""Share of step time spent waiting for samples. A healthy loader is ahead and waits for none; `phalanx status`
shows it from 1 %.
"""
UNEVEN = 0.2
"""Share of the time of all data-parallel ranks that is waiting for those that compute one more slot."""
SLOWER = 0.15
"""Lost share of the run's own earlier throughput. Clocks and networks vary by a few percent."""
SLOWER_DEVIATIONS = 3.0
"""Required drop in deviations of the run's own variation between stretches of steps."""
PAST_STEPS = 100
"""Logged steps needed to estimate the usual throughput and its variation: five stretches."""
FEW_STEPS = 5
"""Settled steps that are enough to see that throughput has fallen to half."""
STEADY_FALL = 0.8
"""Rank correlation of throughput with time from which a fall is steady. A busy machine slows down by spells, which come and go."""
GOODPUT = 0.8
"""Llama 3 had 0.9 on 16,384 GPUs (arXiv 2407.21783, section 3.3.4); below this the cause is worth a look."""
GOODPUT_AFTER_S = 1800.0
"""Minimum run time: starting costs a short run most of its time, which is not a fault."""
GOODPUT_SOON = 0.6
"""The same for less time, without the start: evaluations and saves of a short run have a larger share."""
GOODPUT_SOON_S = 60.0
DISK_NEXT = 1.1
"""Required free space in checkpoint sizes: the next one is written before the oldest is deleted."""
DISK_SHARE = 0.03
"""Free share of the disk below which it counts as filling, if that is also less than ten checkpoints."""
DISK_CHECKPOINTS = 10
CHECKPOINT_INTERVALS = 3
"""Intervals without a checkpoint: one is being written, one is due, and one is missing."""
CHECKPOINT_LEAST_S = 120.0
"""For checkpoints that are due every few seconds and written to a slow disk."""
HELD_OUT_SHARE = 0.1
"""Share of the held-out documents that are also trained on. Web text repeats a few percent of its documents (arXiv 2107.06499)."""
EQUAL_ENDS = 3
"""Newest starts that ended after the same step. Two may be chance where a start makes few steps; kills and lost machines come at any step."""
REPEATED_XZ = 0.5
"""Bits per byte that ``xz -9`` leaves. Prose keeps about 2, and all sources of Python's standard library, which repeat much, 1.2."""
LOST_STARTS = 2
"""Earlier starts without a checkpoint: one may be an attempt that was given up."""
SAVES = 5
"""Newest saves whose delays of training are added up."""
SAVE_SHARE = 0.1
"""Share of the time by which saves delay training. They are written in the background: a healthy one costs a copy in memory."""
SPIKE_WINDOWS = 1
"""A spike is reported until this many windows (``train.spike_window``) of steps have been trained since."""
NEWS_S = 600.0
"""... and for at least ten minutes: a window of a small model is over in seconds. The alert lasts as long."""
_USUAL_WINDOW = 128
BACK = 0.1
"""The loss is back if it exceeds its level before the spike by at most this share."""
SKIPPED_SHARE = 0.02
"""Share of an attempt's steps that were thrown away. At the default of 8 deviations a spike is one step in thousands; each costs its batch."""
SKIPPED_LEAST = 10
"""Thrown-away steps that count: as many in a row end a run by default (``train.max_skipped``), and one damaged file may cost a few."""
ONE_RANK_STEPS = 10
"""Steps that were not finite on the same rank alone. By chance all are one rank's of two in one of 500 runs."""
RISEN = 0.5
"""Share by which the loss must exceed the run's best for a window of steps to count as diverged. Another rule
covers single spikes.
"""
NOISIER = 3.0
"""Factor on the change of the loss from step to step. It grows with the root of the batch: a ninth of it has it, half or a quarter have not."""
TOO_GOOD = 0.02
"""Share of an untrained model's loss. Text is never so predictable: large models keep a tenth of it, on source code a twentieth."""
XZ_SHARE = 0.1
"""Share of what ``xz -9`` leaves of the held-out text. Of English, Chinchilla leaves a third of what LZMA does (arXiv
2309.10668, table 1); regular text is short for both."""
HELD_OUT_RISEN = 0.05
"""Share by which a held-out loss must exceed its best. A higher rate costs a percent or two for a while."""
EVALUATIONS = 4
"""Evaluations of a curve: the best, and two that agree, are not the first ones."""
EPOCHS = 10.0
"""Times that a source was read. Up to four are nearly as good as new text, and from sixteen on more add nothing (arXiv 2305.16264)."""
UNLEARNED = 0.01
"""Share of an untrained model's loss by which the loss must have fallen after two windows of steps with the full rate."""
CLIPPED = 10.0
"""Factor of the gradient norm over its limit in the median step. Small batches exceed the usual limit of 1 by two or three times."""
DECAYED = 0.8
"""Share of the peak rate from which it has hardly begun to decay."""
REPEATED_SHARE = 0.2
"""Share of the windows of 32 tokens that an earlier sample has: licenses and boilerplate have a few percent."""
MOST_SPANS, FEW_SPANS = 0.8, 0.05
"""Shares of learned spans that count as all, and as none."""
JSON_SHARE = 0.5
DOUBLY_ENCODED = 0.3
BYTES_PER_TOKEN = 1.7
"""A BPE of some thousand tokens has three or more on its own language, and one for each byte on text of another."""
LARGE_VOCABULARY = 2048
FAR_OFF = 10.0
"""Factor beyond the usual values of a field from which it harms any run; nearer ones may be meant."""
MOST_UNUSUAL = 8
"""Listed fields that are unusual."""
SMALL_UPDATE = 1e-4
"""Change of a layer's weights in a step over their size. Some 1e-3 is usual (cs231n.github.io/neural-networks-3, "Ratio of weights:updates")."""
NORM_GROWN = 20.0
"""Factor on the least gradient norm of the run's past, for a window of steps. Norms that rise slowly while the loss falls stay below."""
HELD_OUT_WORSE = 0.02
"""Share by which the first held-out loss must exceed the parent's last. It is that of the same texts, and trained weights lower it."""
RATE_JUMP = 3.0
"""Factor on the learning rate with which a parent ended. The rate of a cosine that is planned for a few more steps hardly rises."""
BUMP_STEPS = 5
"""Steps in a row whose median is the height of a bump: one batch may be hard."""
LAYER_MEASUREMENTS = 5
"""Measurements of layers that are needed to compare the newest with the past."""
NEWEST_MEASUREMENTS = 2
"""Newest measurements of layers that must agree."""
LAYER_ALONE = 10.0
"""Factor on the median growth of all layers: below it, the norms of many layers grow, which is another rule's."""
LAYER_SHARE = 0.1
"""Share of a layer's group in the norm of the whole model, below which its growth has no weight."""
LARGE_LOGIT = 100.0
"""Above it a softmax has one winner; Kimi K2 clips its weights from there on (QK-Clip, arXiv 2507.20534, section 2.1)."""
LARGE_RMS = 1e4
"""Root mean square of a residual stream: layers add values near 1 to it, and bf16 has eight bits."""
DEAD_SHARE = 0.25
"""Share of a layer's hidden units, or experts. Healthy layers have none, or a few."""
TOKENS_PER_EXPERT = 100
"""Mean tokens of an expert in a step: with fewer, some experts have none by chance."""
SKEW_S = 5.0
"""Limit on the difference between two clocks that wrote one stream. With NTP machines agree within milliseconds;
leases and log order suffer from seconds.
"""
CLOCK_JUMP_S = 60.0
"""Jump of a clock between two steps; corrections by NTP are below a second."""
COPIES_BEHIND = 3
"""Checkpoints that are not in the store: one is being copied, and one may be due."""
IMBALANCE = 0.6
"""Share of the largest possible router imbalance (all tokens to the same experts), after the router had time to
learn.
"""
IMBALANCE_AFTER_STEPS = 200
BURST_WINDOWS = 0.2
"""Share of the windows in which a rank must be slower to be late in bursts, which a median over all windows does
not show. One or two windows of twenty are any neighbor's.
"""
BURSTS_MOST = 0.5
"""A rank that is late in more of them, and not by the median, shares its cores with noise."""
BURST_ALONE = 4.0
"""Factor on the waits for the next rank: on a shared machine all ranks are late at times, one of two up to 3.6 times as much."""
SLOW_RANK = 0.2
"""Share by which a rank computes longer than its peers; noise of shared machines is below."""
SLOW_LINK = 1 / 3
"""Share of the median rate of all machines' links. Equal links differ by less than half, and by the load of their machines."""
LINK_MACHINES = 3
"""Least number of machines with a rate: of two that are connected, either may be the slow one."""
LINK_READINGS = 2
"""Newest readings of the machines that must agree."""
LINK_WAIT = 0.1
"""Share of the time of steps spent waiting for communication, from which a slow link costs something."""
MEMORY_GROWN = 1.3
"""Factor on a rank's memory after the first part of its attempt. The arenas of a processor's allocator add a seventh in some hundred steps; tensors
on a GPU add nothing.
"""
MEMORY_PARTS = 6
"""Parts of an attempt, of which the first is not judged: buffers, caches and arenas fill there."""
STEADY = 0.5
"""Share of the mean growth that each part must have: a larger batch or another stage of the data adds once, and arenas ever less."""


# Observations.


Body = TypeVar("Body")


def of_kind(kind: type[Body], events: Iterable[run_events.Event]) -> list[tuple[float, Body]]:
    """Return time and content of the events of a kind, in their order."""
    return [(event.t, event.body) for event in events if isinstance(event.body, kind)]


@dataclass(frozen=True)
class FailureSeen:
    """Reason of a process's end, from the file beside its log."""

    who: str
    kind: str
    message: str
    remedy: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class FirstFailureSeen:
    """The first failure of the newest start, from the logs of all processes (``phalanx logs``)."""

    who: str
    text: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class UnreadableLine:
    """A line of the event stream that is no event, and not the unfinished last line of a start."""

    offset: int
    """Offset of its first byte in the file."""
    nbytes: int
    after: int | None
    """The step logged before it; None if that was not read."""
    before: int | None
    """The step logged after it; None if there is none yet."""


@dataclass(frozen=True)
class DeadLinkSeen:
    """A TCP connection of a process whose bytes are not acknowledged though they were sent again and again."""

    peer: str
    """Address and port of the other end."""
    waiting_bytes: int
    """Bytes in its send queue."""
    retransmissions: int


@dataclass(frozen=True)
class ProcessSeen:
    """A process of the run on this machine."""

    pid: int
    state: str
    """State letter in /proc/PID/stat, such as T for stopped and D for disk wait."""
    rank: int | None
    address_space: float = 0.0
    """Used share of its limit of address space (``ulimit -v``); 0 without a limit."""
    dead_links: tuple[DeadLinkSeen, ...] = ()
    cores: frozenset[int] = frozenset()
    """Cores that it may run on; empty if unknown."""
    core_share: float | None = None
    """Processor time over time, 1.0 for one core; None if not measured."""


@dataclass(frozen=True)
class DiskSeen:
    """File system of the run directory, in bytes."""

    free: int
    total: int
    free_files: int | None = None
    """Files (inodes) that can still be made; None if the file system has no limit."""


@dataclass(frozen=True)
class LoadSeen:
    """Use of this machine's processors by all processes."""

    runnable: float
    """Threads that run or want to run: the mean of the last minute."""
    cores: int


@dataclass(frozen=True)
class SlowRankSeen:
    """A rank that computes longer than its peers, from the rank stream."""

    rank: int
    slowdown: float
    """Its compute time over that of its peers, minus one."""
    compute_s: float
    windows: int
    """Number of compared windows."""
    slower: int
    """Windows in which it was slower."""
    since: float | None
    node: str = ""
    late_share: float = 0.0
    """Time that its peers waited for it, over their own time in these windows."""


@dataclass(frozen=True)
class SuspectRanks:
    """Ranks that errors come from, and from no others."""

    place: str
    evidence: str
    next: str
    """Recommended next step."""


@dataclass(frozen=True)
class MemorySeen:
    """The rank whose memory has grown most, from the rank stream: at the end of each of ``MEMORY_PARTS`` even parts of the attempt."""

    rank: int
    node: str
    steps: tuple[int, ...]
    times: tuple[float, ...]
    """Unix seconds."""
    sizes: tuple[float, ...]
    """Bytes, as ``phalanx ranks --column memory_bytes`` has them."""
    alike: int
    """Ranks that have grown by at least half as much, itself among them."""
    ranks: int


@dataclass(frozen=True)
class OriginSeen:
    """Checkpoint of the parent whose training the run continues."""

    run: str
    """Run directory of the parent."""
    step: int
    losses: tuple[float, ...] = ()
    """Losses of the steps before it, the newest last."""
    changed_fields: tuple[str, ...] = ()
    """Fields of the run that differ from the parent's, with both values; those of the model first."""
    init_with: str = "training"
    """The part of the parent's state that was taken over."""
    rate: float = 0.0
    """Learning rate of that step; 0 if unknown."""
    samples: int = 0
    """Samples that the parent had read, in its order."""
    same_data: bool = False
    """True if both runs have the same data."""
    held_out: float | None = None
    """Its newest held-out loss up to that step, of as many sequences as the run's; None if unknown."""
    same_order: bool = False
    """True if both read them in the same order."""


@dataclass(frozen=True)
class Observed:
    """Observation of a run at ``now``."""

    run: str
    """Run directory, as it is written in commands."""
    now: float
    spec: RunSpec | None = None
    """None if its run file cannot be read."""
    events: tuple[run_events.Event, ...] = ()
    """Newest events, in the order written; all of them if the stream is short."""
    past: tuple[run_events.Event, ...] = ()
    """Samples of the stream before ``events``, with the first start."""
    unreadable: tuple[UnreadableLine, ...] = ()
    """Lines in the parts of the stream that were read."""
    is_held: bool | None = None
    """True if a process holds the run directory, False if none does, None if unknown from this machine."""
    starts: int = 0
    """Number of starts that have taken the run directory."""
    last_line: str = ""
    """Newest log line of a run without events that no process holds."""
    finished: bool = False
    """True if there is a result."""
    fleet: FleetFile | None = None
    failures: tuple[FailureSeen, ...] = ()
    """Failures of the newest start, the first one first."""
    first_failure: FirstFailureSeen | None = None
    processes: tuple[ProcessSeen, ...] = ()
    """Processes of the run on this machine."""
    job: JobStanding | None = None
    """Its queued or running job, if the engine was queried."""
    checkpoints: tuple[tuple[int, float], ...] = ()
    """Step and time of each checkpoint on disk, the oldest first."""
    damaged_checkpoints: tuple[tuple[int, str], ...] = ()
    """Step and error of the checkpoints that lack a file, or part of one, from the newest down to the first that does not. Only of a run
    that has ended and is not finished."""
    removed_checkpoint: int = 0
    """Newest step that was saved on this disk, if it and all newer ones are gone; else 0."""
    checkpoint_bytes: int = 0
    """Bytes of the newest checkpoint on disk, all ranks' images together."""
    checkpoint_files: int = 0
    """Files of the newest checkpoint on disk."""
    disk: DiskSeen | None = None
    load: LoadSeen | None = None
    """Load of this machine while processes of the run are on it."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Node of each rank of a fleet; empty if unknown."""
    slow_ranks: tuple[SlowRankSeen, ...] = ()
    memory: MemorySeen | None = None
    metrics_address: str = ""
    """Address ("host:port") of the coordinator's metrics; empty if it announces none."""
    machines: tuple[str, ...] = ()
    """A sentence for each fact in which the nodes' machines differ."""
    throttled: tuple[Throttling, ...] = ()
    """Nodes that report throttling."""
    changed_fields: tuple[str, ...] = ()
    """Fields of the run that were changed in its run file after its last start, with their values."""
    origin: OriginSeen | None = None
    """None if the run began at step 0, or its parent cannot be read."""
    data_fingerprint: str = ""
    """Fingerprint of the data at the start of the run."""
    data_now: str = ""
    """Fingerprint of the data now; empty if unknown."""
    data_error: str = ""
    """Why the data cannot be opened now."""
    events_error: str = ""
    """Why the events cannot be read; empty also if there are none yet."""

    @property
    def all_events(self) -> tuple[run_events.Event, ...]:
        """The samples of the past, and the newest events."""
        return *self.past, *self.events

    @cached_property
    def live_fleet(self) -> FleetFile | None:
        """Fleet of a run that runs; None without a fleet, or if the run or the fleet has ended."""
        return self.fleet if self.fleet is not None and self.running and not self.fleet.over else None

    @cached_property
    def attempt(self) -> int:
        """Newest attempt (of a fleet: epoch) with an event of a rank; -1 if there is none."""
        own = (event.attempt for event in self.events if not isinstance(event.body, run_events.FROM_OUTSIDE))
        return max(own, default=-1)

    @cached_property
    def mine(self) -> tuple[run_events.Event, ...]:
        """Events of the newest attempt."""
        return tuple(event for event in self.events if event.attempt == self.attempt)

    @cached_property
    def steps(self) -> list[tuple[float, run_events.Step]]:
        """Time and content of the newest attempt's logged steps."""
        return of_kind(run_events.Step, self.mine)

    @cached_property
    def settled(self) -> list[tuple[float, run_events.Step]]:
        """The attempt's steps since the number of ranks last changed, without the first ``NEW_STEPS`` if their begin was read."""
        changed = max((t for t, _ in of_kind(run_events.RanksChanged, self.mine)), default=0.0)
        has_start = bool(of_kind(run_events.RunStarted, self.mine))
        steps = [(t, step) for t, step in self.steps if t > changed]
        return steps[NEW_STEPS:] if has_start or changed else steps

    @cached_property
    def recent(self) -> list[tuple[float, run_events.Step]]:
        """Newest of the settled steps: ``RECENT_STEPS``, or as many as span ``RECENT_LEAST_S``."""
        since = self.settled[-1][0] - RECENT_LEAST_S if self.settled else 0.0
        return self.settled[-max(RECENT_STEPS, 1 + sum(t > since for t, _ in self.settled)) :]

    @cached_property
    def last_step(self) -> tuple[float, run_events.Step] | None:
        """(Unix seconds, step) of the newest step of any attempt; None without steps."""
        return self.newest(run_events.Step)

    @property
    def spike_window(self) -> int:
        """Steps of a window (``train.spike_window``), by default if the run file cannot be read."""
        return self.spec.train.spike_window if self.spec else _USUAL_WINDOW

    def stage_of(self, step: int) -> tuple[int, int]:
        """Return the steps after which the stage of the data (``data.stages``) that ``step`` belongs to begins and ends; 0 begins the first."""
        stages, last = (self.spec.data.stages, self.spec.train.steps) if self.spec else ((), step)
        return max((stage for stage in stages if stage < step), default=0), min(
            (stage for stage in stages if stage >= step), default=max(last, step)
        )

    @cached_property
    def last_t(self) -> float:
        """Time of the newest event of a rank; 0 if there is none. Earlier events may be stamped later, if a clock was set back."""
        return max((event.t for event in self.mine[-RECENT_STEPS:]), default=0.0)

    @cached_property
    def step_s(self) -> float:
        """Usual seconds between two logged steps; 0 if unknown."""
        took = [step.logged_s or step.step_s for _, step in self.steps[-RECENT_STEPS:]]
        return median(took) if took else 0.0

    @cached_property
    def over(self) -> bool:
        """True if the run has logged its end: it is finished, or it was stopped."""
        if self.finished or (self.fleet is not None and self.fleet.over):
            return True
        return bool(self.mine) and isinstance(self.mine[-1].body, run_events.Stopped | run_events.Finished)

    @cached_property
    def running(self) -> bool:
        """True if the run should make progress now: it has begun, has not ended, and its processes exist as far as known."""
        return bool(self.events) and not self.over and self.is_held is not False

    @cached_property
    def data_changed(self) -> bool:
        """True if the data are readable, and another version than those that the run was started with."""
        return "" not in (self.data_now, self.data_fingerprint) and self.data_now != self.data_fingerprint

    @cached_property
    def starts_refused(self) -> str:
        """The remedy without which a start of the run is refused; empty if nothing prevents one."""
        if self.changed_fields:
            return f"put {self.run}/run.toml back"
        if self.data_error or self.data_changed:
            return "put the data right (data.path)"
        return ""

    @cached_property
    def after_end(self) -> str:
        """Sentence on an ended run, never empty: it has finished, resumes from a saved step, or has no checkpoint to restore."""
        if self.finished:
            return "nothing: it has finished"
        step = self.saved_step
        none = "no checkpoint can be restored" if self.damaged_checkpoints else "no checkpoint was saved"
        goes_on = ", but a start is refused" if self.starts_refused else ", and it resumes from there"
        kept = f"step {step:,} is saved{goes_on}" if step else none
        return f"nothing: it has ended; {kept}"

    def doing(self, while_running: str) -> str:
        """Return ``while_running``, or ``after_end`` for a run that has ended."""
        return while_running if self.running else self.after_end

    def newest(self, kind: type[Body]) -> tuple[float, Body] | None:
        """Return time and content of the newest event of a kind, of any attempt."""
        return next(
            ((event.t, event.body) for event in reversed(self.events) if isinstance(event.body, kind)), None
        )

    @cached_property
    def started(self) -> run_events.RunStarted | None:
        """Newest start."""
        start = self.newest(run_events.RunStarted)
        return start[1] if start else self.first_started

    @cached_property
    def first_started(self) -> run_events.RunStarted | None:
        """First start that is known."""
        return next((start for _, start in of_kind(run_events.RunStarted, self.all_events)), None)

    @cached_property
    def first_loss(self) -> float | None:
        """Loss of the first logged step of the run; None if no step was logged."""
        return next((step.loss for _, step in of_kind(run_events.Step, self.all_events)), None)

    @cached_property
    def began_far(self) -> bool:
        """True if the loss began far above an untrained model's, which the initial weights do."""
        vocabulary = self.spec.model.vocab_size if self.spec else 0
        return (
            vocabulary > 1
            and self.first_loss is not None
            and self.first_loss > (1 + RISEN) * math.log(vocabulary)
        )

    @cached_property
    def saved_step(self) -> int:
        """Newest durable step on disk that is not known to be damaged; 0 if there is none."""
        saved = self.newest(run_events.CheckpointSaved)
        damaged = {step for step, _ in self.damaged_checkpoints}
        is_there = saved is not None and saved[1].step != self.removed_checkpoint
        steps = {step for step, _ in self.checkpoints} | ({saved[1].step} if saved and is_there else set())
        return max(steps - damaged, default=0)

    @cached_property
    def newest_checkpoint(self) -> str:
        """Words for the newest durable checkpoint, or for none."""
        return newest_in_words(self.saved_step)

    def checkpoint_before(self, step: int) -> int | None:
        """Return the newest step before ``step`` with a checkpoint on disk; None if there is none."""
        return max((saved for saved, _ in self.checkpoints if saved < step), default=None)

    @cached_property
    def began_at(self) -> float | None:
        """Unix seconds at which the newest attempt started or restored its state, the later; None if neither is known."""
        begins = of_kind(run_events.RunStarted, self.mine) + of_kind(run_events.Restored, self.mine)
        return max((t for t, _ in begins), default=None)
