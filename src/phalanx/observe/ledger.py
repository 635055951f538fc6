"""The goodput ledger: where every nanosecond of a rank went.

Frameworks report the time that they thought of measuring; what they did not think of is missing, and
nobody sees it. A ledger is kept as an accountant keeps one: at any moment exactly one bucket is open,
and each change closes one and opens the next at the same reading of the clock. So the buckets sum to
wall time exactly, by construction and in integers, and what nobody claimed is in ``unattributed``.

The buckets refine those of Google's ml-goodput-measurement (which counts exposed communication and
waiting as productive), after the accounting of MegaScale (arXiv:2402.15627) and of "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters" (arXiv:2410.21680). Which of the step
time was kept is decided later, from the events: see ``goodput``.

The last section reads the cost of each recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from phalanx.observe.events import Event, Restored, Step

NS_PER_S = 1_000_000_000


class Bucket(StrEnum):
    """A category of a rank's time; a rank is in exactly one at any moment."""

    START_PROCESS = "start.process"
    """From the start of the process to our own code: interpreter, imports."""
    START_RENDEZVOUS = "start.rendezvous"
    """Waiting for the other ranks to appear, building the process groups."""
    START_PREPARE_DATA = "start.prepare_data"
    """Tokenizing and sharding the text, once a data set."""
    START_PLAN_COMPILE = "start.plan_compile"
    """Building the model, planning its layout, compiling."""
    START_RESTORE = "start.restore"
    """Reading a checkpoint, or drawing the first weights."""
    START_DATA_SEEK = "start.data_seek"
    """Finding the place in the data at which to continue."""
    START_WARMUP = "start.warmup"
    """The first step, with its allocations and autotuning."""
    STEP_COMPUTE = "step.compute"
    STEP_RECOMPUTE = "step.recompute"
    """Activations computed a second time to save memory."""
    STEP_OPTIMIZER = "step.optimizer"
    COMM_EXPOSED_TP = "step.comm_exposed.tp"
    COMM_EXPOSED_CP = "step.comm_exposed.cp"
    COMM_EXPOSED_EP = "step.comm_exposed.ep"
    COMM_EXPOSED_DP = "step.comm_exposed.dp"
    COMM_EXPOSED_PP = "step.comm_exposed.pp"
    """Communication that no computation hides."""
    STEP_WAIT_STRAGGLER = "step.wait_straggler"
    """In a collective, before the last peer has come."""
    STEP_BUBBLE = "step.bubble"
    """A pipeline stage with nothing to do yet, or any more."""
    STEP_DATA_WAIT = "step.data_wait"
    STEP_HOST_GAP = "step.host_gap"
    """The accelerator idles because Python is behind: logging, launching."""
    CKPT_BLOCKING = "ckpt.blocking"
    """The part of a checkpoint for which training stands still."""
    EVAL = "eval"
    HEALTH_SDC_CHECK = "health.sdc_check"
    """Recomputing another rank's work to catch silent corruption."""
    RECONFIGURE = "reconfigure"
    """The fleet grew or shrank: new groups, slots dealt anew."""
    PAUSE_OPERATOR = "pause.operator"
    FAULT_UNDETECTED = "fault.undetected"
    """From the last progress to the moment somebody noticed."""
    FAULT_DIAGNOSE = "fault.diagnose"
    FAULT_DRAIN = "fault.drain"
    STOP = "stop"
    """Closing down in good order."""
    UNATTRIBUTED = "unattributed"


class LedgerError(ValueError):
    """An entry that would break the sum."""


