"""Runs on hosts through a real sshd, and in the background of this machine: all or none, left to themselves, with the same bits."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w

from launch.engines.sshd_hosts import SshHosts, missing, ssh_hosts
from phalanx.cli.fleet.join_from_hosts import verified_hosts
from phalanx.cli.launch.submit_to_hosts import hosts_in
from phalanx.fleet.control.fleet_file import write_fleet_file
from phalanx.launch.engines import standing
from phalanx.launch.engines.bare import Started, end, on_host, preflight, start, started_on
from phalanx.launch.engines.hosts import HERE, Host, read_hosts, start_script, unreachable
from phalanx.launch.engines.order import LaunchOrder
from phalanx.launch.engines.submission import Submitted, problems_of
from phalanx.launch.engines.tools import EngineError
from phalanx.run.read import to_table
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx_process import ENVIRONMENT, RUN_FILE, run
from tiny_runs import make_dataset
from watch.why.watched import fleet_file

needs_sshd = pytest.mark.skipif(bool(missing()), reason=f"no sshd can be started: {missing()}")
PATIENCE_S = 280
QUICK = "\n[fleet]\nheartbeat_s = 0.5\nlease_s = 5.0\nconfirm_s = 0.5\nhealth_checks = false\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 3) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "tiny.toml").write_text(RUN_FILE.format(data=make_dataset(folder / "words")) + QUICK)
    return folder


def phalanx(folder: Path, *words: str, fails: bool = False, **environment: str) -> str:
    done = run(words, folder, {**ENVIRONMENT, **environment})
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The hash of the weights of the same run on one rank."""
    return _alone(folder, "plain")


LONG = ["--set", "train.steps=200", "--set", "checkpoint.every_steps=20"]
"""A run that does not end while somebody looks for one of its processes."""


@pytest.fixture(scope="module")
def undisturbed_long(folder: Path) -> str:
    return _alone(folder, "plain-long", *LONG)


def _alone(folder: Path, name: str, *more: str) -> str:
    words = ["train", "tiny.toml", "--ranks", "1", "--json", "--run-dir", name, *more]
    said = next(line for line in phalanx(folder, *words).splitlines() if line.startswith("{"))
    return str(json.loads(said)["weights_sha256"])


def wait_until(true: Callable[[], bool], what: str, run_dir: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline_s:
            logs = "".join(
                f"--- {path}\n{path.read_text()[-3000:]}" for path in (run_dir / "launch").glob("*.log")
            )
            raise TimeoutError(f"{what}\n{logs}")
        time.sleep(0.1)


def weights(run_dir: Path) -> str:
    wait_until((run_dir / "result.json").exists, f"{run_dir} has not finished", run_dir)
    return str(json.loads((run_dir / "result.json").read_bytes())["weights_sha256"])


def step_of(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "fleet.json").read_bytes())["step"])
    except (OSError, ValueError):
        return -1


def processes_of(run_dir: Path) -> list[str]:
    found = subprocess.run(["pgrep", "-af", str(run_dir)], capture_output=True, text=True, check=False).stdout
    return [line for line in found.splitlines() if "pgrep" not in line]


def sets(run_dir: Path) -> list[str]:
    # sshd gives a clean environment.
    path = [f"PYTHONPATH={ENVIRONMENT['PYTHONPATH']}"] if "PYTHONPATH" in ENVIRONMENT else []
    return ["--set", f'run_dir="{run_dir}"', "--set", f"launch.environment={json.dumps(path)}"]


@needs_sshd
def test_a_run_on_hosts_has_the_bits_of_one_machine_and_leaves_nothing_behind(
    folder: Path, hosts: SshHosts, undisturbed: str
) -> None:
    (folder / "hosts.txt").write_text("# three machines\n" + hosts.file("domain=pod-1/rack-1"))
    run_dir = folder / "by-ssh"
    words = ["submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2", "--spares", "1"]
    told = phalanx(folder, *words, *sets(run_dir), **hosts.environment)
    assert "started on 3 hosts" in told
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
    told = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "host-1: its host key is not known" in told
    assert "Connection refused" in told
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
    told = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "lose more of a step than launch.most_lost_ms = 0.001" in told
    assert "level 1 pod-" in told
    (folder / "far.txt").write_text(hosts.file("domain=pod-1"))
    told = phalanx(folder, *words, fails=True, **hosts.environment)
    assert "cannot be verified: host-1, host-2: no domain=" in told
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
    told = phalanx(folder, *grow, fails=True, **hosts.environment)
    assert "lose more of a step than launch.most_lost_ms = 0.001" in told
    by_hand = ["agent", "--run", str(run_dir), "--node", "by-hand", "--domain", "pod-2"]
    assert "node by-hand does not join: these nodes lose more" in phalanx(folder, *by_hand, fails=True)
    (folder / "more.txt").write_text("\n".join([first, near]))
    assert "started on host-2" in phalanx(folder, *grow, **hosts.environment)
    wait_until(lambda: members(run_dir) == {"host-0", "host-2"}, "it does not join", run_dir)
    assert "running on 2 of 2 hosts" in phalanx(folder, "status", str(run_dir), **hosts.environment)
    assert "is cancelled" in phalanx(folder, "cancel", str(run_dir), **hosts.environment)
    wait_until(lambda: not processes_of(run_dir), "processes are left", run_dir)


