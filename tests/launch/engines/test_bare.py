"""Runs on hosts through a real sshd, and in the background of this machine: all or none, left to themselves, with the same bits."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.engines.bare_runs import (
    hash_without_fleet,
    members,
    phalanx,
    processes_of,
    sets,
    step_of,
    wait_until,
    weights,
)
from launch.engines.sshd_hosts import SshHosts, missing, ssh_hosts
from phalanx_process import ENVIRONMENT, RUN_FILE
from tiny_runs import make_dataset

pytestmark = pytest.mark.servers
needs_sshd = pytest.mark.skipif(bool(missing()), reason=f"no sshd can be started: {missing()}")
QUICK = "\n[fleet]\nheartbeat_s = 0.5\nlease_s = 5.0\nconfirm_s = 0.5\nhealth_checks = false\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 3) as ssh_servers:
        yield ssh_servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "tiny.toml").write_text(RUN_FILE.format(data=make_dataset(folder / "words")) + QUICK)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The hash of the weights of the same run on one rank."""
    return hash_without_fleet(folder, "plain")


LONG = ["--set", "train.steps=200", "--set", "checkpoint.every_steps=20"]
"""A run that does not end while somebody looks for one of its processes."""


@pytest.fixture(scope="module")
def undisturbed_long(folder: Path) -> str:
    return hash_without_fleet(folder, "plain-long", *LONG)


@needs_sshd
def test_a_run_on_hosts_has_the_bits_of_one_machine_and_leaves_nothing_behind(
    folder: Path, hosts: SshHosts, undisturbed: str
) -> None:
    (folder / "hosts.txt").write_text("# three machines\n" + hosts.file("domain=pod-1/rack-1"))
    run_dir = folder / "by-ssh"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2", "--spares", "1"]
    output = phalanx(folder, *words, *sets(run_dir), **hosts.environment)
    assert "started on 3 hosts" in output
    again = phalanx(folder, *words, *sets(run_dir), fails=True, **hosts.environment)
    assert "is running on 3 of 3 hosts already" in again
    assert weights(run_dir) == undisturbed
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)
    assert "ended; its log is" in phalanx(folder, "status", str(run_dir), **hosts.environment)
    assert "weights" in phalanx(folder, "logs", str(run_dir), **hosts.environment)
    assert "is finished" in phalanx(folder, *words, *sets(run_dir), fails=True, **hosts.environment)


@needs_sshd
@pytest.mark.slow
def test_an_agent_that_is_killed_on_a_host_is_started_again_and_no_spare_is_needed(
    folder: Path, hosts: SshHosts, undisturbed_long: str
) -> None:
    (folder / "hosts.txt").write_text("\n".join(hosts.file().splitlines()[:2]))
    run_dir = folder / "killed-agent"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2", *sets(run_dir)]
    quick = ["--set", "fleet.heartbeat_s=0.5", "--set", "fleet.lease_s=5.0", "--set", "fleet.min_nodes=2"]
    phalanx(folder, *words, *quick, *LONG, **hosts.environment)
    wait_until(lambda: step_of(run_dir) >= 2, "the run does not begin", run_dir)
    (agent,) = [
        line
        for line in processes_of(run_dir)
        if " agent " in line and "--node host-1 " in line and "bash" not in line
    ]
    os.kill(int(agent.split()[0]), signal.SIGKILL)
    log = run_dir / "launch" / "host-1.log"
    wait_until(lambda: "is started again" in log.read_text(), "it is not started again", run_dir)
    assert weights(run_dir) == undisturbed_long
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


@needs_sshd
@pytest.mark.slow
def test_a_run_on_hosts_is_cancelled_with_its_step_saved_and_continued(folder: Path, hosts: SshHosts) -> None:
    (folder / "hosts.txt").write_text(hosts.file())
    run_dir = folder / "cancelled"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2", *sets(run_dir)]
    words += ["--set", "train.steps=100000", "--set", "checkpoint.every_steps=100000"]
    phalanx(folder, *words, **hosts.environment)
    wait_until(lambda: step_of(run_dir) >= 2, "the run does not begin", run_dir)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir), **hosts.environment)
    assert not processes_of(run_dir)
    (saved,) = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")]
    phalanx(folder, *words, **hosts.environment)
    wait_until(lambda: step_of(run_dir) > saved, "the run does not go on", run_dir)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir), "--now", **hosts.environment)
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


