"""``phalanx show --ranks`` as a user sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx_process import last_json, run

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("config", "ranks"), [("deepseek-v3", 2048), ("llama3-405b", 16_384), ("moe-100t", 98_304)]
)
def test_the_large_examples_are_legal_on_their_fleets_and_fit_an_accelerator(config: str, ranks: int) -> None:
    facts = last_json(
        run(["show", str(CONFIGS / f"{config}.toml"), "--ranks", str(ranks), "--json"], CONFIGS)
    )
    layout = facts["layout"]
    assert layout["ranks"] == ranks
    placed_layers = [layer for place in layout["pipeline_ranks"] for layer in place["layers"]]
    assert sorted(placed_layers) == list(range(facts["model"]["layers"]))
    assert layout["state_bytes_most"] < (80e9 if config != "moe-100t" else 288e9)


def test_an_impossible_fleet_is_explained(folder: Path) -> None:
    result = run(["show", "tiny.toml", "--ranks", "3", "--set", "parallel.context=2"], folder)
    assert result.returncode == 1
    assert "it must be a multiple of 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_dry_run_compares_and_prints_the_result(folder: Path) -> None:
    command = ["show", "tiny.toml", "--set", "data.vocab_size=257", "--ranks", "4", "--dry-run"]
    facts = last_json(run([*command, "--rank", "3", "--json"], folder))
    assert [comparison["rank"] for comparison in facts["dry_run"]] == [3]
    assert facts["dry_run"][0]["matches"]
    assert "matches" in run([*command, "--rank", "0"], folder).stdout


def test_a_dry_run_without_a_fleet_is_refused(folder: Path) -> None:
    result = run(["show", "tiny.toml", "--dry-run"], folder)
    assert result.returncode == 2
    assert "give --ranks" in result.stderr


def test_showing_ranks_does_not_import_torch() -> None:
    code = "import sys, phalanx.cli.train.show_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