def members(run_dir: Path) -> set[str]:
    found = json.loads((run_dir / "fleet.json").read_bytes())["members"]
    return {str(one["name"]) for one in found if one["role"] == "member"}


@needs_sshd
def test_another_host_key_is_refused_with_the_remedy(folder: Path, hosts: SshHosts) -> None:
    known = hosts.folder / "known_hosts"
    before = known.read_text()
    (folder / "hosts.txt").write_text(hosts.file())
    first, second, *_ = before.splitlines()
    known.write_text(f"{first.split()[0]} {' '.join(second.split()[1:])}\n{second}\n")
    try:
        told = phalanx(
            *(folder, "submit", "tiny.toml", "--on", "ssh", "--hosts", "hosts.txt", "--nodes", "2"),
            *sets(folder / "never"),
            fails=True,
            **hosts.environment,
        )
    finally:
        known.write_text(before)
    assert "host-0: its host key is not the one that is known" in told
    remedy = shlex.split(told[told.index("ssh-keygen -R") :].splitlines()[0])
    subprocess.run([*remedy, "-f", str(known)], check=True, capture_output=True)
    assert known.read_text() == f"{second}\n{before.splitlines()[2]}\n", (
        "the key of this host is forgotten, of no other"
    )
    known.write_text(before)


def test_a_run_in_the_background_goes_on_when_who_started_it_has_gone(folder: Path, undisturbed: str) -> None:
    run_dir = folder / "background"
    words = ["submit", "tiny.toml", "--on", "local", "--nodes", "2", *sets(run_dir)]
    starter = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -m phalanx {' '.join(map(shlex.quote, words))}; kill -9 -- -$$"],
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "started on this machine, and needs this terminal no more" in (starter.communicate()[0] or "")
    wait_until(lambda: step_of(run_dir) >= 1, "the run does not begin", run_dir)
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


def test_an_agent_that_is_never_told_to_begin_ends_by_itself(tmp_path: Path) -> None:
    order = LaunchOrder("tiny", tmp_path, tmp_path, 2, 0, 0, 0, sys.executable, LaunchSpec())
    host = Host("one", HERE, 0, "127.0.0.1")
    order.folder.mkdir()
    script = start_script(order, host, host, "word").replace("seq 240", "seq 1")
    pid = on_host(host, script).split()[-1]
    log = order.folder / "one.log"
    wait_until(lambda: "not all hosts could be started" in log.read_text(), "it does not end", tmp_path)
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), "it does not end", tmp_path)


def test_hosts_are_read_with_their_ports_names_and_domains() -> None:
    text = "# by rack\n\nme@one:2222 name=n1 domain=pod-1/rack-2 address=10.0.0.1\ntwo # the second\n"
    assert len(read_hosts("one name=a\none:2222 name=b\n")) == 2, "another machine may be behind another port"
    assert read_hosts(text) == [
        Host("n1", "me@one", 2222, "10.0.0.1", ("pod-1", "rack-2")),
        Host("two", "two", 0, "two"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\none\n", "line 2 of the hosts: there is a node one already"),
        (
            "me@one name=a\none:22 name=b\n",
            "line 2 of the hosts: one:22 is the host of node a, and two agents",
        ),
        ("one rack=3\n", "line 1 of the hosts: 'rack' is not known"),
        ("a@b@c\n", "line 1 of the hosts: 'a@b@c' is no host"),
        # What ssh would take for an option of its own.
        ("-oProxyCommand=touch\n", "line 1 of the hosts: '-oProxyCommand=touch' is no host"),
        ("-lroot@one\n", "line 1 of the hosts: '-lroot@one' is no host"),
        ("[::1]:22\n", "an IPv6 address needs a name"),
        # Its log would lie elsewhere.
        ("one name=../../evil\n", "line 1 of the hosts: name=../../evil: a node's name has letters"),
        ("one name=\n", "line 1 of the hosts: name= has no value"),
        ("one name=a name=b\n", "line 1 of the hosts: name= is there twice"),
        ("one:0\n", "line 1 of the hosts: port 0 is not between 1 and 65535"),
        (f"one name={129 * 'n'}\n", "line 1 of the hosts: a node's name has at most 128 characters"),
        ("one:99999\n", "line 1 of the hosts: port 99999 is not between"),
    ],
)
def test_a_line_that_names_no_host_is_refused_with_its_number(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        read_hosts(text)


def test_a_leader_that_the_others_cannot_reach_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    order = LaunchOrder("tiny", tmp_path, tmp_path, 2, 0, 0, 0, sys.executable, LaunchSpec())
    here, there = read_hosts("localhost name=head\ngpu2\n")
    assert preflight(order, [here, there]) == [
        "head: gpu2 cannot reach it at localhost, which is gpu2 itself there: give it an address=HOST that the others know"
    ]
    assert unreachable([there, here]) == unreachable(read_hosts("localhost name=a\n127.0.0.2 name=b\n")) == ""
    assert unreachable(read_hosts("one address=::1\ngpu2\n")).startswith("one: gpu2 cannot reach it at ::1")


def test_what_hosts_cannot_give_is_refused_not_ignored(tmp_path: Path) -> None:
    launch = LaunchSpec(gpus_per_node=8, container_mounts=("/a:/b",))
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, sys.executable, launch)
    said = preflight(order, read_hosts("one\n"))
    assert [line.split(":")[0] for line in said] == [
        "launch.gpus_per_node = 8",
        "launch.container_mounts = ('/a",
    ]


