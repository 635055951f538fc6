"""``phalanx agent``: one command on every node."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from free_ports import free_port
from phalanx.cli.fleet.agent import _wait_for
from phalanx.cli.fleet.agent import agent_command as command
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, fleet_file, read_fleet_file
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.succession import first_claim
from phalanx.run.directory.paths import RunDirectory
from phalanx_process import ENVIRONMENT, last_json, run, start


def seen_in(run_dir: Path) -> FleetFile:
    """fleet.json; one of a fleet that has computed nothing while there is none."""
    try:
        return read_fleet_file(run_dir)
    except FleetFileError:
        settings = CoreSettings(Formation(1, (1,)), 1)
        state = initial_state(settings, 0.0)
        return fleet_file(state, "", "", first_claim(state, "", ""), frozenset(), Counter(), 0)


def wait_until(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_agents_with_a_run_file_find_each_other_and_train(
    folder: Path, result: dict[str, object], tmp_path: Path
) -> None:
    where = f"127.0.0.1:{free_port()}"
    sets = ["--set", "train.steps=6", "--set", f'run_dir="{tmp_path}/run"', "--set", "fleet.nodes=2"]
    agent_words = ["agent", "--run", str(folder / "tiny.toml"), "--coordinator", where, *sets]
    follower = start([*agent_words, "--node", "b", "--no-lead"], tmp_path)
    leader = last_json(run([*agent_words, "--node", "a", "--json"], tmp_path))
    assert follower.wait(timeout=240) == 0
    assert leader["weights_sha256"] == result["weights_sha256"]
    seen = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert sorted(member["name"] for member in seen["members"]) == ["a", "b"]


@pytest.mark.slow
def test_the_leading_machine_is_lost_and_comes_back_and_the_weights_are_those_of_the_undisturbed_run(
    folder: Path, tmp_path: Path
) -> None:
    where, path = f"127.0.0.1:{free_port()}", tmp_path / "run"
    sets = [
        "--set",
        "train.steps=150",
        *("--set", "fleet.succession_s=5", "--set", "fleet.lease_s=5", "--set", "fleet.heartbeat_s=1"),
    ]
    undisturbed = last_json(run(["train", str(folder / "tiny.toml"), *sets, "--json"], tmp_path))
    sets += ["--set", f'run_dir="{path}"', "--set", "fleet.nodes=3"]
    agent_words = ["agent", "--run", str(folder / "tiny.toml"), "--coordinator", where, *sets]
    followers = [start([*agent_words, "--node", name, "--no-lead"], tmp_path) for name in "bc"]
    leader = start([*agent_words, "--node", "a"], tmp_path)
    wait_until(lambda: seen_in(path).step >= 20)
    leader.kill()  # and the kernel ends its coordinator, agent and workers with it
    leader.wait()
    wait_until(lambda: seen_in(path).reign >= 2)
    again = run([*agent_words, "--node", "a"], tmp_path)
    assert again.returncode == 0
    assert re.search(r"leads this run now, in reign \d", again.stderr)
    assert [follower.wait(timeout=120) for follower in followers] == [0, 0]
    final = RunDirectory(path).finished_result()
    assert final is not None
    assert final.weights_sha256 == undisturbed["weights_sha256"]
    assert any("leads the fleet from now on" in happening.text for happening in seen_in(path).happenings)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_that_is_laid_anew_on_fewer_nodes_has_the_weights_of_the_undisturbed_run(
    folder: Path, tmp_path: Path
) -> None:
    where, path = f"127.0.0.1:{free_port()}", tmp_path / "run"
    sets = ["--set", "train.steps=150", "--set", "parallel.pipeline=2"]
    sets += ["--set", "model.tie_embeddings=false", "--set", "checkpoint.every_steps=1000"]
    undisturbed = last_json(
        run(["train", str(folder / "tiny.toml"), *sets, "--ranks", "2", "--json"], tmp_path)
    )
    sets += ["--set", f'run_dir="{path}"', "--set", "fleet.nodes=4", "--set", "fleet.succession_s=0"]
    sets += ["--set", "fleet.lease_s=5", "--set", "fleet.heartbeat_s=0.5", "--set", "fleet.confirm_s=0.5"]
    sets += ["--set", "launch.unit=2", "--set", 'launch.order="pipeline"']
    agent_words = ["agent", "--run", str(folder / "tiny.toml"), "--coordinator", where, *sets]
    racks = {"a": "rack-1", "b": "rack-2", "c": "rack-1", "d": "rack-2"}

    def begin(node: str, *more: str) -> subprocess.Popen[str]:
        return start(
            [*agent_words, "--node", node, "--domain", "hall", "--domain", racks[node], *more], tmp_path
        )

    leader, *followers = begin("a"), *(begin(node, "--no-lead") for node in "bcd")
    # On a busy machine it may begin with two nodes, and grow.
    wait_until(lambda: len(laid(path)) == 4 and seen_in(path).phase == "running", patience_s=400.0)
    assert laid(path) == ["rack-1", "rack-2", "rack-1", "rack-2"]  # a replica in each rack
    followers[1].kill()  # c: the replica of b and d is whole
    assert [agent.wait(timeout=400) for agent in (leader, followers[0], followers[2])] == [0] * 3
    assert laid(path) == ["rack-2", "rack-2"]
    final = RunDirectory(path).finished_result()
    assert final is not None
    assert final.weights_sha256 == undisturbed["weights_sha256"]


def laid(run_dir: Path) -> list[str]:
    """The rack of each member, by its ranks."""
    seated_members = [member for member in seen_in(run_dir).members if member.ranks]
    return [member.domain[-1] for member in sorted(seated_members, key=lambda member: member.ranks[0])]


DIES_AS_IT_COMMITS = """
import os, re, signal, time
rename = os.rename

