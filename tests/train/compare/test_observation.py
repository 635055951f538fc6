"""Which of two replays' observations differs first, and on whose rank: a function on values."""

from __future__ import annotations

from phalanx.train.compare.observation import Moment, Observation, Replay, compare_replays


def seen(
    moment: Moment, name: str, value: int, *, slot: int = 0, piece: str = "", adds_up: bool = True
) -> Observation:
    return Observation(1, moment, name, value, slot, 0, piece, adds_up)


def replay(*ranks: list[Observation], pipeline: int = 1) -> Replay:
    return Replay({"pipeline": pipeline}, ranks)


def test_the_first_difference_in_the_order_of_computation_is_named() -> None:
    names = ["embedding", "blocks.0", "norm"]
    right = [seen("forward", name, 7) for name in names] + [
        seen("backward", name, 9) for name in reversed(names)
    ]
    wrong = [seen("forward", name, 7) for name in names] + [
        seen("backward", name, 8) for name in reversed(names)
    ]
    difference = compare_replays(replay(right), replay(wrong)).parting
    assert difference is not None
    assert (difference.moment, difference.name) == ("backward", "norm")
    assert (
        str(difference)
        == "step 1, slot 0, micro-batch 0, gradient of the output of norm: rank 0 of A, rank 0 of B"
    )


def test_slots_that_other_ranks_computed_are_compared_by_slot() -> None:
    on_one_rank = replay([seen("forward", "norm", 10 + slot, slot=slot) for slot in range(4)])
    on_two_ranks = replay(
        *[
            [seen("forward", "norm", 10 + slot + (slot == 3), slot=slot) for slot in mine]
            for mine in ((0, 2), (1, 3))
        ]
    )
    difference = compare_replays(on_one_rank, on_two_ranks).parting
    assert difference is not None
    assert (difference.slot, difference.ranks) == (3, ((0,), (1,)))


def test_pieces_of_another_cut_are_compared_by_their_sum() -> None:
    uncut = replay([seen("weight", "w", 30, piece="0:4")])
    cut = [[seen("weight", "w", 12, piece="0:2")], [seen("weight", "w", 18, piece="2:4")]]
    assert compare_replays(uncut, replay(*cut)).parting is None
    cut[1] = [seen("weight", "w", 19, piece="2:4")]
    difference = compare_replays(uncut, replay(*cut)).parting
    assert difference is not None
    assert difference.ranks == ((0,), (0, 1))


def test_what_does_not_add_up_is_left_out_and_listed() -> None:
    uncut = replay([seen("forward", "query", 30, piece="0 of 1", adds_up=False)])
    cut = replay([seen("forward", "query", 12, piece="0 of 2", adds_up=False)])
    comparison = compare_replays(uncut, cut)
    assert (comparison.parting, comparison.observations, comparison.left_out) == (None, 0, ("query",))


def test_a_copy_that_differs_from_the_other_ranks_copies_is_named_alone() -> None:
    copies = [[seen("updated", "w", 5, piece="0:4")] for _ in range(3)]
    copies[1] = [seen("updated", "w", 6, piece="0:4")]
    difference = compare_replays(replay(*copies[:1]), replay(*copies)).parting
    assert difference is not None
    assert difference.odd == ((), (1,))
    of_two = compare_replays(replay([seen("updated", "w", 6, piece="0:4")]), replay(*copies[:2])).parting
    assert of_two is not None
    assert of_two.odd == ((), (0,))  # the other replay decides which is right
