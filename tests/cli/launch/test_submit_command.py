"""What ``phalanx submit`` and ``phalanx cancel`` do where Slurm takes no job or gives no right, without a Slurm."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from launch.engines.bare_runs import PATIENCE_S
from phalanx.cli.fleet import fleet_command, status_command
from phalanx.cli.launch import submit as commands
from phalanx.fleet.control.fleet_file import write_fleet_file
from phalanx.fleet.core.messages import StopRun
from phalanx.fleet.core.state import FleetPhase
from phalanx.launch.engines import bare, slurm, submission
from phalanx.launch.engines.engine import Lender
from phalanx.launch.engines.hosts import HERE, Host
from phalanx.launch.engines.hosts_engine import LOCAL
from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.launch.engines.slurm_engine import borrowed, queue_job
from phalanx.launch.engines.submission import Submitted, order_of, read_record
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx_process import ENVIRONMENT, RUN_FILE
from watch.why.watched import fleet_file


def test_nodes_of_a_job_that_slurm_does_not_take_are_not_given_back_as_those_of_an_earlier_loan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, lender = tmp_path / "urgent", tmp_path / "lender"
    folder = run_dir / FOLDER
    lends(lender, "slurm")
    (folder / "returned").mkdir(parents=True)
    earlier = Submitted("slurm", "7", "urgent", 2, 0, 0.0, str(tmp_path), taken_from=str(lender), taken=2)
    (folder / "submitted.json").write_text(json.dumps(asdict(earlier)))
    assert read_record(run_dir) == earlier

    def refuse(_script: Path, _private: dict[str, str]) -> str:
        raise EngineError("sbatch: the queue is closed")

    monkeypatch.setattr(slurm, "refuse_second", lambda *_: None)
    monkeypatch.setattr(slurm, "test_submit", lambda _: "")
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 0)
    monkeypatch.setattr(slurm, "submit", refuse)
    monkeypatch.setattr(fleet_command, "request_release", lambda *_: ["n1", "n2"])
    monkeypatch.setattr(fleet_command, "wait_until_released", lambda *_: {})
    grown: list[Path] = []
    monkeypatch.setattr(fleet_command, "request_nodes", lambda run, *_: grown.append(run))

    spec = RunSpec(name="urgent", run_dir=str(run_dir), fleet=FleetSpec(nodes=2))
    with pytest.raises(EngineError, match=r"phalanx fleet grow .* --by 2 takes them again"):
        queue_job(spec, tmp_path, Lender(lender, partial(commands._take_nodes, lender)))
    commands._give_back(run_dir, earlier)
    assert grown == []


@pytest.mark.parametrize("full", ["script", "record", "number", "number and scancel"])
def test_a_disk_that_fills_up_once_nodes_were_given_back_is_told_with_what_takes_them_again(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, lender = tmp_path / "urgent", tmp_path / "lender"
    lends(lender, "slurm")
    cancelled: list[str] = []

    def cancel(job: str) -> None:
        cancelled.append(job)
        if "scancel" in full:
            raise EngineError("slurmctld does not answer")

    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write = submission.write_atomically

    def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
        if full == "script" or path.name == "submitted.json":
            raise no_room
        write(path, content, mode=mode)

    def mkdir(_path: Path, *, exist_ok: bool = False, **_: bool) -> None:
        if not exist_ok:
            raise no_room

    def fill(*_: object) -> dict[str, object]:
        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(submission, "write_atomically", write_atomically)
        return {}

    def submit(_script: Path, _private: dict[str, str]) -> str:
        fill()
        return "7"

    monkeypatch.setattr(slurm, "refuse_second", lambda *_: None)
    monkeypatch.setattr(slurm, "test_submit", lambda _: "")
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 0)
    monkeypatch.setattr(slurm, "submit", submit)
    monkeypatch.setattr(slurm, "cancel", cancel)
    monkeypatch.setattr(fleet_command, "request_release", lambda *_: ["n1", "n2"])
    # Before the job is queued, or once it is.
    early = full in ("script", "record")
    monkeypatch.setattr(fleet_command, "wait_until_released", fill if early else lambda *_: {})
    spec = RunSpec(name="urgent", run_dir=str(run_dir), fleet=FleetSpec(nodes=2))
    with pytest.raises(EngineError, match=r"phalanx fleet grow .* --by 2 takes them again") as caught:
        queue_job(spec, tmp_path, Lender(lender, partial(commands._take_nodes, lender)))
    assert "No space left on device" in str(caught.value)
    assert cancelled == ([] if early else ["7"])
    assert ("scancel 7" in str(caught.value)) == ("scancel" in full)


@pytest.mark.parametrize("earlier", ["ssh", "slurm", ""], ids=["on hosts", "as a job", "none"])
def test_a_job_whose_submitter_was_killed_is_told_and_cancelled_and_not_an_earlier_start(
    earlier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    if earlier:
        lends(run_dir, earlier)
    queue = tmp_path / "queue"
    line = f"9|PENDING|Resources|2||N/A|1:00|phalanx-run|main|phalanx:{run_dir}"
    queue.write_text("")
    with_slurm(tmp_path, monkeypatch, f"cat {queue}", f'echo "$@" >> {tmp_path}/cancelled; > {queue}')

    class KilledError(BaseException):
        """As by SIGKILL: nothing catches it."""

    def submit(_script: Path, _private: dict[str, str]) -> str:
        queue.write_text(line)
        raise KilledError

    monkeypatch.setattr(slurm, "test_submit", lambda _: "")
    monkeypatch.setattr(slurm, "submit", submit)
    spec = RunSpec(name="run", run_dir=str(run_dir), fleet=FleetSpec(nodes=2))
    with pytest.raises(KilledError):
        queue_job(spec, tmp_path)
    assert status_command._job_line(run_dir).startswith("job 9 (slurm): waits for 2 nodes")  # type: ignore[union-attr]
    here = order_of(replace(spec, launch=LaunchSpec(engine="local")), tmp_path)
    with pytest.raises(EngineError, match=r"is job 9 already"):
        LOCAL.verified(here, spec, [], [])
    invocation = CliRunner().invoke(commands.cancel_command, [str(run_dir)])
    assert invocation.output == "job 9 (slurm) is cancelled\n"
    assert (tmp_path / "cancelled").read_text() == "9\n"
    assert (
        status_command._job_line(run_dir)
        == "job of unknown number (slurm): ended without output, or before it began"
    )


def with_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, scancel: str) -> None:
    """Has these lines of shell answer in the place of Slurm's tools."""
    tools = folder / "tools"
    tools.mkdir()
    for name, does in (("squeue", squeue), ("scancel", scancel)):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")


