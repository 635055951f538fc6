"""The closed form of the parameters that ranks hold, against sums over all of them; the modules themselves are in the dry run's tests."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import DENSE, MIXTURE, legal_layouts, tiny
from phalanx.model.facts.holdings import Holding, fullest, holding, place_of, state_bytes
from phalanx.model.facts.shape import parameters
from phalanx.run.layout import Layout
from phalanx.run.spec import OptimizerSpec, ParallelSpec, RunSpec

LAYOUTS = [
    (model, ranks, parallel, layout)
    for model in (DENSE, MIXTURE)
    for ranks in (1, 2, 4, 8)
    for parallel, layout in legal_layouts(model, ranks)
]


def held_by_all(spec: RunSpec, layout: Layout) -> list[Holding]:
    """The holding of every rank."""
    return [holding(spec, layout, place_of(layout, rank)) for rank in range(layout.ranks)]


@given(st.sampled_from(LAYOUTS))
def test_all_ranks_together_hold_each_replica_once_and_common_weights_of_tensor_ranks_once_each(
    drawn: tuple[object, int, ParallelSpec, Layout],
) -> None:
    model, _, parallel, layout = drawn
    spec = tiny(model, parallel)  # type: ignore[arg-type]
    total: dict[str, int] = {}
    for rank_holding in held_by_all(spec, layout):
        for piece in rank_holding.pieces:
            total[piece.parameter.name] = total.get(piece.parameter.name, 0) + piece.elements
    for parameter in parameters(spec.model):
        copies, rest = divmod(total[parameter.name], layout.replicate * parameter.numel)
        assert rest == 0
        assert copies in ({1} if parameter.stacked else {1, layout.tensor})


@given(st.sampled_from(LAYOUTS))
def test_no_rank_holds_more_than_the_fullest_of_its_place(
    drawn: tuple[object, int, ParallelSpec, Layout],
) -> None:
    model, _, parallel, layout = drawn
    spec = tiny(model, parallel)  # type: ignore[arg-type]
    most = [fullest(spec, layout, rank).elements for rank in range(layout.pipeline)]
    largest = [0] * layout.pipeline
    for rank_holding in held_by_all(spec, layout):
        largest[rank_holding.place.pipeline] = max(
            largest[rank_holding.place.pipeline], rank_holding.elements
        )
    assert largest == most


def test_zero3_keeps_a_share_where_zero2_keeps_gathered_weights() -> None:
    layout = Layout(shard=4)
    sizes = {}
    for sharding in ("zero2", "zero3"):
        spec = tiny(DENSE, ParallelSpec(sharding=sharding))  # type: ignore[arg-type]
        sizes[sharding] = state_bytes(spec, layout, fullest(spec, layout, 0), 2)
    assert sizes["zero2"]["compute copy"] == 2 * sum(p.numel for p in parameters(spec.model))
    assert sizes["zero3"]["compute copy"] < sizes["zero2"]["compute copy"]
    assert sizes["zero2"]["weights"] == sizes["zero3"]["weights"] < 4 * sizes["zero2"]["compute copy"]


@pytest.mark.parametrize(
    ("slots", "batch_size", "bytes_per_weight"),
    [(16, 16, 2 + 4), (28, 28, 4 + 4 + 4), (32, 32, 2 + 4 + 4), (32, 64, 4 + 4 + 4)],
)
def test_zero1_holds_a_whole_sum_for_each_level_of_a_ranks_own_slots(
    slots: int, batch_size: int, bytes_per_weight: int
) -> None:
    """The lowest is a slot's gradient, as narrow as it is computed if the slot is one micro-batch.

    Seven slots are no subtree: a rank may hold three sums of several at once.
    """
    spec, layout = tiny(DENSE, ParallelSpec(sharding="zero1")), Layout(shard=4)
    train = dataclasses.replace(spec.train, slots=slots, batch_size=batch_size, micro_batch_size=1)
    spec = dataclasses.replace(spec, train=train)
    sums = state_bytes(spec, layout, fullest(spec, layout, 0), 2)["open sums"]
    assert sums == bytes_per_weight * sum(p.numel for p in parameters(spec.model))


def test_narrow_moments_take_the_bytes_of_their_format() -> None:
    spec, layout = tiny(DENSE, ParallelSpec()), Layout()
    largest = fullest(spec, layout, 0)
    narrow = dataclasses.replace(spec, optimizer=OptimizerSpec(state="bf16"))
    wide = sum(p.elements for p in largest.pieces if len(p.parameter.shape) == 1)
    assert state_bytes(spec, layout, largest, 4)["moments"] == 8 * largest.elements
    assert state_bytes(narrow, layout, largest, 4)["moments"] == 8 * wide + 4 * (largest.elements - wide)
