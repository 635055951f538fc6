"""Goodput: the share of the time a run held its machines that its final weights are made of.

A pure function of the run's events, over all attempts. Each attempt's ledger has where its time went;
the events have what became of the steps:

* ``committed``: a durable checkpoint of the surviving line covers the step, or the run finished.
* ``pending``: done, not yet covered; a crash now would cost it.
* ``discarded.rollback``: done, lost in a crash, done again.
* ``discarded.nonfinite``: done, then skipped because a number was not finite, or a loss spike.
* ``waiting``: for samples, in steps that were not lost; it makes nothing, and is no part of the others.

The time between two attempts (queueing, a person asleep) is held by nobody: it is reported as ``gap``.
Everything is in integer nanoseconds, so that the parts sum to the whole exactly. The definition follows
ml-goodput-measurement (productive step time over elapsed time); the outcome of a step is decided after
the fact, as in ByteRobust's effective training time ratio (arXiv:2509.16293).

The last section converts the account to the definitions of other published goodputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from phalanx.observe import events as run_events
from phalanx.observe.ledger import NS_PER_S, Bucket, add, format_ledger, in_seconds
from phalanx.observe.throughput import format_duration

_LONGEST_S = 1e11


@dataclass(frozen=True)
class Goodput:
    """The goodput report of a run: wall time of the rank that wrote the events, in nanoseconds.

    The buckets sum to ``total_ns`` exactly, the five outcomes to the ``step.*`` buckets.
    """

    buckets_ns: Mapping[str, int]
    committed_ns: int
    pending_ns: int
    rollback_ns: int
    nonfinite_ns: int
    gap_ns: int
    attempts: int
    waiting_ns: int = 0
    """For samples, in steps of all outcomes but ``rollback``, which holds its own."""

    @property
    def total_ns(self) -> int:
        return sum(self.buckets_ns.values())

    @property
    def goodput(self) -> float:
        """Committed step time, without waiting for samples, over held time, 0 to 1; 0 for a run that has held nothing."""
        return self.committed_ns / self.total_ns if self.total_ns else 0.0

    @property
    def goodput_if_kept(self) -> float:
        """The same with pending steps counted as kept: what a running job shows."""
        return (self.committed_ns + self.pending_ns) / self.total_ns if self.total_ns else 0.0

    @property
    def outcomes_ns(self) -> dict[str, int]:
        """Time in steps by what has become of it."""
        return {
            "committed": self.committed_ns,
            "pending": self.pending_ns,
            "discarded.rollback": self.rollback_ns,
            "discarded.nonfinite": self.nonfinite_ns,
            "waiting": self.waiting_ns,
        }


def goodput(events: Iterable[run_events.Event]) -> Goodput:
    """Return the goodput of a run from its events, in any order of attempts but each attempt in its own.

    Attempts without a ledger count their logged ``step_s`` times the steps since the last logged or restored
    one; the rest of them is unattributed. Steps without a checkpoint yet are pending, and steps computed again
    are rolled back.
    """
    return _goodput(_accounts(events))


def rank_goodput(events: Iterable[run_events.Event]) -> Goodput:
    """Return the goodput of a run in nanoseconds of ranks: each attempt's time counts once for each of its ranks.

    The first rank's time is used for all ranks, and an attempt whose start was not logged counts as one rank.
    ``gap_ns`` is wall time.
    """
    return _goodput([_times_ranks(account) for account in _accounts(events)])


def _accounts(events: Iterable[run_events.Event]) -> list[_Account]:
    """Return the accounts of the attempts that held their machines, in order and without overlap."""
    attempts: dict[int, list[run_events.Event]] = {}
    for event in events:
        attempts.setdefault(event.attempt, []).append(event)
    return _disjoint([_account(own) for _, own in sorted(attempts.items()) if _lived(own)])


def _goodput(accounts: Sequence[_Account]) -> Goodput:
    """Return the goodput report of the accounts of all attempts."""
    line = _Line()
    for account in accounts:
        line.live_through(account)
    committed, pending = _cut(line.pieces, line.durable_step)
    return Goodput(
        buckets_ns=add(account.buckets_ns for account in accounts),
        committed_ns=sum(piece.duration_ns for piece in committed),
        pending_ns=sum(piece.duration_ns for piece in pending),
        rollback_ns=line.rollback_ns,
        nonfinite_ns=line.nonfinite_ns,
        gap_ns=sum(max(0, after.start_ns - before.end_ns) for before, after in pairwise(accounts)),
        attempts=len(accounts),
        waiting_ns=sum(piece.waiting_ns for piece in line.pieces),
    )


@dataclass(frozen=True)
class AttemptAccount:
    """Where the time of one attempt went, or of one epoch of a fleet: of the rank that wrote the events."""

    attempt: int
    started_s: float
    """Unix seconds, as ``ended_s``."""
    ended_s: float
    ranks: int
    """0 if its start was not logged."""
    reason: str
    """Why it ended; empty if unknown."""
    buckets_ns: Mapping[str, int]
    """They sum to its share of ``Goodput.total_ns``."""
    first_step: int
    """The first step that it computed, and the last one; 0 if it came to none."""
    last_step: int


def attempt_accounts(events: Iterable[run_events.Event]) -> list[AttemptAccount]:
    """Return the account of each attempt that held its machines, in order, with the reason of its end, or "" if
    none is recorded.

    Together they are all of ``goodput(events)``. An epoch's reason comes from the coordinator's event about the
    last living attempt.
    """
    events = list(events)
    reasons: dict[int, str] = {}
    lived = 0
    for event in events:
        match event.body:
            case run_events.EpochLeft(reason=reason):  # logged under the coordinator's own attempt
                reasons.setdefault(lived, reason)
            case run_events.Stopped(reason=reason):
                reasons[event.attempt] = reason
            case run_events.Finished():
                reasons[event.attempt] = "finished"
        if not isinstance(event.body, run_events.FROM_OUTSIDE):
            lived = event.attempt
    return [_described(account, reasons.get(account.events[0].attempt, "")) for account in _accounts(events)]


def _described(account: _Account, reason: str) -> AttemptAccount:
    """Return an account with its attempt, reason, seconds, ranks, and first and last logged step (0 if none)."""
    steps = [event.body.step for event in account.events if isinstance(event.body, run_events.Step)]
    return AttemptAccount(
        attempt=account.events[0].attempt,
        started_s=account.start_ns / NS_PER_S,
        ended_s=account.end_ns / NS_PER_S,
        ranks=_ranks(account),
        reason=reason,
        buckets_ns=account.buckets_ns,
        first_step=steps[0] if steps else 0,
        last_step=steps[-1] if steps else 0,
    )


def _ranks(account: _Account) -> int:
    """Return the ranks of an attempt; 0 if its start was not logged."""
    ranks = [event.body.ranks for event in account.events if isinstance(event.body, run_events.RunStarted)]
    return ranks[-1] if ranks else 0


def _times_ranks(account: _Account) -> _Account:
    """Return an account whose buckets and time in steps count once for each rank; its start and end stay."""
    ranks = max(1, _ranks(account))
    return replace(
        account,
        in_steps=[
            None if times is None else _InSteps(times.rest_ns * ranks, times.waiting_ns * ranks)
            for times in account.in_steps
        ],
        buckets_ns={name: value * ranks for name, value in account.buckets_ns.items()},
    )


# --- the time of one attempt --------------------------------------------------------------------


class _InSteps(NamedTuple):
    """The time in the step loop: waiting for samples, and all else."""

    rest_ns: int
    waiting_ns: int


@dataclass(frozen=True)
class _Account:
    """One attempt: when it began and ended (unix nanoseconds), and where the time between went."""

    events: Sequence[run_events.Event]
    in_steps: Sequence[_InSteps | None]
    """Beside each event: the time in the step loop so far, where the event has it."""
    start_ns: int
    end_ns: int
    buckets_ns: Mapping[str, int]


def _disjoint(accounts: list[_Account]) -> list[_Account]:
    """Return the accounts without overlap: time after the next one's start is taken off ``UNATTRIBUTED``, and an account with
    nothing left is dropped.

    A fleet's epoch counts the time since the last ledger of the one before.
    """
    latest_first: list[_Account] = []
    for account in reversed(accounts):
        later_ns = latest_first[-1].start_ns if latest_first else account.end_ns
        rest_ns = account.buckets_ns.get(Bucket.UNATTRIBUTED.value, 0)
        over_ns = min(max(0, account.end_ns - later_ns), rest_ns)
        if over_ns >= account.end_ns - account.start_ns > 0:
            continue  # it ended before its first step
        if over_ns:
            buckets = {**account.buckets_ns, Bucket.UNATTRIBUTED.value: rest_ns - over_ns}
            account = replace(account, end_ns=account.end_ns - over_ns, buckets_ns=buckets)
        latest_first.append(account)
    return latest_first[::-1]


def _lived(events: list[run_events.Event]) -> list[run_events.Event]:
    """The events that the ranks of an attempt wrote themselves."""
    return [event for event in events if not isinstance(event.body, run_events.FROM_OUTSIDE)]


def _account(events: list[run_events.Event]) -> _Account:
    """Return an attempt's account by its last ledger; the time after that, up to the last event, is unattributed.

    Without a ledger, by its step times. Raises ``ValueError`` if the attempt lived in no event.
    """
    end_ns = max(_ns(event.t) for event in _lived(events))
    entries = [(_ns(event.t), ledger) for event in events if (ledger := ledger_of(event))]
    if not entries:
        return _account_from_step_times(events, end_ns)
    at_ns, ledger = entries[-1]
    buckets = {name: _ns(seconds) for name, seconds in ledger.items()}
    return _Account(
        events=events,
        in_steps=[_in_steps(ledger_of(event)) for event in events],
        start_ns=at_ns - sum(buckets.values()),
        end_ns=end_ns,
        buckets_ns=_with_rest(buckets, end_ns - at_ns),
    )


def _account_from_step_times(events: list[run_events.Event], end_ns: int) -> _Account:
    """Return the account of an attempt without a ledger: each logged step's seconds count for all steps since the
    one logged or restored before.
    """
    in_steps: list[_InSteps | None] = []
    done_ns, cursor = 0, 0
    for event in events:
        if isinstance(event.body, run_events.Restored):
            cursor = event.body.step
        if isinstance(event.body, run_events.Step):
            done_ns += _ns(event.body.step_s) * max(1, event.body.step - cursor)
            cursor = event.body.step
        in_steps.append(_InSteps(done_ns, 0) if isinstance(event.body, run_events.Step) else None)
    start_ns = min(_ns(event.t) for event in events)
    rest_ns = end_ns - start_ns - done_ns
    return _Account(
        events, in_steps, start_ns, end_ns, _with_rest({Bucket.STEP_COMPUTE.value: done_ns}, rest_ns)
    )


def ledger_of(event: run_events.Event) -> Mapping[str, float]:
    """Return the ledger (seconds by bucket) of the event's attempt up to the event; empty if the event carries none."""
    return (
        event.body.ledger
        if isinstance(event.body, (run_events.Step, run_events.Stopped, run_events.Finished))
        else {}
    )


