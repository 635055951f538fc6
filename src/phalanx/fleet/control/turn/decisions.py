"""The decisions of one turn: the core takes a batch of events, and what follows is sent only if the state does not contradict itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.fleet.control.inquiry.hang_inquiry import Inquiry
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import step
from phalanx.fleet.core.invariants import Mark, check, mark
from phalanx.fleet.core.orders import deliveries
from phalanx.fleet.core.state import FleetState


@dataclass
class Decided:
    """What the core has made of a batch."""

    state: FleetState
    before: Mark
    """The marks of the state before the batch."""
    sending: list[tuple[str, c.Command]] = field(default_factory=list)
    """Commands, each with the node that it goes to; not to be sent if there is a ``contradiction``."""
    inquiry: Inquiry | None = None
    """An inquiry into a hang, if the core has asked for flight records."""
    contradiction: Exception | None = None
    """The state contradicts itself, or the core has raised."""
    undecided: Sequence[m.CoreEvent] = ()
    """Events behind the one at which the core raised."""


def decide(state: FleetState, batch: Sequence[m.CoreEvent], now_s: float) -> Decided:
    """Lets the core decide all events of ``batch``, then checks its invariants; ``state`` is taken over."""
    decided, undecided = Decided(state, mark(state)), deque(batch)
    try:
        while undecided:
            decided.state, orders = step(decided.state, undecided.popleft(), now_s)
            for order in orders:
                if isinstance(order.command, c.Diagnose):
                    decided.inquiry = Inquiry.into(decided.state, order.command.silent_s, now_s)
            decided.sending += deliveries(decided.state, orders)
        check(decided.state, decided.before)
    except Exception as error:
        # A state that contradicts itself may also make the core raise.
        decided.contradiction, decided.undecided = error, tuple(undecided)
    return decided
