"""A list of hosts and the scripts that check, start and end the sessions of a run on them; what they cannot give is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from shutil import which

import pytest
import tomli_w
from click.testing import CliRunner

from launch.engines.bare_runs import processes_of, wait_until
from phalanx.cli.launch import submit
from phalanx.cli.launch.joining_hosts import hosts_in, verified_hosts
from phalanx.fleet.control.fleet_file import write_fleet_file
from phalanx.launch.engines.bare import Started, end, on_all, on_host, preflight, start, started_on
from phalanx.launch.engines.engine import engine_named, problems_of, wait_until_ended
from phalanx.launch.engines.hosts import HERE, Host, network_of, read_hosts, start_script, unreachable
from phalanx.launch.engines.order import EngineError, LaunchOrder
from phalanx.launch.engines.submission import Submitted, read_record
from phalanx.launch.placing import TopologyError
from phalanx.run.read import to_table
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx_process import RUN_FILE
from watch.why.watched import fleet_file


def test_an_agent_that_is_never_told_to_begin_ends_by_itself(tmp_path: Path) -> None:
    order = LaunchOrder("tiny", tmp_path, tmp_path, 2, 0, 0, 0, sys.executable, LaunchSpec())
    host = Host("one", HERE, 0, "127.0.0.1")
    order.folder.mkdir()
    script = start_script(order, host, host, "word").replace("seq 240", "seq 1")
    pid = on_host(host, script).split()[-1]
    log = order.folder / "one.log"
    wait_until(lambda: "not all hosts could be started" in log.read_text(), "it does not end", tmp_path)
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), "it does not end", tmp_path)


def test_a_session_that_is_asked_to_end_more_than_once_hears_of_it_once(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    signal_log = tmp_path / "heard"
    saves = f"trap 'echo heard >> {signal_log}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    session = subprocess.Popen(["bash", "-c", saves, str(tmp_path)], start_new_session=True)
    started = [Started(Host("one", HERE, 0, "127.0.0.1"), session.pid)]
    try:
        wait_until((tmp_path / "ready").exists, "it does not begin", tmp_path)
        for _ in range(3):
            assert end(tmp_path, started, signal.SIGTERM) == (started, [])
        wait_until(
            lambda: signal_log.exists() and signal_log.read_text().endswith("\n"),
            "it has not heard",
            tmp_path,
        )
        assert end(tmp_path, started, None) == (started, [])
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()
    assert signal_log.read_text() == "heard\n"
    assert end(tmp_path, started, signal.SIGTERM) == ([], [])


def test_a_session_is_there_when_its_number_is_known(tmp_path: Path) -> None:
    for name, does in (("sleeps", "exec sleep 900"), ("setsid", f'sleep 0.3; exec {which("setsid")} "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slow = LaunchSpec(prologue=(f'PATH="{tmp_path}:$PATH"',))
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, str(tmp_path / "sleeps"), slow)
    order.folder.mkdir()
    started = start(order, [Host("one", HERE, 0, "127.0.0.1")])
    try:
        assert os.getpgid(started[0].pid) == started[0].pid, "a signal to the session would reach nobody"
        assert end(tmp_path, started, None) == (started, [])
    finally:
        end(tmp_path, started, signal.SIGKILL)
    wait_until(lambda: not end(tmp_path, started, None)[0], "its session does not end", tmp_path)


def test_an_agent_is_not_started_again_after_its_session_was_asked_to_end_between_two_starts(
    tmp_path: Path,
) -> None:
    program = tmp_path / "dies"
    program.write_text("#!/bin/bash\necho start >> starts\nkill -9 $$\n")
    program.chmod(0o755)
    # The pause is long enough to send the signal within it on a busy machine.
    order = LaunchOrder(
        "tiny", tmp_path, tmp_path, 1, 0, 0, 0, str(program), LaunchSpec(), restart_pauses_s=(20,)
    )
    order.folder.mkdir()
    started = start(order, [Host("one", HERE, 0, "127.0.0.1")])
    log = order.folder / "one.log"
    wait_until(lambda: "is started again in 20 s" in log.read_text(), "it does not die", tmp_path)
    end(tmp_path, started, signal.SIGTERM)
    wait_until(lambda: not end(tmp_path, started, None)[0], "its session does not end", tmp_path)
    assert (tmp_path / "starts").read_text() == "start\n"


@pytest.mark.parametrize("unwritable", ["submitted.json", "hosts.json", "go"])
def test_a_run_of_which_nothing_could_be_noted_is_not_left_running(
    unwritable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a disk that fills up meanwhile: a file cannot be put where a folder is.
    folder = tmp_path / "run" / "launch"
    (folder / unwritable).mkdir(parents=True)
    earlier = Submitted("local", "this machine", "tiny", 0, 0, 0.0, str(tmp_path), "this-machine")
    if unwritable != "submitted.json":
        (folder / "submitted.json").write_text(json.dumps(asdict(earlier)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="words"))
    words = ["tiny.toml", "--on", "local", "--set", f'run_dir="{tmp_path}/run"']
    invocation = CliRunner().invoke(submit.submit_command, words)
    assert invocation.exit_code == 1
    assert "cannot write" in invocation.output, invocation.exception
    # A killed session takes a while to end on a busy machine. One that nobody kills waits for its start for two minutes, twice as long as this.
    wait_until(lambda: not processes_of(tmp_path / "run"), "something runs", tmp_path / "run", timeout_s=60.0)
    assert read_record(tmp_path / "run") == (None if unwritable == "submitted.json" else earlier)


def test_hosts_that_were_not_reached_yet_are_left_alone_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [Host(f"node-{number}", HERE, 0, "127.0.0.1") for number in range(100)]
    reached, is_over = list[str](), threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def ended(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        is_over.set()
        shutdown(pool, wait, cancel_futures=cancel_futures)

    def reach(host: Host) -> None:
        reached.append(host.name)
        if host is hosts[0]:
            raise KeyboardInterrupt
        is_over.wait()

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", ended)
    with pytest.raises(KeyboardInterrupt):
        on_all(hosts, reach)
    assert len(reached) < len(hosts)


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
    problems = preflight(order, read_hosts("one\n"))
    assert [line.split(":")[0] for line in problems] == [
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
    there = [asdict(Started(Host(member.name, f"me@{member.name}", 0, "a"), 1)) for member in fleet.members]
    (order.folder / "hosts.json").write_text(json.dumps(there))
    write_fleet_file(tmp_path, fleet)
    (tmp_path / "more.txt").write_text(f"you@{fleet.members[0].name}:22 name=other\n")
    made = Submitted("ssh", "2 hosts", "tiny", 2, 0, 0.0, str(tmp_path))
    with pytest.raises(EngineError, match="names 0 hosts that are not in the fleet, and 1 are to join"):
        verified_hosts(tmp_path, made, tmp_path / "more.txt", 1)


def test_it_is_not_waited_for_ever_for_hosts_that_do_not_answer(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    nobody = {"name": "a", "destination": "127.0.0.1", "port": 1, "address": "127.0.0.1", "domain": []}
    (folder / "hosts.json").write_text(json.dumps([{"host": nobody, "pid": 2**22}]))
    made = Submitted("ssh", "1 hosts", "tiny", 1, 0, 0.0, str(tmp_path))
    run = engine_named("ssh").submitted(tmp_path, made)
    standing = run.standing()
    assert standing is not None
    assert standing.doing.startswith("perhaps running: 1 of 1 hosts do not answer (a: ")
    with pytest.raises(
        EngineError, match=re.escape(f"or remove {folder / 'hosts.json'} if they are gone for good")
    ):
        wait_until_ended(run, 0.0, silent_timeout_s=0.0)


@pytest.mark.parametrize(
    ("engine", "nodes", "refused"),
    [("ssh", 1, False), ("slurm", 1, True), ("local", 1, True), ("local", 0, True)],
)
def test_what_another_engine_would_ignore_is_refused(engine: str, nodes: int, refused: bool) -> None:
    launch = LaunchSpec(hosts="hosts.txt", namespace="research")
    spec = RunSpec(fleet=FleetSpec(nodes=nodes), launch=launch)
    named = [problem.path for problem in problems_of(spec, engine_named(engine))]
    assert ("launch.hosts" in named) == refused
    assert "launch.namespace" in named


@pytest.mark.parametrize("strict", [(), ("set -eu",)], ids=["as it is", "in a strict shell"])
def test_a_host_that_cannot_write_into_the_run_directory_is_refused(
    strict: tuple[str, ...], tmp_path: Path
) -> None:
    # As on a full disk: files can be made, and nothing be written into them.
    full = LaunchSpec(prologue=("trap '' XFSZ; ulimit -f 0", *strict))
    order = LaunchOrder("tiny", tmp_path, tmp_path, 1, 0, 0, 0, sys.executable, full)
    (problem,) = preflight(order, [Host("this-machine", HERE, 0, "127.0.0.1")])
    assert f"cannot write into {order.folder}: its disk is full, or it is mounted read-only" in problem
    assert [path.name for path in order.folder.iterdir()] == ["nonce"]


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


def host_in(name: str, *domain: str) -> Host:
    return Host(name, name, 0, name, domain)


def test_the_network_of_hosts_has_a_level_for_each_part_of_their_domains() -> None:
    network = network_of(
        [host_in("a", "pod-1", "rack-1"), host_in("b", "pod-1", "rack-2"), host_in("c", "pod-2")]
    )
    assert [level.name for level in network.levels] == ["level 1", "level 2"]
    assert network.nodes["a"] == ("pod-1", "rack-1")
    assert network.nodes["c"][0] == "pod-2"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([host_in("a"), host_in("b")], "no host has its place in the network"),
        ([host_in("a", "pod-1"), host_in("b")], "b: no domain=, and other hosts have one"),
    ],
)
def test_hosts_of_which_it_is_not_known_where_they_are_have_no_network(
    hosts: list[Host], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        network_of(hosts)
