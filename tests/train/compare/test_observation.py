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
    found = compare_replays(replay(right), replay(wrong)).parting
    assert found is not None
    assert (found.moment, found.name) == ("backward", "norm")
    assert (
        str(found)
        == "step 1, slot 0, micro-batch 0, gradient of the output of norm: rank 0 of A, rank 0 of B"
    )


def test_slots_that_other_ranks_computed_are_compared_by_slot() -> None:
    one = replay([seen("forward", "norm", 10 + slot, slot=slot) for slot in range(4)])
    other = replay(
        *[
            [seen("forward", "norm", 10 + slot + (slot == 3), slot=slot) for slot in mine]
            for mine in ((0, 2), (1, 3))
        ]
    )
    found = compare_replays(one, other).parting
    assert found is not None
    assert (found.slot, found.ranks) == (3, ((0,), (1,)))


def test_pieces_of_another_cut_are_compared_by_their_sum() -> None:
    whole = replay([seen("weight", "w", 30, piece="0:4")])
    cut = [[seen("weight", "w", 12, piece="0:2")], [seen("weight", "w", 18, piece="2:4")]]
    assert compare_replays(whole, replay(*cut)).parting is None
    cut[1] = [seen("weight", "w", 19, piece="2:4")]
    found = compare_replays(whole, replay(*cut)).parting
    assert found is not None
    assert found.ranks == ((0,), (0, 1))


def test_what_does_not_add_up_is_left_out_and_said() -> None:
    whole = replay([seen("forward", "query", 30, piece="0 of 1", adds_up=False)])
    cut = replay([seen("forward", "query", 12, piece="0 of 2", adds_up=False)])
    found = compare_replays(whole, cut)
    assert (found.parting, found.observations, found.left_out) == (None, 0, ("query",))


def test_a_copy_that_differs_from_the_other_ranks_copies_is_named_alone() -> None:
    copies = [[seen("updated", "w", 5, piece="0:4")] for _ in range(3)]
    copies[1] = [seen("updated", "w", 6, piece="0:4")]
    found = compare_replays(replay(*copies[:1]), replay(*copies)).parting
    assert found is not None
    assert found.odd == ((), (1,))
    of_two = compare_replays(replay([seen("updated", "w", 6, piece="0:4")]), replay(*copies[:2])).parting
    assert of_two is not None
    assert of_two.odd == ((), (0,))  # the other replay says who is right
