"""The core works without the packages beside it, and finds what other projects add."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx_process
from phalanx.plugins import load_plugin, plugin_names
from phalanx_process import ENVIRONMENT, RUN_FILE, last_json
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
        ("phalanx.engines", ["kubernetes", "local", "slurm", "ssh"]),
        ("phalanx.sinks", ["mlflow", "otel", "tensorboard", "trackio", "wandb"]),
    ],
)
def test_every_name_of_a_group_is_found(group: str, names: list[str]) -> None:
    assert plugin_names(group) == names
    assert all(load_plugin(group, name) is not None for name in names)


def test_an_unknown_name_is_none() -> None:
    assert load_plugin("phalanx.sinks", "abacus") is None
    assert load_plugin("phalanx.unknown", "phalanx") is None


def other_project(folder: Path, entry_points: str, code: str) -> dict[str, str]:
    """An environment in which another project is installed, whose module is ``other_project``."""
    info = folder / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / "other_project.py").write_text(code)
    return {**ENVIRONMENT, "PYTHONPATH": f"{folder}:{ENVIRONMENT.get('PYTHONPATH', '')}"}


def run_with(environment: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in an environment; it is forked, with nothing of another project imported."""
    return phalanx_process.run([*map(str, words)], Path.cwd(), environment)


def test_another_project_adds_a_command_by_an_entry_point(tmp_path: Path) -> None:
    code = "import click\n\n@click.command()\ndef command():\n    click.echo('good day')\n"
    environment = other_project(tmp_path, "[phalanx.commands]\ngreet = other_project:command\n", code)
    said = run_with(environment, "greet")
    assert (said.returncode, said.stdout) == (0, "good day\n")


TRACKER = """
from pathlib import Path
from phalanx.observe.sink_registry import Vendor

class Lines:
    def __init__(self, directory, run):
        self.file = Path(directory) / "lines.txt"
    def holds(self, event):
        return False
    def write(self, event):
        with self.file.open("a") as file:
            file.write(type(event.body).__name__)
    def close(self):
        pass

VENDOR = Vendor("json", Lines)
"""


def test_another_project_adds_a_tracker_that_a_run_file_names(tmp_path: Path) -> None:
    environment = other_project(tmp_path, "[phalanx.sinks]\nlines = other_project:VENDOR\n", TRACKER)
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    run = tmp_path / "run"
    trained = run_with(
        *(environment, "train", run_file, "--set", f"run_dir={run}", "--set", "train.steps=2"),
        *("--set", 'observe.sinks=["lines"]'),
    )
    assert trained.returncode == 0, trained.stderr
    assert (run / "lines.txt").read_text()


OBSERVER = """
from phalanx.train.lifecycle.observers import Observer

with open({imports!r}, "a") as file:
    file.write("imported\\n")

class Own(Observer):
    def __init__(self, training):
        pass
    def after_step(self, end):
        {body}
"""


def test_an_observer_is_imported_by_training_and_by_no_command_that_reads(tmp_path: Path) -> None:
    imports, run = tmp_path / "imports.txt", tmp_path / "run"
    code = OBSERVER.format(imports=str(imports), body="pass")
    environment = other_project(tmp_path, "[phalanx.observers]\nown = other_project:Own\n", code)
    run_file = tmp_path / "run.toml"
    observed = '\n[observe]\nobservers = ["own"]\n\n[runtime]\n'
    text = RUN_FILE.format(data=make_dataset(tmp_path / "data")).replace("\n[runtime]\n", observed)
    run_file.write_text(text)
    trained = run_with(
        *(environment, "train", run_file, "--set", f"run_dir={run}", "--set", "train.steps=2", "--ranks", "2")
    )
    assert trained.returncode == 0, trained.stderr
    assert imports.read_text().splitlines() == ["imported"] * 2  # once on each rank
    for words in (
        ["status"],
        ["why"],
        ["show"],
        ["spec"],
        ["goodput"],
        ["ranks"],
        ["hash"],
        ["plan", "--cluster", "h100:8"],
    ):
        reading = run_with(environment, words[0], run, *words[1:])
        assert "Traceback" not in reading.stderr, words
    assert len(imports.read_text().splitlines()) == 2


def test_an_observer_that_fails_ends_the_run_which_resumes_without_it(tmp_path: Path) -> None:
    code = OBSERVER.format(imports=str(tmp_path / "imports.txt"), body="assert end.step < 5, 'too much'")
    environment = other_project(tmp_path, "[phalanx.observers]\nown = other_project:Own\n", code)
    run_file, run = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    words = ["train", run_file, "--set", f"run_dir={run}", "--set", "train.steps=6"]
    failed = run_with(environment, *words, "--set", 'observe.observers=["own"]')
    assert failed.returncode == 1
    assert "the observer 'own' failed in after_step of step 5: AssertionError: too much (" in failed.stderr
    assert f"{tmp_path / 'other_project.py'}, line 11); mend it, or leave it out" in failed.stderr
    resumed = run_with(environment, *words, "--json")
    assert resumed.returncode == 0, resumed.stderr
    alone = run_with(environment, *words, "--set", f"run_dir={tmp_path / 'alone'}", "--json")
    assert last_json(resumed)["weights_sha256"] == last_json(alone)["weights_sha256"]


