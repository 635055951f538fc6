"""Silent data corruption (SDC): which slots are recomputed by which team, which rank is wrong, and to which
step the run rolls back.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.parallel.divisions import Deal
from phalanx.run.layout import Layout

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
    """Return the checks of step ``step``: every team that has slots has one random round checked by another team.

    A team checks at most once. ``turn`` 0 is the audit; further turns name other checkers for the same slots, the
    owners themselves last. Empty if there is only one team.
    """
    count = teams(deal)
    if count == 1:
        return ()
    shift = _shifts(count, seed, step)[turn % count]
    planned = []
    for owner in range(count):
        hands = _slots_by_round(deal, owner)
        if hands:
            number = _draw(seed, step, f"round of team {owner}") % len(hands)
            planned.append(Check(owner, (owner + shift) % count, number, hands[number]))
    return tuple(planned)


def _slots_by_round(deal: Deal, team: int) -> list[tuple[int, ...]]:
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
    """Find the wrong voters by majority, and the places at which their sums differ.

    A voter that contradicts itself is wrong, and its votes do not count. Unless all others agree or a majority of
    at least two does, all voters are named, without places, and the judgment is unsure.
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
    """Return the verdict on all audited slots, with ``good_step`` to return to; ``None`` if all votes agree.

    ``votes`` are the teams' by the slots voted on. Named are the ranks at differing places of wrong teams; with
    ``whole_teams``, or an unsure judgment, all of a team. An unsure mismatch is explained by a team proven wrong
    elsewhere.
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
    """Return the groups of ranks that hold the same parameters (one of each replica); empty without replicas."""
    if layout.replicate == 1:
        return ()
    inner = layout.shard * layout.model_ranks
    return tuple(
        tuple((stage * layout.replicate + replica) * inner + place for replica in range(layout.replicate))
        for stage in range(layout.pipeline)
        for place in range(inner)
    )


def parameter_verdict(layout: Layout, sums: Mapping[int, int], good_step: int) -> AuditVerdict | None:
    """Return the verdict on the parameters' checksums, by rank, with ``good_step``; ``None`` if replicas agree.

    Ranks without a checksum do not vote. It is sure only if every group's judgment is.
    """
    judged = [
        judge([Vote(rank, (sums[rank],)) for rank in group if rank in sums])
        for group in equal_holders(layout)
    ]
    ranks = {rank for judgment in judged for rank in judgment.wrong}
    if not ranks:
        return None
    return AuditVerdict(tuple(sorted(ranks)), all(judgment.sure for judgment in judged), good_step)
