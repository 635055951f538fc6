"""The coordinator's inquiry into a hang: it waits a moment for every rank's flight record, and comes to a finding.

It is short and bounded: one record of each rank, of no other epoch, from that rank's own node, and after ``PATIENCE_S`` it makes
do with what has come. What a coordinator that is killed meanwhile had collected is lost; the epoch is then ended by the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.fleet.control.hang import FlightRecord, FlightRecordError, diagnose, parse_record
from phalanx.fleet.core.messages import Diagnosed, Recorded
from phalanx.fleet.core.state import FleetState

PATIENCE_S = 2.0
_WAITED_SHARE = 0.5
"""A collective that all others have been in for this share of the silence does not merely happen to go on just now."""
_TEXT_MAX = 2000


@dataclass
class Inquiry:
    """Into one epoch."""

    epoch: int
    ranks_of: dict[str, range]
    """Node -> its ranks."""
    silent_s: float
    """For how long no step had ended."""
    until_s: float
    records: dict[int, FlightRecord] = field(default_factory=dict)

    @classmethod
    def into(cls, state: FleetState, silent_s: float, now_s: float) -> Inquiry:
        """Begins when the members have been told to say what they know."""
        formation = state.settings.formation
        places = {name: formation.ranks_of(seat, state.ranks) for seat, name in enumerate(state.seats)}
        return cls(state.epoch, places, silent_s, now_s + PATIENCE_S)

    @property
    def ranks(self) -> int:
        """Of the epoch."""
        return sum(map(len, self.ranks_of.values()))

    def add(self, said: Recorded) -> str:
        """Takes a record in; returns why not, if not."""
        try:
            record = parse_record(said.record.encode())
        except FlightRecordError as error:
            return str(error)[:300]
        if said.epoch != self.epoch or record.rank not in self.ranks_of.get(said.node, ()):
            return f"rank {record.rank} of epoch {said.epoch} is not on {said.node}"
        self.records.setdefault(record.rank, record)
        return ""

    def over(self, now_s: float) -> bool:
        """Whether there is nothing more to wait for."""
        return len(self.records) == self.ranks or now_s >= self.until_s

    def finding(self) -> Diagnosed:
        """What all the records say together."""
        found = diagnose(list(self.records.values()), self.ranks)
        proven = found.proven(_WAITED_SHARE * self.silent_s)
        silent = f"; no full record of ranks {', '.join(map(str, found.silent))}" if found.silent else ""
        return Diagnosed(self.epoch, f"{found}{silent}"[:_TEXT_MAX], proven)
