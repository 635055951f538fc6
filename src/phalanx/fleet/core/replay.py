"""The lines of the coordinator's journal, and the one function that replays them to a state.

A journal begins with a state and goes on with batches of events, each with the time at which the core saw it
(``phalanx.fleet.control.journal`` keeps the lines on disk). The live coordinator, the simulator and the tests all replay
with ``replay``: what the property tests hold it to is what a restarted coordinator does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from phalanx.fleet.core import decide
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import FleetState, decode_state, encode_state

JOURNAL_VERSION = 2
"""Version of the journal's lines: raised whenever a state, an event or a rule of the core changes its meaning."""
RESTARTED = (m.Restarted(),)
"""A batch of this event alone is a coordinator's first: it began, and replayed the journal."""
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


def replay(lines: Sequence[bytes], step: decide.CoreStep = decide.step) -> tuple[FleetState, int]:
    """Replays a journal: the state after its last event, and how often the coordinator had been started again.

    The orders that follow from the events are left out: they were given when the events happened.

    Raises:
        JournalError: The lines are no journal, are one of another version, or the core fails on them.
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
        for line in lines[1:]:
            happened = _lines.decode(line)
            if isinstance(happened, Began):
                raise JournalError(f"the journal begins twice; {_REMEDY}")
            if happened.events == RESTARTED:
                restarts += 1
            for event in happened.events:
                state = _stepped(step, state, event, happened.now_s)
    except msgspec.MsgspecError as error:
        raise JournalError(f"the journal was written by another version ({error}); {_REMEDY}") from error
    return state, restarts


def _stepped(step: decide.CoreStep, state: FleetState, event: m.CoreEvent, now_s: float) -> FleetState:
    try:
        return step(state, event, now_s)[0]
    except Exception as error:
        raise JournalError(f"the core fails on an event of the journal ({error!r}); {_REMEDY}") from error
