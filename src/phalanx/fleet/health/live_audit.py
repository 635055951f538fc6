"""Audits of running steps for silent data corruption: every rank carries out the plan of
``phalanx.fleet.health.audit``.

In an audited step a rank first compares its parameters with those of the other replicas and computes another
team's slot (``begin``), takes checksums of its own audited round (``around``), and then compares with all
others (``verdict``). If all agree, the step continues, its bits untouched. If not, the step's gradients are
dropped, and more teams compute the slots until a team is proven wrong; every rank reaches the same verdict.

Parameters are compared once more before the next step. Only then is the audited step's update proven right
too, so that its result is a state to roll back to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from phalanx.fleet.health import audit
from phalanx.parallel.divisions import Deal, Round
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.parallel.reduction.checksum import Witness, attach, extra_round, named_checksum, total_checksum
from phalanx.parallel.reduction.data_parallel import DataParallel, local
from phalanx.train.step.state import state_tensors

Votes = dict[tuple[int, ...], list[audit.Vote]]


class CorruptionFoundError(RuntimeError):
    """A rank computed wrongly. Raised on every rank."""

    def __init__(self, verdict: audit.AuditVerdict) -> None:
        """Describe the wrong slots or parameters, the ranks, and the step to roll back to."""
        self.verdict = verdict
        ranks = ", ".join(map(str, verdict.ranks))
        doubt = "" if verdict.sure else " (one of them)"
        finding = (
            f"{'slot' if len(verdict.slots) == 1 else 'slots'} {', '.join(map(str, verdict.slots))} computed wrongly by"
            if verdict.slots
            else "replicas' parameters to differ, the wrong ones on"
        )
        super().__init__(
            f"an audit found {finding} rank {ranks}{doubt}; all is good up to step {verdict.roll_back_to}"
        )


@dataclass
class LiveAudit:
    """The audits of one rank."""

    model: DataParallel
    deal: Deal
    seed: int
    every: int
    """Steps between audits."""
    compute: Callable[[Round], object]
    """Forward and backward of a round's slot, between ``begin`` and ``end`` of the model."""
    good_step: int = 0
    """The last step whose audit passed, before its update and after it."""
    whole_teams: bool = False
    """True if a verdict names every rank of a wrong team (``slot_verdict``)."""
    witness: Witness = field(init=False)

    def __post_init__(self) -> None:
        """Attach the witness to the model, and start from ``good_step``."""
        self.witness = attach(self.model)
        self._plan: tuple[audit.Check, ...] = ()
        self._mine = self._checked = 0
        self._unsealed = self.good_step
        """The last step whose slots were right; its update is checked before the next step."""

    @property
    def team(self) -> int:
        """The number of this rank's team, among all teams of the fleet."""
        mesh = self.model.mesh
        return mesh.replica * (self.deal.shard_ranks // self.deal.team) + mesh.shard_rank // self.deal.team

    def begin(self, step: int) -> None:
        """Start step ``step``, before its rounds: if it is audited, compute the slot that this rank checks.

        If this step or the last one is audited, raises ``CorruptionFoundError`` if the parameters of replicas
        differ.
        """
        if audit.due(step, self.every) or audit.due(step - 1, self.every):
            self._compare_parameters()
        self._plan = audit.checks(self.deal, self.seed, step) if audit.due(step, self.every) else ()
        if self._plan:
            self._checked = self._compute_extra_slot(self._plan)

    def _compare_parameters(self) -> None:
        """Compare checksums of the parameters with the other replicas; raise ``CorruptionFoundError`` if they
        differ.

        If they agree, or there are no replicas, ``good_step`` becomes the last step whose slots were right. A
        collective if there are replicas.
        """
        layout = self.model.mesh.layout
        if audit.equal_holders(layout):
            tensors = state_tensors(self.model.parts).items()
            mine = total_checksum([named_checksum(name, local(tensor)) for name, tensor in tensors])
            verdict = audit.parameter_verdict(layout, dict(enumerate(self._gathered(mine))), self.good_step)
            if verdict is not None:
                raise CorruptionFoundError(verdict)
        self.good_step = self._unsealed

    def around(self, number: int) -> AbstractContextManager[None]:
        """Return the context for computing gradients of round ``number``; in the audited round it takes their
        checksums.
        """
        if any(check.owner == self.team and check.round == number for check in self._plan):
            return self.witness.watch()
        return nullcontext()

    def ended(self, step: int) -> None:
        """Finish the audit after the rounds, before the update. Raises ``CorruptionFoundError`` if it fails."""
        verdict = self.verdict(step)
        if verdict is not None:
            raise CorruptionFoundError(verdict)

    def verdict(self, step: int) -> audit.AuditVerdict | None:
        """Compare the checksums of the audited slots of step ``step`` with all ranks; those of parameters are not
        compared. Return ``None`` if the audit passes or the step is not audited.

        A collective call, with the same result everywhere. Disputed slots are computed by further teams; the step's
        gradients are then discarded and must not be applied.
        """
        if not self._plan:
            return None
        self._mine = self.witness.take()
        own, checked = self._gathered(self._mine), self._gathered(self._checked)
        votes: Votes = {}
        for check in self._plan:
            votes[check.slots] = [self._vote(check.owner, own), self._vote(check.checker, checked)]
        if audit.open_cases(votes):
            self.model.abandon()
            self._call_witnesses(step, votes)
        outcome = audit.slot_verdict(
            self.model.mesh.layout, votes, self.good_step, whole_teams=self.whole_teams
        )
        if outcome is None:
            self._unsealed = step
        return outcome

    def _call_witnesses(self, step: int, votes: Votes) -> None:
        """Let further teams compute the disputed slots, one team a turn, and add their votes to ``votes``.

        A collective. Ends when no slot is disputed, or after ``MOST_TURNS``.
        """
        for turn in range(1, 1 + audit.MOST_TURNS):
            disputed = audit.open_cases(votes)
            if not disputed:
                return
            plan = audit.checks(self.deal, self.seed, step, turn)
            sums = self._gathered(self._compute_extra_slot(plan))
            for check in plan:
                if check.slots in disputed:
                    votes[check.slots].append(self._vote(check.checker, sums))

    def _compute_extra_slot(self, plan: tuple[audit.Check, ...]) -> int:
        """Compute this rank's slot of an extra round by ``plan``, and return its checksum.

        A team that checks nothing computes some slot too, since gathering weights is a collective.
        """
        mesh, deal = self.model.mesh, self.deal
        by_checker = {check.checker: check.slots for check in plan}
        first = mesh.replica * (deal.shard_ranks // deal.team)
        # A team with nothing to check computes some slot all the same, since weights are gathered
        # collectively.
        hands = [by_checker.get(first + i, plan[0].slots) for i in range(deal.shard_ranks // deal.team)]
        with self.witness.watch(extra=True):
            self.compute(extra_round(tuple(slot for hand in hands for slot in hand), mesh.shard_rank))
        return self.witness.take()

    def _gathered(self, mine: int) -> list[int]:
        return gather_typed(mine, int)

    def _vote(self, team: int, sums: list[int]) -> audit.Vote:
        return audit.Vote(team, tuple(sums[rank] for rank in audit.team_ranks(self.model.mesh.layout, team)))
