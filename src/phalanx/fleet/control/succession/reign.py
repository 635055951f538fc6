"""The reign of a coordinator: its claim, its lock, the journal and state from which it leads, its watch for a
successor, and its end.

The first coordinator of a start of a run leads in reign 1, and so does each that its launcher starts in its
place. A coordinator on another machine that succeeds it leads in reign 2, with a journal of its own: the
previous machine may only be cut off, and continue to write. If the journal of a reign is behind its newest
claim, the claim counts (``phalanx.fleet.core.succession``).

A coordinator's process is started with ``CoordinatorArgs``. Its exit code is the reason for which its reign
ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.fleet.control.fleet_file import ClaimError, ClaimRegister
from phalanx.fleet.control.security import SecurityError
from phalanx.fleet.control.succession.journal import Journal, PatientJournal, read_journal
from phalanx.fleet.control.transport import DescriptorLimitError, TransportError
from phalanx.fleet.core import invariants
from phalanx.fleet.core.state import FleetState, note
from phalanx.fleet.core.succession import Claim, first_claim, inherited, is_behind, is_due, is_untold, renewed
from phalanx.process.exit_codes import EXIT_CANNOT_START, EXIT_SUPERSEDED
from phalanx.process.lock_file import LockHeldError, lock_file
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.train.lifecycle.ending import report_failure

FIRST_REIGN = 1


class SupersededError(RuntimeError):
    """Another coordinator leads this run now; the message names it."""


@dataclass
class Reign:
    """The part of a coordinator that outlives its process."""

    register: ClaimRegister
    claim: Claim
    journal: Journal
    restored: ReplayedReign


def nonce() -> str:
    """Return random text that distinguishes two claims of one term."""
    return secrets.token_hex(8)


def journal_path(directory: RunDirectory, attempt: int, reign: int) -> Path:
    """Return the path of the journal of one reign in one start of a run."""
    first = directory.journal(attempt)
    return first if reign == FIRST_REIGN else first.with_name(f"{first.stem}-reign-{reign}.jsonl")


def candidates_in(directory: RunDirectory) -> Path:
    """Return the folder in which candidates publish their addresses."""
    return directory.fleet / "candidates"


def forget_candidates(directory: RunDirectory) -> None:
    """Remove the files of all candidates, since a coordinator leads; errors are ignored.

    A candidate that still stands notices by itself.
    """
    with suppress(OSError):
        for path in candidates_in(directory).glob("*.json"):
            path.unlink(missing_ok=True)


def require_leading(register: ClaimRegister, claim: Claim) -> None:
    """Raise ``SupersededError`` if a later claim than ``claim``, this coordinator's last, exists. Raises
    ``OSError`` if the claims cannot be read.
    """
    if register.newest_term() > claim.term:
        raise SupersededError(_by_whom(register))


def _by_whom(register: ClaimRegister) -> str:
    """Return the text "superseded by NODE, reign N"; only "superseded" if the newest claim cannot be read."""
    try:
        newest = register.newest()
    except ClaimError:
        newest = None
    return (
        f"superseded by {newest.node or 'another coordinator'}, reign {newest.reign}"
        if newest
        else "superseded"
    )


def successor_in(directory: RunDirectory) -> Claim | None:
    """Return the newest claim of this run's present start if a coordinator on another machine has taken over and the
    run is not over. None also if the claims cannot be read.
    """
    try:
        newest = ClaimRegister(directory, directory.newest_attempt()).newest()
    except (ClaimError, RunDirectoryError):
        return None
    return newest if newest is not None and newest.reign > FIRST_REIGN and newest.ended is None else None


def reign_again(args: CoordinatorArgs, empty: FleetState, log: Callable[[str], None]) -> Reign:
    """Return the reign of a coordinator that is the first of its run's start, or was restarted where it led before.

    Makes the first claim, by ``args.node``, if there is none. A journal that ends before the newest claim is replaced,
    and an epoch that was never claimed is dropped. ``empty`` is the state without nodes; ``log`` takes lines for
    people. Raises ``SupersededError`` if the newest claim is of another reign, and ``ClaimError`` or
    ``JournalError`` if one cannot be read or written.
    """
    directory = RunDirectory(args.run_dir)
    directory.fleet.mkdir(exist_ok=True)
    register = ClaimRegister(directory, args.attempt)
    newest = register.newest()
    if newest is not None and newest.reign != args.reign:
        raise SupersededError(_by_whom(register))
    journal = Journal(journal_path(directory, args.attempt, args.reign))
    restored_state = restored(journal, empty, log)
    if newest is None:
        newest = first_claim(restored_state.state, args.node, nonce())
        if not register.make(newest):
            raise SupersededError(_by_whom(register))
    elif is_behind(restored_state.state, newest):
        state = inherited(newest, (), empty.fencing, max(restored_state.state.now_s, time.time()))
        state.incidents[:0] = restored_state.state.incidents
        log(f"{journal.path} ends before claim {newest.term}: all nodes must describe themselves again")
        journal.replace_content(invariants.first_line(state, restored_state.restarts))
        restored_state = restored_state._replace(state=state)
    state = _without_untold_epoch(restored_state.state, newest, journal)
    return Reign(register, newest, journal, restored_state._replace(state=state))


def _without_untold_epoch(state: FleetState, newest: Claim, journal: Journal) -> FleetState:
    """Return the state without an epoch that was decided but is not in the ``newest`` claim, and record that in the
    journal.

    No node has received such an epoch. Otherwise the state is returned as it is. Raises ``JournalError``.
    """
    if not is_untold(state, newest):
        return state
    state, _ = invariants.replay_batch(state, invariants.UNTOLD, state.now_s)
    journal.append(invariants.batch_line(state.now_s, invariants.UNTOLD))
    journal.sync()
    return state


def succeed(register: ClaimRegister, before: Claim, claim: Claim, empty: FleetState) -> Reign:
    """Return the reign of a coordinator that has just made ``claim``, as successor of the maker of ``before``.

    Writes a new journal that begins with the predecessor's state. If its journal is unreadable, of another
    start or behind ``before``, it begins with the state that ``before`` records. Raises ``JournalError`` if the
    new one cannot be written.
    """
    directory, attempt = register.directory, register.attempt
    lines = read_journal(journal_path(directory, attempt, before.reign))
    journal = Journal(journal_path(directory, attempt, claim.reign))
    now_s = time.time()
    state = inherited(before, lines, empty.fencing, now_s)
    state.now_s = now_s = max(state.now_s, now_s)
    published_s = max((incident.at_s for incident in state.incidents if lines), default=0.0)
    lost = f"the coordinator on {before.node} is lost" if before.node else "the coordinator is lost"
    note(state, claim.node, f"leads the fleet from now on: {lost}")
    journal.append(invariants.first_line(state))
    state, _ = invariants.replay_batch(state, invariants.RESTARTED, now_s)
    journal.append(invariants.batch_line(now_s, invariants.RESTARTED))
    journal.sync()
    state = _without_untold_epoch(state, claim, journal)
    return Reign(register, claim, journal, ReplayedReign(state, 0, min(published_s, now_s - 1e-3)))


# Restoration: a coordinator begins with the last state of the previous coordinator of this start. A complete
# journal is replayed. If that leads to a contradiction, or the disk has damaged the journal, the file is kept
# as evidence and a new one begins. Then every node must describe itself again
# (``phalanx.fleet.core.invariants``).


class ReplayedReign(NamedTuple):
    """Initial state of a coordinator's process."""

    state: FleetState
    restarts: int
    """Number of earlier coordinators of this start of the run."""
    published_s: float = 0.0
    """Incidents up to this time were published by an earlier coordinator."""


