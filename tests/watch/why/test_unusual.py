"""Fields that no usual run has are named, with what they do; those of usual runs never are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phalanx.model.facts.presets import PRESETS
from phalanx.observe.events import Evaluated, RunStarted
from phalanx.run.read import read_run
from phalanx.run.spec import (
    CheckpointSpec,
    EvalSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    ScheduleSpec,
    TrainSpec,
)
from phalanx_watch.why.observed import Reason
from watch.why.test_rules import only
from watch.why.watched import Watched, steps

ROOT = Path(__file__).parents[3]
SPEC = RunSpec(
    model=ModelSpec(vocab_size=4096),
    checkpoint=CheckpointSpec(every_steps=1000),
    evaluation=EvalSpec(every_steps=0),
    train=TrainSpec(steps=100_000),
)


def reasons(path: Path, spec: RunSpec, norm: float = 0.5) -> list[Reason]:
    run = Watched(path, spec)
    run.write(steps(1, 60, lambda _: {"grad_norm": norm}))
    return run.reasons()


@pytest.mark.parametrize(
    ("spec", "path", "severity"),
    [
        (dataclasses.replace(SPEC, optimizer=OptimizerSpec(eps=1e-3)), "optimizer.eps", "warning"),
        (dataclasses.replace(SPEC, optimizer=OptimizerSpec(eps=1e-5)), "", ""),
        (dataclasses.replace(SPEC, optimizer=OptimizerSpec(name="muon", lr=0.02)), "optimizer.lr", "info"),
        (
            dataclasses.replace(SPEC, optimizer=OptimizerSpec(weight_decay=30)),
            "optimizer.weight_decay",
            "warning",
        ),
        (dataclasses.replace(SPEC, optimizer=OptimizerSpec(clip_norm=0)), "", ""),
        (
            dataclasses.replace(SPEC, schedule=ScheduleSpec(kind="wsd", decay_fraction=0)),
            "schedule.decay_fraction",
            "warning",
        ),
        (dataclasses.replace(SPEC, schedule=ScheduleSpec(kind="cosine", decay_fraction=0)), "", ""),
        (dataclasses.replace(SPEC, model=ModelSpec(vocab_size=4096, logit_cap=2)), "model.logit_cap", "info"),
        (dataclasses.replace(SPEC, model=ModelSpec(vocab_size=4096, logit_cap=30, score_cap=50)), "", ""),
        (
            dataclasses.replace(
                SPEC, model=ModelSpec(vocab_size=4096, attention_pattern=("window",), window=8)
            ),
            "model.window",
            "info",
        ),
        (
            dataclasses.replace(
                SPEC, model=ModelSpec(vocab_size=4096, attention_pattern=("window", "full"), window=8)
            ),
            "",
            "",
        ),
    ],
)
def test_a_field_that_no_usual_run_has_is_named_and_weighs_more_the_farther_it_is(
    tmp_path: Path, spec: RunSpec, path: str, severity: str
) -> None:
    if not path:
        assert reasons(tmp_path, spec) == []
        return
    reason = only(reasons(tmp_path, spec))
    assert (reason.code, reason.severity) == ("unusual-fields", severity)
    assert reason.evidence[0].startswith(f"{path} = ")
    assert f"--set {path}=" in reason.next


def test_an_unusual_field_is_a_warning_while_the_loss_does_not_fall(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, optimizer=OptimizerSpec(lr=0.02))
    run = Watched(tmp_path, spec)
    run.write(steps(1, 400, lambda _: {"loss": 8.3}))
    assert {(reason.code, reason.severity) for reason in run.reasons()} == {
        ("not-learning", "warning"),
        ("unusual-fields", "warning"),
    }


def test_a_limit_that_clips_every_step_is_named_with_how_far_the_norms_are_above_it(tmp_path: Path) -> None:
    tight = dataclasses.replace(SPEC, optimizer=OptimizerSpec(clip_norm=0.25))
    assert reasons(tmp_path / "usual", tight) == [], "twice the limit"
    reason = only(reasons(tmp_path / "far", tight, norm=5.0))
    assert (reason.code, reason.severity) == ("unusual-fields", "warning")
    assert "all of 50 logged steps after the warmup were clipped" in reason.evidence[0]
    assert "20 times" in reason.evidence[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_no_run_file_of_ours_has_an_unusual_field(tmp_path: Path, path: Path) -> None:
    assert "unusual-fields" not in [
        reason.code for reason in reasons(tmp_path / "run", read_run(path, PRESETS))
    ]


# --- text ------------------------------------------------------------------------------------------------

HEALTHY = {
    "samples": 64,
    "learned": 0.3,
    "repeated": 0.04,
    "held_out_repeated": 0.03,
    "ends_learned": 1.0,
    "next_special": 0.0,
    "role": "assistant",
    "role_share": 1.0,
    "json_lines": 0.1,
    "doubly_encoded": 0.0,
}


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ({}, ""),
        ({"repeated": 0.4}, "it repeats itself"),
        ({"held_out_repeated": 0.5}, "held-out text is trained on"),
        ({"ends_learned": 0.0, "next_special": 1.0}, "the end of an answer is not learned"),
        ({"next_special": 1.0}, ""),
        ({"role": "user"}, "the loss is on the wrong side"),
        ({"role": "user", "role_share": 0.3}, ""),
        ({"json_lines": 0.9}, "it is JSON"),
        ({"doubly_encoded": 0.9}, "it is encoded twice"),
    ],
)
def test_unusual_figures_of_the_first_samples_are_named(
    tmp_path: Path, facts: dict[str, float | str], title: str
) -> None:
    run = Watched(tmp_path, SPEC)
    start = RunStarted("r", 100_000, ranks=4, environment={"first_samples": {**HEALTHY, **facts}})
    run.write([start, *steps(1, 20)], attempt=1)
    for is_finished in (False, True):
        run_reasons = run.reasons(finished=is_finished)
        assert [(reason.code, reason.severity) for reason in run_reasons] == [
            ("unusual-text", "warning")
        ] * bool(title)
        assert all(title in reason.title and "data show" in reason.next for reason in run_reasons)


@pytest.mark.parametrize(
    ("bits_per_byte", "vocabulary", "codes"), [(2.0, 4096, ["unusual-text"]), (0.7, 4096, []), (2.0, 257, [])]
)
def test_a_tokenizer_of_another_language_has_a_byte_or_so_for_each_token(
    tmp_path: Path, bits_per_byte: float, vocabulary: int, codes: list[str]
) -> None:
    run = Watched(tmp_path, dataclasses.replace(SPEC, model=ModelSpec(vocab_size=vocabulary)))
    run.write([*steps(1, 20), Evaluated(20, 2.0, bits_per_byte)])
    assert run.codes() == codes
