"""Faults against real processes: whatever is killed, the weights at the end are those of the undisturbed run."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forked_python import children
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Restored
from phalanx.run.directory.paths import RunDirectory
from phalanx_process import ENVIRONMENT, TIMEOUT_S, alive, last_json, run, start, steps_done, wait_until

FLEETS = [
    ["--ranks", "1"],
    ["--ranks", "2"],
    ["--ranks", "3", "--set", "parallel.sharding=zero2"],
    ["--ranks", "3", "--set", "parallel.sharding=none"],
    ["--ranks", "4", "--set", "parallel.shard_ranks=2"],
    ["--ranks", "5"],
]
ENDLESS = ("--set", "train.steps=100000")
"""A run that is not over before the signal comes, however late that is."""


def hash_after_kill(run_file: Path, folder: Path, seed: int, victim: str) -> str:
    """The final hash of a run whose launcher or one of whose ranks got SIGKILL at a random step."""
    chance = random.Random(seed)
    command = ["train", str(run_file), "--run-dir", str(folder / "run")]
    process = start([*command, *chance.choice(FLEETS)], folder, kind=subprocess.Popen)
    at_step = chance.randint(4, 18)  # after the first checkpoint is due
    wait_until(lambda: steps_done(folder / "run") >= at_step, process)
    ranks = children(process.pid)
    # A busy machine may have done all steps before the signal comes.
    with suppress(ProcessLookupError, IndexError):
        os.kill(process.pid if victim == "launcher" else chance.choice(ranks), signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT_S)
    directory = RunDirectory(folder / "run")
    assert process.returncode != 0 or directory.result.exists()
    if victim == "rank" and process.returncode != 0:
        assert "was killed by SIGKILL" in err
        assert "phalanx train" in err  # the command to continue
    deadline = time.monotonic() + TIMEOUT_S
    while any(alive(pid) for pid in ranks):  # the kernel kills them, but not in the same instant
        assert time.monotonic() < deadline, "a rank outlived the launcher"
    is_continued = bool(directory.committed_steps()) and not directory.result.exists()
    result = last_json(run([*command, *chance.choice(FLEETS), "--json"], folder))
    events = [event.body for event in read_events(directory.events)]
    assert any(isinstance(body, Restored) for body in events) == is_continued, (
        "it began anew although there was a checkpoint"
    )
    return str(result["weights_sha256"])


@pytest.mark.parametrize(
    ("seed", "victim"), [(4, "launcher"), pytest.param(1, "rank", marks=pytest.mark.slow)]
)
def test_after_sigkill_the_run_goes_on_to_the_same_weights(
    seed: int, victim: str, run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    assert hash_after_kill(run_file, tmp_path, seed, victim) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *range(2, 14)])
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_after_sigkill_at_many_moments_the_run_goes_on_to_the_same_weights(
    seed: int, victim: str, run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    assert hash_after_kill(run_file, tmp_path, seed, victim) == undisturbed


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["SIGINT", "SIGTERM"]
)
def test_a_stopped_run_saves_its_current_step_and_prints_how_to_go_on(
    number: signal.Signals, run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    command = [
        "train",
        str(run_file),
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "checkpoint.every_steps=1000",
    ]
    code, out = 0, ""
    while code == 0:  # a busy machine may have done all steps before the signal came
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        process = start([*command, "--ranks", "2"], tmp_path)
        wait_until(lambda: steps_done(tmp_path / "run") >= 2, process)
        process.send_signal(number)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        code = process.returncode
    assert code == 75
    assert "the step in progress is finished and saved" in " ".join(out.split())
    assert f"to continue: {sys.executable} -m phalanx train" in " ".join(out.split())
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= steps_done(tmp_path / "run") - 1
    done = run([*command, "--ranks", "1", "--json"], tmp_path)
    assert last_json(done)["weights_sha256"] == undisturbed


def test_a_run_that_is_stopped_before_it_has_begun_stops_as_well(run_file: Path, tmp_path: Path) -> None:
    train = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), *ENDLESS]
    process = start([*train, "--ranks", "2"], tmp_path)
    wait_until(lambda: len(children(process.pid)) == 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75


def test_a_stop_names_the_checkpoint_that_is_kept_also_if_the_last_save_fails(
    run_file: Path, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    often = ["--set", "checkpoint.every_steps=2", *ENDLESS]
    process = start(
        ["train", str(run_file), "--run-dir", str(directory.path), "--ranks", "1", *often], tmp_path
    )
    wait_until(lambda: bool(directory.committed_steps()), process)
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGSTOP)
    resource.prlimit(
        rank, resource.RLIMIT_FSIZE, (1024, 1024)
    )  # as on a full disk: neither saves nor events are written
    process.send_signal(signal.SIGTERM)
    os.kill(rank, signal.SIGCONT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    kept = max(directory.committed_steps())
    assert process.returncode == 75
    assert f"stopped; the newest checkpoint is of step {kept};" in " ".join(out.split())


def test_a_second_request_to_stop_ends_a_run_at_once_and_it_prints_that_steps_are_lost(
    run_file: Path, tmp_path: Path
) -> None:
    slow = ["--set", "checkpoint.every_steps=1000", *ENDLESS]
    process = start(
        ["train", str(run_file), "--run-dir", str(tmp_path / "run"), "--ranks", "1", *slow], tmp_path
    )
    wait_until(lambda: steps_done(tmp_path / "run") >= 2, process)
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGSTOP)  # a step that takes long
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    while alive(rank) and process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75
    assert "without saving; there is no checkpoint yet" in " ".join(out.split())


def test_a_run_that_is_stopped_while_a_rank_builds_its_model_stops_at_once(
    run_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow_model.py").write_text(
        "import pathlib, time\ndef build(spec):\n    pathlib.Path('building').touch()\n    time.sleep(3600)\n"
    )
    factory = ["--set", 'model.factory="slow_model:build"']
    process = start(
        ["train", str(run_file), "--run-dir", str(tmp_path / "run"), "--ranks", "1", *factory], tmp_path
    )
    wait_until((tmp_path / "building").exists, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75


def test_a_fleet_that_is_stopped_before_its_coordinator_listens_stops_as_well(
    run_file: Path, tmp_path: Path
) -> None:
    train = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), *ENDLESS]
    process = start([*train, "--nodes", "1"], tmp_path)
    wait_until(lambda: len(children(process.pid)) == 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75


@pytest.mark.servers
def test_under_torchrun_it_is_the_same_run(run_file: Path, undisturbed: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*torchrun, "-m", "phalanx", "train", str(run_file), "--json"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert last_json(done)["weights_sha256"] == undisturbed
