"""``phalanx plan --serve`` as a user types it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from phalanx_plan.cli.plan_command import command

ASKED = ["--model", "llama3-8b", "--serve", "--cluster", "h100:8"]
TRAFFIC = ["--traffic", "in=2000,out=500,hit=0.3,rate=20", "--slo", "ttft=1s,tpot=50ms"]


def test_json_says_which_workers_carry_the_rate_within_the_objectives() -> None:
    done = CliRunner().invoke(command, [*ASKED, *TRAFFIC, "--json"])
    assert done.exit_code == 0, done.output
    best = json.loads(done.output)["answers"][0]
    assert best["rate"] == pytest.approx(20)
    assert best["ttft_s"]["percentile"] <= 1
    assert best["tpot_s"]["percentile"] <= 0.05 * 1.02


def test_the_table_fits_80_columns() -> None:
    done = CliRunner().invoke(command, [*ASKED, *TRAFFIC])
    assert done.exit_code == 0, done.output
    assert "requests/s" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--serve needs --traffic"),
        (["--traffic", "in=2000,out=500,rate=fast"], "--traffic rate=fast"),
        (["--traffic", "in=2000,out=500", "--slo", "tpot=50"], "--slo tpot=50"),
        (["--traffic", "in=2000,out=500,rate=1e6", "--slo", "tpot=50ms"], "the nearest"),
        (["--traffic", "in=2000,out=500", "--optimize", "cost"], "--optimize cannot be given with --serve"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(options: list[str], words: str) -> None:
    done = CliRunner().invoke(command, [*ASKED, *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_options_of_serving_are_refused_without_serve() -> None:
    done = CliRunner().invoke(command, ["--model", "llama3-8b", "--traffic", "in=1,out=1"])
    assert done.exit_code == 2
    assert "--traffic goes with --serve" in done.output


@pytest.mark.parametrize("model", ["deepseek-v3", "llama3-405b", "qwen3-30b-a3b"])
def test_large_models_are_planned(model: str) -> None:
    asked = ["--model", model, "--serve", "--cluster", "h200:32", "--traffic", "in=4000,out=1000"]
    done = CliRunner().invoke(command, [*asked, "--format", "fp8", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["answers"]
