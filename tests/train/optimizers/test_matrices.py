"""Owners of matrices, and which parameters are matrices at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrix_holders import holders_of, shares_of
from phalanx.model.facts.optimizer_state import takes_matrix
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.parallel.divisions import LocalSlice
from phalanx.parallel.mesh import piece
from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.matrix_optimizer import matrices_of, owners_of
from phalanx.train.optimizers.matrix_rules import MATRIX_RULES

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30)


def by_rows(shapes: dict[str, tuple[int, ...]], ranks: int) -> list[dict[str, LocalSlice]]:
    """The part that every rank holds of parameters that are divided along their first dimension."""
    holders: list[dict[str, LocalSlice]] = [{} for _ in range(ranks)]
    for rank, boxes in enumerate(holders):
        for name, shape in shapes.items():
            rows = piece(shape[0], rank, ranks)
            boxes[name] = LocalSlice((rows.start, *(0,) * (len(shape) - 1)), (len(rows), *shape[1:]))
    return holders


@given(sizes, st.integers(1, 8))
def test_no_owner_has_more_than_its_part_and_one_matrix(shapes: list[tuple[int, int]], ranks: int) -> None:
    named = {f"w{n}": shape for n, shape in enumerate(shapes)}
    matrices = [m for name, shape in named.items() for m in matrices_of(name, shape)]
    boxes = by_rows(named, ranks)
    free = [m for m in matrices if all(part != m.box for _, part in shares_of(m, boxes))]
    costs = [float(m.numel) for m in free]
    owners = owners_of(free, holders_of(named, boxes), costs, ranks)
    if free:
        load = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks)]
        assert max(load) <= sum(load) / ranks + max(costs)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[dict[str, LocalSlice]]]:
    """A parameter, and its parts on ranks that form a grid over its dimensions, each part on one to three of them, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
    parts = [LocalSlice((), ())]
    for size in shape:
        count = draw(st.integers(1, 3))
        cuts = [piece(size, index, count) for index in range(count)]
        parts = [
            LocalSlice((*part.offset, cut.start), (*part.shape, len(cut))) for part in parts for cut in cuts
        ]
    parts *= draw(st.integers(1, 3))
    return shape, [{"w": part} if all(part.shape) else {} for part in draw(st.permutations(parts))]


@given(grids(), st.data())
def test_the_tables_agree_with_every_rank_about_every_matrix(
    drawn: tuple[tuple[int, ...], list[dict[str, LocalSlice]]], data: st.DataObject
) -> None:
    shape, boxes = drawn
    table = holders_of({"w": shape}, boxes)["w"]
    for matrix in matrices_of("w", shape):
        shares = shares_of(matrix, boxes)
        assert [(rank, table.part(matrix, rank)) for rank in table.of(matrix).tolist()] == shares
        assert table.whole_on(matrix) == [rank for rank, part in shares if part == matrix.box]
        owner = data.draw(st.integers(0, len(boxes) - 1))
        # Among ranks with the same part the owner sends, else the first.
        alike = [
            [rank for rank, part in shares if part == distinct_part]
            for distinct_part in {part for _, part in shares}
        ]
        senders = sorted(owner if owner in ranks else ranks[0] for ranks in alike)
        assert table.senders(matrix, owner).tolist() == senders
        assert [rank for rank, _ in shares if table.sends(matrix, rank, owner)] == senders


def test_an_expert_is_owned_by_the_rank_that_holds_it() -> None:
    named = {"experts": (7, 4, 3)}
    matrices = matrices_of("experts", named["experts"])
    assert owners_of(matrices, holders_of(named, by_rows(named, 3)), [1.0] * 7, 3) == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", MATRIX_RULES)
def test_vectors_and_routers_are_never_taken_for_matrices(name: str) -> None:
    spec = OptimizerSpec(name=name)  # type: ignore[arg-type]
    assert not takes_matrix(spec, Parameter("blocks.0.ffn_norm.weight", (8,), "norm"))
    assert not takes_matrix(spec, Parameter("blocks.0.ffn.router.weight", (4, 8), "router"))
    assert takes_matrix(spec, Parameter("blocks.0.ffn.experts.up", (4, 8, 8), "matrix", stacked=True))


def test_of_a_model_only_adafactor_takes_embedding_and_head() -> None:
    model = list(parameters(resolve(PRESETS["llama3-8b"], 1000)))
    left = {
        name: [p.name for p in model if len(p.shape) > 1 and not takes_matrix(OptimizerSpec(name=name), p)]  # type: ignore[arg-type]
        for name in ("muon", "adafactor")
    }
    assert left == {"muon": ["embedding.weight", "head.weight"], "adafactor": []}