def restored(journal: Journal, empty: FleetState, log: Callable[[str], None]) -> ReplayedReign:
    """Restore the state from ``journal``, and append that a coordinator has begun. A damaged journal is salvaged; one
    that contradicts itself is replaced by a rebuilt state, and kept as evidence. Without lines, the state is ``empty``.

    Args:
        journal: As it was read; its ``lines`` are released.
        empty: The state of a fleet without nodes, of the start of the run that this process belongs to.
        log: Takes a line for the coordinator's log.

    Raises:
        JournalError: It cannot be read or written, or is of another run file.
    """
    if journal.damaged:
        return _salvaged(journal, empty, log)
    if not journal.lines:
        journal.append(invariants.first_line(empty))
        journal.sync()
        return ReplayedReign(empty, 0)
    state, restarts, contradiction = invariants.replay(journal.lines)
    journal.lines = []
    _require_same_start(journal, state, empty)
    now_s = max(state.now_s, time.time())
    state, error = invariants.replay_batch(state, invariants.RESTARTED, now_s)
    published_times = [incident.at_s for incident in state.incidents]
    if error := error or contradiction:
        evidence = report_contradiction(journal, error, log)
        journal.replace_content(invariants.first_line(state, restarts + 1), keep_as=evidence)
        # The coordinator that met the contradiction was killed before it published that turn's incidents.
        published_times = [at_s for at_s in published_times if at_s < max(published_times)]
    else:
        journal.append(invariants.batch_line(now_s, invariants.RESTARTED))
    return ReplayedReign(state, restarts + 1, max(published_times, default=0.0))