def _in_steps(ledger: Mapping[str, float]) -> _InSteps | None:
    """Return the nanoseconds in steps by a ledger, with the wait for data apart; ``None`` for an empty one."""
    if not ledger:
        return None
    waiting_ns = _ns(ledger.get(Bucket.STEP_DATA_WAIT, 0.0))
    return _InSteps(
        sum(_ns(seconds) for name, seconds in ledger.items() if name.startswith("step.")) - waiting_ns,
        waiting_ns,
    )


def _with_rest(buckets: Mapping[str, int], rest_ns: int) -> dict[str, int]:
    # If the wall clock was set back, the remainder is negative; allocated time cannot be.
    return add([buckets, {Bucket.UNATTRIBUTED.value: rest_ns}]) if rest_ns > 0 else add([buckets])


def _ns(seconds: float) -> int:
    """Nanoseconds; 0 for a value that only a damaged line can hold."""
    return round(seconds * NS_PER_S) if abs(seconds) < _LONGEST_S else 0


# --- outcomes of the steps -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Steps ``first`` to ``last`` inclusive, and the time they took, apart from waiting for samples."""

    first: int
    last: int
    duration_ns: int
    waiting_ns: int


@dataclass
class _Line:
    """The steps that the present weights descend from, as far as the events were read."""

    pieces: list[_Piece] = field(default_factory=list)
    durable_step: int = 0
    rollback_ns: int = 0
    nonfinite_ns: int = 0

    def live_through(self, account: _Account) -> None:
        """Add an attempt: it continues from the step that it restored, or from 0. Earlier work on steps that it
        repeats is lost.

        A saved checkpoint makes its step durable, and the run's end the last one.
        """
        cursor, seen, skipped = 0, _InSteps(0, 0), 0
        for event, in_steps in zip(account.events, account.in_steps, strict=True):
            match event.body:
                case run_events.Restored(step=step):
                    self._go_back_to(step)
                    cursor = step
                case run_events.NonFinite(skipped=True) | run_events.LossSpike(action="skip"):
                    skipped += 1
                case run_events.CheckpointSaved(step=step):
                    self.durable_step = max(self.durable_step, step)
                case run_events.Finished():
                    self.durable_step = max(self.durable_step, cursor)
                case run_events.Step(step=step) if in_steps is not None:
                    cursor = min(cursor, step - 1)
                    self._go_back_to(cursor)
                    done = _InSteps(in_steps.rest_ns - seen.rest_ns, in_steps.waiting_ns - seen.waiting_ns)
                    self._do(cursor + 1, step, done, skipped)
                    cursor, seen, skipped = step, in_steps, 0

    def _do(self, first: int, last: int, done: _InSteps, skipped: int) -> None:
        """Add the steps ``first`` to ``last`` with their time; the share of ``skipped`` ones counts as not finite."""
        steps = last - first + 1
        nonfinite_ns = done.rest_ns * min(skipped, steps) // steps
        self.nonfinite_ns += nonfinite_ns
        self.pieces.append(_Piece(first, last, done.rest_ns - nonfinite_ns, done.waiting_ns))

    def _go_back_to(self, step: int) -> None:
        """Remove the steps after ``step``; their time counts as rolled back. Also bounds the durable step by it."""
        if not self.pieces or self.pieces[-1].last <= step:
            return
        self.pieces, lost = _cut(self.pieces, step)
        self.rollback_ns += sum(piece.duration_ns + piece.waiting_ns for piece in lost)
        self.durable_step = min(self.durable_step, step)


