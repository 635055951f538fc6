"""Rules of forks at loss spikes: fields that a run file cannot combine."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.run.rules import check
from phalanx.run.sections.monitoring import SpikeSpec
from phalanx.run.spec import RunSpec
from run.specs import replace_at

FORKING = replace_at(RunSpec(), "train.on_spike", "fork")


@pytest.mark.parametrize(
    ("candidates", "clip_norm", "audit_every_steps", "path"),
    [
        ((), 1.0, 0, "spike.candidates"),
        (("skip", "skip"), 1.0, 0, "spike.candidates"),
        (("clip",), 0.0, 0, "spike.candidates"),
        (("wide",), 1.0, 0, "spike.candidates"),
        (("skip",), 0.0, 10, "train.on_spike"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_with_its_field(
    candidates: tuple[str, ...], clip_norm: float, audit_every_steps: int, path: str
) -> None:
    spike = SpikeSpec(candidates=candidates)  # type: ignore[arg-type]
    spec = replace_at(dataclasses.replace(FORKING, spike=spike), "optimizer.clip_norm", clip_norm)
    spec = replace_at(spec, "fleet.audit_every_steps", audit_every_steps)
    assert path in [problem.path for problem in check(spec)]
    unforked = replace_at(spec, "train.on_spike", "skip")
    assert path not in [problem.path for problem in check(unforked)]


def test_a_wide_child_is_of_runs_with_narrow_products_that_are_not_compiled() -> None:
    spec = dataclasses.replace(FORKING, spike=SpikeSpec(candidates=("wide",)))
    spec = replace_at(spec, "precision.matmul", "mxfp8")
    assert check(spec) == []
    compiled = check(replace_at(spec, "runtime.compile", True))
    assert [(problem.path, problem.also) for problem in compiled] == [
        ("spike.candidates", ("runtime.compile",))
    ]


def test_the_defaults_fork() -> None:
    assert check(FORKING) == check(RunSpec())
