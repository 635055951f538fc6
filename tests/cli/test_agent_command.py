"""``phalanx agent``: one command on every node."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from click.testing import CliRunner

from phalanx.cli.fleet.agent_command import command
from phalanx_process import last_json, run, start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_agents_with_a_run_file_find_each_other_and_train(
    folder: Path, result: dict[str, object], tmp_path: Path
) -> None:
    where = f"127.0.0.1:{free_port()}"
    sets = ["--set", "train.steps=6", "--set", f'run_dir="{tmp_path}/run"', "--set", "fleet.nodes=2"]
    told = ["agent", "--run", str(folder / "tiny.toml"), "--coordinator", where, *sets]
    follower = start([*told, "--node", "b", "--no-lead"], tmp_path)
    leader = last_json(run([*told, "--node", "a", "--json"], tmp_path))
    assert follower.wait(timeout=60) == 0
    assert leader["weights_sha256"] == result["weights_sha256"]
    seen = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert sorted(member["name"] for member in seen["members"]) == ["a", "b"]


def refused(*arguments: str) -> str:
    found = CliRunner().invoke(command, [*arguments])
    assert found.exit_code == 2
    return " ".join(found.output.split())


def test_what_the_nodes_could_not_agree_on_is_asked_for(folder: Path) -> None:
    run_file = str(folder / "tiny.toml")
    assert "run_dir" in refused("--run", run_file, "--coordinator", "head:29400")
    placed = ["--run", run_file, "--set", 'run_dir="runs/x"']
    assert "fleet.nodes=N" in refused(*placed, "--coordinator", "head:29400")
    assert "HOST:PORT" in refused(*placed, "--set", "fleet.nodes=2")
    assert "HOST:PORT" in refused(*placed, "--coordinator", "head")


def test_a_mistake_in_the_run_file_is_explained(folder: Path) -> None:
    done = run(["agent", "--run", "tiny.toml", "--coordinator", "head:1", "--set", "fleet.knots=2"], folder)
    assert done.returncode == 1
    assert "fleet.knots: there is no such field (did you mean nodes?)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_in_which_nobody_has_started_a_run_is_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(command, ["--run", str(tmp_path)])
    assert found.exit_code != 0
    assert str(tmp_path) in str(found.output) + str(found.exception)
