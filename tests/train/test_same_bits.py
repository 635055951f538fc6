"""One table of the promise: a run in lanes or context tiles has the same bits on every layout and fleet.

Rows are runs (a model, its pieces, a format), columns are layouts and what else a fleet may change. The suite tries cells in which every
choice occurs; the slow tests try cells in which every two choices meet. Each run is compared with itself on one rank, trained once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covering import covering, new_choices_first
from layouts import Whole, legal_layouts, merged, steps_on_this_rank
from one_hash import same
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.reduction.integer_summation import IntegerSummation
from phalanx.parallel.reduction.reproducible_sums import BinFormat
from phalanx.run.layout import layout_problems
from phalanx.run.spec import MemorySpec, ModelSpec, ParallelSpec, RunSpec
from phalanx.train.compose import build_model
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank
from train.pieces import MODELS, PIECES, divided, model_in, run_in_pieces

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 4": (4, {"tensor": 4, "sharding": "none"}),
    "tensor 2, zero2": (4, {"tensor": 2, "sharding": "zero2"}),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "context 2": (2, {"context": 2}),
    "context 4": (4, {"context": 4}),
    "context 2, zero2": (4, {"context": 2, "shard_ranks": 2, "sharding": "zero2"}),
    "context 2, pipeline 2": (4, {"context": 2, "pipeline": 2, "pipeline_schedule": "gpipe"}),
    "context 2, zero-bubble pipeline 2": (4, {"context": 2, "pipeline": 2, "pipeline_schedule": "zbv"}),
    "tensor 2, context 2": (4, {"tensor": 2, "context": 2}),
    "experts on two ranks": (2, {"expert": 2, "sharding": "zero2"}),
}
"""Ranks, and how they are used."""
OF_THE_FLEET: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "recompute": {"memory": MemorySpec(recompute="full")},
    "selective recompute": {"memory": MemorySpec(recompute="selective")},
    "optimizer on the host": {"memory": MemorySpec(offload_optimizer="host")},
    "selective recompute, optimizer on the host": {
        "memory": MemorySpec(recompute="selective", offload_optimizer="host")
    },
    "offload to files": {"memory": MemorySpec(offload_activations="file", offload_optimizer="file")},
}
"""Changes that the run on one rank does not have."""
OF_THE_RUN: dict[str, dict[str, Any]] = {
    "integer sums": {"train.reduction": "integer"},
    "sums per slot": {"train.expert_sums": "slot"},
    "moments rounded at random": {"optimizer.state": "bf16"},
    "moments of 8 bits": {"optimizer.state": "int8"},
    "adafactor": {"optimizer.name": "adafactor"},
    "muon": {"optimizer.name": "muon"},
    "shampoo": {"optimizer.name": "shampoo"},
    "soap": {"optimizer.name": "soap"},
}
"""Changes that the run on one rank has too."""
ONLY_MIXTURES = ("sums per slot", "experts on two ranks", "adafactor", "muon", "shampoo", "soap")
LEAST_LAYOUTS = 22
"""Legal layouts of up to eight ranks of each model in lanes."""
LEFT_TO_SLOW_TESTS = (("change", "adafactor"), ("change", "soap"))


@dataclass(frozen=True)
class Cell:
    """One comparison: a run, the layout on which it is trained, and what else is changed."""

    model: str
    pieces: str
    compute: str
    layout: str
    change: str

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def steps(self) -> int:
        """Return 2 for optimizers, whose second step depends on the state that the first has left."""
        return 2 if any(field.startswith("optimizer.") for field in OF_THE_RUN.get(self.change, {})) else 1

    def run(self) -> RunSpec:
        """Return the run on one rank."""
        spec = run_in_pieces(model_in(self.pieces, self.model), compute=self.compute)
        for field, value in OF_THE_RUN.get(self.change, {}).items():
            spec = replace_at(spec, field, value)
        return spec

    def on_its_layout(self) -> RunSpec:
        """Return the run on the cell's layout, with the changes that are the fleet's."""
        spec = self.run()
        parallel = divided(spec.model, **LAYOUTS[self.layout][1])
        return dataclasses.replace(spec, parallel=parallel, **OF_THE_FLEET.get(self.change, {}))

    def is_legal(self) -> bool:
        degrees = LAYOUTS[self.layout][1]
        in_lanes, in_tiles = "lanes" in self.pieces, "tiles" in self.pieces
        if ("tensor" in degrees and not in_lanes) or ("context" in degrees and not in_tiles):
            return False
        if "mixture" not in self.model and {self.layout, self.change} & set(ONLY_MIXTURES):
            return False
        return not layout_problems(self.on_its_layout(), self.ranks)


def choices(cell: Cell) -> tuple[tuple[str, object], ...]:
    return tuple(dataclasses.asdict(cell).items())


def axes() -> tuple[Iterable[str], ...]:
    """Return the choices of each field of a cell."""
    pieces = [name for name in PIECES if name != "whole"]
    return MODELS, pieces, ("fp32", "bf16"), LAYOUTS, [*OF_THE_FLEET, *OF_THE_RUN]


@functools.cache
def cells() -> tuple[Cell, ...]:
    legal = [cell for cell in itertools.starmap(Cell, itertools.product(*axes())) if cell.is_legal()]
    few = covering(legal, choices, cost=lambda cell: 1 + cell.ranks)
    return *IN_THE_SUITE, *(cell for cell in few if cell not in IN_THE_SUITE)


IN_THE_SUITE = [
    Cell("four layers", "tiles", "bf16", "context 2, zero-bubble pipeline 2", "nothing else"),
    Cell("two ahead", "tiles", "fp32", "context 4", "recompute"),
    Cell("dense", "lanes and tiles", "fp32", "tensor 2, context 2", "offload to files"),
    Cell("mixture", "lanes", "bf16", "tensor 4", "selective recompute, optimizer on the host"),
]
"""Cells in which more than two choices meet that have their own code together."""


def test_the_suite_runs_a_cell_with_every_choice() -> None:
    parameters = new_choices_first(cells(), choices, LEFT_TO_SLOW_TESTS)
    of_the_suite = {choice for cell in parameters if isinstance(cell, Cell) for choice in choices(cell)}
    every = {
        (axis, value)
        for axis, values in zip([field.name for field in fields(Cell)], axes(), strict=True)
        for value in values
    }
    assert every - of_the_suite == set(LEFT_TO_SLOW_TESTS), "a choice that every layout refuses is lost"


def name_of(cell: Cell) -> str:
    return ", ".join(str(value) for _, value in choices(cell))


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Callable[[RunSpec, int], Whole]:
    """The result of some steps of a run on one rank, computed once."""

    @functools.cache
    def computed(spec: RunSpec, steps: int) -> Whole:
        return merged(ranks.run(1, steps_on_this_rank, spec, steps))

    return computed


@pytest.mark.parametrize("cell", new_choices_first(cells(), choices, LEFT_TO_SLOW_TESTS), ids=name_of)
def test_a_run_in_pieces_has_the_same_bits_on_every_layout(
    ranks: Ranks, alone: Callable[[RunSpec, int], Whole], cell: Cell, tmp_path: Path
) -> None:
    spec = cell.on_its_layout()
    if cell.change == "offload to files":
        spec = replace_at(spec, "memory.offload_path", str(tmp_path / "offload"))
    result = merged(ranks.run(cell.ranks, steps_on_this_rank, spec, cell.steps))
    assert same(result, alone(cell.run(), cell.steps))


@pytest.mark.parametrize(
    "matmul", quick(["fp8-tensorwise", "fp8-rowwise", "mxfp8"], of_the_suite=["fp8-rowwise"])
)
def test_a_narrow_product_has_the_scales_of_its_lane(ranks: Ranks, matmul: str) -> None:
    model = ModelSpec(layers=1, dim=128, heads=2, ffn_dim=128, vocab_size=61, lanes=2)
    specs = [run_in_pieces(model, ParallelSpec(tensor=tensor), "bf16") for tensor in (1, 2)]
    on_one_rank, on_two_ranks = (
        merged(ranks.run(count, steps_on_this_rank, replace_at(spec, "precision.matmul", matmul), 1))
        for count, spec in enumerate(specs, 1)
    )
    assert same(on_one_rank, on_two_ranks)


def widths_of_bins(spec: RunSpec) -> set[int]:
    """Return the widths of the integer bins in which a rank adds gradients."""
    summation = build_model(
        spec, build_mesh(spec, dist.get_world_size(), torch.device("cpu"))
    ).model.summation
    assert isinstance(summation, IntegerSummation)
    reducers = [*summation._reducers, *summation._unsharded.values()]
    return {BinFormat(reducer.summands).width for reducer in reducers}


@pytest.mark.parametrize("model", quick(["mixture", "shared key heads"], of_the_suite=["mixture"]))
def test_bins_of_integers_are_as_wide_on_any_context_degree(ranks: Ranks, model: str) -> None:
    cut = model_in("tiles", model)
    widths = []
    for context in (1, 2, 4):
        spec = replace_at(run_in_pieces(cut, divided(cut, context=context)), "train.reduction", "integer")
        widths += ranks.run(context, widths_of_bins, spec)
    assert all(len(width) == 1 and width == widths[0] for width in widths)


@pytest.mark.parametrize(
    ("experts_of", "compute"),
    quick(
        itertools.product(["lanes", "tiles", "lanes and tiles"], ["fp32", "bf16"]),
        of_the_suite=[("lanes and tiles", "bf16")],
    ),
)
def test_experts_that_serve_several_slots_at_once_keep_the_bits(
    ranks: Ranks, experts_of: str, compute: str
) -> None:
    model = model_in(experts_of, "mixture")
    degrees = {"lanes": {"tensor": 2}, "tiles": {"context": 2}, "lanes and tiles": {"tensor": 2}}[experts_of]
    wholes = []
    for count, parallel in (
        (1, ParallelSpec()),
        (4, divided(model, **degrees, expert=4)),
        (4, divided(model, expert=2, sharding="zero2")),
    ):
        spec = run_in_pieces(model, parallel, compute)
        train = dataclasses.replace(
            spec.train, batch_size=4 * 2 * spec.train.micro_batch_size, slots=4, expert_sums="slot"
        )
        wholes.append(merged(ranks.run(count, steps_on_this_rank, dataclasses.replace(spec, train=train), 1)))
    assert all(same(other, wholes[0]) for other in wholes[1:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_legal_layout_of_up_to_eight_ranks_has_the_bits_of_one_rank_in_lanes(
    ranks: Ranks, alone: Callable[[RunSpec, int], Whole], model: str, compute: str
) -> None:
    cut = model_in("lanes", model)
    reference = alone(run_in_pieces(cut, compute=compute), 1)
    layouts = [
        (count, parallel)
        for count in (1, 2, 4, 8)
        for parallel, _ in legal_layouts(cut, count, made=run_in_pieces)
    ]
    assert len(layouts) >= LEAST_LAYOUTS, "a table whose layouts are refused compares nothing"
    others = [
        (count, parallel)
        for count, parallel in layouts
        if not same(
            merged(ranks.run(count, steps_on_this_rank, run_in_pieces(cut, parallel, compute), 1)), reference
        )
    ]
    assert others == []


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tensor", "context"), [(4, 2), (2, 4)])
def test_eight_ranks_have_the_bits_of_one_in_lanes_and_tiles(
    ranks: Ranks,
    alone: Callable[[RunSpec, int], Whole],
    model: str,
    compute: str,
    tensor: int,
    context: int,
) -> None:
    cut = model_in("lanes and tiles", model)
    spec = run_in_pieces(cut, divided(cut, tensor, context), compute)
    result = merged(ranks.run(8, steps_on_this_rank, spec, 1))
    assert same(result, alone(run_in_pieces(cut, compute=compute), 1))


STARTS: dict[str, tuple[dict[str, int], tuple[tuple[int, dict[str, int], int | None], ...]]] = {
    "lanes": ({"lanes": 4}, ((4, {"tensor": 4}, 4), (2, {"tensor": 2}, None))),
    "tiles": ({"context_tiles": 4}, ((2, {"context": 2}, 3), (1, {}, None))),
    "lanes and tiles": (
        {"lanes": 2, "context_tiles": 2},
        ((4, {"tensor": 2, "context": 2}, 2), (2, {"context": 2}, 3), (2, {"tensor": 2}, None)),
    ),
}
"""By pieces: fields of the model; then, for each start of the run, its ranks, their degrees, and the step before which it breaks off."""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", STARTS)
def test_a_run_in_pieces_resumes_on_other_degrees_with_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path, pieces: str
) -> None:
    cut, starts = STARTS[pieces]

    def spec(folder: str, degrees: dict[str, int]) -> RunSpec:
        run = tiny_run(dataset, tmp_path / folder, steps=4)
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, **cut))
        return dataclasses.replace(run, parallel=divided(run.model, **degrees))

    undisturbed = ranks.run(1, train_on_this_rank, spec("undisturbed", {}))[0]
    for count, degrees, stop_before_step in starts:
        result = ranks.run(count, train_on_this_rank, spec("disturbed", degrees), stop_before_step)[0]
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["held_out_loss"] == undisturbed["held_out_loss"]
    assert not result.get("layout_changes")
