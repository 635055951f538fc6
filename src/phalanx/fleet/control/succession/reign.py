"""The begin of a coordinator's reign: its claim, its journal, and the state from which it leads.

The first coordinator of a start of a run leads in reign 1, and so does each that its launcher starts in its place. A coordinator on another
machine that succeeds it leads in reign 2, with a journal of its own: the machine of the one before may only be cut off, and write on.
Where the journal of a reign does not reach its newest claim, the claim counts (``phalanx.fleet.core.succession``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.fleet.control.succession.claims import ClaimError, ClaimRegister
from phalanx.fleet.control.succession.journal import Journal, read_journal
from phalanx.fleet.control.succession.restoration import Restored, restored
from phalanx.fleet.core.replay import RESTARTED, UNTOLD, batch_line, first_line, replay_batch
from phalanx.fleet.core.state import FleetState, note
from phalanx.fleet.core.succession import Claim, first_claim, inherited, is_behind, is_untold
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

FIRST_REIGN = 1


class SupersededError(RuntimeError):
    """Another coordinator leads this run now; the message says which."""


@dataclass
class Reign:
    """The part of a coordinator that outlives its process."""

    register: ClaimRegister
    claim: Claim
    journal: Journal
    restored: Restored


def nonce() -> str:
    """Random text that tells two claims of one term apart."""
    return secrets.token_hex(8)


def journal_path(directory: RunDirectory, attempt: int, reign: int) -> Path:
    """The journal of one reign in one start of a run."""
    first = directory.journal(attempt)
    return first if reign == FIRST_REIGN else first.with_name(f"{first.stem}-reign-{reign}.jsonl")


def candidates_in(directory: RunDirectory) -> Path:
    """The folder in which candidates say where they listen."""
    return directory.fleet / "candidates"


def forget_candidates(directory: RunDirectory) -> None:
    """Removes the files of candidates, the living and the dead: a coordinator leads. One that still stands finds that out by itself."""
    with suppress(OSError):
        for path in candidates_in(directory).glob("*.json"):
            path.unlink(missing_ok=True)


def require_leading(register: ClaimRegister, claim: Claim) -> None:
    """Raises ``SupersededError`` if a later claim than ``claim``, the last of a coordinator, was made; ``OSError`` if nobody can say."""
    if register.newest_term() > claim.term:
        raise SupersededError(_by_whom(register))


def _by_whom(register: ClaimRegister) -> str:
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
    """The newest claim of this run's present start if a coordinator on another machine than the first has taken over, and the run is not over."""
    try:
        newest = ClaimRegister(directory, directory.newest_attempt()).newest()
    except (ClaimError, RunDirectoryError):
        return None
    return newest if newest is not None and newest.reign > FIRST_REIGN and newest.ended is None else None


def reign_again(
    directory: RunDirectory,
    attempt: int,
    reign: int,
    node: str,
    empty: FleetState,
    log: Callable[[str], None],
) -> Reign:
    """The reign of a coordinator that is the first of its run's start, or was started again where it led before.

    Args:
        directory: The run's.
        attempt: The number of the run's start.
        reign: Number of its reign.
        node: The node on whose machine it runs; empty for none of the fleet's.
        empty: The state of a fleet without nodes, of this start of the run.
        log: Takes a line for the coordinator's log.

    Raises:
        SupersededError: A coordinator on another machine has succeeded it.
        ClaimError, JournalError: The claims or the journal cannot be read or written.
    """
    directory.fleet.mkdir(exist_ok=True)
    register = ClaimRegister(directory, attempt)
    newest = register.newest()
    if newest is not None and newest.reign != reign:
        raise SupersededError(_by_whom(register))
    journal = Journal(journal_path(directory, attempt, reign))
    found = restored(journal, empty, log)
    if newest is None:
        newest = first_claim(found.state, node, nonce())
        if not register.make(newest):
            raise SupersededError(_by_whom(register))
    elif is_behind(found.state, newest):
        state = inherited(newest, (), empty.fencing, max(found.state.now_s, time.time()))
        state.incidents[:0] = found.state.incidents
        log(f"{journal.path} ends before claim {newest.term}: every node is asked anew")
        journal.begin_anew(first_line(state, found.restarts))
        found = Restored(state, found.restarts, found.published_s)
    state = _without_untold_epoch(found.state, newest, journal)
    return Reign(register, newest, journal, Restored(state, found.restarts, found.published_s))


def _without_untold_epoch(state: FleetState, newest: Claim, journal: Journal) -> FleetState:
    """The state in which an epoch that was decided and never claimed has been left again; written into the journal."""
    if not is_untold(state, newest):
        return state
    state, _ = replay_batch(state, UNTOLD, state.now_s)
    journal.append(batch_line(state.now_s, UNTOLD))
    journal.sync()
    return state


def succeed(
    directory: RunDirectory,
    register: ClaimRegister,
    attempt: int,
    before: Claim,
    claim: Claim,
    empty: FleetState,
) -> Reign:
    """The reign of a coordinator that has just made ``claim``, in succession of the one that had made ``before``.

    Raises ``JournalError`` if its journal cannot be written.
    """
    lines = read_journal(journal_path(directory, attempt, before.reign))
    journal = Journal(journal_path(directory, attempt, claim.reign))
    now_s = time.time()
    state = inherited(before, lines, empty.fencing, now_s)
    state.now_s = now_s = max(state.now_s, now_s)
    told_s = max((incident.at_s for incident in state.incidents if lines), default=0.0)
    lost = f"the coordinator on {before.node} is lost" if before.node else "the coordinator is lost"
    note(state, claim.node, f"leads the fleet from now on: {lost}")
    journal.append(first_line(state))
    state, _ = replay_batch(state, RESTARTED, now_s)
    journal.append(batch_line(now_s, RESTARTED))
    journal.sync()
    state = _without_untold_epoch(state, claim, journal)
    return Reign(register, claim, journal, Restored(state, 0, min(told_s, now_s - 1e-3)))
