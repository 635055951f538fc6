"""The coordinator's inquiry into a hang: collects the ranks' flight records for a moment, then diagnoses.

It is bounded: it takes one record of each rank, of this epoch only, from that rank's own node, and after ``PATIENCE_S``
diagnoses with what has arrived. A coordinator that is killed meanwhile loses the records; a deadline then ends the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.fleet.control.inquiry.hang import FlightRecord, FlightRecordError, diagnose, parse_record
from phalanx.fleet.core.messages import (
    Diagnosed,
    Recorded,
)
from phalanx.fleet.core.state import FleetState

PATIENCE_S = 2.0
_WAITED_SHARE = 0.5
"""A rank is proven guilty only if the others have waited in the collective for at least this share of the silence."""
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
        """The inquiry into the present epoch, to be begun when its members are asked for their flight records."""
        formation = state.settings.formation
        places = {name: formation.ranks_of(seat, state.ranks) for seat, name in enumerate(state.seats)}
        return cls(state.epoch, places, silent_s, now_s + PATIENCE_S)

    @property
    def ranks(self) -> int:
        """Number of ranks of the epoch."""
        return sum(map(len, self.ranks_of.values()))

    def add(self, said: Recorded) -> str:
        """Adds a record; returns why it was refused, or an empty text."""
        try:
            record = parse_record(said.record.encode())
        except FlightRecordError as error:
            return str(error)[:300]
        if said.epoch != self.epoch or record.rank not in self.ranks_of.get(said.node, ()):
            return f"rank {record.rank} of epoch {said.epoch} is not on {said.node}"
        self.records.setdefault(record.rank, record)
        return ""

    def over(self, now_s: float) -> bool:
        """True if all records have arrived, or the time is up."""
        return len(self.records) == self.ranks or now_s >= self.until_s

    def finding(self) -> Diagnosed:
        """The diagnosis of all records, as an event for the core."""
        found = diagnose(list(self.records.values()), self.ranks)
        proven = found.proven(_WAITED_SHARE * self.silent_s)
        silent = f"; no full record of ranks {', '.join(map(str, found.silent))}" if found.silent else ""
        return Diagnosed(self.epoch, f"{found}{silent}"[:_TEXT_MAX], proven)
