"""Portable numerics refuses, by field, what its kernels do not compute."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from phalanx.run.identity import differences, identity, run_owned
from phalanx.run.read import device_of
from phalanx.run.rules import portable_problems
from phalanx.run.spec import ModelSpec, OptimizerSpec, RunSpec, RuntimeSpec

RUN = RunSpec(name="portable", runtime=RuntimeSpec(numerics="portable"))


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("runtime.device", replace(RUN, runtime=RuntimeSpec(numerics="portable", device="cuda"))),
        ("runtime.compile", replace(RUN, runtime=RuntimeSpec(numerics="portable", compile=True))),
        ("optimizer.name", replace(RUN, optimizer=OptimizerSpec(name="soap"))),
        ("model.factory", replace(RUN, model=ModelSpec(factory="mine:Model"))),
    ],
)
def test_what_its_kernels_do_not_compute_is_refused_by_its_field(path: str, spec: RunSpec) -> None:
    (problem,) = portable_problems(spec)
    assert problem.path == path
    assert 'runtime.numerics = "native"' in problem.remedy
    assert list(portable_problems(replace(spec, runtime=replace(spec.runtime, numerics="native")))) == []


def with_numerics(numerics: str) -> RunSpec:
    return RunSpec(runtime=RuntimeSpec(numerics=numerics))  # type: ignore[arg-type]


def test_native_numerics_are_no_part_of_an_identity_and_portable_ones_are_another_runs() -> None:
    before_there_was_a_choice = {
        path: value
        for path, value in run_owned(with_numerics("native")).items()
        if path != "runtime.numerics"
    }
    canonical = json.dumps(before_there_was_a_choice, sort_keys=True, separators=(",", ":"))
    assert identity(with_numerics("native")) == hashlib.sha256(canonical.encode()).hexdigest()
    assert identity(with_numerics("portable")) != identity(with_numerics("native"))


def test_the_difference_of_runs_that_differ_in_it_has_values_that_can_be_set() -> None:
    (line,) = differences(with_numerics("native"), with_numerics("portable"))
    assert line == "runtime.numerics: 'native' != 'portable'"


def test_it_computes_on_the_processor_even_where_there_is_a_gpu() -> None:
    assert device_of(RUN.runtime, has_gpu=True) == "cpu"
    assert device_of(RuntimeSpec(), has_gpu=True) == "cuda"
