"""The lines of the coordinator's journal, and the one function that replays them to a state.

A journal begins with a state and goes on with batches of events, each with the time at which the core saw it
(``phalanx.fleet.control.succession.journal`` keeps the lines on disk). The live coordinator, the simulator and the tests all replay
with ``replay``: what the property tests hold it to is what a restarted coordinator does.

A journal can lead to a state that contradicts itself: the coordinator that found it was killed before it had written the
new journal. The replay rebuilds the state as that coordinator would have (``phalanx.fleet.core.invariants``); to refuse the
journal would end at its second start the run that the resynchronization is there to save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from phalanx.fleet.core import decide
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.invariants import check, mark, reason, resync
from phalanx.fleet.core.state import FleetState, decode_state, encode_state

JOURNAL_VERSION = 9
"""Version of the journal's lines: raised whenever a state, an event or a rule of the core changes its meaning."""
RESTARTED = (m.Restarted(),)
"""A batch of this event alone is a coordinator's first: it began, and replayed the journal."""
UNTOLD = (m.Untold(),)
"""Follows it where the epoch that the journal ends in was never claimed."""
_REMEDY = "move it away and start again: the run goes on from its newest checkpoint"


class JournalError(RuntimeError):
    """The journal cannot be read or written; the message says what to do."""


class Began(Struct, frozen=True, tag=True):
    """The first line of a journal: the state that the rest builds on."""

    version: int
    state: msgspec.Raw
    restarts: int = 0
    """How often the coordinator had been started again by then."""


class Happened(Struct, frozen=True, tag=True):
    """A later line: events in the order in which the core saw them, all at one time."""

    now_s: float
    events: tuple[m.CoreEvent, ...]


_lines: msgspec.json.Decoder[Began | Happened] = msgspec.json.Decoder(Began | Happened)


def first_line(state: FleetState, restarts: int = 0) -> bytes:
    """The line that begins a journal at ``state``."""
    return msgspec.json.encode(Began(JOURNAL_VERSION, msgspec.Raw(encode_state(state)), restarts))


def batch_line(now_s: float, events: tuple[m.CoreEvent, ...]) -> bytes:
    """The line of a batch of events."""
    return msgspec.json.encode(Happened(now_s, events))


class Replayed(NamedTuple):
    """Where a journal leads."""

    state: FleetState
    restarts: int
    """How often the coordinator had been started again."""
    contradiction: Exception | None
    """Why the state was rebuilt, if it was: the journal is then evidence, and a new one has to begin."""


def replay(lines: Sequence[bytes], step: decide.CoreStep = decide.step) -> Replayed:
    """Replays a journal to the state after its last event; a state that contradicts itself on the way is rebuilt.

    The orders that follow from the events are left out: they were given when the events happened. Where the state was
    rebuilt, every node has to describe itself before anything is decided.

    Raises:
        JournalError: The lines are no journal, or one of another version.
    """
    try:
        began = _lines.decode(lines[0])
        if not isinstance(began, Began):
            raise JournalError(f"the journal does not begin with a state; {_REMEDY}")
        if began.version != JOURNAL_VERSION:
            raise JournalError(
                f"the journal has version {began.version}, and this Phalanx reads version {JOURNAL_VERSION}; {_REMEDY}"
            )
        state, restarts = decode_state(bytes(began.state)), began.restarts
        contradiction: Exception | None = None
        in_last_line = False
        for line in lines[1:]:
            happened = _lines.decode(line)
            if isinstance(happened, Began):
                raise JournalError(f"the journal begins twice; {_REMEDY}")
            if happened.events == RESTARTED:
                restarts += 1
            state, found = replay_batch(state, happened.events, happened.now_s, step)
            contradiction, in_last_line = found or contradiction, found is not None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalError(f"the journal was written by another version ({error}); {_REMEDY}") from error
    if contradiction is not None and not in_last_line:
        # The coordinator that wrote the lines behind it had another state: what it ordered then is not known here.
        state, _ = resync(state, mark(state), reason(contradiction))
    return Replayed(state, restarts, contradiction)


def replay_batch(
    state: FleetState, events: tuple[m.CoreEvent, ...], now_s: float, step: decide.CoreStep = decide.step
) -> tuple[FleetState, Exception | None]:
    """The state after a batch of events, and the contradiction for which it was rebuilt, if it was. Mutates ``state``."""
    before, found = mark(state), None
    for event in events:
        try:
            state, _ = step(state, event, now_s)
        except Exception as error:
            state, _ = resync(state, before, reason(error))
            found = error
    try:
        check(state, before)
    except Exception as error:
        state, _ = resync(state, before, reason(error))
        found = error
    return state, found
