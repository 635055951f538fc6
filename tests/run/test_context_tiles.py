"""Runs that cannot be cut into context tiles are refused by name and with a remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.model.facts.presets import PRESETS
from phalanx.run.identity import identity
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import layout_problems
from phalanx.run.read import read_run
from phalanx.run.spec import ModelSpec, MoeSpec, ParallelSpec, RunSpec, RuntimeSpec, TrainSpec
from run.specs import replace_at

MIXTURE = MoeSpec(experts=4, ffn_dim=32)


def run(moe: MoeSpec | None = None) -> RunSpec:
    model = ModelSpec(layers=2, dim=64, heads=4, ffn_dim=64, vocab_size=64, context_tiles=4, moe=moe)
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(batch_size=8, slots=4, seq_len=64),
        parallel=ParallelSpec(context=2, context_mode="allgather"),
        runtime=RuntimeSpec(device="cpu", compile=False),
    )


def with_fields(spec: RunSpec, values: dict[str, Any]) -> RunSpec:
    for path, value in values.items():
        spec = replace_at(spec, path, value)
    return spec


def test_tiles_and_context_ranks_that_gather_keys_go_together() -> None:
    assert layout_problems(run(), 2) == []
    assert layout_problems(with_fields(run(MIXTURE), {"parallel.expert": 2}), 2) == []
    assert layout_problems(with_fields(run(), {"model.mtp_depth": 1}), 2) == []


def test_lanes_and_tiles_free_both_degrees_together() -> None:
    both = with_fields(run(), {"model.lanes": 4, "parallel.tensor": 2})
    assert layout_problems(both, 4) == []
    mixture = with_fields(run(MIXTURE), {"model.lanes": 4, "parallel.tensor": 2, "parallel.expert": 4})
    assert layout_problems(mixture, 4) == []


NATIVE: dict[str, Any] = {"runtime.numerics": "native", "parallel.expert": 2}
NATIVE_MIXTURES = (
    ("model.moe.ffn_dim", {"model.moe": replace(MIXTURE, ffn_dim=24), **NATIVE}),
    ("runtime.threads", {"model.moe": MIXTURE, "runtime.threads": 2, **NATIVE}),
    (
        "model.moe.ffn_dim",
        {"model.moe": replace(MIXTURE, ffn_dim=48), "precision.compute": "bf16", **NATIVE},
    ),
)


@pytest.mark.parametrize("numerics", ["auto", "portable"])
@pytest.mark.parametrize(("path", "values"), NATIVE_MIXTURES)
def test_portable_activations_depend_neither_on_widths_nor_on_threads(
    path: str, values: dict[str, Any], numerics: str
) -> None:
    spec = with_fields(run(), {**values, "runtime.numerics": numerics})
    assert path not in [problem.path for problem in layout_problems(spec, 0)]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("model.context_tiles", {"model.context_tiles": 6}),
        ("train.seq_len", {"train.seq_len": 60}),
        ("parallel.context", {"parallel.context": 8}),
        ("parallel.context_mode", {"parallel.context_mode": "ring"}),
        ("parallel.tensor", {"parallel.tensor": 2}),
        ("runtime.compile", {"runtime.compile": True}),
        ("parallel.expert", {"model.moe": MIXTURE}),
        ("train.seq_len", {"model.lanes": 4, "train.seq_len": 48}),
        (
            "parallel.expert",
            {"model.lanes": 4, "parallel.tensor": 2, "model.moe": MIXTURE, "parallel.expert": 2},
        ),
        ("parallel.expert_tensor", {"model.lanes": 4, "model.moe": MIXTURE, "parallel.expert_tensor": 2}),
        *NATIVE_MIXTURES,
    ],
)
def test_all_else_is_refused_with_the_field_to_change(path: str, values: dict[str, Any]) -> None:
    problems = layout_problems(with_fields(run(), values), 0)
    assert path in [problem.path for problem in problems]
    assert all(problem.remedy for problem in problems)


def test_a_ring_of_one_rank_is_none() -> None:
    alone = with_fields(run(), {"parallel.context": 1, "parallel.context_mode": "ring"})
    assert layout_problems(alone, 1) == []


def over(tensor: int, context: int, **other: Any) -> ParallelSpec:
    return ParallelSpec(tensor=tensor, context=context, context_mode="allgather", **other)


@pytest.mark.parametrize("name", PRESETS)
def test_every_known_model_can_be_cut_into_lanes_and_tiles_and_divided_as_finely(name: str) -> None:
    model = resolve(PRESETS[name], 32_768)
    widths = (model.heads, model.kv_heads, 8)
    lanes = next(count for count in (8, 4, 2) if not any(width % count for width in widths))
    # Experts are dealt to all who share a slot.
    tiles = min(8, model.moe.experts // lanes) if model.moe else 8
    model = replace(model, lanes=lanes, context_tiles=tiles)
    spec = replace(run(), model=model, train=TrainSpec(slots=8, seq_len=4096))
    parallel = over(lanes, tiles, expert=lanes * tiles if model.moe else 1)
    assert layout_problems(replace(spec, parallel=parallel), lanes * tiles) == []


def test_the_shipped_run_in_lanes_is_one_run_however_up_to_eight_ranks_divide_it() -> None:
    shipped = read_run(Path("configs/quickstart-lanes.toml"), PRESETS)
    shipped = replace(shipped, model=resolve(shipped.model, 4096))
    layouts = {
        over(1, 1): 1,
        over(2, 1, expert=2): 2,
        over(1, 2, expert=2): 2,
        over(2, 1, expert=2, pipeline=2): 4,
        over(2, 2, expert=4, pipeline=2): 8,
        over(2, 2, expert=8): 8,
    }
    runs = {replace(shipped, parallel=parallel): ranks for parallel, ranks in layouts.items()}
    assert [problem for run, ranks in runs.items() for problem in layout_problems(run, ranks)] == []
    assert len(set(map(identity, runs))) == 1