def started_session(run_dir: Path) -> subprocess.Popen[bytes]:
    """A session of a run on this machine: one process, since a shell that is ended while it starts another waits for that first."""
    code = "import time; print('is there', flush=True); time.sleep(900)"
    session = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert session.stdout is not None
    with session.stdout:
        session.stdout.readline()  # a process that has just been started may have no command line yet
    return session


def lends(run_dir: Path, engine: str) -> None:
    """Makes the folder of a run that was submitted."""
    (run_dir / FOLDER).mkdir(parents=True)
    made = Submitted(engine, "3", "lender", 4, 0, 0.0, str(run_dir.parent))
    (run_dir / FOLDER / "submitted.json").write_text(json.dumps(asdict(made)))


def test_nodes_that_slurm_does_not_manage_are_not_taken_from_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends(tmp_path / "by-ssh", "ssh")
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 0)
    order = order_of(
        RunSpec(name="urgent", run_dir=str(tmp_path / "urgent"), fleet=FleetSpec(nodes=2)), tmp_path
    )
    with pytest.raises(EngineError, match="by-ssh: no nodes of Slurm's to give back"):
        borrowed(order, Lender(tmp_path / "by-ssh", lambda _: []))


def test_a_dry_run_prints_the_lines_that_give_borrowed_nodes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends(tmp_path / "lender", "slurm")
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="words"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 1)
    words = ["tiny.toml", "--on", "slurm", "--nodes", "3", "--dry-run", "--take-from", "lender"]
    shown = CliRunner().invoke(commands.submit_command, words)
    assert f"fleet grow {tmp_path / 'lender'} --by 2" in shown.output
    assert not (tmp_path / "runs").exists()


def test_nodes_of_a_job_are_not_left_in_it_by_who_does_not_wait_for_them(tmp_path: Path) -> None:
    lends(tmp_path, "slurm")
    invocation = CliRunner().invoke(fleet_command.shrink, [str(tmp_path), "--by", "1", "--no-wait"])
    assert invocation.exit_code == 2
    assert "without the wait they would stay in the job" in " ".join(invocation.output.split())


