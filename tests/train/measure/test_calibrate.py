"""Measuring a machine, and fitting what plans are made with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_python import in_place_of_execution
from phalanx.hardware.catalog import accelerator, load_user
from phalanx.hardware.profile import Profile, profile_of
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, PrecisionSpec, RunSpec, TrainSpec
from phalanx.train.measure.calibrate import (
    COLLECTIVES,
    MeasuredPoints,
    Settings,
    best_seconds,
    measure_collectives,
    measure_step,
    operations,
    product_sizes,
)
from phalanx_plan.fit_profile import CalibrationOrigin, fit_profile, to_tables
from phalanx_plan.step_cost.hardware_times import matmul_s

QUICK = Settings(torch.device("cpu"), "cpu", quick=True)
ORIGIN = CalibrationOrigin("a test", "2026-01", "none")


def made_up(launch_s: float, efficiency: float, peak: float = 1e11) -> MeasuredPoints:
    """Points as a machine would give that follows the law exactly."""
    chip = accelerator("cpu")
    chip = dataclasses.replace(chip, flops={"fp32": dataclasses.replace(chip.flops["fp32"], value=peak)})
    constants = profile_of(chip).constants
    law = dataclasses.replace(constants.matmul["fp32"], launch_s=launch_s, efficiency=efficiency)
    profile = Profile(chip, dataclasses.replace(constants, matmul={"fp32": law}))
    sizes = list(product_sizes(Settings(torch.device("cpu"), "wall")))
    seconds = matmul_s(profile, "fp32", *np.array(sizes, dtype=float).T)
    return {
        "matmul.fp32": list(zip(sizes, seconds.tolist(), strict=True)),
        "attention.forward": [((1e9,), 0.02)],
        "attention.backward": [((2.5e9,), 0.05)],
        "memory": [((2.0**n,), 1e-6 + 2.0**n / 1e10) for n in range(12, 26)],
        "host_copy": [((1e8,), 0.01)],
        "disk": [((1e8,), 0.1)],
        **{name: [((2.0, 2.0**n), 1e-4 + 2.0**n / 2e9) for n in range(12, 24)] for name in COLLECTIVES},
    }


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-6, 3e-5), st.floats(0.4, 0.95))
def test_points_that_follow_the_law_are_fitted_to_within_two_per_cent(
    launch_s: float, efficiency: float
) -> None:
    fitted = fit_profile(made_up(launch_s, efficiency), accelerator("cpu"), ORIGIN)
    assert fitted.constants.matmul["fp32"].provenance.median_error < 0.02
    assert fitted.constants.memory.provenance.median_error < 0.02
    assert fitted.constants.collectives["all_gather"].provenance.median_error < 0.02


def test_what_is_written_is_read_back_as_the_machine_that_was_measured(tmp_path: Path) -> None:
    fitted = fit_profile(made_up(5e-6, 0.8), accelerator("cpu"), ORIGIN)
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(to_tables(fitted, 4, 32e9, ORIGIN)))
    machine = load_user(path)
    assert machine.per_node == machine.domain.size == 4
    assert machine.accelerator.memory_bytes.value == 8e9
    assert machine.accelerator.flops["fp32"].value == pytest.approx(fitted.accelerator.flops["fp32"].value)
    read = profile_of(machine.accelerator).constants
    assert read.matmul["fp32"] == fitted.constants.matmul["fp32"]
    assert read.collectives["all_reduce"] == fitted.constants.collectives["all_reduce"]


def test_longer_work_takes_longer_on_either_clock() -> None:
    for clock in ("wall", "cpu"):
        quick = dataclasses.replace(QUICK, clock=clock)
        small, large = torch.ones(64, 64), torch.ones(512, 512)
        short = best_seconds(lambda a=small: a @ a, quick)  # type: ignore[misc]
        assert 0 < short < best_seconds(lambda a=large: a @ a, quick)  # type: ignore[misc]


@pytest.mark.slow
def test_every_kind_of_work_is_timed_and_fitted() -> None:
    points = operations(QUICK) | measure_collectives(QUICK, 2)
    assert all(seconds > 0 for series in points.values() for _, seconds in series)
    fitted = fit_profile(points, accelerator("cpu"), ORIGIN)
    assert 1e9 < fitted.accelerator.flops["fp32"].value < 1e13
    assert 0.2 < fitted.constants.matmul["fp32"].efficiency <= 1


def test_a_step_of_the_trainer_is_timed_and_weighed() -> None:
    spec = RunSpec(
        model=resolve(ModelSpec(layers=1, dim=64, heads=2, ffn_dim=128, vocab_size=256), 256),
        train=TrainSpec(batch_size=2, slots=2, seq_len=32, micro_batch_size=1),
        precision=PrecisionSpec(compute="fp32"),
    )
    with in_place_of_execution():
        alone, together = (measure_step(spec, ranks, steps=1) for ranks in (1, 2))
    assert alone.wall_s > 0
    assert alone.cpu_s > 0
    # Two ranks share masters and moments, which one rank holds whole.
    assert together.memory_bytes["optimizer"] == pytest.approx(alone.memory_bytes["optimizer"] / 2, rel=0.05)


FAILING_MODELS = """
import os, signal
from pathlib import Path
import torch.distributed as dist

rank_0_has_connected = Path(__file__).with_suffix(".rank0")

def broken_group(*arguments, **options):
    def fail(): raise RuntimeError("the group is broken")
    dist.destroy_process_group = fail
    raise ValueError("the layer is too wide")

def killed(*arguments, **options):
    if dist.get_rank() == 0:
        rank_0_has_connected.touch()
        while True:
            signal.pause()
    # Before that, rank 0 may still connect to this one, and would fail itself.
    while not rank_0_has_connected.exists():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("factory", "ranks", "says"),
    [
        ("broken_group", 1, r"rank 0: .*the layer is too wide"),
        ("killed", 2, r"rank 0: it was ended.*rank 1: its process was killed by SIGKILL"),
    ],
)
def test_the_cause_of_a_failed_rank_is_reported_and_the_others_are_ended(
    factory: str, ranks: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_models.py").write_text(FAILING_MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = RunSpec(
        model=ModelSpec(factory=f"failing_models:{factory}", layers=1, dim=64, heads=2, vocab_size=256),
        train=TrainSpec(batch_size=2, slots=2, seq_len=32, micro_batch_size=1),
        precision=PrecisionSpec(compute="fp32"),
    )
    with in_place_of_execution(), pytest.raises(RuntimeError, match=says):
        measure_step(spec, ranks, steps=1)


@pytest.mark.slow
def test_the_command_writes_a_machine_that_plans_can_be_made_for(tmp_path: Path) -> None:
    from phalanx_plan.cli.calibrate_command import command as calibrate
    from phalanx_plan.cli.plan_command import command as plan

    out = tmp_path / "node.toml"
    done = CliRunner().invoke(calibrate, ["--quick", "--ranks", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "training step" in done.output
    arguments = ["--model", "toy-4m", "--cluster", str(out), "--batch", "16", "--seq-len", "256", "--json"]
    shown = json.loads(CliRunner().invoke(plan, arguments).stdout)
    assert shown["chosen"]["time_s"]["stack_scalar"] != 0
    assert shown["best"][0]["accelerators"] == 2
