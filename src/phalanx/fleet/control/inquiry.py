"""Inquiries of a coordinator into a fault: which rank the others wait for in a hang, and which rank failed
first.

PyTorch's flight recorder keeps the last collectives of a process: group, number in the group, operation,
sizes, and whether each has ended. In a hang, a rank inside a collective waits for the members of its group
that have not reached it. Those may wait in other groups in turn. The ranks at the end of all chains, which
wait for nobody, are the cause. The idea is that of PyTorch's ``fr_trace`` analyzer, here as a function on
values.

``phalanx.parallel.torch_compat.flight_record`` takes records in any thread of a worker, also while its
main thread hangs. A worker that returns none counts as absent. A process records only if
``TORCH_FR_BUFFER_SIZE`` was above 0 when its first group was made; agents set it for their workers. Gloo does
not record point-to-point messages (the pipeline's). A rank that waits for one looks idle, and may be named
beside the culprit, or in its place. NCCL records them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import FleetState
from phalanx.observe.logs.line import LogLine, first_failure, what_happened, who
from phalanx.observe.logs.log_file import last_lines
from phalanx.run.directory.paths import RunDirectory

_LOOKED_AT = (
    "process_group",
    "collective_seq_id",
    "profiling_name",
    "input_sizes",
    "retired",
    "state",
    "time_created_ns",
    "is_p2p",
)


class FlightRecordError(ValueError):
    """A flight record that cannot be read."""


@dataclass(frozen=True)
class Call:
    """A rank's last collective in a group."""

    number: int
    """Number of the collective in its group, from 1, the same on all members."""
    operation: str
    """Name of the operation in the recorder, such as ``gloo:all_reduce``."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of its inputs."""
    over: bool
    since_ns: int
    """When it was called, in ns of its node's Unix clock."""


@dataclass(frozen=True)
class FlightRecord:
    """The collectives that one rank was in when the record was taken."""

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each of its process groups, by the group's name."""
    last: Mapping[str, Call]
    """Its last collective in each group; groups without one have no entry."""
    taken_ns: int = 0
    """When the record was taken, by the same clock as ``Call.since_ns``."""
    cut: bool = False
    """True if ``shortened`` has left groups out."""


@dataclass(frozen=True)
class Stuck:
    """A collective that cannot end."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...]
    """The ranks that are in it."""
    absent: tuple[int, ...]
    """The ranks of the group that have not reached it; empty if all are in it and it does not end."""
    odd: tuple[int, ...]
    """The ranks that called another operation than most."""
    waited_s: float = 0.0
    """Seconds for which all of ``waiting`` had been in it."""

    def __str__(self) -> str:
        """Describe the collective, and the ranks that call another operation, else those absent, else all that wait."""
        collective = f"{self.operation} number {self.number} of group {self.group[:12]}"
        if self.odd:
            return f"{collective}: {_who(self.odd, 'calls', 'call')} another operation"
        if self.absent:
            return f"{collective}: {_who(self.waiting, 'waits', 'wait')} for {_who(self.absent)}"
        return f"{collective}: {_who(self.waiting, 'is', 'are')} in it, and it does not end"


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a hang, as far as the records show it."""

    culprits: tuple[int, ...]
    """The ranks that others wait for and that wait for nobody, or that called another operation than their peers."""
    stuck: tuple[Stuck, ...]
    """All collectives that cannot end, those that wait for a culprit first."""
    silent: tuple[int, ...]
    """Ranks that gave no record, or not all of it."""

    def proven(self, least_s: float) -> tuple[int, ...]:
        """Return the culprits if the evidence is complete, else nothing.

        It is complete if every rank gave a full record, all members called the same operations, and the
        others have waited in the collective for at least ``least_s``.
        """
        blocking = [collective for collective in self.stuck if set(self.culprits) & set(collective.absent)]
        doubt = self.silent or any(collective.odd for collective in self.stuck)
        return () if doubt or any(collective.waited_s < least_s for collective in blocking) else self.culprits

    def __str__(self) -> str:
        if not self.stuck:
            return "no rank is in a collective: if the run hangs, it hangs elsewhere"
        culprits = f"{_who(self.culprits)}: " if self.culprits else ""
        return f"{culprits}{self.stuck[0]}"


