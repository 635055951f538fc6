"""The values that "auto" stands for, which are the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from phalanx.cli.train.show_command import resolved
from phalanx.hardware.catalog import cluster
from phalanx.run.read import compute_format, device_of, plugin_problems
from phalanx.run.spec import ModelSpec, PrecisionSpec, RunSpec, RuntimeSpec
from phalanx_plan.search.query import job_of
from phalanx_plan.workload.stacks import stack_of

SPEC = RunSpec(model=ModelSpec(vocab_size=512))


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert [device_of(RuntimeSpec(), has_gpu=there) for there in (False, True)] == ["cpu", "cuda"]
    assert [device_of(RuntimeSpec(device="cpu"), has_gpu=there) for there in (False, True)] == ["cpu", "cpu"]


def test_auto_computes_in_bf16_on_a_gpu_alone() -> None:
    assert [compute_format(PrecisionSpec(), device) for device in ("cpu", "cuda")] == ["fp32", "bf16"]
    assert compute_format(PrecisionSpec(compute="fp32"), "cuda") == "fp32"
    assert compute_format(PrecisionSpec(compute="bf16"), "cpu") == "bf16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_show_and_the_planner_hold_what_the_trainer_would(device: Literal["cpu", "cuda"]) -> None:
    spec = replace(SPEC, runtime=RuntimeSpec(device=device))
    expected = compute_format(spec.precision, device)
    assert resolved(spec, 1, Path("run.toml")).precision.compute == expected
    assert stack_of(spec).states.copy_bytes == (2.0 if expected == "bf16" else 4.0)
    where = cluster("h100:1" if device == "cuda" else "cpu:1")
    assert job_of(spec, where).stack.states.copy_bytes == (2.0 if expected == "bf16" else 4.0)


def test_a_plug_in_that_is_named_twice_is_a_mistake() -> None:
    (problem,) = plugin_problems("observe.sinks", ("otel", "wandb", "otel"), "phalanx.sinks")
    assert str(problem) == "observe.sinks: has 'otel' twice (name each once)"
