"""The core works without the packages beside it, and finds what other projects add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.plugins import load_plugin, plugin_names
from phalanx_process import RUN_FILE
from tiny_runs import make_dataset

ALONE = """
import sys
for name in ("phalanx_plan", "phalanx_serve", "phalanx_watch", "starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None  # as if it were not installed
from phalanx.cli.main import exit_code
sys.exit(exit_code(sys.argv[1:]))
"""


def run_alone(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of the core where nothing else is installed."""
    return subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("phalanx.planners", ["phalanx"]),
        ("phalanx.samplers", ["phalanx"]),
        ("phalanx.export_checks", ["phalanx"]),
        ("phalanx.simulations", ["traffic"]),
        ("phalanx.sinks", ["mlflow", "otel", "tensorboard", "trackio", "wandb"]),
    ],
)
def test_every_name_of_a_group_is_found(group: str, names: list[str]) -> None:
    assert plugin_names(group) == names
    assert all(load_plugin(group, name) is not None for name in names)


def test_an_unknown_name_is_none() -> None:
    assert load_plugin("phalanx.sinks", "abacus") is None
    assert load_plugin("phalanx.unknown", "phalanx") is None


def test_another_project_adds_a_command_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.commands]\ngreet = other_commands:command\n")
    (tmp_path / "other_commands.py").write_text(
        "import click\n\n@click.command()\ndef command():\n    click.echo('good day')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = subprocess.run(
        [sys.executable, "-m", "phalanx", "greet"], capture_output=True, text=True, check=False
    )
    assert (said.returncode, said.stdout) == (0, "good day\n")


def test_a_run_is_trained_by_the_core_alone(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    trained = run_alone("train", run_file, "--set", f"run_dir={tmp_path / 'run'}", "--set", "train.steps=2")
    assert trained.returncode == 0, trained.stderr
    assert run_alone("hash", tmp_path / "run").returncode == 0


@pytest.mark.parametrize(("command", "extra"), [("serve", "serve"), ("ui", "watch"), ("plan", "plan")])
def test_a_command_whose_package_is_missing_names_what_to_install(command: str, extra: str) -> None:
    refused = run_alone(command, "--help")
    assert refused.returncode == 1
    assert f"pip install 'phalanx-train[{extra}]'" in refused.stderr


def test_a_tracker_is_refused_by_name_where_no_package_offers_it(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    refused = run_alone("train", run_file, "--set", 'observe.sinks=["tensorboard"]')
    assert refused.returncode != 0
    assert "there is no sink 'tensorboard'" in refused.stderr