def _cut(pieces: Sequence[_Piece], step: int) -> tuple[list[_Piece], list[_Piece]]:
    """Return the pieces up to ``step`` and those after it; one that spans it is divided by its steps."""
    before = [piece for piece in pieces if piece.last <= step]
    after = [piece for piece in pieces if piece.first > step]
    for piece in pieces:
        if piece.first <= step < piece.last:
            done, steps = step - piece.first + 1, piece.last - piece.first + 1
            done_ns, waiting_ns = piece.duration_ns * done // steps, piece.waiting_ns * done // steps
            before.append(_Piece(piece.first, step, done_ns, waiting_ns))
            rest = _Piece(step + 1, piece.last, piece.duration_ns - done_ns, piece.waiting_ns - waiting_ns)
            after.insert(0, rest)
    return before, after


# --- text ----------------------------------------------------------------------------------------


def format_goodput(result: Goodput) -> str:
    """Format the report as plain text: the headline with times, the ledger in seconds, and the outcomes of the
    steps.
    """
    lines = [
        f"goodput {100 * result.goodput:.1f} %  ({100 * result.goodput_if_kept:.1f} % with steps that no "
        "checkpoint covers yet)",
        f"{format_duration(result.total_ns / NS_PER_S)} in {result.attempts} "
        f"attempt{'' if result.attempts == 1 else 's'}, {format_duration(result.gap_ns / NS_PER_S)} between "
        "them",
        "",
        format_ledger(in_seconds(result.buckets_ns)),
        "",
        "of the time in steps",
        format_ledger(in_seconds(result.outcomes_ns)),
    ]
    return "\n".join(lines)