@needs_sshd
def test_nothing_is_started_where_one_host_cannot_and_every_reason_is_said(
    folder: Path, hosts: SshHosts
) -> None:
    run_dir = folder / "never"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "bad.txt", "--nodes", "3", *sets(run_dir)]
    bad = hosts.file().splitlines()
    (folder / "bad.txt").write_text(
        "\n".join([bad[0], bad[1].replace("@127.0.0.1", "@localhost"), "nobody@127.0.0.1:9"])
    )
    output = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "host-1: its host key is not known" in output
    assert "Connection refused" in output
    few = phalanx(folder, *words, "--spares", "2", "--partition", "big", fails=True, **hosts.environment)
    assert "fleet.nodes + fleet.spares = 5, and there are 3 hosts" in few
    assert "launch.partition = 'big': there is no scheduler to ask" in few
    assert not processes_of(run_dir)


FAR = ["--set", 'launch.shares=["level 1=0.00001"]', "--set", "launch.most_lost_ms=0.001"]
"""Next to nothing may leave a pod."""


@needs_sshd
def test_hosts_that_lose_more_of_a_step_than_they_may_are_not_trained_on(
    folder: Path, hosts: SshHosts
) -> None:
    run_dir = folder / "too-far"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "far.txt", "--nodes", "2", *sets(run_dir), *FAR]
    (folder / "far.txt").write_text(hosts.file("domain=pod-1", "domain=pod-2", "domain=pod-2"))
    output = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "lose more of a step than launch.most_lost_ms = 0.001" in output
    assert "level 1 pod-" in output
    (folder / "far.txt").write_text(hosts.file("domain=pod-1"))
    output = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "cannot be verified: host-1, host-2: no domain=" in output
    assert not processes_of(run_dir)


@needs_sshd
@pytest.mark.slow
def test_hosts_join_a_run_that_trains_if_they_are_near_enough_and_leave_nothing_behind(
    folder: Path, hosts: SshHosts
) -> None:
    run_dir = folder / "growing"
    first, far, near = hosts.file("domain=pod-1", "domain=pod-2", "domain=pod-1").splitlines()
    (folder / "first.txt").write_text(first)
    words = [
        "submit",
        "tiny.toml",
        "--on",
        "ssh",
        "--hosts",
        "first.txt",
        "--nodes",
        "1",
        *sets(run_dir),
        *FAR,
    ]
    words += ["--set", "train.steps=100000", "--set", "checkpoint.every_steps=100000"]
    assert "no other nodes would be faster" in phalanx(folder, *words, **hosts.environment)
    wait_until(lambda: step_of(run_dir) >= 2, "the run does not begin", run_dir)
    grow = ["fleet", "grow", str(run_dir), "--by", "1", "--hosts", "more.txt"]
    (folder / "more.txt").write_text("\n".join([first, far]))
    output = phalanx(folder, *grow, fails=True, **hosts.environment)
    assert "lose more of a step than launch.most_lost_ms = 0.001" in output
    by_hand = ["agent", "--run", str(run_dir), "--node", "by-hand", "--domain", "pod-2"]
    assert "node by-hand does not join: these nodes lose more" in phalanx(folder, *by_hand, fails=True)
    (folder / "more.txt").write_text("\n".join([first, near]))
    assert "started on host-2" in phalanx(folder, *grow, **hosts.environment)
    wait_until(lambda: members(run_dir) == {"host-0", "host-2"}, "it does not join", run_dir)
    assert "running on 2 of 2 hosts" in phalanx(folder, "status", str(run_dir), **hosts.environment)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir), **hosts.environment)
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