def test_a_host_that_was_given_back_and_joins_again_is_there_once(tmp_path: Path) -> None:
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, "/bin/true", LaunchSpec())
    order.folder.mkdir()
    first, again = Host("first", HERE, 0, "a"), Host("again", HERE, 0, "b")
    started = start(order, [first, again])
    end(
        tmp_path, started, signal.SIGKILL
    )  # or those that have not been told yet would wait on for two minutes
    joined = start(order, [again], joins=True)
    end(tmp_path, joined, signal.SIGKILL)
    assert started_on(tmp_path) == [started[0], *joined]
    assert started[1] != joined[0]


def test_a_host_whose_node_is_in_the_fleet_does_not_join_it_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(to_table(RunSpec())))
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, "/bin/true", LaunchSpec())
    order.folder.mkdir()
    fleet = fleet_file(0.0)
    there = [asdict(Started(Host(one.name, f"me@{one.name}", 0, "a"), 1)) for one in fleet.members]
    (order.folder / "hosts.json").write_text(json.dumps(there))
    write_fleet_file(tmp_path, fleet)
    (tmp_path / "more.txt").write_text(f"you@{fleet.members[0].name}:22 name=other\n")
    made = Submitted("ssh", "2 hosts", "tiny", 2, 0, 0.0, str(tmp_path))
    with pytest.raises(EngineError, match="names 0 hosts that are not in the fleet, and 1 are to join"):
        verified_hosts(tmp_path, made, tmp_path / "more.txt", 1)


def test_it_is_not_waited_for_ever_for_hosts_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "_SILENT_S", 0.0)
    folder = tmp_path / "launch"
    folder.mkdir()
    nobody = {"name": "a", "destination": "127.0.0.1", "port": 1, "address": "127.0.0.1", "domain": []}
    (folder / "hosts.json").write_text(json.dumps([{"host": nobody, "pid": 2**22}]))
    made = Submitted("ssh", "1 hosts", "tiny", 1, 0, 0.0, str(tmp_path))
    told = standing.sentence(tmp_path, made)
    assert told is not None
    assert told.startswith("perhaps running: 1 of 1 hosts do not answer (a: ")
    with pytest.raises(
        EngineError, match=re.escape(f"or remove {folder / 'hosts.json'} if they are gone for good")
    ):
        standing.wait_until_ended(tmp_path, made, 0.0)


@pytest.mark.parametrize(
    ("engine", "nodes", "refused"),
    [("ssh", 1, False), ("slurm", 1, True), ("local", 1, True), ("local", 0, True)],
)
def test_what_another_engine_would_ignore_is_refused(engine: str, nodes: int, refused: bool) -> None:
    launch = LaunchSpec(hosts="hosts.txt", namespace="research")
    spec = RunSpec(fleet=FleetSpec(nodes=nodes), launch=launch)
    named = [problem.path for problem in problems_of(spec, engine)]
    assert ("launch.hosts" in named) == refused
    assert "launch.namespace" in named


@pytest.mark.parametrize("strict", [(), ("set -eu",)], ids=["as it is", "in a strict shell"])
def test_a_host_that_cannot_write_into_the_run_directory_is_refused(
    strict: tuple[str, ...], tmp_path: Path
) -> None:
    # As on a full disk: files can be made, and nothing be written into them.
    full = LaunchSpec(prologue=("trap '' XFSZ; ulimit -f 0", *strict))
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, sys.executable, full)
    (said,) = preflight(order, [Host("this-machine", HERE, 0, "127.0.0.1")])
    assert f"cannot write into {order.folder}: its disk is full, or it is mounted read-only" in said
    assert [path.name for path in order.folder.iterdir()] == ["nonce"]


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
    told = phalanx(folder, *words, fails=True)
    assert "fleet.nodes + fleet.spares = 2, and there are 1 hosts" in told
    assert "launch.time_limit = '1h': there is no scheduler to ask" in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(128, 256)), "is no text"),
        (b"\xef\xbb\xbf# by Windows\r\n", "names no host"),
        (None, "cannot read"),
    ],
)
def test_a_file_of_hosts_that_is_none_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, sys.executable, LaunchSpec())
    path = tmp_path / "hosts"
    if content is None:
        path = Path("/dev/zero")  # it has no end
    else:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=message):
        hosts_in(order, str(path))