@pytest.mark.parametrize("now", [(), ("--now",)], ids=["saving", "at-once"])
def test_a_run_that_somebody_else_has_submitted_is_not_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "shared"
    (run_dir / FOLDER).mkdir(parents=True)
    made = Submitted("slurm", "7", "shared", 2, 0, 0.0, str(tmp_path), taken_from=str(tmp_path), taken=2)
    (run_dir / FOLDER / "submitted.json").write_text(json.dumps(asdict(made)))
    line = f"7|RUNNING|None|2|n[1-2]|N/A|1:00|phalanx-shared|main|phalanx:{run_dir}"
    denied = "echo Access/permission denied >&2; exit 1"
    with_slurm(tmp_path, monkeypatch, f"[ \"$2\" = --me ] || echo '{line}'", denied)
    ended = CliRunner().invoke(commands.cancel_command, [str(run_dir), "--no-wait", *now])
    assert ended.exit_code == 1
    assert "Access/permission denied" in ended.output
    assert not (run_dir / FOLDER / "returned").exists()


def test_a_folder_that_is_not_there_is_not_called_a_run_that_nobody_has_submitted(tmp_path: Path) -> None:
    invocation = CliRunner().invoke(commands.cancel_command, [str(tmp_path / "nowhere")])
    assert invocation.exit_code == 1
    assert f"there is no folder {tmp_path / 'nowhere'}" in invocation.output


def test_a_lender_that_does_not_answer_can_be_asked_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    lender = tmp_path / "lender"
    made = Submitted("slurm", "7", "urgent", 2, 0, 0.0, str(tmp_path), taken_from=str(lender), taken=2)
    commands._give_back(tmp_path, made)
    assert f"phalanx fleet grow {lender} --by 2 repeats the request" in capsys.readouterr().err


