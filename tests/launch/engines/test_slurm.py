"""Runs under a real Slurm of virtual nodes: submitted, killed, preempted, cancelled, with the hash of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.engines.slurm_cluster import SlurmCluster, missing, slurm_cluster
from launch.engines.slurm_runs import (
    ENDLESS,
    Phalanx,
    fleet_of,
    hash_without_slurm,
    members,
    saved_hash,
    trains,
    undisturbed_until,
    wait_until,
    weights,
    whole_pairs,
    write_run_file,
)
from phalanx.cli.launch import submit
from phalanx.launch.engines.submission import read_record

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm cluster can be started: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def _idle(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.end_jobs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submitted")
    write_run_file(folder)
    return folder


@pytest.fixture(scope="module")
def phalanx(cluster: SlurmCluster, folder: Path) -> Phalanx:
    return Phalanx(cluster, folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return hash_without_slurm(folder)


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_a_spare_and_the_bits_are_those_of_one_machine(
    phalanx: Phalanx, cluster: SlurmCluster, undisturbed: str
) -> None:
    run_dir = phalanx.submit("lost-node", "--nodes", "2", "--spares", "1")
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    record = read_record(run_dir)
    assert record is not None
    assert f"job {record.job}" in phalanx("runs", "--on", "slurm")
    wait_until(lambda: "no other nodes would be faster" in phalanx("status", str(run_dir)), "no verdict")
    # All three nodes are under one switch, and each says so.
    wait_until(lambda: len(members(run_dir, "spare")) == 1, "there is no spare", run_dir / "launch")
    (spare,) = members(run_dir, "spare")
    victim = members(run_dir, "member")[-1]
    cluster.kill_node(victim)
    try:
        wait_until(lambda: spare in members(run_dir, "member"), "the spare has no rank", run_dir / "launch")
        assert weights(run_dir) == undisturbed
    finally:
        cluster.start_node(int(victim[1:]))
        cluster.end_jobs()
        cluster.wait_for_nodes()
    assert "finished" in phalanx("status", str(run_dir))
    assert not any(cluster.processes_of(f"n{number}") for number in range(1, 9))


def first_node(cluster: SlurmCluster, run_dir: Path) -> str:
    """The node of a job's batch shell. It leads, unless another has succeeded it on a machine with much else to do."""
    return cluster.tool("squeue", "-h", "-j", read_record(run_dir).job, "-o", "%B").strip()  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_first_node_is_lost_and_the_same_job_goes_on_under_another_head_and_ends_by_itself(
    phalanx: Phalanx, cluster: SlurmCluster, undisturbed: str
) -> None:
    quick = ["--set", "fleet.succession_s=3", "--set", "checkpoint.every_steps=1000"]
    run_dir = phalanx.submit("first-lost", "--nodes", "2", "--spares", "1", *quick)
    wait_until(lambda: len(fleet_of(run_dir).get("members", ())) == 3, "not all are there")  # type: ignore[arg-type]
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    victim = first_node(cluster, run_dir)
    cluster.kill_node(victim)
    try:
        wait_until(lambda: fleet_of(run_dir)["leader"] != victim, "nobody succeeds it", run_dir / "launch")
        assert weights(run_dir) == undisturbed
        assert json.loads((run_dir / "record.json").read_bytes())["attempts"] == 1
        # Slurm would keep the nodes until the time limit: nothing of the job is left that could end it but the agents' wrappers.
        wait_until(lambda: not cluster.tool("squeue", "-h").strip(), "the job does not end")
    finally:
        cluster.start_node(int(victim[1:]))
        cluster.end_jobs()
        cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_run_that_has_lost_its_first_node_is_cancelled_with_its_step_saved(
    phalanx: Phalanx, cluster: SlurmCluster
) -> None:
    long = ["--set", "train.steps=100000", "--set", "checkpoint.every_steps=100000"]
    run_dir = phalanx.submit("headless", "--nodes", "2", *long, "--set", "fleet.succession_s=3")
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    victim = first_node(cluster, run_dir)
    cluster.kill_node(victim)
    try:
        wait_until(lambda: fleet_of(run_dir)["leader"] != victim, "nobody succeeds it", run_dir / "launch")
        wait_until(trains(run_dir), "it does not go on", run_dir / "launch")
        assert "is cancelled" in phalanx("cancel", str(run_dir))
        assert list((run_dir / "checkpoints").glob("step-*"))
        assert not cluster.tool("squeue", "-h").strip()
    finally:
        cluster.start_node(int(victim[1:]))
        cluster.end_jobs()
        cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_run_may_name_several_partitions_and_starts_in_the_one_that_can(
    phalanx: Phalanx, cluster: SlurmCluster
) -> None:
    run_dir = phalanx.submit("either", "--nodes", "2", "--partition", "small,main")
    wait_until(lambda: "RUNNING main" in cluster.tool("squeue", "-h", "-o", "%T %P"), "it does not start")
    phalanx("cancel", str(run_dir))
    told = phalanx(
        *("submit", "tiny.toml", "--on", "slurm", "--nodes", "2", "--partition", "small,shut"),
        *("--set", 'run_dir="neither"'),
        fails=True,
    )
    assert "a job of small may have 1 nodes" in told
    assert "shut takes no jobs now" in told