# Goodput by the definitions of Google and Meta, computed from our ledger, for comparison with published figures.
#
# * Google (ml-goodput-measurement 0.2.3): productive step time over the job's elapsed time, from its first start to its end. All
#   other time is badput of a named type. Exposed communication, bubbles and waits for stragglers count as productive.
# * Meta (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025,
#   arXiv:2410.21680): ETTR, productive runtime over wall time. Steps computed again after the last checkpoint, the overhead of
#   starts and restarts, and the time between two attempts are not productive. Writing a checkpoint and scoring held-out text are.
#
# All times are integer nanoseconds, so the parts of each account sum exactly to its total.


STEP = "step."
BADPUT_OF_BUCKET: Mapping[str, str] = {
    Bucket.START_RENDEZVOUS: "TPU_INITIALIZATION",
    Bucket.START_PROCESS: "PROGRAM_STARTUP",
    Bucket.START_PLAN_COMPILE: "PROGRAM_STARTUP",
    Bucket.START_PREPARE_DATA: "TRAINING_PREP",
    Bucket.START_DATA_SEEK: "TRAINING_PREP",
    Bucket.START_WARMUP: "TRAINING_PREP",
    Bucket.START_RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Bucket.CKPT_BLOCKING: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Bucket.STEP_DATA_WAIT: "DATA_LOADING_SYNC",
    Bucket.FAULT_UNDETECTED: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.FAULT_DIAGNOSE: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.FAULT_DRAIN: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.RECONFIGURE: "ELASTIC_REINITIALIZATION",
    Bucket.EVAL: "CUSTOM_BADPUT_EVENTS",
    Bucket.HEALTH_SDC_CHECK: "CUSTOM_BADPUT_EVENTS",
    Bucket.PAUSE_OPERATOR: "CUSTOM_BADPUT_EVENTS",
}
"""Google's type of badput for each bucket that is not productive there; of what is not listed: ``OTHER``, but steps are productive."""
WASTED = "WASTED_PROGRESS_FROM_DISRUPTION"
BETWEEN = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
OVERHEAD = ("start.", "fault.", "reconfigure")
"""Beginnings of the buckets of a start."""