@needs_sshd
def test_another_host_key_is_refused_with_the_remedy(folder: Path, hosts: SshHosts) -> None:
    known_hosts = hosts.folder / "known_hosts"
    before = known_hosts.read_text()
    (folder / "hosts.txt").write_text(hosts.file())
    first, second, *_ = before.splitlines()
    known_hosts.write_text(f"{first.split()[0]} {' '.join(second.split()[1:])}\n{second}\n")
    try:
        output = phalanx(
            *(folder, "submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2"),
            *sets(folder / "never"),
            fails=True,
            **hosts.environment,
        )
    finally:
        known_hosts.write_text(before)
    assert "host-0: its host key is not the one that is known" in output
    remedy = shlex.split(output[output.index("ssh-keygen -R") :].splitlines()[0])
    subprocess.run([*remedy, "-f", str(known_hosts)], check=True, capture_output=True)
    assert known_hosts.read_text() == f"{second}\n{before.splitlines()[2]}\n", (
        "the key of this host is forgotten, of no other"
    )
    known_hosts.write_text(before)


def test_a_run_in_the_background_goes_on_when_who_started_it_has_gone(folder: Path, undisturbed: str) -> None:
    run_dir = folder / "background"
    words = ["submit", "tiny.toml", "--on", "local", "--nodes", "1", *sets(run_dir)]
    starter = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -m phalanx {' '.join(map(shlex.quote, words))}; kill -9 -- -$$"],
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "started on this machine, and needs this terminal no more" in (starter.communicate()[0] or "")
    # Twenty steps may be over before a busy machine looks; they have not begun yet.
    assert "running on this machine" in phalanx(folder, "status", str(run_dir))
    assert weights(run_dir) == undisturbed


@pytest.mark.slow
def test_a_launcher_that_is_killed_in_the_background_is_started_again_and_its_run_goes_on(
    folder: Path, undisturbed_long: str
) -> None:
    run_dir = folder / "launcher-killed"
    phalanx(folder, "submit", "tiny.toml", "--on", "local", "--nodes", "2", *sets(run_dir), *LONG)
    saved = run_dir / "checkpoints"
    wait_until(lambda: any(saved.glob("step-*")), "nothing is saved", run_dir)
    (launcher,) = [line for line in processes_of(run_dir) if " train " in line and "bash" not in line]
    os.kill(int(launcher.split()[0]), signal.SIGKILL)
    log = run_dir / "launch" / "this-machine.log"
    wait_until(lambda: "is started again" in log.read_text(), "it is not started again", run_dir)
    assert weights(run_dir) == undisturbed_long
    assert json.loads((run_dir / "record.json").read_bytes())["attempts"] == 2
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


@pytest.mark.slow
def test_a_run_without_a_fleet_is_cancelled_in_the_background(folder: Path) -> None:
    run_dir = folder / "single"
    words = ["submit", "tiny.toml", "--on", "local", *sets(run_dir), "--set", "train.steps=100000"]
    phalanx(folder, *words, "--set", "checkpoint.every_steps=100000")
    wait_until(lambda: "2" in _logged(run_dir), "the run does not begin", run_dir)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir))
    assert list((run_dir / "checkpoints").glob("step-*"))
    phalanx(folder, *words)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir), "--now")
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


def _logged(run_dir: Path) -> str:
    path = run_dir / "events.jsonl"
    return path.read_text() if path.exists() and '"step"' in path.read_text() else ""


def test_a_dry_run_refuses_what_the_hosts_could_never_do(folder: Path) -> None:
    (folder / "one.txt").write_text("gpu-1\n")
    words = [
        "submit",
        "tiny.toml",
        "--on",
        "ssh",
        "--hosts",
        "one.txt",
        "--nodes",
        "2",
        "--time",
        "1h",
        "--dry-run",
    ]
    output = phalanx(folder, *words, fails=True)
    assert "fleet.nodes + fleet.spares = 2, and there are 1 hosts" in output
    assert "launch.time_limit = '1h': there is no scheduler to ask" in output