def _salvaged(journal: Journal, empty: FleetState, log: Callable[[str], None]) -> ReplayedReign:
    """Rebuild the state from the good lines of a damaged journal and from the nodes' next reports.

    The nodes report again their epochs, ranks and snapshots. Only the good lines record lost, drained and quarantined
    nodes, and the step from which a corruption invalidates snapshots. So good lines behind damaged ones are replayed
    too. The journal is replaced, and the damaged one kept as evidence. Logs that.
    """
    begin = [invariants.first_line(empty)] if journal.damaged[0] == 1 else []
    state, restarts, _ = invariants.replay([*begin, *journal.lines])
    _require_same_start(journal, state, empty)
    state.now_s = max(state.now_s, time.time())
    published_s = max((incident.at_s for incident in state.incidents), default=0.0)
    evidence = journal.path.with_name(f"damaged-{time.time_ns()}.jsonl")
    numbers = ", ".join(map(str, journal.damaged[:8])) + ("..." if len(journal.damaged) > 8 else "")
    detail = f"line {numbers} of {journal.path}, kept as {evidence.name}; is its disk all right?"
    state, _ = invariants.resync(
        state, invariants.mark(state), detail, "the disk has damaged the coordinator's journal"
    )
    log(f"the disk has damaged {detail} All nodes must describe themselves again")
    journal.replace_content(invariants.first_line(state, restarts + 1), keep_as=evidence)
    journal.lines = []
    return ReplayedReign(state, restarts + 1, published_s)


def _require_same_start(journal: Journal, state: FleetState, empty: FleetState) -> None:
    """Raise ``JournalError`` if the journal is of another start or run file than this process has read."""
    if state.fencing != empty.fencing:
        raise invariants.JournalError(
            f"the run file has changed since this start of the run began: {journal.path} is of {state.fencing}, this is "
            f"{empty.fencing}. Undo the change, or start the run again"
        )


def report_contradiction(journal: Journal, contradiction: Exception, log: Callable[[str], None]) -> Path:
    """Log a contradiction's traceback, and return a new path at which to keep the journal that led to it.

    The file is not moved here.
    """
    evidence = journal.path.with_name(f"contradiction-{time.time_ns()}.jsonl")
    log("".join(traceback.format_exception(contradiction)))
    log(
        f"this is a bug in the coordinator, please report it with {evidence}; all nodes must describe themselves again"
    )
    return evidence


# The lock of a run's one coordinator, held for the life of its process.


@contextmanager
def only_coordinator(directory: RunDirectory, reign: int = FIRST_REIGN) -> Iterator[None]:
    """Hold the lock that makes this process the run's only coordinator: two would overwrite each other's
    journal.

    It is a file of its own (``fleet/coordinator.lock``), since the journal is replaced now and then. The
    kernel releases it, however this process ends. Each reign has its own: on a lost machine, the previous
    process may still hold its lock.

    Raises:
        JournalError: Another process holds it.
    """
    directory.fleet.mkdir(exist_ok=True)
    name = "coordinator.lock" if reign == FIRST_REIGN else f"coordinator-reign-{reign}.lock"
    try:
        lock = lock_file(directory.fleet / name, 0o600)
    except LockHeldError as error:
        raise invariants.JournalError(
            f"{directory.path} is coordinated by {error.holder} already; end it first"
        ) from None
    try:
        yield
    finally:
        os.close(lock)


# Leadership: a coordinator renews its claim before each epoch, and looks for a successor. Commands that
# follow from a state are sent only once the claim for that state is made (``phalanx.fleet.core.succession``).

_LEADS_PER_PATIENCE = 4
"""Leader heartbeats in each ``fleet.succession_s``."""


