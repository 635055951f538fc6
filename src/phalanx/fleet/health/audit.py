"""Silent data corruption (SDC): which slots are recomputed by which team, which rank is wrong, and to which
step the run rolls back. ``LiveAudit`` carries the plan out.

A slot's gradient has the same bits on any healthy rank. So a second computation on another node and a
comparison of two checksums reveal a machine that computes wrongly, whatever operation it gets wrong. Dixit et
al., "Silent Data Corruptions at Scale", 2021, found about one core in a thousand; vendors' tests miss many.
In an audited step every data-parallel *team* (the ranks that compute a slot together, see
``phalanx.parallel.divisions``) computes one slot more: one of another team's. So one extra round checks
every team of the fleet.

On a mismatch there are more turns, with other teams as witnesses, until a majority decides which one is
wrong. The step is not applied meanwhile. A team that contradicts itself is guilty without a majority. If two
teams both confirm their answers, both are named, and their nodes' health checks decide.

Slots do not reveal a wrong update or wrong memory. The parameters of replicas must be equal, so their
checksums are compared in the same way (``equal_holders``).

Everything is a function of the run's seed and the step: ranks need no messages to agree, and a replay audits
the same slots.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from phalanx.parallel.divisions import Deal, Round
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.parallel.reduction.checksum import Witness, attach, extra_round, named_checksum, total_checksum
from phalanx.parallel.reduction.data_parallel import DataParallel, local
from phalanx.run.layout import Layout
from phalanx.train.step.state import state_tensors

MOST_TURNS = 4
"""Number of times that further teams recompute a disputed slot, before all that disagree are named."""

Sums = tuple[int, ...]
"""The checksums of a team's ranks, in the order of ``team_ranks``."""


@dataclass(frozen=True)
class Check:
    """The second computation of a team's slots of one round, by another team."""

    owner: int
    """The team whose slots these are in this step."""
    checker: int
    """The team that recomputes them; in the confirmation turn, the owner itself."""
    round: int
    """The number of the owner's round in which it computes them."""
    slots: tuple[int, ...]
    """The slots, one for each data-parallel rank of the team."""


@dataclass(frozen=True)
class Vote:
    """A voter's checksums of something that has one right value."""

    voter: int
    sums: Sums


@dataclass(frozen=True)
class Judgment:
    """The voters that are wrong, among those that voted on one slot or tensor."""

    wrong: tuple[int, ...]
    """Empty if all agree."""
    sure: bool
    """True if a majority or a contradiction proves it; otherwise some of ``wrong`` may be right."""
    places: tuple[int, ...] = ()
    """The indexes at which their sums differ from the right ones: the team's ranks with the error."""


@dataclass(frozen=True)
class AuditVerdict:
    """The consequences of a mismatch."""

    ranks: tuple[int, ...]
    """The ranks whose nodes are to be quarantined."""
    sure: bool
    """If false, health checks must decide which of them is wrong."""
    roll_back_to: int
    """The last step whose audit passed; 0 is the beginning. No later result can be trusted."""
    slots: tuple[int, ...] = ()
    """The slots that were computed wrongly; none if parameters were wrong."""


def due(step: int, every: int) -> bool:
    """Return True if step ``step`` (from 1) is audited; ``every`` 0 means never."""
    return every > 0 and step % every == 0


