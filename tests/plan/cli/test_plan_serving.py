"""``phalanx plan serve`` as a user types it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from phalanx_plan.cli.plan_command import command

ARGUMENTS = ["--model", "llama3-8b", "--serve", "--cluster", "h100:8"]
TRAFFIC = ["--traffic", "in=2000,out=500,hit=0.3,rate=20", "--slo", "ttft=1s,tpot=50ms"]


def test_json_has_the_workers_that_carry_the_rate_within_the_objectives() -> None:
    result = CliRunner().invoke(command, [*ARGUMENTS, *TRAFFIC, "--json"])
    assert result.exit_code == 0, result.output
    best = json.loads(result.output)["answers"][0]
    assert best["rate"] == pytest.approx(20)
    assert best["ttft_s"]["percentile"] <= 1
    assert best["tpot_s"]["percentile"] <= 0.05 * 1.02


def test_the_table_fits_80_columns() -> None:
    result = CliRunner().invoke(command, [*ARGUMENTS, *TRAFFIC])
    assert result.exit_code == 0, result.output
    assert "requests/s" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "serve needs --traffic"),
        (["--traffic", "in=2000,out=500,rate=fast"], "--traffic rate=fast"),
        (["--traffic", "in=2000,out=500", "--slo", "tpot=50"], "--slo tpot=50"),
        (["--traffic", "in=2000,out=500,rate=1e6", "--slo", "tpot=50ms"], "the nearest"),
        (["--traffic", "in=2000,out=500", "--optimize", "cost"], "--optimize cannot be given with --serve"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(options: list[str], words: str) -> None:
    result = CliRunner().invoke(command, [*ARGUMENTS, *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_options_of_serving_are_refused_without_serve() -> None:
    result = CliRunner().invoke(command, ["--model", "llama3-8b", "--traffic", "in=1,out=1"])
    assert result.exit_code == 2
    assert "--traffic goes with --serve" in result.output


@pytest.mark.parametrize("model", ["deepseek-v3", "llama3-405b", "qwen3-30b-a3b"])
def test_large_models_are_planned(model: str) -> None:
    arguments = ["--model", model, "--serve", "--cluster", "h200:32", "--traffic", "in=4000,out=1000"]
    result = CliRunner().invoke(command, [*arguments, "--format", "fp8", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["answers"]
