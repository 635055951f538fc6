"""The answer of a budget: the budget is used up, the shape is one that trains, and mistakes are explained."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run
from phalanx_plan.cli.plan_command import command
from phalanx_plan.scaling.answer import run_of_shape
from phalanx_plan.scaling.optimum import MODEL_KINDS, shape_of


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(command, list(arguments))


@cache
def facts(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@given(st.floats(3e7, 1e12), st.sampled_from(MODEL_KINDS))
@settings(max_examples=15, deadline=None)
def test_a_shape_has_about_the_size_and_is_a_run_that_passes_all_checks(size: float, kind: Any) -> None:
    shape = shape_of(kind, size)
    assert shape.active == pytest.approx(size, rel=0.15)
    assert 40 < shape.model.dim / shape.model.layers <= 256
    assert shape.model.dim % 128 == 0
    assert run_of_shape(shape, 20 * size, 4096, None, ()).model == shape.model


def test_flop_need_no_cluster_and_are_used_up() -> None:
    answers = facts("--budget", "1e22FLOP")["found"]
    assert {answer["kind"] for answer in answers} == {"dense", "mixture"}
    for answer in answers:
        assert 6 * answer["active_parameters"] * answer["tokens"] == pytest.approx(1e22)
        assert answer["plan"] is None
        assert answer["loss_p5_p95"][0] < answer["loss"] < answer["loss_p5_p95"][1]
    assert answers[0]["loss"] <= answers[1]["loss"]


SMALL = ("--cluster", "h100:8", "--kind", "dense", "--batch", "64", "--seq-len", "2048")


@pytest.mark.parametrize(("budget", "amount"), [("3000$", 3000.0), ("20d", 20.0), ("4000 gpu-hours", 4000.0)])
def test_the_planned_cost_of_a_run_is_the_budget(budget: str, amount: float) -> None:
    (answer,) = facts("--budget", budget, *SMALL)["found"]
    run = answer["plan"]["whole_run"]
    spent = {
        "$": run["cost"]["total_usd"],
        "d": run["days"],
        "s": 24 * run["days"] * (8 + run["spare_accelerators"]),
    }[budget[-1]]
    assert spent == pytest.approx(amount, rel=0.01)
    assert answer["plan"]["tokens"] == pytest.approx(answer["tokens"], rel=1e-3)
    assert answer["plan"]["parameters"] == answer["parameters"]


def test_a_budget_between_two_of_the_coarse_sizes_of_small_models_has_an_answer() -> None:
    """Each of the two sizes leads to the other one: planned again in turn, neither settles."""
    (answer,) = facts("--budget", "1$", "--cluster", "h100:8", "--kind", "dense")["found"]
    assert answer["plan"]["whole_run"]["cost"]["total_usd"] == pytest.approx(1.0, rel=0.01)


def test_more_dollars_buy_a_larger_model_and_a_lower_loss() -> None:
    (poor,), (rich,) = (facts("--budget", budget, *SMALL)["found"] for budget in ("300$", "3000$"))
    assert rich["active_parameters"] > poor["active_parameters"]
    assert rich["loss"] < poor["loss"]


def test_little_text_and_much_serving_change_the_answer() -> None:
    arguments = ("--budget", "1e22FLOP", "--kind", "dense")
    (plain,), (scarce,), (served,) = (
        facts(*arguments, *more)["found"]
        for more in ((), ("--unique-tokens", "20B"), ("--inference-tokens", "1T"))
    )
    assert scarce["loss"] > plain["loss"]
    assert served["active_parameters"] < plain["active_parameters"]
    for answer in (plain, scarce, served):
        low, high = answer["parameters_p5_p95"]
        assert 0.95 * low < answer["active_parameters"] < 1.05 * high
    assert "times" in plan(*arguments, "--unique-tokens", "20B").output


def test_a_kind_that_the_cluster_cannot_hold_is_left_out_with_the_reason() -> None:
    result = plan("--budget", "100d", "--cluster", "h100:1", "--batch", "8", "--seq-len", "2048")
    assert result.exit_code == 0, result.output
    assert "no mixture model" in result.output
    assert "train a dense model" in result.output


def test_the_run_file_of_the_answer_is_read_and_names_what_nobody_chose(tmp_path: Path) -> None:
    out, page = tmp_path / "run.toml", tmp_path / "page.html"
    result = plan("--budget", "300$", *SMALL, "--out", str(out), "--report", str(page))
    assert result.exit_code == 0, result.output
    spec = read_run(out, PRESETS)
    assert spec.parallel.ranks == 8
    assert "optimizer.lr" in spec.unfilled
    assert "train a dense model of" in " ".join(result.output.split())
    assert "<h2>What to train</h2><p>Train a dense model of" in page.read_text()


def test_a_run_file_with_nothing_to_fill_in_has_no_remark_about_it(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    chosen = {
        "data.path": "text",
        "data.corpus": "none",
        "data.tokenizer": "bytes",
        "optimizer.lr": "3e-4",
        "schedule.warmup_steps": "10",
    }
    overrides = [word for field, value in chosen.items() for word in ("--set", f"{field}={value}")]
    result = plan("--budget", "300$", *SMALL, *overrides, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "fill in" not in result.output
    assert read_run(out, PRESETS).unfilled == ()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "40"], "of what?"),
        (["--budget", "40M$"], "give --cluster"),
        (["--budget", "1FLOP"], "plausible are 3e+06 to 2e+13"),
        (["--budget", "1e34 FLOP"], "plausible are 3e+06 to 2e+13"),
        (["--budget", "0.001$", "--cluster", "h100:8"], "plausible are 3e+06 to 2e+13"),
        (["--budget", "1e22FLOP", "--model", "llama3-8b"], "--model cannot be given with --budget"),
        (["--budget", "1e22FLOP", "--tokens", "1T"], "--tokens cannot be given with --budget"),
        (["--budget", "1e22FLOP", "run.toml"], "cannot be given with --budget"),
        (["--budget", "1e22FLOP", "--set", "model.layers=3"], "the model, its steps and its batch are the answer"),
        (["--budget", "1e22FLOP", "--set", "parallel.tensor=8"], "--require"),
        (["--budget", "1e22FLOP", "--unique-tokens", "0"], "--unique-tokens 0"),
        (["--budget", "1e22FLOP", "--inference-tokens", "1e400"], "--inference-tokens"),
        (["--budget", "1e18FLOP", "--inference-tokens", "900000T"], "no training at all"),
        (["--budget", "1e22FLOP", "--out", "x.toml"], "give --cluster"),
        (["--budget", "1000$", "--cluster", "h100:8", "--kind", "dense", "--set", "cluster.accelerator.price_per_hour=0"], "price of 0"),
        (["--kind", "dense", "--model", "llama3-8b"], "--kind goes with --budget"),
        (["a.toml", "b.toml"], "one run file is planned at a time"),
    ],
)  # fmt: skip
def test_a_mistake_is_explained_with_exit_code_two(arguments: list[str], says: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_money_that_buys_nothing_since_the_text_is_used_up_is_reported() -> None:
    arguments = ("--budget", "1e22FLOP", "--kind", "dense")
    assert "text is used up" not in plan(*arguments, "--unique-tokens", "200B").output
    assert "half the budget reaches" in " ".join(plan(*arguments, "--unique-tokens", "1B").output.split())
    halved, full_loss = (
        facts(*arguments, "--unique-tokens", "1B")["found"][0][key] for key in ("half_the_budget", "loss")
    )
    assert 0 <= halved["loss"] - full_loss < 0.01
