"""Runs whose rows are to be independent: what would make them depend on each other is refused by its field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.run.rules import independent_rows_problems
from phalanx.run.spec import (
    ModelSpec,
    MoeSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    RuntimeSpec,
    TrainSpec,
)

RUN = RunSpec(
    name="rows",
    model=ModelSpec(dim=64, ffn_dim=96, moe=MoeSpec(experts=8, ffn_dim=32)),
    precision=PrecisionSpec(rows="independent"),
)
ODD = ModelSpec(dim=64, ffn_dim=96, moe=MoeSpec(experts=8, ffn_dim=40))


def test_a_mixture_of_fitting_widths_is_accepted() -> None:
    assert list(independent_rows_problems(RUN)) == []


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("runtime.compile", replace(RUN, runtime=RuntimeSpec(compile=True))),
        ("parallel.context", replace(RUN, parallel=ParallelSpec(context=2))),
        ("parallel.tensor", replace(RUN, parallel=ParallelSpec(tensor=2))),
        ("precision.matmul", replace(RUN, precision=PrecisionSpec(matmul="mxfp8", rows="independent"))),
        ("model.moe.ffn_dim", replace(RUN, model=ODD)),
        ("train.seq_len", replace(RUN, train=TrainSpec(seq_len=130))),
    ],
)
def test_what_mixes_rows_is_refused_by_its_field(path: str, spec: RunSpec) -> None:
    assert [problem.path for problem in independent_rows_problems(spec)] == [path]


def test_a_run_without_the_field_may_mix_rows() -> None:
    assert list(independent_rows_problems(replace(RUN, model=ODD, precision=PrecisionSpec()))) == []
