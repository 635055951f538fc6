"""Who owns which matrix, and which parameters are matrices at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.facts.optimizer_state import takes_matrix
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.mesh.partition import piece
from phalanx.run.kinds.parts import Parameter
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.matrices import matrices_of, owners_of, shares_of

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30)


def by_rows(shapes: dict[str, tuple[int, ...]], ranks: int) -> list[dict[str, LocalSlice]]:
    """The part that every rank holds of parameters that are divided along their first dimension."""
    holders: list[dict[str, LocalSlice]] = [{} for _ in range(ranks)]
    for rank, boxes in enumerate(holders):
        for name, shape in shapes.items():
            rows = piece(shape[0], rank, ranks)
            boxes[name] = (rows.start, *(0,) * (len(shape) - 1)), (len(rows), *shape[1:])
    return holders


@given(sizes, st.integers(1, 8))
def test_no_owner_has_more_than_its_part_and_one_matrix(shapes: list[tuple[int, int]], ranks: int) -> None:
    named = {f"w{n}": shape for n, shape in enumerate(shapes)}
    matrices = [m for name, shape in named.items() for m in matrices_of(name, shape)]
    shares = [shares_of(matrix, by_rows(named, ranks)) for matrix in matrices]
    costs = [float(m.rows * m.columns) for m in matrices]
    free = [n for n, m in enumerate(matrices) if all(s.part != m.box for s in shares[n])]
    owners = owners_of(
        [matrices[n] for n in free], [shares[n] for n in free], [costs[n] for n in free], ranks
    )
    if free:
        load = [
            sum(costs[n] for n, owner in zip(free, owners, strict=True) if owner == r) for r in range(ranks)
        ]
        assert max(load) <= sum(load) / ranks + max(costs[n] for n in free)


@given(sizes, st.integers(1, 8))
def test_shares_of_a_matrix_are_the_whole_matrix(shapes: list[tuple[int, int]], ranks: int) -> None:
    named = {f"w{n}": shape for n, shape in enumerate(shapes)}
    for name, shape in named.items():
        (matrix,) = matrices_of(name, shape)
        shares = shares_of(matrix, by_rows(named, ranks))
        assert sum(share.part[1][0] * share.part[1][1] for share in shares) == matrix.numel
        assert [share.part[0][0] for share in shares] == sorted({share.part[0][0] for share in shares})


def test_an_expert_is_owned_by_the_rank_that_holds_it() -> None:
    named = {"experts": (7, 4, 3)}
    holders = by_rows(named, 3)
    matrices = matrices_of("experts", named["experts"])
    shares = [shares_of(matrix, holders) for matrix in matrices]
    assert owners_of(matrices, shares, [1.0] * 7, 3) == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", ["adafactor", "muon", "shampoo", "soap"])
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
