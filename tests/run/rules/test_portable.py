"""Portable numerics refuses, by field, what its kernels do not compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.run.identity import run_owned
from phalanx.run.resolve import device_of
from phalanx.run.rules.portable import ARITHMETIC, problems
from phalanx.run.spec import ModelSpec, OptimizerSpec, PrecisionSpec, RunSpec, RuntimeSpec

RUN = RunSpec(name="portable", runtime=RuntimeSpec(numerics="portable"))


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("runtime.device", replace(RUN, runtime=RuntimeSpec(numerics="portable", device="cuda"))),
        ("runtime.compile", replace(RUN, runtime=RuntimeSpec(numerics="portable", compile=True))),
        ("precision.matmul", replace(RUN, precision=PrecisionSpec(matmul="fp8-rowwise"))),
        ("optimizer.name", replace(RUN, optimizer=OptimizerSpec(name="soap"))),
        ("model.factory", replace(RUN, model=ModelSpec(factory="mine:Model"))),
    ],
)
def test_what_its_kernels_do_not_compute_is_refused_by_its_field(path: str, spec: RunSpec) -> None:
    (problem,) = problems(spec)
    assert problem.path == path
    assert 'runtime.numerics = "native"' in problem.remedy
    assert list(problems(replace(spec, runtime=replace(spec.runtime, numerics="native")))) == []


def test_a_run_that_does_not_ask_for_it_keeps_its_identity() -> None:
    assert "runtime.numerics" not in run_owned(RunSpec(name="native"))


def test_a_run_that_asks_for_it_is_another_run_and_names_the_definition_of_its_arithmetic() -> None:
    assert run_owned(RUN)["runtime.numerics"] == ARITHMETIC


def test_it_computes_on_the_processor_even_where_there_is_a_gpu() -> None:
    assert device_of(RUN.runtime, has_gpu=True) == "cpu"
    assert device_of(RuntimeSpec(), has_gpu=True) == "cuda"