def _who(ranks: Collection[int], of_one: str = "", of_many: str = "") -> str:
    """Return ``rank 2`` or ``ranks 0, 1``, followed by the form of a verb that is given for one or for many."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} {of_one}".rstrip() if len(ranks) == 1 else f"ranks {numbers} {of_many}".rstrip()


def parse_record(record: bytes) -> FlightRecord:
    """Parse a record of ``torch_compat.flight_record``; of each group the last collective is kept, without messages
    of pairs.

    Raises ``FlightRecordError``.
    """
    try:
        data = json.loads(record)
        groups = {str(name): tuple(map(int, ranks)) for name, ranks in data["groups"].items()}
        last: dict[str, Call] = {}
        for entry in data["recorder"].get("entries", []):
            # Numbers of messages between two ranks count pairs, not groups.
            if not entry["is_p2p"]:
                last[str(entry["process_group"][0])] = _call(entry)
        return FlightRecord(
            int(data["rank"]), groups, last, int(data["taken_ns"]), bool(data.get("cut", False))
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FlightRecordError(
            f"this is no flight record ({error!r}); take it with torch_compat.flight_record of the same version"
        ) from error


def shortened(record: bytes, most_bytes: int = m.MOST_RECORD_BYTES) -> str:
    """Reduce a record to the input of ``diagnose``: the last collective of each group, as JSON text.

    Unfinished ones come first, then the newest, as many as fit into ``most_bytes``; "cut" marks that some are left
    out. Raises ``FlightRecordError`` if not even one fits, or if it is no record.
    """
    try:
        data = json.loads(record)
        last = {
            entry["process_group"][0]: entry
            for entry in data["recorder"].get("entries", [])
            if not entry["is_p2p"]
        }
        # The collective that the rank waits in now is the most important one.
        newest = sorted(last.values(), key=lambda entry: (_over(entry), -entry["time_created_ns"]))
        for count in range(len(newest), -1, -1):
            entries = [{key: entry[key] for key in _LOOKED_AT} for entry in newest[:count]]
            names = {entry["process_group"][0] for entry in entries}
            groups = {
                name: ranks for name, ranks in data["groups"].items() if name in names or count == len(newest)
            }
            content = {**data, "groups": groups, "recorder": {"entries": entries}, "cut": count < len(newest)}
            short = json.dumps(content, separators=(",", ":"))
            if len(short) <= most_bytes and (count or not newest):
                return short
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FlightRecordError(f"this is no flight record ({error!r})") from error
    raise FlightRecordError(f"not one collective of this flight record fits into {most_bytes} bytes")


def _call(entry: Mapping[str, object]) -> Call:
    """Return a collective call from an entry of PyTorch's flight record."""
    sizes = entry["input_sizes"]
    if not isinstance(sizes, list):
        raise TypeError("input_sizes is no list")
    return Call(
        number=int(str(entry["collective_seq_id"])),
        operation=str(entry["profiling_name"]),
        sizes=tuple(tuple(map(int, shape)) for shape in sizes),
        over=_over(entry),
        since_ns=int(str(entry["time_created_ns"])),
    )


