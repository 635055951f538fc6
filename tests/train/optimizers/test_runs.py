"""Whole runs with every optimizer: the bits of the weights are the run's, and a run goes on where it was broken off."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.spec import OptimizerSpec, RunSpec
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank

SPECS = {
    "adamw-bf16": OptimizerSpec(lr=1e-2, state="bf16", clip_norm=0.5),
    "adamw-int8": OptimizerSpec(lr=1e-2, state="int8", clip_norm=0.5),
    "adafactor": OptimizerSpec(name="adafactor", lr=1e-2, clip_norm=0.5),
    "muon": OptimizerSpec(name="muon", lr=1e-2, clip_norm=0.5),
    "shampoo": OptimizerSpec(name="shampoo", lr=1e-2, clip_norm=0.5, block_size=24, precondition_every=2),
    "soap": OptimizerSpec(name="soap", lr=1e-2, clip_norm=0.5, block_size=24, precondition_every=2),
}


def run_with(optimizer: OptimizerSpec, dataset: Path, run_dir: Path) -> RunSpec:
    spec = replace_at(tiny_run(dataset, run_dir), "train.micro_batch_size", 2)
    return dataclasses.replace(spec, optimizer=optimizer)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights that each optimizer comes to on one rank, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    hashes = {}
    for name, optimizer in SPECS.items():
        result = ranks.run(1, train_on_this_rank, run_with(optimizer, dataset, folder / name))[0]
        hashes[name] = str(result["weights_sha256"])
    return hashes


@pytest.mark.servers
@pytest.mark.parametrize("name", quick(SPECS, of_the_suite=["muon"]))
def test_a_run_broken_off_on_one_fleet_ends_on_another_with_the_weights_of_one_rank(
    name: str, ranks: Ranks, dataset: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    spec = run_with(SPECS[name], dataset, tmp_path / "run")
    ranks.run(4, train_on_this_rank, on_layout(spec, "zero3", 2), 5)
    results: list[Any] = ranks.run(3, train_on_this_rank, on_layout(spec, "zero2", 0))
    assert all(result["weights_sha256"] == alone[name] for result in results)


def test_every_optimizer_comes_to_weights_of_its_own(alone: dict[str, str]) -> None:
    assert len(set(alone.values())) == len(SPECS)