class Leadership:
    """The claims of one coordinator in one start of the run."""

    def __init__(
        self, register: ClaimRegister, claim: Claim, journal: PatientJournal, patience_s: float
    ) -> None:
        """Set up the leadership by ``claim``, the newest one and its own; nothing is written.

        ``journal`` is on disk before a claim is made in ``register``. ``patience_s`` is ``fleet.succession_s``; 0
        if there is no succession.
        """
        self._register, self._journal = register, journal
        self._patience_s, self._heartbeat_due_s = patience_s, 0.0
        self.claim = claim
        """The newest claim that it has made."""

    def leads(self) -> bool:
        """True if nobody has made a later claim. Raises ``OSError`` if the claims cannot be read."""
        return self._register.newest_term() <= self.claim.term

    def look_for_successor(self) -> None:
        """Raise ``SupersededError`` if another coordinator leads now, or the run was started again.

        If the claims or attempts cannot be read, nothing is raised.
        """
        with suppress(OSError):  # Tried again at the next look; a due claim notices in any case.
            require_leading(self._register, self.claim)
        with suppress(RunDirectoryError):
            if self._register.directory.newest_attempt() > self._register.attempt:
                raise SupersededError("the run was started again")

    def is_due(self, state: FleetState) -> bool:
        """Return True if the next term must be claimed before anything that follows from ``state`` is sent."""
        return is_due(self.claim, state)

    async def claim_next_term(self, state: FleetState) -> None:
        """Sync the journal and claim the next term, before anything that follows from ``state`` is sent.

        Does not check ``is_due``. Waits and retries for as long as the disk fails. Raises ``SupersededError`` if
        another coordinator has claimed it.
        """
        await self._journal.synced()
        claim = renewed(self.claim, state, nonce())

        def make() -> None:
            try:
                if not self._register.make(claim):
                    require_leading(self._register, self.claim)
                    raise SupersededError("superseded")
            except (ClaimError, OSError) as error:
                raise invariants.JournalError(str(error)) from error

        await self._journal.until_written(make)
        self.claim = claim

    def is_heartbeat_due(self, now_s: float) -> bool:
        """Return True if a leader heartbeat to all agents is due, and then start the next interval. Always False
        without succession.
        """
        if not self._patience_s or now_s < self._heartbeat_due_s:
            return False
        self._heartbeat_due_s = now_s + self._patience_s / _LEADS_PER_PATIENCE
        return True


# The interface of a coordinator's process: arguments, exit codes, and the signal that ends it at once.


HURRY_SIGNAL = signal.SIGUSR1
"""The launcher's request to end at once.

SIGTERM, however often it comes, means save and stop: Slurm sends it to all processes of a job.
"""


@dataclass(frozen=True)
class CoordinatorArgs:
    """The arguments with which a coordinator is started."""

    run_dir: Path
    attempt: int = 0
    host: str = "127.0.0.1"
    """The host on which it listens and agents find it."""
    port: int = 0
    node: str = ""
    """The node on whose machine it runs; that node is never given back."""
    listen: str = ""
    """The address that it binds, if that is not ``host``: another name of the machine, or its address behind
    NAT.
    """
    reign: int = FIRST_REIGN
    """The number of its reign: the one in which it led before, or 1."""
    certificates: Path | None = None
    """The folder of its certificates, if connections are encrypted."""
    term: int = 0
    """The newest claim when a candidate was started; 0 for the first coordinator."""

    @property
    def listening_on(self) -> str:
        """The address that it binds."""
        return self.listen or self.host


def exit_code_of(coordinate: Callable[[], int], args: CoordinatorArgs, name: str) -> int:
    """Run ``coordinate`` and return its exit code. The errors of a coordinator are written to the log ``name`` and become exit codes.

    ``EXIT_CANNOT_START``: restarting is hopeless (descriptors, security, ValueError). ``EXIT_SUPERSEDED``: a ``SupersededError``, which
    is only printed. Else 1. Other errors are raised.
    """
    try:
        return coordinate()
    except SupersededError as error:
        print(time.strftime("%H:%M:%S"), f"ends: {error}", flush=True)
        return EXIT_SUPERSEDED
    except (
        ClaimError,
        DescriptorLimitError,
        invariants.JournalError,
        RunDirectoryError,
        SecurityError,
        TransportError,
        ValueError,
    ) as error:
        log = RunDirectory(args.run_dir).named_log(args.attempt, name)
        report_failure(error, log, args.attempt)
        hopeless = isinstance(error, (DescriptorLimitError, SecurityError, ValueError))
        return EXIT_CANNOT_START if hopeless else 1
