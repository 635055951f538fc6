"""Fleets of a few nodes for tests of the core, and a driver that answers for its agents."""

from __future__ import annotations

from typing import Any

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state, step
from phalanx.fleet.core.epochs.epoch_plan import Order, deliveries
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.state import FleetState


def settings(nodes: int = 4, **changes: Any) -> CoreSettings:
    """One worker a node, any number of ranks, every rank with a state of its own."""
    formation = Formation(1, tuple(range(1, nodes + 1)))
    return CoreSettings(**{"formation": formation, "wanted_nodes": nodes, "form_s": 10.0, **changes})


class Fleet:
    """A core and the time; remembers what it ordered."""

    def __init__(self, using: CoreSettings) -> None:
        self.state: FleetState = initial_state(using, 0.0)
        self.now_s = 0.0
        self.journal: list[tuple[float, m.CoreEvent]] = []
        self.sent: list[tuple[str, c.Command]] = []

    def handle(self, *events: m.CoreEvent, after_s: float = 0.0) -> list[tuple[str, c.Command]]:
        """The commands that follow from these events."""
        self.now_s += after_s
        self.sent = []
        for event in events:
            self.journal.append((self.now_s, event))
            orders: list[Order]
            self.state, orders = step(self.state, event, self.now_s)
            self.sent += deliveries(self.state, orders)
        return self.sent

    def join(self, *names: str, incarnation: int = 1, racks: int = 2) -> None:
        """Nodes appear, their workers warm."""
        for index, name in enumerate(names):
            rack = f"rack{(int(name) if name.isdigit() else index) % racks}"
            self.handle(m.Joined(name, incarnation, 1, name, 7, (rack,), meeting_points=(f"{name}:1",)))

    def bind(self) -> None:
        """Everyone waited for has bound."""
        for name in sorted(self.state.awaiting):
            self.handle(m.Bound(name, self.incarnation(name), self.state.epoch))

    def park(self, *but: str, step: int = 5) -> None:
        """Everyone waited for has parked, and holds its own and its buddy's snapshot of ``step``."""
        state, ranks = self.state, self.state.ranks
        for seat, name in enumerate(state.seats):
            if name in state.awaiting and name not in but:
                snapshots = (
                    m.RankSnapshot(ranks, seat, step, "own", epoch=state.epoch),
                    m.RankSnapshot(ranks, state.ring.index(seat), step, "buddy", epoch=state.epoch),
                )
                self.handle(m.Parked(name, self.incarnation(name), state.epoch, (f"{name}:1",), snapshots))

    def incarnation(self, name: str) -> int:
        """The one that is believed."""
        return self.state.nodes[name].incarnation

    def commands_to(self, name: str) -> list[c.Command]:
        """The commands that a node got last."""
        return [command for to, command in self.sent if to == name]


def running(nodes: int = 4, spares: int = 1, **changes: Any) -> Fleet:
    """A fleet whose first epoch trains."""
    fleet = Fleet(settings(nodes, **changes))
    fleet.join(*(str(index) for index in range(nodes + spares)))
    fleet.bind()
    return fleet


def fleet_in_racks(*racks: str, seats: int = 0, **changes: Any) -> Fleet:
    """A fleet of one-worker nodes "0", "1", ..., each in a rack; all but the last two get a seat, or as many as there are ``seats``."""
    fleet = Fleet(settings(seats or len(racks) - 2, **changes))
    for index, rack in enumerate(racks):
        name = str(index)
        fleet.handle(m.Joined(name, 1, 1, name, 7, ("hall", rack), meeting_points=(f"{name}:1",)))
    fleet.bind()
    return fleet