class Ledger:
    """The time accounting of one rank in one attempt. Not thread-safe: a rank does one thing at a time.

    ``start_ns`` is a reading of ``clock`` (by default ``time.monotonic_ns``), now or in the past:
    ``time.monotonic_ns() - records.process_age_ns()`` counts the imports too.
    """

    def __init__(
        self,
        start_ns: int | None = None,
        first_bucket: Bucket = Bucket.START_PROCESS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Open ``first_bucket`` at ``start_ns`` of the clock, or now. Raises LedgerError if that is in the future."""
        now_ns = clock()
        if start_ns is not None and start_ns > now_ns:
            raise LedgerError(f"a ledger cannot start in the future: {start_ns=} is after {now_ns=}")
        self.start_ns = now_ns if start_ns is None else start_ns
        self._clock = clock
        self._open = first_bucket
        self._since_ns = self.start_ns
        self._closed: dict[str, int] = dict.fromkeys((bucket.value for bucket in Bucket), 0)

    def switch(self, bucket: Bucket) -> None:
        """Add the time since the last switch to the open bucket, and open ``bucket``. A clock that goes back counts
        as standing.
        """
        # If the clock steps back, the sum would be wrong, so time is frozen until the clock catches up.
        now_ns = max(self._clock(), self._since_ns)
        self._closed[self._open] += now_ns - self._since_ns
        self._open, self._since_ns = bucket, now_ns

    @contextmanager
    def bucket(self, bucket: Bucket) -> Iterator[None]:
        """Context whose time goes to ``bucket``; after it, to the one that was open before.

        Nests: an inner ``with`` takes its time from the outer one, so nothing is counted twice.
        """
        outer = self._open
        self.switch(bucket)
        try:
            yield
        finally:
            self.switch(outer)

    def reassign(self, source: Bucket, target: Bucket, duration_ns: int) -> None:
        """Move ``duration_ns`` that turns out to belong elsewhere from ``source`` to ``target``; the sum stays as
        it is.

        An accelerator reports only after the step how much of it was exposed communication. Raises LedgerError if
        ``source`` does not have that much, or it is negative.
        """
        self.switch(self._open)
        if not 0 <= duration_ns <= self._closed[source]:
            raise LedgerError(
                f"cannot move {duration_ns} ns from {source} to {target}: it has {self._closed[source]} ns"
            )
        self._closed[source] -= duration_ns
        self._closed[target] += duration_ns

    def totals_ns(self) -> dict[str, int]:
        """Bucket -> nanoseconds until now, empty buckets left out. Sums to the time since the start."""
        self.switch(self._open)
        return {name: total for name, total in self._closed.items() if total}

    def seconds(self) -> dict[str, float]:
        """``totals_ns`` in seconds, as a ``Step`` event carries it."""
        return in_seconds(self.totals_ns())


# --- sums of accounts ---------------------------------------------------------------------------


def add(totals: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of accounts (ns), bucket by bucket, in the order of ``Bucket``."""
    result: dict[str, int] = {}
    for account in totals:
        for name, value in account.items():
            result[name] = result.get(name, 0) + value
    return dict(sorted(result.items(), key=lambda item: _position(item[0])))


def in_seconds(account_ns: Mapping[str, int]) -> dict[str, float]:
    """Return an account in seconds."""
    return {name: value / NS_PER_S for name, value in account_ns.items()}


def _position(name: str) -> int:
    order = [bucket.value for bucket in Bucket]
    return order.index(name) if name in order else len(order)


# --- text ----------------------------------------------------------------------------------------


def format_ledger(seconds: Mapping[str, float], bar_width: int = 24) -> str:
    """Format a ledger (seconds by bucket) as a table of plain text: bucket, seconds, share, bar, and a last line
    with the total.

    Empty buckets are left out; groups are in the order of a run's life.
    """
    total = sum(seconds.values())
    names = sorted((name for name in seconds if seconds[name]), key=_position)
    width = max(map(len, [*names, "total"]), default=0)
    lines = [_row(name, seconds[name], total, width, bar_width) for name in names]
    return "\n".join([*lines, f"{'total':<{width}}  {total:>12,.3f} s  {'100.0 %' if total else '':>7}"])


def _row(name: str, value: float, total: float, width: int, bar_width: int) -> str:
    share = value / total if total else 0.0
    eighths = round(share * bar_width * 8)
    bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
    return f"{name:<{width}}  {value:>12,.3f} s  {100 * share:>5.1f} %  {bar}".rstrip()


# Cost of each recovery of a run, from its events.
#
# Each epoch of a fleet logs its events as an attempt of its own, whose ledger begins at the end of the previous attempt's. At
# the attempt's first step, that ledger has the recovery's time by phase, in addition to the step's own.


PHASES = (
    Bucket.FAULT_UNDETECTED,
    Bucket.FAULT_DRAIN,
    Bucket.RECONFIGURE,
    Bucket.START_RENDEZVOUS,
    Bucket.START_PLAN_COMPILE,
    Bucket.START_RESTORE,
    Bucket.START_DATA_SEEK,
    Bucket.START_WARMUP,
)
"""Buckets that a recovery may fill, in order."""


@dataclass(frozen=True)
class Recovery:
    """One recovery: from the end of an epoch to the first step of the next one."""

    attempt: int
    resumed_step: int
    """The step whose state it went on from; 0 is the beginning."""
    lost_steps: int
    """Steps that had ended and had to be computed again."""
    seconds: dict[str, float]
    """By phase, to the beginning of the first step."""
    moved_bytes: int = 0
    """Bytes that ranks fetched from other nodes' memory to restore the state."""


def recoveries(events: Iterable[Event], first_attempt: int) -> list[Recovery]:
    """Return all recoveries after ``first_attempt``, in order: source step, lost steps, seconds by phase, and
    moved bytes.

    Epochs that ended before their first logged step are left out.
    """
    listed: list[Recovery] = []
    restored: dict[int, Restored] = {}
    done, seen = 0, {first_attempt}
    for event in events:
        body = event.body
        if event.attempt < first_attempt:
            continue
        if isinstance(body, Restored):
            restored[event.attempt] = body
        if not isinstance(body, Step):
            continue
        if event.attempt not in seen:
            seen.add(event.attempt)
            source = restored.get(event.attempt, Restored(0, ""))
            lost = max(0, done - source.step)
            seconds = {phase.value: body.ledger[phase] for phase in PHASES if phase in body.ledger}
            listed.append(Recovery(event.attempt, source.step, lost, seconds, source.moved_bytes))
        done = body.step
    return listed