def _over(entry: Mapping[str, object]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def diagnose(records: Sequence[FlightRecord], ranks: int) -> Diagnosis:
    """Diagnose a hang of a run of ``ranks`` ranks from its ranks' records.

    Culprits are ranks that others wait for and that wait nowhere themselves, and ranks in another operation. Stuck
    collectives are returned with those of culprits first. Silent are ranks without a full record.
    """
    by_rank = {record.rank: record for record in records}
    # Each rank counts its own groups, so two different groups may have the same name.
    groups = {(name, members) for record in records for name, members in record.groups.items()}
    stuck = [collective for name, members in sorted(groups) for collective in _stuck(name, members, by_rank)]
    silent = tuple(rank for rank in range(ranks) if rank not in by_rank or by_rank[rank].cut)
    blocked = {rank for collective in stuck for rank in collective.waiting}
    culprits = {
        rank for collective in stuck for rank in (*collective.absent, *collective.odd) if rank not in blocked
    }
    culprits |= {rank for collective in stuck for rank in collective.odd}
    first = sorted(stuck, key=lambda collective: not culprits & {*collective.absent, *collective.odd})
    return Diagnosis(tuple(sorted(culprits)), tuple(first), silent)


def _stuck(name: str, members: tuple[int, ...], by_rank: Mapping[int, FlightRecord]) -> list[Stuck]:
    """Return the earliest unfinished collective of one group, as a list of one; empty if its members wait in none.

    Absent are members with no record of this group or an earlier call. The waiting time is the shortest one.
    """
    calls = {
        rank: by_rank[rank].last.get(name)
        for rank in members
        if rank in by_rank and by_rank[rank].groups.get(name) == members
    }
    unfinished = {rank: call for rank, call in calls.items() if call and not call.over}
    if not unfinished:
        return []
    number = min(call.number for call in unfinished.values())
    waiting = {rank: call for rank, call in unfinished.items() if call.number == number}
    absent = tuple(rank for rank in members if (call := calls.get(rank)) is None or call.number < number)
    kinds = [(call.operation, call.sizes) for call in waiting.values()]
    usual = max(kinds, key=kinds.count)
    odd = tuple(rank for rank, kind in zip(waiting, kinds, strict=True) if kind[0] != usual[0])
    waited_s = min(by_rank[rank].taken_ns - call.since_ns for rank, call in waiting.items()) / 1e9
    return [Stuck(name, number, *usual, tuple(sorted(waiting)), absent, odd, waited_s)]


# Inquiry into a hang: collects the ranks' flight records for a moment, then diagnoses. It is bounded: it
# takes one record of each rank, of this epoch only, from that rank's own node. After ``PATIENCE_S`` it
# diagnoses with the records that it has. A coordinator that is killed meanwhile loses the records; a deadline
# then ends the epoch.

PATIENCE_S = 2.0
_WAITED_SHARE = 0.5
"""A rank is proven guilty only if the others have waited in the collective for at least this share of the
silence.
"""
_TEXT_MAX = 2000


@dataclass
class Inquiry:
    """The inquiry into one epoch."""

    epoch: int
    ranks_of: dict[str, range]
    """Node -> its ranks."""
    silent_s: float
    """Seconds for which no step had ended."""
    until_s: float
    records: dict[int, FlightRecord] = field(default_factory=dict)

    @classmethod
    def into(cls, state: FleetState, silent_s: float, now_s: float) -> Inquiry:
        """Begin the inquiry into the present epoch, before its members send their flight records."""
        formation = state.settings.formation
        places = {name: formation.ranks_of(seat, state.ranks) for seat, name in enumerate(state.seats)}
        return cls(state.epoch, places, silent_s, now_s + PATIENCE_S)

    @property
    def ranks(self) -> int:
        """Number of ranks of the epoch."""
        return sum(map(len, self.ranks_of.values()))

    def add(self, message: m.Recorded) -> str:
        """Add a rank's record. Return why it was refused, or an empty text.

        A malformed record, or one of another epoch or node, is refused. A second record of a rank is ignored.
        """
        try:
            record = parse_record(message.record.encode())
        except FlightRecordError as error:
            return str(error)[:300]
        if message.epoch != self.epoch or record.rank not in self.ranks_of.get(message.node, ()):
            return f"rank {record.rank} of epoch {message.epoch} is not on {message.node}"
        self.records.setdefault(record.rank, record)
        return ""

    def over(self, now_s: float) -> bool:
        """Return True if all records have arrived, or the time is up."""
        return len(self.records) == self.ranks or now_s >= self.until_s

    def finding(self) -> m.Diagnosed:
        """Return the diagnosis of all records so far, as an event for the core.

        It names culprits only if they are proven and the others waited for at least half of the silence.
        """
        diagnosis = diagnose(list(self.records.values()), self.ranks)
        proven = diagnosis.proven(_WAITED_SHARE * self.silent_s)
        silent = (
            f"; no full record of ranks {', '.join(map(str, diagnosis.silent))}" if diagnosis.silent else ""
        )
        return m.Diagnosed(self.epoch, f"{diagnosis}{silent}"[:_TEXT_MAX], proven)


# Inquiry into a failure: which rank failed first when a fault has ended an epoch, from the logs of the
# workers. A fault in one rank breaks the collectives of all others, and their reports reach the coordinator
# in any order. Each worker's last lines are in its log in the shared run directory, with time, rank and step.
# The coordinator reads the ends of the logs of the nodes that reported a failure, a moment later and in a
# thread. So a fault costs the fleet no message, and no text is cut. For a node whose log cannot be read, its
# own report counts.

_WAIT_S = 1.0
"""The others' errors, and the ends of processes, arrive a moment after the first."""
_MOST_NODES = 64
_LAST_SAID = 100
_RECENT_S = 120.0
_MOST_CHARACTERS = 600


class FailureInquiry:
    """Failure reports of nodes since the last epoch ended."""

    def __init__(self, directory: RunDirectory, attempt: int, workers: int) -> None:
        self._directory, self._attempt, self._workers = directory, attempt, workers
        self._reports: dict[str, LogLine] = {}
        self._asking: asyncio.Task[None] | None = None

    def begin(self, tell: Callable[[str], None]) -> None:
        """Start a task that passes the first failure to ``tell`` after a second, in which other ranks may report
        theirs.

        Does nothing while such a task is in progress.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._report_first_failure(tell))

    async def _report_first_failure(self, tell: Callable[[str], None]) -> None:
        """Wait a second for the other nodes' reports, and call ``tell`` with the first failure, if it can be
        determined.

        The reports are forgotten.
        """
        await asyncio.sleep(_WAIT_S)
        reports = self.take()
        if reports and (text := await asyncio.to_thread(self.finding, reports)):
            tell(text)

    def add(self, report: m.AgentMessage) -> None:
        """Record a node's report of a failed worker or epoch. Ignore other reports, and Broken ones that leave as
        ordered.

        Of each node the first report within two minutes counts. While 64 reports are recorded, more are
        ignored.
        """
        if not isinstance(report, m.FailureReport):
            return
        if isinstance(report, m.Broken) and report.text == m.LEFT_AS_ASKED:
            return
        now_s = time.time()
        # An older failure that ended no epoch, such as that of a spare's worker, is not the cause of this
        # one.
        self._reports = {node: line for node, line in self._reports.items() if line.t > now_s - _RECENT_S}
        if len(self._reports) < _MOST_NODES:
            text = f"error: {_failure_text(report)}"
            line = LogLine(
                now_s, "error", report.node, None, report.epoch, self._attempt, None, text, report.node
            )
            self._reports.setdefault(report.node, line)

    def take(self) -> Mapping[str, LogLine]:
        """Return the reports, and forget them."""
        reports, self._reports = self._reports, {}
        return reports

    def finding(self, reports: Mapping[str, LogLine]) -> str:
        """Describe which rank failed first, by time; empty if that cannot be determined.

        Reads the error lines of the last two minutes at the ends of each reporting node's logs; a node without
        any counts with its report itself.
        """
        errors: list[LogLine] = []
        since = time.time() - _RECENT_S
        for node, reported in reports.items():
            lines: list[LogLine] = []
            for worker in range(self._workers):
                log = self._directory.named_log(self._attempt, f"{node}-{worker}")
                with suppress(OSError):
                    lines += (
                        line
                        for line in last_lines(log, _LAST_SAID)
                        if line.level == "error" and line.t > since
                    )
            errors += lines or [reported]
        failure = first_failure(errors)
        if failure is None:
            return ""
        message = what_happened(failure.line.text).splitlines()[0][:_MOST_CHARACTERS]
        return f"first failure: {who(failure.line)}: {message} ({'; '.join(failure.evidence)})"


def _failure_text(report: m.FailureReport) -> str:
    """Return a report of a failure as text: seconds of silence, the last words, or the exit code."""
    if isinstance(report, m.WorkerHung):
        return f"its worker was silent for {report.silent_s:.0f} s"
    if isinstance(report, m.WorkerExited):
        return report.text or f"exit code {report.code}"
    return report.text
