"""Audits: every team is checked by another, the culprit is named, and nobody else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.fleet.health.audit import (
    MOST_TURNS,
    AuditVerdict,
    Sums,
    Vote,
    checks,
    due,
    equal_holders,
    judge,
    open_cases,
    parameter_verdict,
    slot_verdict,
    team_ranks,
    teams,
)
from phalanx.parallel.divisions import Deal
from phalanx.run.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Deal]:
    team, model_ranks = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    layout = Layout(
        pipeline=draw(st.integers(1, 3)),
        replicate=draw(st.integers(1, 4)),
        shard=team * draw(st.integers(1, 4)),
        tensor=model_ranks,
        expert=team * model_ranks,
    )
    hands = draw(st.integers(layout.data_ranks // team, 3 * layout.data_ranks // team))
    return layout, Deal(hands * team, layout.replicate, layout.shard, team)


def audited(
    layout: Layout, deal: Deal, step: int, faulty: dict[int, float], seed: int = 0
) -> AuditVerdict | None:
    """An audit of ``step`` in which each rank of ``faulty`` computes wrongly with that probability."""
    chance = random.Random(f"{seed} {step}")

    def computed(team: int, slots: tuple[int, ...]) -> Vote:
        sums = [hash(("sum", step, slots, place)) for place in range(len(team_ranks(layout, team)))]
        for place, rank in enumerate(team_ranks(layout, team)):
            if chance.random() < faulty.get(rank, 0.0):
                sums[place] ^= 1 << chance.randrange(60)
        return Vote(team, tuple(sums))

    votes: dict[tuple[int, ...], list[Vote]] = {}
    for turn in range(1 + MOST_TURNS):
        cases = open_cases(votes)
        if turn and not cases:
            break
        for check in checks(deal, seed, step, turn):
            if turn == 0:
                votes[check.slots] = [computed(check.owner, check.slots)]
            if turn == 0 or check.slots in cases:
                votes[check.slots].append(computed(check.checker, check.slots))
    return slot_verdict(layout, votes, good_step=step - 1)


def test_where_a_ranks_error_may_show_at_another_its_whole_team_is_named() -> None:
    layout = Layout(replicate=3, context=2)
    votes: dict[tuple[int, ...], list[Vote]] = {(0,): [Vote(0, (1, 5)), Vote(1, (1, 4)), Vote(2, (1, 4))]}
    for whole_teams, ranks in ((False, (1,)), (True, (0, 1))):
        verdict = slot_verdict(layout, votes, 0, whole_teams=whole_teams)
        assert verdict is not None
        assert (verdict.ranks, verdict.sure) == (ranks, True)


@given(layouts(), st.integers(0, 2**60), st.integers(1, 10**6), st.integers(0, 3))
def test_every_team_is_checked_once_by_another_and_checks_once(
    drawn: tuple[Layout, Deal], seed: int, step: int, turn: int
) -> None:
    layout, deal = drawn
    planned = checks(deal, seed, step, turn)
    if teams(deal) == 1:
        assert planned == ()
        return
    assert sorted(check.owner for check in planned) == list(range(teams(deal)))
    assert len({check.checker for check in planned}) == len(planned)
    assert turn >= teams(deal) - 1 or all(check.checker != check.owner for check in planned)
    for check in planned:
        replica, place = divmod(check.owner, layout.shard // layout.team)
        dealt = deal.rounds(replica)[check.round]
        assert dealt[place * layout.team : (place + 1) * layout.team] == check.slots
    # Other witnesses are called for the same slots.
    assert [check.slots for check in planned] == [check.slots for check in checks(deal, seed, step)]


@given(layouts().filter(lambda drawn: teams(drawn[1]) > 1), st.integers(0, 1000))
def test_all_turns_before_the_owners_own_call_different_witnesses(
    drawn: tuple[Layout, Deal], step: int
) -> None:
    _, deal = drawn
    called = [checks(deal, 1, step, turn)[0].checker for turn in range(teams(deal))]
    assert sorted(called) == list(range(teams(deal)))
    assert called[-1] == 0


def test_all_slots_of_a_run_come_to_be_audited() -> None:
    deal = Deal(slots=12, replicas=2, shard_ranks=2)
    seen = {check.slots for step in range(1, 200) for check in checks(deal, 3, step)}
    assert seen == {(slot,) for slot in range(12)}


@given(layouts().filter(lambda drawn: teams(drawn[1]) > 1), st.integers(0, 2**32))
def test_no_false_alarm_in_clean_audits(drawn: tuple[Layout, Deal], step: int) -> None:
    assert audited(*drawn, step, faulty={}) is None


def test_no_false_alarm_in_a_thousand_clean_audits_of_one_run() -> None:
    layout, deal = Layout(replicate=2, shard=4), Deal(16, 2, 4)
    assert all(audited(layout, deal, step, {}) is None for step in range(1, 1001))


@given(layouts().filter(lambda drawn: teams(drawn[1]) > 2), st.integers(0, 2**32), st.data())
def test_a_rank_that_always_computes_wrongly_is_named_for_sure(
    drawn: tuple[Layout, Deal], step: int, data: st.DataObject
) -> None:
    layout, deal = drawn
    culprit = data.draw(st.integers(0, layout.ranks - 1))
    verdict = audited(layout, deal, step, {culprit: 1.0})
    assert verdict is not None
    assert (verdict.ranks, verdict.sure, verdict.roll_back_to) == ((culprit,), True, step - 1)


@given(layouts().filter(lambda drawn: teams(drawn[1]) > 1), st.integers(0, 2**32), st.data())
def test_a_rank_that_sometimes_computes_wrongly_is_named_and_nobody_else_for_sure(
    drawn: tuple[Layout, Deal], step: int, data: st.DataObject
) -> None:
    layout, deal = drawn
    culprit = data.draw(st.integers(0, layout.ranks - 1))
    verdict = audited(layout, deal, step, {culprit: 0.5})
    if verdict is not None:
        assert culprit in verdict.ranks
        assert verdict.ranks == (culprit,) or not verdict.sure


def test_of_two_teams_that_stand_by_their_answers_both_are_named_but_not_for_sure() -> None:
    verdict = audited(Layout(replicate=2), Deal(4, 2, 1), 7, {1: 1.0})
    assert verdict is not None
    assert (verdict.sure, set(verdict.ranks)) in ((False, {0, 1}), (True, {1}))
    same_lie = [Vote(0, (1,)), Vote(1, (2,)), Vote(0, (1,)), Vote(1, (2,))]
    assert judge(same_lie).wrong == (0, 1)
    assert not judge(same_lie).sure


@pytest.mark.parametrize(
    ("votes", "wrong", "sure"),
    [
        ([(0, 5), (1, 5)], (), True),
        ([(0, 5), (1, 6)], (0, 1), False),
        ([(0, 5), (1, 6), (2, 6)], (0,), True),
        ([(0, 5), (1, 6), (0, 6)], (0,), True),
        ([(0, 5), (1, 6), (2, 7)], (0, 1, 2), False),
        ([(0, 5), (1, 6), (2, 7), (3, 7)], (0, 1, 2, 3), False),
        ([(0, 5), (1, 6), (2, 7), (3, 7), (4, 7)], (0, 1), True),
        ([(0, 5), (0, 6)], (0,), False),
    ],
)
def test_votes_are_judged(votes: list[tuple[int, int]], wrong: tuple[int, ...], sure: bool) -> None:
    judgment = judge([Vote(voter, (value,)) for voter, value in votes])
    assert (judgment.wrong, judgment.sure) == (wrong, sure)


def test_the_place_where_a_teams_checksums_differ_is_named() -> None:
    def vote(voter: int, *sums: int) -> Vote:
        checksums: Sums = sums
        return Vote(voter, checksums)

    assert judge([vote(0, 1, 2, 3), vote(1, 1, 9, 3), vote(2, 1, 2, 3)]).places == (1,)


@given(layouts())
def test_teams_divide_the_ranks(drawn: tuple[Layout, Deal]) -> None:
    layout, deal = drawn
    members = [rank for team in range(teams(deal)) for rank in team_ranks(layout, team)]
    assert sorted(members) == list(range(layout.ranks))


@given(layouts(), st.data())
def test_a_replica_with_other_parameters_is_outvoted(drawn: tuple[Layout, Deal], data: st.DataObject) -> None:
    layout, _ = drawn
    inner = layout.ranks // layout.pipeline // layout.replicate
    sums = {
        rank: rank % inner + 1000 * (rank * layout.pipeline // layout.ranks) for rank in range(layout.ranks)
    }
    assert parameter_verdict(layout, sums, 3) is None
    culprit = data.draw(st.integers(0, layout.ranks - 1))
    verdict = parameter_verdict(layout, sums | {culprit: -1}, 3)
    if layout.replicate == 1:
        assert equal_holders(layout) == ()
        assert verdict is None
    elif layout.replicate == 2:
        assert verdict is not None
        assert culprit in verdict.ranks
        assert (len(verdict.ranks), verdict.sure) == (2, False)
    else:
        assert verdict == AuditVerdict((culprit,), True, 3)


def test_audits_are_due_every_so_many_steps_or_never() -> None:
    assert [step for step in range(1, 10) if due(step, 3)] == [3, 6, 9]
    assert not any(due(step, 0) for step in range(10))