@dataclass(frozen=True)
class GoogleGoodput:
    """Google's account: the parts of ``badput_ns`` and ``productive_ns`` sum to ``elapsed_ns``."""

    elapsed_ns: int
    productive_ns: int
    badput_ns: Mapping[str, int]

    @property
    def goodput(self) -> float:
        """Productive over elapsed time, 0 to 1."""
        return self.productive_ns / self.elapsed_ns if self.elapsed_ns else 0.0


@dataclass(frozen=True)
class MetaEttr:
    """Meta's account: the four parts sum to ``wall_ns``."""

    productive_ns: int
    catch_up_ns: int
    """Steps that were lost, and computed again."""
    restart_overhead_ns: int
    """The first start is among them."""
    between_ns: int
    """Between two attempts: queueing, among others. What passed before the first start is not known to a run."""

    @property
    def wall_ns(self) -> int:
        """Time from the first start to the end."""
        return self.productive_ns + self.catch_up_ns + self.restart_overhead_ns + self.between_ns

    @property
    def ettr(self) -> float:
        """The effective training time ratio, 0 to 1."""
        return self.productive_ns / self.wall_ns if self.wall_ns else 0.0


def google_goodput(ours: Goodput) -> GoogleGoodput:
    """Return our account in Google's terms: elapsed, productive and badput nanoseconds by kind.

    Lost steps are waste with all that was in them, so a part of the waiting for data is there. Gaps between
    attempts count.
    """
    badput: dict[str, int] = {}
    for name, value in ours.buckets_ns.items():
        kind = BADPUT_OF_BUCKET.get(name, "" if name.startswith(STEP) else "OTHER")
        if kind:
            badput[kind] = badput.get(kind, 0) + value
    badput["DATA_LOADING_SYNC"] = ours.waiting_ns
    badput[WASTED] = ours.rollback_ns
    badput[BETWEEN] = badput.get(BETWEEN, 0) + ours.gap_ns
    elapsed_ns = ours.total_ns + ours.gap_ns
    return GoogleGoodput(
        elapsed_ns,
        elapsed_ns - sum(badput.values()),
        {kind: value for kind, value in badput.items() if value},
    )


def meta_ettr(ours: Goodput) -> MetaEttr:
    """Return our account in the terms of Meta's effective training time ratio, in nanoseconds."""
    overhead_ns = sum(value for name, value in ours.buckets_ns.items() if name.startswith(OVERHEAD))
    return MetaEttr(
        productive_ns=ours.total_ns - overhead_ns - ours.rollback_ns,
        catch_up_ns=ours.rollback_ns,
        restart_overhead_ns=overhead_ns,
        between_ns=ours.gap_ns,
    )
