"""The lead of a coordinator: its claim, which it renews before each epoch, and its watch for a successor.

What follows from a state is sent only once the claim that the state needs is made (``phalanx.fleet.core.succession``).
"""

from __future__ import annotations

from contextlib import suppress

from phalanx.fleet.control.succession.claims import ClaimError, ClaimRegister
from phalanx.fleet.control.succession.patient_journal import PatientJournal
from phalanx.fleet.control.succession.reign import SupersededError, nonce, require_leading
from phalanx.fleet.core.replay import JournalError
from phalanx.fleet.core.state import FleetState
from phalanx.fleet.core.succession import Claim, is_due, renewed
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

_LEADS_PER_PATIENCE = 4
"""So many times in ``fleet.succession_s`` the coordinator says that it leads."""


class Leadership:
    """The claims of one coordinator in one start of the run."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        register: ClaimRegister,
        claim: Claim,
        journal: PatientJournal,
        patience_s: float,
    ) -> None:
        """
        Args:
            directory: The run's.
            attempt: The number of the run's start.
            register: Where claims are made.
            claim: The newest one, its own.
            journal: Its journal, which is on disk before a claim is made.
            patience_s: ``fleet.succession_s``; 0 if nobody ever succeeds it.
        """
        self._directory, self._attempt, self._register = directory, attempt, register
        self._journal, self._patience_s, self._say_due_s = journal, patience_s, 0.0
        self.claim = claim
        """The newest claim that it has made."""

    def leads(self) -> bool:
        """True if nobody has made a later claim."""
        return self._register.newest_term() <= self.claim.term

    def look_for_successor(self) -> None:
        """Raises ``SupersededError`` if another coordinator leads now, or the run was started again."""
        with suppress(OSError):  # tried again at the next look; a claim that is due finds out in any case
            require_leading(self._register, self.claim)
        with suppress(RunDirectoryError):
            if self._directory.newest_attempt() > self._attempt:
                raise SupersededError("the run was started again")

    def is_due(self, state: FleetState) -> bool:
        """True if nothing may be sent that follows from ``state`` before the next term is claimed."""
        return is_due(self.claim, state)

    async def claim_anew(self, state: FleetState) -> None:
        """Claims the next term, before anything is sent that follows from ``state``. Raises ``SupersededError``."""
        await self._journal.synced()
        claim = renewed(self.claim, state, nonce())

        def make() -> None:
            try:
                if not self._register.make(claim):
                    require_leading(self._register, self.claim)
                    raise SupersededError("superseded")
            except (ClaimError, OSError) as error:
                raise JournalError(str(error)) from error

        await self._journal.until_written(make)
        self.claim = claim

    def is_to_be_said(self, now_s: float) -> bool:
        """True if all agents are to be told again that it leads; counted as said then."""
        if not self._patience_s or now_s < self._say_due_s:
            return False
        self._say_due_s = now_s + self._patience_s / _LEADS_PER_PATIENCE
        return True
