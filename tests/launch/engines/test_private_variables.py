"""Secrets of agents: by name or from a private file, in no script and no file of a run, and masked in runs of older versions."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tomli_w

from launch.engines.slurm_orders import order
from phalanx.launch.engines import bare
from phalanx.launch.engines.engine import engine_named, problems_of
from phalanx.launch.engines.hosts import HERE, Host
from phalanx.launch.engines.order import EngineError, private_exports, private_variables
from phalanx.launch.engines.slurm_script import batch_script
from phalanx.observe.sinks import hyperparameters
from phalanx.run.read import to_table, variable_problems
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx_watch.page.export import exported
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.runs.recorded import compare
from recorded_runs import RecordedRun

SECRET = "SECRETSECRET123"
SPEC = RunSpec(fleet=FleetSpec(nodes=2))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A private file with a key."""
    path = tmp_path / "keys"
    path.write_text(f"# for trackers\nWANDB_API_KEY={SECRET}\n\nAWS_REGION=eu\n")
    path.chmod(0o600)
    return path


# --- the run file holds no secret ------------------------------------------------------------------------


def test_the_value_of_a_secret_in_a_run_file_is_refused_and_not_repeated() -> None:
    spec = dataclasses.replace(
        SPEC, launch=LaunchSpec(environment=(f"WANDB_API_KEY={SECRET}", "NCCL_DEBUG=INFO"))
    )
    (problem,) = problems_of(spec, engine_named("slurm"))
    assert problem.path == "launch.environment"
    assert "WANDB_API_KEY" in str(problem)
    assert SECRET not in str(problem)


@pytest.mark.parametrize("text", ["NCCL_DEBUG=INFO", "WANDB_API_KEY", "GIT_AUTHOR_NAME=me", "HF_TOKEN="])
def test_names_and_harmless_values_are_allowed(text: str) -> None:
    assert list(variable_problems(LaunchSpec(environment=(text,)))) == []


# --- where values come from ------------------------------------------------------------------------------


def test_a_name_takes_the_value_of_the_launching_environment(tmp_path: Path) -> None:
    launch = LaunchSpec(environment=("WANDB_API_KEY", "NCCL_DEBUG=INFO"))
    assert private_variables(launch, tmp_path, {"WANDB_API_KEY": SECRET}) == {"WANDB_API_KEY": SECRET}
    with pytest.raises(EngineError, match=r"launch\.environment: WANDB_API_KEY has no value here: export"):
        private_variables(launch, tmp_path, {})


def test_a_pipe_in_the_place_of_a_private_file_is_refused_and_a_link_to_one_is_read(keys: Path) -> None:
    (keys.parent / "link").symlink_to(keys)
    assert private_variables(LaunchSpec(secrets="link"), keys.parent, {})["WANDB_API_KEY"] == SECRET
    os.mkfifo(keys.parent / "pipe", 0o600)
    with pytest.raises(EngineError, match=r"launch\.secrets: cannot read .*pipe"):
        private_variables(LaunchSpec(secrets="pipe"), keys.parent, {})


def test_a_private_file_gives_its_variables(keys: Path) -> None:
    launch = LaunchSpec(environment=("WANDB_API_KEY",), secrets=keys.name)
    assert private_variables(launch, keys.parent, {}) == {"WANDB_API_KEY": SECRET, "AWS_REGION": "eu"}


@pytest.mark.parametrize(
    ("mode", "line", "message"), [(0o644, "", "chmod 600"), (0o600, "oops", "line 5 of")]
)
def test_a_file_that_others_read_or_that_is_no_list_of_variables_is_refused(
    keys: Path, mode: int, line: str, message: str
) -> None:
    keys.write_text(keys.read_text() + line)
    keys.chmod(mode)
    with pytest.raises(EngineError, match=rf"launch\.secrets: .*{message}"):
        private_variables(LaunchSpec(secrets=str(keys)), keys.parent, {})


# --- no script and no file holds them --------------------------------------------------------------------


def test_a_batch_script_has_the_name_and_not_the_value(keys: Path) -> None:
    launch = LaunchSpec(environment=("WANDB_API_KEY", "X=1"), secrets=str(keys))
    script = batch_script(dataclasses.replace(order(), launch=launch))
    assert SECRET not in script
    assert "${WANDB_API_KEY:?" in script
    assert "export X=1" in script


def test_a_session_on_a_host_gets_the_values_and_no_file_of_the_run_holds_them(
    tmp_path: Path, keys: Path
) -> None:
    asked = dataclasses.replace(
        order(),
        run_dir=tmp_path / "run",
        working_dir=tmp_path,
        launch=LaunchSpec(secrets=str(keys), prologue=('printf %s "$WANDB_API_KEY" > seen',)),
    )
    asked.folder.mkdir(parents=True)
    host = Host("here", HERE, 0, "127.0.0.1")
    started = bare.start(asked, [host])
    bare.end(asked.run_dir, started, bare.signal.SIGKILL)
    assert (tmp_path / "seen").read_text() == SECRET
    (tmp_path / "seen").unlink()
    held = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert held == [keys]


def test_values_are_quoted_for_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ODD_TOKEN", "a b'; rm -rf x")
    exports = private_exports(LaunchSpec(environment=("ODD_TOKEN",)), tmp_path)
    assert exports == """export ODD_TOKEN='a b'"'"'; rm -rf x'\n"""


# --- runs of older versions ------------------------------------------------------------------------------


def test_secrets_in_the_run_file_of_an_older_version_are_masked_wherever_it_is_shown_or_sent(
    tmp_path: Path,
) -> None:
    secret = "plainwords42"
    runs = []
    for name in ("a", "b"):
        run = RecordedRun(tmp_path / name, name, 10)
        run.train(3)
        launch = LaunchSpec(environment=(f"MY_AUTH={secret}{name}", "NCCL_DEBUG=INFO"))
        run.spec = dataclasses.replace(run.spec, launch=launch)
        run.directory.run_file.write_text(tomli_w.dumps(to_table(run.spec)))
        runs.append(run.directory.path)
    pages = PageRuns([tmp_path])
    shown = [
        exported(pages, pages.places()[0]).decode(),
        json.dumps(compare(runs).to_json()),
        json.dumps(hyperparameters(runs[0])),
    ]
    assert all("NCCL_DEBUG=INFO" in text for text in (shown[0], shown[2]))
    assert not any(secret in text for text in shown)
