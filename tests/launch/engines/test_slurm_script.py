"""The batch script, times, and what Slurm's tables say, without a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.engines.slurm_orders import order, with_tools
from phalanx.launch.engines import slurm
from phalanx.launch.engines.order import EngineError
from phalanx.launch.engines.slurm_script import batch_script, joining_script
from phalanx.process.exit_codes import EXIT_STOPPED


def test_a_script_asks_for_nodes_and_spares_and_says_all_that_the_run_file_says() -> None:
    script = batch_script(
        order(
            partition="big",
            account="team",
            qos="high",
            time_limit="2d12h",
            exclude="n[1-2]",
            options=("--licenses=lustre",),
        )
    )
    lines = script.splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    expected = {
        "--nodes=18",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--no-kill",
        "--requeue",
        "--exclusive",
    }
    expected |= {"--partition=big", "--account=team", "--qos=high", "--time=2-12:00:00", "--exclude=n[1-2]"}
    expected |= {'--comment="phalanx:/shared/runs/big one"', "--signal=B:TERM@120", "--licenses=lustre"}
    assert expected <= asked
    assert all(line.startswith("#") for line in lines[: lines.index("")]), (
        "sbatch reads options up to the first command"
    )


def test_options_that_only_look_like_refused_ones_are_taken() -> None:
    options = (
        "--licenses lustre",
        "--time-min=5",
        "--nice=3",
        "--mail-user=n",
        "--mem=0",
        "--nodelist=n1",
        "-L a",
    )
    assert {f"#SBATCH {option}" for option in options} <= set(
        batch_script(order(options=options)).splitlines()
    )


def test_a_run_directory_with_a_percent_sign_keeps_its_log() -> None:
    # %j in a folder's name would be the job's number, and the job would fail without a word.
    script = batch_script(replace(order(), run_dir=Path("/runs/%j of 5%")))
    assert '#SBATCH --output="/runs/%%j of 5%%/launch/job-%j.log"' in script
    with pytest.raises(EngineError, match="holds a backslash"):
        batch_script(replace(order(), run_dir=Path("/runs/a\\b")))


@pytest.mark.parametrize(
    "folder", ["/home/o'brien", "/home/a 'b' c", "/home/a\\b", "/home/a#1", "/home/plain"]
)
def test_a_folder_reaches_sbatch_as_it_is(folder: str) -> None:
    script = batch_script(replace(order(), working_dir=Path(folder)))
    (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --chdir=")]
    assert shlex.split(line.removeprefix("#SBATCH "), comments=True) == [f"--chdir={folder}"]


def test_a_script_is_shell_that_can_be_read(tmp_path: Path) -> None:
    full = order(
        environment=("NCCL_DEBUG=a b'c", "X="),
        prologue=("module load cuda || true",),
        container_image="nvcr.io/x:1",
    )
    path = tmp_path / "job.sh"
    path.write_text(batch_script(full))
    subprocess.run(["bash", "-n", str(path)], check=True)
    exports = "\n".join(line for line in path.read_text().splitlines() if line.startswith("export "))
    shown = subprocess.run(
        ["bash", "-c", f'{exports}; printf %s "$NCCL_DEBUG"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "a b'c"


def test_a_lender_with_any_name_is_given_back_to_by_a_wrapper_too() -> None:
    script = batch_script(replace(order(), taken_from=Path("/runs/a b/it's"), taken=2))
    begin = script.index("on_node='")
    quoted = script[begin : script.index("\n'\n", begin) + 2]
    shown = subprocess.run(
        ["bash", "-c", f'{quoted}\nprintf %s "$on_node"'], capture_output=True, text=True, check=True
    )
    lender = shlex.quote("/runs/a b/it's")
    assert f"fleet grow {lender} --by 2 || true" in shown.stdout


def test_a_job_that_is_told_of_its_end_twice_and_cannot_reach_its_fleet_ends_its_step_once() -> None:
    script = batch_script(replace(order(), python="/bin/false"))
    told = script[script.index("told=") : script.index("trap save_and_end")]
    heard = subprocess.run(
        ["bash", "-c", f"kill() {{ echo kill $*; }}\n{told}\nstep=7; save_and_end; save_and_end"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert heard.stdout.count("kill -TERM 7") == 1


def test_the_script_queues_again_what_ends_with_the_code_of_a_stopped_run() -> None:
    assert f'lead-exit 2>/dev/null)" = {EXIT_STOPPED} ]' in batch_script(order())


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"options": ("--array=1-4",)}, "launch.options: --array=1-4: a run is one job"),
        ({"prologue": ("#SBATCH --gpus=2",)}, "Slurm reads such lines at the top alone: launch.options"),
        ({"environment": ("1X=2",)}, "launch.environment: '1X' is no name of a variable"),
        (
            {"container_mounts": ("/a:/b",)},
            "launch.container_mounts: /a:/b: there is no container to see them",
        ),
        ({"partition": 'a"b'}, "holds a line break or a quote"),
        ({"time_limit": "soon"}, "launch.time_limit: 'soon' is no time"),
    ],
)
def test_what_no_job_can_have_is_refused(launch: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        batch_script(order(**launch))


@pytest.mark.parametrize(
    ("files", "fleet", "does"),
    [
        ({"result.json": "{}"}, {"phase": "finished", "reign": 2}, ["scancel 7"]),
        ({}, {"phase": "finished", "reign": 2}, ["scontrol requeue 7"]),
        ({}, {"phase": "failed", "reign": 12}, ["scancel 7"]),
        ({"launch/stopped": ""}, {"phase": "finished", "reign": 2}, ["scancel 7"]),
        ({"launch/lead-exit": "75"}, {"phase": "finished", "reign": 2}, []),
        ({"launch/concluded/by": "another"}, {"phase": "finished", "reign": 2}, []),
        ({}, {"phase": "finished", "reign": 1}, []),
        ({}, {"phase": "running", "reign": 2, "written": "still"}, []),
        ({}, {"phase": "running", "reign": 2}, ["scontrol requeue 7"]),
    ],
    ids=[
        "finished",
        "saved",
        "failed",
        "stopped for good",
        "first node there",
        "another does",
        "never succeeded",
        "given back, and the others train on",
        "all are gone without a word",
    ],
)
def test_the_last_wrapper_of_an_agent_ends_the_job_or_queues_it_again_only_where_the_first_node_is_gone(
    files: dict[str, str], fleet: dict[str, object], does: list[str], tmp_path: Path
) -> None:
    script = batch_script(order())
    body = script[script.index("on_node='") + len("on_node='") :]
    on_node = (
        body[: body.index("\n'")]
        .replace("seq 630", "seq 2")
        .replace("-lt 30 ]", "-lt 1 ]")
        .replace("-ne 15 ]", "-ne 1 ]")
    )
    (tmp_path / "bin").mkdir()
    for name in ("scancel", "scontrol"):  # what Slurm does then, the test with a real one shows
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/told\n')
        tool.chmod(0o755)
    for name, text in {**files, "launch/nonce": "7.0\n", "fleet.json": json.dumps(fleet, indent=1)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if (
        "written" in fleet
    ):  # a coordinator writes the file every second or two: this one is later than the end of the agent
        later = time.time() + 60
        os.utime(tmp_path / "fleet.json", (later, later))
    own = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    words = ["bash", "-c", on_node, str(tmp_path / "launch" / "nonce"), "bash", "-c", "exit 5"]
    done = subprocess.run(words, env={**os.environ, **own, "PATH": path}, check=False)
    told = tmp_path / "told"
    assert (told.read_text().splitlines() if told.exists() else []) == does
    assert done.returncode == 5
    assert not list((tmp_path / "launch" / "at-work").iterdir())


def test_who_cancels_a_run_just_when_its_job_queues_itself_again_is_obeyed_by_the_job_that_begins(
    tmp_path: Path,
) -> None:
    told = replace(order(), run_dir=tmp_path, python=str(tmp_path / "bin" / "phalanx"), taken_from=tmp_path)
    script = batch_script(replace(told, taken=2))
    (tmp_path / "launch").mkdir()
    environment = with_tools(
        tmp_path, srun="said srun", squeue="", phalanx='[ "$3" = place ] || said "$@"', scontrol="said $@"
    )

    def job_says(restarts: str) -> list[str]:
        (tmp_path / "launch" / "stopped").touch()
        own = {**environment, **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
        subprocess.run(["bash", "-c", script], env=own, capture_output=True, check=False)
        noted = (tmp_path / "told").read_text().splitlines()
        (tmp_path / "told").write_text("")
        return noted

    grows = f"-m phalanx fleet grow {tmp_path} --by 2"
    assert job_says(restarts="1") == [grows]
    assert job_says(restarts="") == ["srun"], "a new submission counts, and nodes are given back once"


@pytest.mark.parametrize(
    "busy",
    [
        "Job update not available right now, the DB index is being set",
        "Unexpected message received for job 7",
    ],
)
def test_nodes_leave_no_fleet_whose_job_cannot_be_made_smaller_and_a_busy_one_is_asked_again(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    line = f"7|RUNNING|None|3|n[1-3]|x|1:00|phalanx-big|main|phalanx:{run_dir}"
    fails = f'said "$@"; [ -e {tmp_path}/ready ] || {{ echo "{busy}" >&2; exit 1; }}'
    path = with_tools(tmp_path, squeue=f"echo '{line}'", scontrol=fails)["PATH"]
    monkeypatch.setenv("PATH", path)
    with pytest.raises(EngineError, match="job 7 cannot be made smaller now: a Slurm that keeps no accounts"):
        slurm.demand_resizable(run_dir)
    with pytest.raises(EngineError, match="n3 have left the run, but Slurm keeps them in job 7"):
        slurm.give_back(run_dir, {"n3"}, retry_pause_s=0.0)
    updates = (tmp_path / "told").read_text().splitlines()
    assert updates == [f"update JobId=7 Comment=phalanx:{run_dir}", *3 * ["update JobId=7 NodeList=n1,n2"]]
    (tmp_path / "ready").touch()
    slurm.demand_resizable(run_dir)
    assert slurm.give_back(run_dir, {"n3"}) == {"7": ("n3",)}


def test_jobs_that_wait_to_join_a_run_that_is_over_are_cancelled_and_no_others(tmp_path: Path) -> None:
    run_dir = tmp_path / "a|b"
    (run_dir / "launch").mkdir(parents=True)
    queue = [f"8|phalanx-joining:{run_dir}", f"9|phalanx-joining:{run_dir}-2", f"10|phalanx:{run_dir}"]
    environment = with_tools(
        tmp_path, srun="", phalanx="", scancel="said $@", squeue=f"printf '%s\\n' {shlex.join(queue)}"
    )
    script = batch_script(replace(order(), run_dir=run_dir, python=str(tmp_path / "bin" / "phalanx")))
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == "8\n"


@pytest.mark.parametrize(
    ("limit", "saves_in", "queued"),
    [("1m", (), 3), ("1m", (0,), 3), ("1m", (2,), 5), ("1h", (), 8), ("", (), 8)],
    ids=[
        "never saves",
        "saved first",
        "saves in the third",
        "is preempted long before its time is up",
        "has no time limit",
    ],
)
def test_a_job_whose_time_is_always_up_before_a_step_is_saved_is_not_queued_again_for_ever(
    limit: str, saves_in: tuple[int, ...], queued: int, tmp_path: Path
) -> None:
    job_order = replace(order(time_limit=limit, grace_s=30.0), run_dir=tmp_path)
    script = batch_script(job_order)
    end = script[script.index(f'if [ "$(cat {tmp_path}/launch/lead-exit') :].replace("sleep 60", "exit 0")
    (tmp_path / "bin").mkdir()
    for name, does in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$@" >> {tmp_path}/told')):
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\n{does}\n")
        tool.chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "lead-exit").write_text("75\n")
    own = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for job in range(8):
        if job in saves_in:
            (tmp_path / "checkpoints" / f"step-{job}").mkdir(parents=True)
        done = subprocess.run(
            ["bash", "-c", f"code=75; {end}"],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 67:
            assert "at least 3 jobs in a row were over before the run had saved a step" in done.stderr
            break
    assert len((tmp_path / "told").read_text().splitlines()) == queued


def test_a_job_that_is_queued_again_saves_no_second_time_and_keeps_what_it_has_borrowed(
    tmp_path: Path,
) -> None:
    told = replace(order(time_limit="1h"), run_dir=tmp_path, taken_from=tmp_path, taken=2)
    script = batch_script(replace(told, python=str(tmp_path / "phalanx")))
    end = script[script.index('while kill -0 "$step"') :]
    # Slurm sends SIGTERM to a job that it queues again, to the shell and what it waits for, also before it answers; SIGKILL comes when it likes.
    for name, does in (
        ("squeue", "echo RUNNING"),
        ("scontrol", "kill -TERM $PPID $$"),
        ("sleep", "exit 143"),
        ("phalanx", f'echo "$@" >> {tmp_path}/told'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "lead-exit").write_text("75\n")
    own = {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    begin = f"trap 'echo saves >> {tmp_path}/told' TERM; step=; code=75"
    done = subprocess.run(["bash", "-c", f"{begin}\n{end}"], env=own, capture_output=True, check=False)
    assert done.returncode == 75
    assert not (tmp_path / "told").exists()
    assert not (tmp_path / "launch" / "returned").exists()


@pytest.mark.parametrize(
    ("ended_by", "does"),
    [("saved.json", ["requeue 7"]), ("result.json", ["-m phalanx fleet grow /lender --by 2", "scancel 7"])],
)
def test_a_job_without_its_first_node_gives_back_what_it_has_borrowed_when_it_ends_and_keeps_it_when_it_goes_on(
    ended_by: str, does: list[str], tmp_path: Path
) -> None:
    environment = with_tools(
        tmp_path, squeue="", scancel='said scancel "$@"', scontrol="said $@", phalanx="said $@"
    )
    told = replace(order(), run_dir=tmp_path, python=str(tmp_path / "bin" / "phalanx"))
    script = batch_script(replace(told, taken_from=Path("/lender"), taken=2))
    last = script[script.index('mkdir "$folder/concluded"') : script.index("\n  fi\n  sleep 1\ndone\necho")]
    (tmp_path / "launch").mkdir()
    for name in (ended_by, "fleet.json"):
        (tmp_path / name).touch()
    begin = f"folder={tmp_path}/launch; code=5"
    done = subprocess.run(["bash", "-c", f"{begin}\n{last}"], env=environment, check=False)
    assert done.returncode == 5
    assert (tmp_path / "told").read_text().splitlines() == does


def test_a_job_that_saves_nothing_gives_back_the_nodes_that_it_has_borrowed(tmp_path: Path) -> None:
    told = replace(order(time_limit="1m", grace_s=30.0), run_dir=tmp_path, taken_from=tmp_path, taken=2)
    told = replace(told, python=str(tmp_path / "phalanx"))
    script = batch_script(told)
    end = script[script.index(f'if [ "$(cat {tmp_path}/launch/lead-exit') :]
    for name, does in (("squeue", "echo RUNNING"), ("phalanx", f'echo "$@" >> {tmp_path}/told')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "lead-exit").write_text("75\n")
    same = subprocess.run(["cksum"], input=b"", capture_output=True, check=True).stdout.decode()
    (tmp_path / "launch" / "saved-nothing-since").write_text(3 * same)
    own = {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f"code=75; {end}"], env=own, capture_output=True, check=False)
    assert done.returncode == 67
    assert (tmp_path / "told").read_text() == f"-m phalanx fleet grow {tmp_path} --by 2\n"


def test_nodes_of_a_joining_job_are_verified_with_the_fleet_and_do_not_join_if_they_lose_too_much() -> None:
    unlimited = joining_script(order(), 4)
    assert '--allocation "$SLURM_JOB_NODELIST" --joining' in unlimited
    limited = joining_script(order(most_lost_ms=2.5), 4)
    verified, joins = limited.index("--most-lost-ms 2.5"), limited.index("exec srun")
    assert verified < limited.index("exit 66") < joins
    assert "exit 66" not in unlimited