def renamed(source, target, **how):
    step = re.fullmatch(r"step-(\\d+)", os.path.basename(str(target)))
    falls = step is not None and int(step[1]) >= 20
    if falls and os.environ["FALLS"] == "before":
        die()
    rename(source, target, **how)
    if falls:
        die()

def die():
    with open(os.environ["DOOMED"]) as file:
        os.kill(int(file.read()), signal.SIGKILL)  # and the kernel ends its coordinator, agent and workers with it
    time.sleep(60)

os.rename = renamed
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_leading_machine_is_lost_before_or_after_the_rename_that_commits_a_checkpoint(
    moment: str, folder: Path, tmp_path: Path
) -> None:
    where, path = f"127.0.0.1:{free_port()}", tmp_path / "run"
    sets = ["--set", "train.steps=60", "--set", "fleet.succession_s=5"]
    undisturbed = last_json(run(["train", str(folder / "tiny.toml"), *sets, "--json"], tmp_path))
    sets += ["--set", "fleet.lease_s=5", "--set", "fleet.heartbeat_s=1"]
    sets += ["--set", f'run_dir="{path}"', "--set", "fleet.nodes=3"]
    agent_words = ["agent", "--run", str(folder / "tiny.toml"), "--coordinator", where, *sets]
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(DIES_AS_IT_COMMITS)
    with Path(tmp_path / "doomed").open("w") as doomed:
        modules = f"{tmp_path / 'modules'}:{ENVIRONMENT.get('PYTHONPATH', '')}"
        changed = {"PYTHONPATH": modules, "DOOMED": doomed.name, "FALLS": moment}
        leader = start([*agent_words, "--node", "a"], tmp_path, {**ENVIRONMENT, **changed})
        doomed.write(str(leader.pid))
    followers = [start([*agent_words, "--node", name, "--no-lead"], tmp_path) for name in "bc"]
    assert leader.wait(timeout=400) == -signal.SIGKILL
    assert [follower.wait(timeout=400) for follower in followers] == [0, 0]
    final = RunDirectory(path).finished_result()
    assert final is not None
    assert final.weights_sha256 == undisturbed["weights_sha256"]
    assert seen_in(path).reign >= 2, "a slow successor may be succeeded too"


def refused(*arguments: str) -> str:
    invocation = CliRunner().invoke(command, [*arguments])
    assert invocation.exit_code == 2
    return " ".join(invocation.output.split())


def test_what_the_nodes_could_not_agree_on_is_asked_for(folder: Path) -> None:
    run_file = str(folder / "tiny.toml")
    assert "run_dir" in refused("--run", run_file, "--coordinator", "head:29400")
    placed = ["--run", run_file, "--set", 'run_dir="runs/x"']
    assert "fleet.nodes=N" in refused(*placed, "--coordinator", "head:29400")
    assert "HOST:PORT" in refused(*placed, "--set", "fleet.nodes=2")
    assert "HOST:PORT" in refused(*placed, "--coordinator", "head")


@pytest.mark.parametrize("name", ["a b", "a/b", "*", 129 * "n"])
def test_what_cannot_be_a_node_s_name_is_refused_before_anything_is_read(name: str) -> None:
    assert "at most 128 characters" in refused("--run", "none.toml", "--node", name)


def test_a_mistake_in_the_run_file_is_explained(folder: Path) -> None:
    done = run(["agent", "--run", "tiny.toml", "--coordinator", "head:1", "--set", "fleet.knots=2"], folder)
    assert done.returncode == 1
    assert "fleet.knots: there is no such field (did you mean nodes?)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_in_which_nobody_has_started_a_run_is_named(tmp_path: Path) -> None:
    invocation = CliRunner().invoke(command, ["--run", str(tmp_path)])
    assert invocation.exit_code != 0
    assert str(tmp_path) in str(invocation.output) + str(invocation.exception)


def test_an_agent_waits_on_while_another_program_listens_where_its_coordinator_will(tmp_path: Path) -> None:
    # Two jobs whose ports are one, on one host: the agents of the later one ended, and its first node waited for them for ever.
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        where = f"127.0.0.1:{foreign.getsockname()[1]}"
        with pytest.raises(
            TimeoutError, match="another program listens there, and nobody has started the run in"
        ):
            _wait_for(where, tmp_path, 0.0, lambda: False)
        (tmp_path / "record.json").write_text('{"attempts": 1}')
        _wait_for(where, tmp_path, 0.0, lambda: False)
