"""A real Slurm of virtual nodes prepares the same bytes, also when jobs are killed, and reports why it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file
from launch.engines.slurm_cluster import SlurmCluster, missing, slurm_cluster
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import SlurmArray
from phalanx_process import ENVIRONMENT

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
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


def prepare(cluster: SlurmCluster, folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", "data", "prepare", *words],
        cwd=folder,
        env={**ENVIRONMENT, **cluster.environment, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def jobs(cluster: SlurmCluster) -> list[str]:
    return cluster.tool("squeue", "-h", "-r", "-o", "%i %j %T").splitlines()


def test_an_array_of_jobs_writes_the_bytes_of_one_process_and_leaves_no_job(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, "[dedup]", output='seq_len = 64\ntokenizer = "bpe"\nvocab_size = 300')
    prepared(recipe, tmp_path / "alone")
    words = ("recipe.toml", "--out", "out", "--slurm", "--workers", "3", "--json")
    done = json.loads(ended(prepare(cluster, tmp_path, *words)).splitlines()[-1])
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")
    assert not done["reused"]
    cluster.wait_until(lambda: not jobs(cluster))


def test_jobs_and_commands_that_are_killed_change_no_byte_and_a_second_command_finds_the_jobs(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw_folder(tmp_path, files=6)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    words = ("recipe.toml", "--out", "out", "--slurm", "--workers", "2")
    first = prepare(cluster, tmp_path, *words)
    cluster.wait_until(lambda: len(jobs(cluster)) == 2)
    before = jobs(cluster)
    first.kill()
    first.wait()
    second = prepare(cluster, tmp_path, *words)
    time.sleep(2)
    assert {row.split()[0] for row in jobs(cluster)} <= {row.split()[0] for row in before}
    # A job that is submitted in the place of a killed one does the rest.
    for node in ("n1", "n2"):
        for pid in cluster.processes_of(node)[:2]:
            os.kill(pid, signal.SIGKILL)
    ended(second)
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def test_after_a_kill_a_command_with_another_number_of_jobs_ends_the_jobs_of_the_first_and_changes_no_byte(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw_folder(tmp_path, files=6)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    words = ("recipe.toml", "--out", "out", "--slurm", "--workers")
    first = prepare(cluster, tmp_path, *words, "2")
    cluster.wait_until(lambda: len(jobs(cluster)) == 2)
    first.kill()
    first.wait()
    second = prepare(cluster, tmp_path, *words, "3")
    cluster.wait_until(
        lambda: second.poll() is not None or any(row.split()[1][-2:] == "-3" for row in jobs(cluster))
    )
    assert not [
        row for row in jobs(cluster) if row.split()[1].endswith("-2") and row.split()[2] != "COMPLETING"
    ]
    ended(second)
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")
    cluster.wait_until(lambda: not jobs(cluster))


def test_a_controller_that_does_not_answer_for_a_moment_costs_no_job(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    tools = tmp_path / "tools"
    tools.mkdir()
    squeue, requests = tools / "squeue", tmp_path / "requests"
    squeue.write_text(
        f'#!/bin/sh\necho x >> {requests}\n[ $(wc -l < {requests}) -le 2 ] && {{ echo "Unable to contact slurm controller" >&2; exit 1; }}\n'
        f'exec {shutil.which("squeue")} "$@"\n'
    )
    squeue.chmod(0o755)
    words = ("recipe.toml", "--out", "out", "--slurm", "--workers", "2")
    ended(prepare(cluster, tmp_path, *words, PATH=f"{tools}:{os.environ['PATH']}"))
    assert len(requests.read_text().splitlines()) > 2
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def test_what_ends_a_job_with_a_message_ends_the_command_with_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw = raw_folder(tmp_path)
    with (raw / "part-1.jsonl").open("a") as file:
        file.write("{broken\n")
    recipe_file(tmp_path)
    output = ended(
        prepare(cluster, tmp_path, "recipe.toml", "--out", "out", "--slurm", "--workers", "2"), code=1
    )
    assert "line 61 of" in output
    assert "is not JSON" in output
    assert "run the same command again to resume" in output
    cluster.wait_until(lambda: not jobs(cluster))


def test_a_refusal_of_slurm_is_printed_with_the_variables_that_mend_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    raw_folder(tmp_path)
    words = (str(tmp_path / "raw"), "--out", "out", "--tokenizer", "bytes", "--slurm", "--workers", "2")
    output = ended(prepare(cluster, tmp_path, *words, SBATCH_PARTITION="nowhere"), code=1)
    assert "nvalid partition" in output
    assert "SBATCH_PARTITION" in output
    assert "tokens to train on" in ended(prepare(cluster, tmp_path, *words, SBATCH_PARTITION="main"))


def test_a_machine_without_slurm_is_refused_with_the_machine_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_folder(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PreparationError, match="--slurm needs squeue, which is not here: give the command on"
    ):
        prepared(recipe_file(tmp_path), tmp_path / "out", SlurmArray(2))


def test_a_tool_of_slurm_that_may_not_be_executed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_folder(tmp_path)
    (tmp_path / "squeue").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreparationError, match="--slurm needs squeue, which cannot run: Permission denied"):
        prepared(recipe_file(tmp_path), tmp_path / "out", SlurmArray(2))