def teams(deal: Deal) -> int:
    """Return the number of teams of data-parallel ranks, over all replicas."""
    return deal.replicas * (deal.shard_ranks // deal.team)


def checks(deal: Deal, seed: int, step: int, turn: int = 0) -> tuple[Check, ...]:
    """Return the checks of step ``step``: every team that has slots is checked once, and every team checks at
    most once.

    ``turn`` 0 is the audit; further turns name other witnesses for the same slots, the owners themselves
    last. Empty if there is only one team.
    """
    count = teams(deal)
    if count == 1:
        return ()
    shift = _shifts(count, seed, step)[turn % count]
    planned = []
    for owner in range(count):
        hands = _hands(deal, owner)
        if hands:
            number = _draw(seed, step, f"round of team {owner}") % len(hands)
            planned.append(Check(owner, (owner + shift) % count, number, hands[number]))
    return tuple(planned)


def _hands(deal: Deal, team: int) -> list[tuple[int, ...]]:
    """Return the slots of one team in each of its non-empty rounds."""
    per_replica = deal.shard_ranks // deal.team
    first = team % per_replica * deal.team
    rounds = (slots[first : first + deal.team] for slots in deal.rounds(team // per_replica))
    return [tuple(slot for slot in slots if slot is not None) for slots in rounds if slots[0] is not None]


def _shifts(count: int, seed: int, step: int) -> list[int]:
    """Return the checker's distance from the owner, by turn: all other teams from a random one on, then the
    owner (0).
    """
    start = _draw(seed, step, "shift") % (count - 1)
    return [1 + (start + turn) % (count - 1) for turn in range(count - 1)] + [0]


def _draw(seed: int, step: int, purpose: str) -> int:
    """Return a random number of 64 bits, the same on all ranks."""
    digest = hashlib.blake2b(f"audit\0{seed}\0{step}\0{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def judge(votes: Sequence[Vote]) -> Judgment:
    """Find the wrong voters by majority.

    A voter may vote several times; one that contradicts itself is wrong, and its votes do not count. If no majority is
    at least two, all voters are named, and the judgment is unsure.
    """
    answers: dict[int, set[Sums]] = {}
    for vote in votes:
        answers.setdefault(vote.voter, set()).add(vote.sums)
    fickle = {voter for voter, sums_seen in answers.items() if len(sums_seen) > 1}
    steady = {voter: next(iter(sums_seen)) for voter, sums_seen in answers.items() if voter not in fickle}
    support = Counter(steady.values()).most_common(1)
    right, backing = support[0] if support else ((), 0)
    outvoted = {voter for voter, sums in steady.items() if sums != right}
    if not outvoted and (not fickle or steady):
        return Judgment(tuple(sorted(fickle)), True, _places(answers, fickle, right))
    if 2 * backing > len(steady) and backing >= 2:
        wrong = fickle | outvoted
        return Judgment(tuple(sorted(wrong)), True, _places(answers, wrong, right))
    return Judgment(tuple(sorted(answers)), False)


def _places(answers: Mapping[int, set[Sums]], wrong: Iterable[int], right: Sums) -> tuple[int, ...]:
    """Return the places at which a wrong voter's sums differ from the right ones."""
    wrong_sums = [sums for voter in wrong for sums in answers[voter]]
    return tuple(
        place for place in range(len(right)) if any(sums[place] != right[place] for sums in wrong_sums)
    )


def team_ranks(layout: Layout, team: int) -> tuple[int, ...]:
    """Return the ranks of a data-parallel team, of all its stages, in the order of a team's ``Sums``."""
    per_replica = layout.shard // layout.team
    replica, first = team // per_replica, team % per_replica * layout.team
    return tuple(
        ((stage * layout.replicate + replica) * layout.shard + shard) * layout.model_ranks + inner
        for stage in range(layout.pipeline)
        for shard in range(first, first + layout.team)
        for inner in range(layout.model_ranks)
    )


def slot_verdict(
    layout: Layout,
    votes: Mapping[tuple[int, ...], Sequence[Vote]],
    good_step: int,
    *,
    whole_teams: bool = False,
) -> AuditVerdict | None:
    """Return the verdict on all audited slots; ``None`` if all votes agree.

    Args:
        votes: The teams' votes, by the slots that were voted on.
        good_step: The last step whose audit passed; 0 if none has.
        whole_teams: True if gradients were added over a team's ranks before their checksums were taken, as
            with context tiles. A rank's error may then show only at another rank, so every rank of a wrong
            team is named.

    A rank's error spreads to the ranks that compute the slot with it, so all ranks of a team whose checksums
    differ are named; if only one differs, it alone is.
    """
    judged = {slots: judge(cast) for slots, cast in votes.items()}
    proven = {team for judgment in judged.values() if judgment.sure for team in judgment.wrong}
    ranks: set[int] = set()
    for judgment in judged.values():
        # If nothing is proven for these slots, a team proven wrong on others explains the mismatch.
        explained = not judgment.sure and proven & set(judgment.wrong)
        for team in explained or judgment.wrong:
            members = team_ranks(layout, team)
            places = () if whole_teams else judgment.places
            ranks |= {members[place] for place in places or range(len(members))}
    if not ranks:
        return None
    sure = all(judgment.sure or proven & set(judgment.wrong) for judgment in judged.values())
    bad = sorted(slot for slots, judgment in judged.items() if judgment.wrong for slot in slots)
    return AuditVerdict(tuple(sorted(ranks)), sure, good_step, tuple(bad))


def open_cases(votes: Mapping[tuple[int, ...], Sequence[Vote]]) -> tuple[tuple[int, ...], ...]:
    """Return the slots that need another turn: votes differ, and no team is proven wrong yet."""
    return tuple(slots for slots, cast in votes.items() if not judge(cast).sure)


def equal_holders(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that hold the same parameters, whose checksums must be equal; none without
    replicas.
    """
    if layout.replicate == 1:
        return ()
    inner = layout.shard * layout.model_ranks
    return tuple(
        tuple((stage * layout.replicate + replica) * inner + place for replica in range(layout.replicate))
        for stage in range(layout.pipeline)
        for place in range(inner)
    )


def parameter_verdict(layout: Layout, sums: Mapping[int, int], good_step: int) -> AuditVerdict | None:
    """Return the verdict on the parameters' checksums, by rank; ``None`` if replicas agree.

    Ranks without one are left out.
    """
    judged = [
        judge([Vote(rank, (sums[rank],)) for rank in group if rank in sums])
        for group in equal_holders(layout)
    ]
    ranks = {rank for judgment in judged for rank in judgment.wrong}
    if not ranks:
        return None
    return AuditVerdict(tuple(sorted(ranks)), all(judgment.sure for judgment in judged), good_step)


# Audits of running steps for silent data corruption: every rank carries out the plan above.
#
# In an audited step a rank first compares its parameters with those of the other replicas and computes another
# team's slot (``begin``), takes checksums of its own audited round (``around``), and then compares with all
# others (``verdict``). If all agree, the step continues, its bits untouched. If not, the step's gradients are
# dropped, and more teams compute the slots until a team is proven wrong; every rank reaches the same verdict.
#
# Parameters are compared once more before the next step. Only then is the audited step's update proven right
# too, so that its result is a state to roll back to.

Votes = dict[tuple[int, ...], list[Vote]]


class CorruptionFoundError(RuntimeError):
    """A rank computed wrongly. Raised on every rank."""

    def __init__(self, verdict: AuditVerdict) -> None:
        self.verdict = verdict
        ranks = ", ".join(map(str, verdict.ranks))
        doubt = "" if verdict.sure else " (one of them)"
        finding = (
            f"slots {verdict.slots} computed wrongly by"
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
        self.witness = attach(self.model)
        self._plan: tuple[Check, ...] = ()
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
        if due(step, self.every) or due(step - 1, self.every):
            self._compare_parameters()
        self._plan = checks(self.deal, self.seed, step) if due(step, self.every) else ()
        if self._plan:
            self._checked = self._extra(self._plan)

    def _compare_parameters(self) -> None:
        """Compare checksums of the parameters with the other replicas; raises ``CorruptionFoundError`` if they differ.

        A collective. Equal ones confirm the last audited step.
        """
        layout = self.model.mesh.layout
        if equal_holders(layout):
            tensors = state_tensors(self.model.parts).items()
            mine = total_checksum([named_checksum(name, local(tensor)) for name, tensor in tensors])
            verdict = parameter_verdict(layout, dict(enumerate(self._gathered(mine))), self.good_step)
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

    def verdict(self, step: int) -> AuditVerdict | None:
        """Compare checksums with all ranks. Return ``None`` if the audit passes. A collective call, with the
        same result everywhere.

        A verdict discards the step's gradients: the step must not be applied.
        """
        if not self._plan:
            return None
        self._mine = self.witness.take()
        own, checked = self._gathered(self._mine), self._gathered(self._checked)
        votes: Votes = {}
        for check in self._plan:
            votes[check.slots] = [self._vote(check.owner, own), self._vote(check.checker, checked)]
        if open_cases(votes):
            self.model.abandon()
            self._call_witnesses(step, votes)
        outcome = slot_verdict(self.model.mesh.layout, votes, self.good_step, whole_teams=self.whole_teams)
        if outcome is None:
            self._unsealed = step
        return outcome

    def _call_witnesses(self, step: int, votes: Votes) -> None:
        """Let further teams compute the disputed slots, a turn at a time, and add their votes to ``votes``.

        A collective. Ends when none is disputed, or after ``MOST_TURNS``.
        """
        for turn in range(1, 1 + MOST_TURNS):
            disputed = open_cases(votes)
            if not disputed:
                return
            plan = checks(self.deal, self.seed, step, turn)
            sums = self._gathered(self._extra(plan))
            for check in plan:
                if check.slots in disputed:
                    votes[check.slots].append(self._vote(check.checker, sums))

    def _extra(self, plan: tuple[Check, ...]) -> int:
        """Compute this rank's slot of an extra round and return its checksum."""
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

    def _vote(self, team: int, sums: list[int]) -> Vote:
        return Vote(team, tuple(sums[rank] for rank in team_ranks(self.model.mesh.layout, team)))