def asked_in(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs whose coordinators are asked from now on to save, however often somebody asks; all accept."""
    run_dirs: list[Path] = []

    def answered(run: Path, request: object, *_: object) -> str:
        assert request == StopRun(never_at_once=True)
        run_dirs.append(run)
        return "accepted"

    monkeypatch.setattr(fleet_command, "send_request", answered)
    return run_dirs


@pytest.mark.parametrize(
    ("of_this_job", "changes", "answered_by"),
    [
        (True, {"reign": 1}, "scancel"),
        (True, {"reign": 2}, "coordinator"),
        (False, {"reign": 2}, "scancel"),
        (True, {"reign": 2, "phase": FleetPhase.FINISHED}, "scancel"),
        (True, {"reign": 1, "stopping": True}, "nobody"),
        (True, {"reign": 2, "stopping": True}, "nobody"),
    ],
    ids=[
        "the first node leads",
        "another leads",
        "it led an earlier job",
        "it is over",
        "it saves already",
        "it saves already under another",
    ],
)
def test_a_job_whose_batch_shell_was_lost_is_cancelled_by_its_coordinator(
    of_this_job: bool,
    changes: dict[str, Any],
    answered_by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, saving_runs = tmp_path / "run", asked_in(monkeypatch)
    lends(run_dir, "slurm")
    write_fleet_file(run_dir, fleet_file(0.0, **changes))
    nonce = run_dir / FOLDER / "nonce"
    nonce.touch()
    now_s = (run_dir / "fleet.json").stat().st_mtime
    os.utime(nonce, (now_s, now_s - 60 if of_this_job else now_s + 60))
    line = f"3|RUNNING|None|2|n[1-2]|N/A|1:00|phalanx-run|main|phalanx:{run_dir}"
    with_slurm(tmp_path, monkeypatch, f"echo '{line}'", f'echo "$@" >> {tmp_path}/cancelled')
    invocation = CliRunner().invoke(commands.cancel_command, [str(run_dir), "--no-wait"])
    assert invocation.exit_code == 0, invocation.output
    assert saving_runs == ([run_dir] if answered_by == "coordinator" else [])
    cancelled = tmp_path / "cancelled"
    assert (cancelled.read_text() if cancelled.exists() else "") == (
        "--batch --signal=TERM 3\n" if answered_by == "scancel" else ""
    )


def test_the_script_of_a_job_asks_its_run_to_save_however_often_it_is_told_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving_runs = asked_in(monkeypatch)
    for _ in range(2):
        invocation = CliRunner().invoke(fleet_command.command, ["stop", "--for-now", str(tmp_path)])
        assert invocation.output == "accepted\n"
    assert saving_runs == [tmp_path] * 2


@pytest.mark.parametrize(
    ("before", "earlier"),
    [("start", False), ("word", True)],
    ids=["before any host is", "before the word, after an earlier start"],
)
def test_a_run_that_is_cancelled_while_it_is_being_started_does_not_run(
    before: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, program = tmp_path / "run", tmp_path / "python"
    began = tmp_path / "began"
    program.write_text(
        f'#!/bin/bash\n[ "$1" != -c ] || exec {sys.executable} "$@"\necho $$ >> {began}; exec sleep 900\n'
    )
    program.chmod(0o755)
    if earlier:
        lends(run_dir, "local")
        (run_dir / FOLDER / "stopped").touch()
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="words"))
    monkeypatch.chdir(tmp_path)
    cancels: list[subprocess.Popen[str]] = []

    def cancel() -> None:
        words = [sys.executable, "-m", "phalanx", "cancel", str(run_dir)]
        cancels.append(
            subprocess.Popen(
                words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        while not (run_dir / FOLDER / "stopped").exists() and cancels[0].poll() is None:
            time.sleep(0.01)

    start, write = bare.start, bare.write_atomically

    def started(*given: Any) -> list[bare.Started]:
        if before == "start":
            cancel()
        return start(*given)

    def written(path: Path, content: bytes) -> None:
        if before == "word" and path.name == "go":
            cancel()
        write(path, content)

    monkeypatch.setattr(submission, "sys", SimpleNamespace(executable=str(program)))
    monkeypatch.setattr(bare, "start", started)
    monkeypatch.setattr(bare, "write_atomically", written)
    words = ["tiny.toml", "--on", "local", "--set", f'run_dir="{run_dir}"']
    submitted = CliRunner().invoke(commands.submit_command, words)
    (cancelled,) = cancels
    cancel_output, _ = cancelled.communicate()
    try:
        assert (cancelled.returncode, bare.alive(run_dir)) == (0, ([], [])), cancel_output
    finally:
        bare.end(run_dir, bare.started_on(run_dir), signal.SIGKILL)
    assert "cancelled" in cancel_output
    assert "has ended already" not in cancel_output
    assert (submitted.exit_code == 0) == (before == "word")
    if before == "start":
        assert "was cancelled while it was being submitted" in submitted.output
        assert not began.exists()


@pytest.mark.parametrize("at", ["its beginning", "its job's start"])
def test_a_cancellation_is_not_forgotten_by_the_submission_or_the_job_that_begins_meanwhile(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, queue, ended = tmp_path / "run", tmp_path / "queue", tmp_path / "ended"
    lends(run_dir, "slurm")
    stopped = run_dir / FOLDER / "stopped"
    queue.write_text("")
    # A job that is told to end and finds no mark queues itself again.
    with_slurm(tmp_path, monkeypatch, f"cat {queue}", f'[ ! -e {stopped} ] || echo "$@" >> {ended}')
    words = {"args": [str(run_dir), "--no-wait"], "standalone_mode": False}
    cancel = threading.Thread(target=commands.cancel_command.main, kwargs=words)

    def until_noted() -> None:
        while not stopped.exists() and cancel.is_alive():
            time.sleep(0.01)

    def begin(*_: object) -> None:
        if at == "its beginning":
            cancel.start()
            until_noted()

    def checked(_script: Path) -> str:
        if at == "its beginning":
            until_noted()
        return ""

    def submit(_script: Path, _private: dict[str, str]) -> str:
        cancel.start()
        until_noted()
        stopped.unlink()  # as the job's script does
        queue.write_text(f"9|RUNNING|None|2|n[1-2]|N/A|1:00|phalanx-run|main|phalanx:{run_dir}")
        return "9"

    monkeypatch.setattr(slurm, "refuse_second", begin)
    monkeypatch.setattr(slurm, "test_submit", checked)
    monkeypatch.setattr(slurm, "submit", submit)
    spec = RunSpec(name="run", run_dir=str(run_dir), fleet=FleetSpec(nodes=2))
    refused = pytest.raises(EngineError, match="was cancelled while it was being submitted")
    with refused if at == "its beginning" else nullcontext():
        queue_job(spec, tmp_path)
    cancel.join()
    assert ended.exists() == (at == "its job's start")
    assert stopped.exists()


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_run_is_ended_also_where_that_cannot_be_noted_unless_it_would_queue_itself_again(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, requests = tmp_path / "run", list[object]()
    lends(run_dir, engine)
    (run_dir / FOLDER / "stopped").mkdir()  # as of another user, or on a full disk
    line = f"3|RUNNING|None|2|n[1-2]|N/A|1:00|phalanx-run|main|phalanx:{run_dir}"
    ended = tmp_path / "cancelled"
    with_slurm(tmp_path, monkeypatch, f"[ -e {ended} ] || echo '{line}'", f'echo "$@" > {ended}')
    session = started_session(run_dir)
    started = bare.Started(Host("host", HERE, 0, "127.0.0.1"), session.pid)
    (run_dir / FOLDER / "hosts.json").write_text(json.dumps([asdict(started)]))

    def accepted(_run: Path, request: object, _certificates: object) -> str:
        requests.append(request)
        return "accepted"

    monkeypatch.setattr(fleet_command, "send_request", accepted)
    refused = engine == "slurm"
    for command in (fleet_command.command.commands["stop"], commands.cancel_command):
        invocation = CliRunner().invoke(command, [str(run_dir)])
        assert invocation.exit_code == refused, invocation.output
        assert f"cannot write {run_dir / FOLDER / 'stopped'}" in invocation.output
        assert ("nothing else queues it again" in invocation.output) != refused
    assert requests == ([] if refused else [StopRun()])
    # A process that ends has no command line any more for a moment before its parent can see its end.
    assert (session.poll() if refused else session.wait(PATIENCE_S)) == (None if refused else -signal.SIGTERM)
    assert not (tmp_path / "cancelled").exists()
    assert CliRunner().invoke(commands.cancel_command, [str(run_dir), "--now"]).exit_code == 0
    assert (tmp_path / "cancelled").exists() == refused
    with suppress(ProcessLookupError):
        os.killpg(session.pid, signal.SIGKILL)
    session.wait()


def test_nodes_whose_return_cannot_be_noted_are_said_to_be_lent_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Submitted("slurm", "7", "urgent", 2, 0, 0.0, str(tmp_path), taken_from="/lender", taken=2)

    def mkdir(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    commands._give_back(tmp_path, made)
    warning = capsys.readouterr().err
    assert "/lender does not take its 2 nodes again: " in warning
    assert "No space left on device" in warning
    assert "phalanx fleet grow /lender --by 2 repeats the request" in warning


@pytest.mark.parametrize("earlier", ["over", "killed"])
def test_a_run_that_is_started_again_is_cancelled_before_its_fleet_has_formed(
    earlier: str, tmp_path: Path
) -> None:
    lends(tmp_path, "ssh")
    phase = FleetPhase.FAILED if earlier == "over" else FleetPhase.RUNNING
    write_fleet_file(tmp_path, fleet_file(0.0, phase=phase))
    then_s = (tmp_path / "fleet.json").stat().st_mtime
    (tmp_path / FOLDER / "job.sh").touch()
    os.utime(tmp_path / FOLDER / "job.sh", (then_s, then_s + 60))
    starting = started_session(tmp_path)
    session = bare.Started(Host("host", HERE, 0, "127.0.0.1"), starting.pid)
    (tmp_path / FOLDER / "hosts.json").write_text(json.dumps([asdict(session)]))
    invocation = CliRunner().invoke(commands.cancel_command, [str(tmp_path)])
    assert invocation.exit_code == 0, invocation.output
    assert starting.wait() == -signal.SIGTERM


@pytest.mark.parametrize("joined", [True, False])
def test_a_run_is_cancelled_by_its_coordinator_also_after_hosts_were_to_join_it(
    joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends(tmp_path, "ssh")
    write_fleet_file(tmp_path, fleet_file(0.0, reign=2))
    then_s = (tmp_path / "fleet.json").stat().st_mtime
    (tmp_path / FOLDER / "job.sh").touch()
    os.utime(tmp_path / FOLDER / "job.sh", (then_s, then_s - 60))
    if joined:  # a moment ago; where they could not, nothing told them to go
        (tmp_path / FOLDER / "go").touch()
        os.utime(tmp_path / FOLDER / "go", (then_s, then_s + 60))
    saving_runs = asked_in(monkeypatch)
    monkeypatch.setattr(bare, "sentence", lambda _: "running on 2 of 2 hosts")
    invocation = CliRunner().invoke(commands.cancel_command, [str(tmp_path), "--no-wait"])
    assert invocation.exit_code == 0, invocation.output
    assert saving_runs == [tmp_path]