def test_an_observer_that_no_package_offers_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    environment = other_project(tmp_path, "[phalanx.observers]\nmargin = other_project:Own\n", "")
    run_file, run = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    words = [run_file, "--set", 'observe.observers=["margn"]', "--set", f"run_dir={run}"]
    refused = run_with(environment, "train", *words)
    assert refused.returncode != 0
    assert "observe.observers: 'margn' is not known" in refused.stderr
    assert "did you mean 'margin'" in refused.stderr
    assert not run.exists()
    refused = run_with(environment, "submit", *words, "--on", "local")
    assert "observe.observers: 'margn' is not known" in refused.stderr


def test_another_project_adds_an_engine_whose_runs_the_commands_follow(tmp_path: Path) -> None:
    code = "import dataclasses\nfrom phalanx.launch.engines.hosts_engine import LOCAL\nENGINE = dataclasses.replace(LOCAL, name='mine')\n"
    environment = other_project(tmp_path, "[phalanx.engines]\nmine = other_project:ENGINE\n", code)
    run_file, run = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    assert "[kubernetes|local|mine|slurm|ssh]" in run_with(environment, "submit", "--help").stdout
    submitted = run_with(environment, "submit", run_file, "--on", "mine", "--set", f"run_dir={run}")
    assert submitted.returncode == 0, submitted.stderr
    cancelled = run_with(environment, "cancel", run, "--now")
    assert cancelled.stdout.startswith("run on this machine (mine)"), cancelled.stderr
    assert run_with(environment, "status", run).stdout.startswith("run on this machine (mine): ended")
    alone = run_with(ENVIRONMENT, "cancel", run)
    assert "the engine 'mine' is not known" in alone.stderr
    assert f"remove {run / 'launch' / 'submitted.json'} if nothing of it runs" in alone.stderr


def test_an_engine_that_cannot_be_loaded_hides_no_other_run(tmp_path: Path) -> None:
    environment = other_project(
        tmp_path, "[phalanx.engines]\nbroken = other_project:x\n", "import no_such_module\n"
    )
    (tmp_path / "run" / "launch").mkdir(parents=True)
    refused = run_with(environment, "cancel", tmp_path / "run")
    assert refused.returncode == 1
    assert "broken" not in refused.stderr


def test_a_misspelled_engine_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data="words"))
    refused = run_with(ENVIRONMENT, "submit", run_file, "--set", "launch.engine=slrum")
    assert refused.returncode == 1
    assert "launch.engine: 'slrum' is not known" in refused.stderr
    assert "did you mean 'slurm'" in refused.stderr


@pytest.mark.parametrize("words", [["greet"], ["sinks", "fill", "RUN", "--sink", "lines"]])
def test_a_plugin_that_cannot_be_loaded_is_named_with_its_package(tmp_path: Path, words: list[str]) -> None:
    points = "[phalanx.commands]\ngreet = other_project:x\n[phalanx.sinks]\nlines = other_project:x\n"
    environment = other_project(tmp_path, points, "import no_such_module\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(RUN_FILE.format(data="words"))
    refused = run_with(environment, *(str(run) if word == "RUN" else word for word in words))
    assert refused.returncode == 1
    assert "of the package other cannot be loaded" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_words_are_completed_without_the_packages_beside_the_core() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", ALONE.replace("from phalanx", "sys.argv[0] = 'phalanx'\nfrom phalanx", 1)],
        env={
            **os.environ,
            "COMP_WORDS": "phalanx s",
            "COMP_CWORD": "1",
            "_PHALANX_COMPLETE": "bash_complete",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in completed.stderr


def test_a_run_is_trained_by_the_core_alone(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    trained = run_alone("train", run_file, "--set", f"run_dir={tmp_path / 'run'}", "--set", "train.steps=2")
    assert trained.returncode == 0, trained.stderr
    assert run_alone("hash", tmp_path / "run").returncode == 0


@pytest.mark.parametrize("command", ["serve", "ui", "plan"])
def test_a_command_whose_package_is_missing_names_what_to_install(command: str) -> None:
    refused = run_alone(command, "--help")
    assert refused.returncode == 1
    assert "pip install --force-reinstall --no-deps phalanx-train" in refused.stderr


def test_a_command_that_lacks_a_library_names_the_extra(tmp_path: Path) -> None:
    code = ALONE.replace('"phalanx_plan", "phalanx_serve", "phalanx_watch", ', "")
    refused = subprocess.run(
        [sys.executable, "-c", code, "ui", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "pip install 'phalanx-train[watch]'" in refused.stderr


def test_a_tracker_is_refused_by_name_where_no_package_offers_it(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    refused = run_alone("train", run_file, "--set", 'observe.sinks=["tensorboard"]')
    assert refused.returncode != 0
    assert "the sink 'tensorboard' is not known: nothing here offers one" in refused.stderr