@pytest.mark.slow
def test_a_preempted_run_saves_queues_again_and_goes_on(
    phalanx: Phalanx, cluster: SlurmCluster, undisturbed: str
) -> None:
    run_dir = phalanx.submit(
        "preempted", "--nodes", "2", "--set", "launch.grace_s=30", "--set", "checkpoint.every_steps=1000"
    )
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    cluster.tool("sbatch", "-p", "high", "-N", "8", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    log = run_dir / "launch" / f"job-{read_record(run_dir).job}.log"  # type: ignore[union-attr]
    wait_until(lambda: "it is queued again" in log.read_text(), "it has not saved", run_dir / "launch")
    saved = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    assert saved  # in the grace: none was due
    assert weights(run_dir) == undisturbed
    assert json.loads((run_dir / "record.json").read_bytes())["attempts"] == 2


@pytest.mark.slow
def test_of_several_nodes_lost_at_once_one_has_a_spare_and_the_fleet_goes_on_smaller(
    phalanx: Phalanx, cluster: SlurmCluster, undisturbed: str
) -> None:
    pairs = ["--set", "launch.unit=2", "--set", "fleet.min_nodes=1"]
    run_dir = phalanx.submit("several", "--nodes", "4", "--spares", "1", *pairs)
    # It may begin without those that are late.
    wait_until(
        lambda: fleet_of(run_dir) != {} and len(members(run_dir, "member")) == 4,
        "not all are there",
        run_dir / "launch",
    )
    wait_until(lambda: len(members(run_dir, "spare")) == 1, "there is no spare", run_dir / "launch")
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    whole, most = whole_pairs(run_dir)
    assert whole == most, "ranks follow the tree"
    leader = str(fleet_of(run_dir)["leader"])
    victims = [name for name in members(run_dir, "member") if name != leader][:2]
    for name in victims:
        cluster.kill_node(name)
    try:
        wait_until(lambda: len(members(run_dir, "lost")) == 2, "nobody is missed", run_dir / "launch")
        wait_until(lambda: len(members(run_dir, "member")) == 3, "it does not re-form", run_dir / "launch")
        assert weights(run_dir) == undisturbed
    finally:
        for name in victims:
            cluster.start_node(int(name[1:]))
        cluster.end_jobs()
        cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_run_whose_time_is_up_saves_queues_itself_again_and_goes_on(
    phalanx: Phalanx, cluster: SlurmCluster
) -> None:
    # The limit is drawn near once the run trains, so that nothing depends on how long Python's start takes. That such a requeue keeps the bits, the test of
    # preemption shows.
    limits = ["--time", "1h", "--set", "launch.grace_s=120", "--set", "checkpoint.every_steps=100000"]
    run_dir = phalanx.submit("time-is-up", "--nodes", "2", *limits, "--set", "train.steps=100000")
    job = read_record(run_dir).job  # type: ignore[union-attr]
    log = run_dir / "launch" / f"job-{job}.log"

    def attempts() -> int:
        return int(json.loads((run_dir / "record.json").read_bytes())["attempts"])

    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    used = cluster.tool("squeue", "-h", "-j", job, "-o", "%M").split(":")
    cluster.tool("scontrol", "update", f"JobId={job}", f"TimeLimit={int(used[-2]) + 3}")
    wait_until(lambda: "it is queued again" in log.read_text(), "it is not queued again", log.parent)
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    cluster.tool("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_until(lambda: attempts() == 2, "it has not begun again", log.parent)
    wait_until(trains(run_dir, after=int(saved.name[5:]) + 1), "it does not go on", log.parent)
    phalanx("cancel", str(run_dir))


@pytest.mark.slow
def test_a_cancelled_run_saves_and_is_continued_by_the_same_command(
    phalanx: Phalanx, undisturbed: str
) -> None:
    run_dir = phalanx.submit("cancelled", "--nodes", "1", "--set", "checkpoint.every_steps=1000")
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    again = phalanx(
        *("submit", "tiny.toml", "--on", "slurm", "--nodes", "1", "--set", f'run_dir="{run_dir}"'), fails=True
    )
    assert "already (running on 1 nodes" in again
    assert "is cancelled" in phalanx("cancel", str(run_dir))
    assert list((run_dir / "checkpoints").glob("step-*"))
    assert "ended" in phalanx("status", str(run_dir))
    assert "the run saves" in phalanx("logs", str(run_dir))
    phalanx.submit("cancelled", "--nodes", "2", "--set", "checkpoint.every_steps=1000")
    assert weights(run_dir) == undisturbed


def test_a_job_that_could_never_start_is_refused_with_every_reason(
    phalanx: Phalanx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(phalanx.folder)
    for name in [one for one in os.environ if one.startswith(("PHALANX_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in phalanx.environment.items():
        monkeypatch.setenv(name, value)

    def refused(*words: str, **environment: str) -> str:
        sets = ["--set", 'run_dir="never"', "--set", "fleet.nodes=1"]
        # In this process: nine starts of Python would take longer than all that is asked of Slurm.
        told = CliRunner(env=environment).invoke(
            submit.submit_command, ["tiny.toml", "--on", "slurm", *sets, *words]
        )
        assert told.exit_code == 1, told.output
        return told.output

    told = refused(
        "--nodes",
        "2",
        "--partition",
        "small",
        "--time",
        "1d",
        "--set",
        "launch.gpus_per_node=4",
        "--set",
        'runtime.device="cuda"',
    )
    assert "a job of small may have 1 nodes" in told
    assert "1d is more than small allows (0-00:10:00)" in told
    assert "2 nodes with 4 GPUs are requested, and 0 have so many (at most 2)" in told
    assert "there is no partition 'big': --partition with one of main, high, small" in refused(
        "--nodes", "1", "--partition", "big"
    )
    assert "shut takes no jobs now" in refused("--nodes", "1", "--partition", "shut")
    assert "main has 8 nodes, 8 of them usable" in refused("--nodes", "8", "--spares", "1")
    assert not (phalanx.folder / "never").exists()
    assert "shut takes no jobs now" in refused("--nodes", "1", SBATCH_PARTITION="shut")
    assert "SBATCH_ARRAY_INX=1-4 in the environment: a run is one job" in refused(SBATCH_ARRAY_INX="1-4")
    # What only Slurm knows it says itself.
    assert "sbatch: " in refused("--nodes", "1", "--qos", "gold", "--reservation", "nothing")


def test_a_run_is_queued_once_whoever_submits_it_and_nothing_starts_before_all_nodes_are_free(
    phalanx: Phalanx, cluster: SlurmCluster
) -> None:
    cluster.tool("sbatch", "-N", "6", "--exclusive", "-o", "/dev/null", "--wrap", "sleep infinity")
    run_dir = phalanx.folder / "once"
    words = ["submit", "tiny.toml", "--on", "slurm", "--nodes", "3", "--set", f'run_dir="{run_dir}"']
    told = sorted(
        (at_once.communicate()[0], at_once.returncode)
        for at_once in [phalanx.start(*words), phalanx.start(*words)]
    )
    assert sorted(code for _, code in told) == [0, 1], told
    assert "expected to start 20" in next(text for text, code in told if not code)
    refused = next(text for text, code in told if code)
    assert "is being submitted by process" in refused or "already (waits for 3 nodes" in refused
    job = read_record(run_dir).job  # type: ignore[union-attr]
    assert "already (waits for 3 nodes" in phalanx(*words, fails=True)
    assert cluster.tool("squeue", "-h", "-o", "%T", "-j", job).split() == ["PENDING"]
    assert not (run_dir / "launch" / f"job-{job}.log").exists()
    # Whoever submitted it did not live to note it: the queue knows it.
    record = run_dir / "launch" / "submitted.json"
    record.rename(run_dir / "noted")
    assert f"job {job} (slurm): waits for 3 nodes" in phalanx("status", str(run_dir))
    (run_dir / "noted").rename(record)
    # Who cancels it also cancels the job whose nodes were to join it, and its lender is asked to take its nodes again.
    lent = {"taken_from": str(phalanx.folder / "no-lender"), "taken": 2}
    record.write_text(json.dumps({**json.loads(record.read_bytes()), **lent}))
    joins = [f"--comment=phalanx-joining:{run_dir}", "-o", "/dev/null", "--hold", "--wrap", "true"]
    cluster.tool("sbatch", *joins)
    assert "no-lender does not take its 2 nodes again: " in phalanx("cancel", str(run_dir))
    assert not json.loads(phalanx("runs", "--on", "slurm", "--json"))
    assert "ended without output, or before it began" in phalanx("status", str(run_dir))
    # A job of somebody else is none of one's own; the record of the run has its number.
    other = ["--uid=nobody", "-o", "/dev/null", "-D", "/", "--parsable", f"--comment=phalanx:{run_dir}"]
    number = cluster.tool("sbatch", "--hold", *other, "--wrap", "true").strip()
    record.write_text(json.dumps({**json.loads(record.read_bytes()), "job": number}))
    assert f"is job {number} already (waits for 1 nodes: JobHeldUser" in phalanx(*words, fails=True)


@pytest.mark.parametrize("when", ["before", "behind sbatch"])
def test_a_job_that_cannot_be_noted_is_not_queued_or_taken_back(
    phalanx: Phalanx, cluster: SlurmCluster, tmp_path: Path, when: str
) -> None:
    run_dir = phalanx.folder / f"not-noted-{when[:6]}"
    record = run_dir / "launch" / "submitted.json"  # a folder there is as a disk that is full
    sbatch = tmp_path / "sbatch"
    if when == "before":
        record.mkdir(parents=True)
    else:
        real = shutil.which("sbatch", path=phalanx.environment.get("PATH"))
        full = f'case "$*" in *--test-only*) ;; *) rm {record} && mkdir {record} ;; esac'
        sbatch.write_text(f'#!/bin/sh\n{real} "$@" || exit\n{full}\n')
        sbatch.chmod(0o755)
    told = phalanx(
        *("submit", "tiny.toml", "--on", "slurm", "--nodes", "1", "--set", f'run_dir="{run_dir}"'),
        *("--set", 'launch.options=["--begin=now+1hour"]'),
        fails=True,
        PATH=f"{tmp_path}:{phalanx.environment['PATH']}",
    )
    why = rf"cannot write {run_dir}/launch: Is a directory"
    assert re.search(why if when == "before" else rf"job \d+ is taken back: {why}", told), told
    assert not cluster.tool("squeue", "-h").strip()


def test_what_the_run_file_exports_reaches_the_agents_where_sbatch_is_told_to_export_nothing(
    phalanx: Phalanx, cluster: SlurmCluster, tmp_path: Path
) -> None:
    sets = [
        f'run_dir="{tmp_path}"',
        'launch.options=["--export=NONE"]',
        'launch.environment=["SEEN=by agents"]',
    ]
    script = phalanx(
        *("submit", "tiny.toml", "--on", "slurm", "--nodes", "2", "--dry-run"),
        *(word for one in sets for word in ("--set", one)),
    )
    (tmp_path / "show").write_text('#!/bin/sh\necho "it is seen $SEEN"\n')
    (tmp_path / "show").chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "job.sh").write_text(script.replace(sys.executable, str(tmp_path / "show")))
    number = cluster.tool("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
    log = tmp_path / "launch" / f"job-{number}.log"
    wait_until(
        lambda: log.exists() and log.read_text().count(": it is seen by agents") == 2,
        "it is not seen",
        log.parent,
    )


def test_a_secret_that_the_run_file_names_reaches_the_job_and_no_file_of_the_run_holds_it(
    phalanx: Phalanx, tmp_path: Path
) -> None:
    seen, run_dir = tmp_path / "seen", tmp_path / "run"
    phalanx(
        *("submit", "tiny.toml", "--on", "slurm", "--nodes", "1", "--set", f'run_dir="{run_dir}"'),
        *("--set", 'launch.environment=["MY_TOKEN"]'),
        *("--set", f"launch.prologue=['printf %s \"$MY_TOKEN\" > {seen}']"),
        MY_TOKEN="not-for-others-42",
    )
    wait_until(seen.exists, "the job does not begin", run_dir / "launch")
    wait_until(lambda: seen.read_text() != "", "the prologue does not write", run_dir / "launch")
    phalanx("cancel", str(run_dir), "--now")
    assert seen.read_text() == "not-for-others-42"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert files
    assert not any(b"not-for-others-42" in path.read_bytes() for path in files)


def test_nodes_that_lose_more_of_a_step_than_they_may_are_not_trained_on(phalanx: Phalanx) -> None:
    slow = ["--set", 'launch.shares=["leaf=0.00001"]', "--set", "launch.most_lost_ms=0.001"]
    run_dir = phalanx.submit("too-far", "--nodes", "8", *slow)
    wait_until(lambda: "ended" in phalanx("status", str(run_dir)), "the job goes on", run_dir / "launch")
    assert "of a step are lost on the way" in phalanx("status", str(run_dir))
    assert "lose more of a step than launch.most_lost_ms = 0.001" in phalanx("logs", str(run_dir))
    assert not (run_dir / "fleet.json").exists()


@pytest.mark.slow
def test_nodes_of_a_second_job_do_not_join_if_the_fleet_would_lose_more_than_it_may(phalanx: Phalanx) -> None:
    slow = ["--set", 'launch.shares=["leaf=0.00001"]', "--set", "launch.most_lost_ms=0.001"]
    run_dir = phalanx.submit("near", "--nodes", "4", *slow, "--set", "train.steps=100000")
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    phalanx("fleet", "grow", str(run_dir), "--by", "4")

    def refused() -> bool:
        return any("they do not join it" in path.read_text() for path in run_dir.glob("launch/joining-*.log"))

    wait_until(refused, "the second job does not end", run_dir / "launch")
    assert len(members(run_dir, "member")) == 4
    assert "of a step are lost on the way" in phalanx("status", str(run_dir))
    phalanx("cancel", str(run_dir))


def test_the_topology_and_the_free_nodes_are_those_of_the_cluster(
    phalanx: Phalanx, cluster: SlurmCluster
) -> None:
    cluster.tool("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    try:
        shown = json.loads(
            phalanx("place", "tiny.toml", "--topology", "slurm", "--nodes", "4", "--json").splitlines()[-1]
        )
    finally:
        cluster.tool("scontrol", "update", "NodeName=n3", "State=RESUME")
    assert shown["topology"]["nodes"] == 8
    assert shown["topology"]["free"] == 7
    assert sorted(shown["seats"]) == ["n5", "n6", "n7", "n8"]


def test_a_node_that_does_not_see_the_run_directory_is_named(phalanx: Phalanx, folder: Path) -> None:
    script = phalanx(
        "submit", "tiny.toml", "--on", "slurm", "--nodes", "2", "--dry-run", "--set", 'run_dir="elsewhere"'
    )
    body = script[script.index("on_node='") + len("on_node='") :]
    on_node = body[: body.index("\n'")].replace("seq 60", "seq 1")
    told = subprocess.run(
        ["bash", "-c", on_node, str(folder / "no-nonce"), "true"],
        env={**os.environ, "SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 65
    assert "node n7 does not see" in told.stderr


@pytest.mark.slow
def test_a_run_lends_nodes_to_another_and_takes_them_again_without_computing_a_step_twice(
    phalanx: Phalanx, cluster: SlurmCluster, folder: Path
) -> None:
    lender = phalanx.submit("lender", "--nodes", "3", *ENDLESS)
    cluster.tool("sbatch", "-N", "5", "--exclusive", "-o", "/dev/null", "--wrap", "sleep infinity")
    wait_until(trains(lender), "the lender does not begin", lender / "launch")
    # Who borrows and is cancelled before it begins gives back what it has borrowed.
    later = ["--nodes", "2", "--take-from", str(lender), "--set", 'launch.options=["--begin=now+1hour"]']
    never = phalanx.submit("never-begun", *later)
    assert len(members(lender, "member")) == 1
    assert f"{lender} takes 2 nodes again" in phalanx("cancel", str(never))
    wait_until(lambda: len(members(lender, "member")) == 3, "the lender has not grown", lender / "launch")
    began_s = time.monotonic()
    urgent = phalanx.submit("urgent", "--nodes", "2", "--take-from", str(lender), "--set", "train.steps=20")
    wait_until(trains(urgent, after=0), "the urgent run does not begin", urgent / "launch")
    print(f"urgent run trains after {time.monotonic() - began_s:.1f} s")
    assert len(members(lender, "member")) == 1
    weights(urgent)
    # At its end its script asks for as many nodes again: a second job, whose nodes join.
    wait_until(lambda: len(members(lender, "member")) == 3, "the lender has not grown", lender / "launch")
    wait_until(trains(lender), "the lender does not train on", lender / "launch")
    (joining,) = [job for job in json.loads(phalanx("runs", "--on", "slurm", "--json")) if job["joins"]]
    # The scheduler takes them away once more; the agents leave at a step boundary.
    cluster.tool("scancel", "--signal=TERM", joining["id"])
    wait_until(lambda: len(members(lender, "member")) == 1, "the nodes have not left", lender / "launch")
    phalanx("cancel", str(lender))
    assert not [job for job in json.loads(phalanx("runs", "--on", "slurm", "--json")) if job["joins"]]
    seen = fleet_of(lender)
    assert seen["recoveries"] == 0
    assert int(str(seen["regroups"])) >= 3
    step, saved = saved_hash(lender)
    assert saved == undisturbed_until(folder, step)
