"""The state with which a coordinator begins: that in which the last one of this start of the run was killed.

A whole journal is replayed. If that leads to a contradiction, or if the disk has damaged the journal, the file is kept as evidence, a
new one begins, and every node is asked to describe itself (``phalanx.fleet.core.resync``).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.core.invariants import mark
from phalanx.fleet.core.replay import RESTARTED, JournalError, batch_line, first_line, replay, replay_batch
from phalanx.fleet.core.resync import resync
from phalanx.fleet.core.state import FleetState


class Restored(NamedTuple):
    """The begin of a coordinator's life."""

    state: FleetState
    restarts: int
    """Number of earlier coordinators of this start of the run."""
    published_s: float = 0.0
    """Incidents up to this time were published by an earlier coordinator."""


def restored(journal: Journal, empty: FleetState, log: Callable[[str], None]) -> Restored:
    """Restores the state from ``journal``, and writes into it that a coordinator has begun.

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
        journal.append(first_line(empty))
        journal.sync()
        return Restored(empty, 0)
    state, restarts, contradiction = replay(journal.lines)
    journal.lines = []
    _require_same_start(journal, state, empty)
    now_s = max(state.now_s, time.time())
    state, found = replay_batch(state, RESTARTED, now_s)
    told_s = [incident.at_s for incident in state.incidents]
    if error := found or contradiction:
        kept = report_contradiction(journal, error, log)
        journal.begin_anew(first_line(state, restarts + 1), keep_as=kept)
        # The coordinator that met the contradiction was killed before it published that turn's incidents.
        told_s = [at_s for at_s in told_s if at_s < max(told_s)]
    else:
        journal.append(batch_line(now_s, RESTARTED))
    return Restored(state, restarts + 1, max(told_s, default=0.0))


def _salvaged(journal: Journal, empty: FleetState, log: Callable[[str], None]) -> Restored:
    """Rebuilds the state to which the good lines of a damaged journal lead from what the nodes will say.

    What the lost lines said of epochs, ranks and snapshots the nodes say again. Only they know which nodes were lost, drained
    or quarantined, and from which step on a corruption made snapshots worthless, so the good lines behind them are replayed too.
    """
    begin = [first_line(empty)] if journal.damaged[0] == 1 else []
    state, restarts, _ = replay([*begin, *journal.lines])
    _require_same_start(journal, state, empty)
    state.now_s = max(state.now_s, time.time())
    published_s = max((incident.at_s for incident in state.incidents), default=0.0)
    kept = journal.path.with_name(f"damaged-{time.time_ns()}.jsonl")
    numbers = ", ".join(map(str, journal.damaged[:8])) + ("..." if len(journal.damaged) > 8 else "")
    why = f"line {numbers} of {journal.path}, kept as {kept.name}; is its disk all right?"
    state, _ = resync(state, mark(state), why, "the disk has damaged the coordinator's journal")
    log(f"the disk has damaged {why} Every node is asked anew")
    journal.begin_anew(first_line(state, restarts + 1), keep_as=kept)
    journal.lines = []
    return Restored(state, restarts + 1, published_s)


def _require_same_start(journal: Journal, state: FleetState, empty: FleetState) -> None:
    """Raises ``JournalError`` if the journal is of another run file than this process has read."""
    if state.fencing != empty.fencing:
        raise JournalError(
            f"the run file has changed since this start of the run began: {journal.path} is of {state.fencing}, this is "
            f"{empty.fencing}. Undo the change, or start the run again"
        )


def report_contradiction(journal: Journal, contradiction: Exception, log: Callable[[str], None]) -> Path:
    """Writes a contradiction into the log; returns the path at which the journal that led to it is to be kept."""
    kept = journal.path.with_name(f"contradiction-{time.time_ns()}.jsonl")
    log("".join(traceback.format_exception(contradiction)))
    log(f"this is a bug in the coordinator, please report it with {kept}; every node is asked anew")
    return kept
