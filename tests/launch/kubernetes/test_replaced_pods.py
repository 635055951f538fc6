"""Pods that are lost, evicted and replaced under their index: each is the node that it was, and the bits are those of one machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from launch.kubernetes.small_kubelet import SmallJob, missing, small_job
from phalanx.launch.kubernetes.manifests import job_of
from phalanx.launch.kubernetes.request import request_of, with_pod_run_dir
from phalanx.run.read import read_run, to_table
from phalanx_process import ENVIRONMENT, RUN_FILE
from tiny_runs import make_dataset

pytestmark = [pytest.mark.servers, pytest.mark.skipif(bool(missing()), reason=missing())]
PATIENCE_S = 600
STEPS = 60
QUICK = (
    "\n[fleet]\nheartbeat_s = 0.5\nlease_s = 5.0\nconfirm_s = 0.5\nhealth_checks = false\nport = 29400\n"
    '[launch]\ncontainer_image = "none"\ncontainer_mounts = ["runs:/mnt/runs"]\ngrace_s = 30\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pods")
    text = RUN_FILE.format(data=make_dataset(folder / "words")).replace(
        "every_steps = 3", "every_steps = 1000"
    )
    (folder / "tiny.toml").write_text(text.replace("steps = 20", f"steps = {STEPS}") + QUICK)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The hash of the weights of the same run on one rank of this machine."""
    words = ["train", "tiny.toml", "--ranks", "1", "--json", "--run-dir", "plain"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(done.stdout)["weights_sha256"])


class Pods:
    """A run in pods, and what it writes into its volume."""

    def __init__(self, job: SmallJob, run_dir: Path) -> None:
        self.job, self.run_dir = job, run_dir

    def wait(self, true: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what}: {self.fleet}\n{self.job.logs}")
            time.sleep(0.05)

    @property
    def fleet(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.run_dir / "fleet.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def trains(self, after: int = 3) -> None:
        """Waits until the run trains, and has done some steps."""
        self.wait(
            lambda: self.fleet.get("phase") == "running" and int(self.fleet["step"]) >= after,
            "it does not train",
        )

    def weights(self) -> str:
        """The hash of the weights at the end; the job is done then."""
        self.wait(lambda: self.job.state != "running", "it does not end")
        assert self.job.state == "completed", self.job.logs
        return str(json.loads((self.run_dir / "result.json").read_bytes())["weights_sha256"])

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node."""
        return {one["name"]: one["ranks"] for one in self.fleet["members"]}

    @property
    def starts(self) -> int:
        return int(json.loads((self.run_dir / "record.json").read_bytes())["attempts"])


@contextmanager
def pods_of(folder: Path, name: str, *sets: str, volume: Path | None = None) -> Iterator[Pods]:
    """The pods of the tiny run, on two nodes."""
    overrides = ["fleet.nodes=2", f'run_dir="{name}"', *sets]
    spec = with_pod_run_dir(read_run(folder / "tiny.toml", {}, overrides))
    run_file = tomli_w.dumps(to_table(spec))
    manifest: dict[str, Any] = job_of(request_of(spec, run_file), f"submission-{volume}")
    own = folder / (f"{name}-again" if volume else name)
    with small_job(own, manifest, run_file) as job:
        if volume is not None:
            (own / "volume").rmdir()
            (own / "volume").symlink_to(volume)
        yield Pods(job, own / "volume" / name)


@pytest.mark.slow
def test_a_lost_pod_is_replaced_under_its_index_and_is_the_node_that_it_was(
    folder: Path, undisturbed: str
) -> None:
    with pods_of(folder, "lost", "fleet.min_nodes=2") as pods:
        pods.trains()
        before = pods.nodes
        assert all((pods.job.folder / f"{index}-phalanx-alive").exists() for index in (0, 1))
        lost = pods.job.kill(1)
        assert pods.weights() == undisturbed
        assert pods.job.failures == {1: 1}
        assert pods.job.started == {0: 1, 1: 2}
        assert pods.nodes == before == {"node-0": [0], "node-1": [1]}
        hosts = {one["name"]: one["host"] for one in pods.fleet["members"]}
        assert hosts["node-1"] != lost.address
        assert pods.fleet["recoveries"] == 1
        assert pods.starts == 1


@pytest.mark.slow
def test_a_lost_leading_pod_is_replaced_and_the_other_node_keeps_its_memory(
    folder: Path, undisturbed: str
) -> None:
    with pods_of(folder, "leader-lost", "checkpoint.every_steps=5") as pods:
        pods.trains(after=12)
        pods.job.kill(0)
        assert pods.weights() == undisturbed
        assert pods.job.started == {0: 2, 1: 1}
        assert pods.starts == 2


@pytest.mark.slow
def test_an_evicted_pod_leaves_at_a_step_boundary_and_comes_back(folder: Path, undisturbed: str) -> None:
    with pods_of(folder, "evicted", "fleet.spares=1") as pods:
        pods.wait(lambda: len(pods.fleet.get("members", ())) == 3, "not all are there")
        pods.trains()
        member = next(name for name, ranks in pods.nodes.items() if ranks and name != "node-0")
        index = int(member.removeprefix("node-"))
        pods.job.evict(index)
        assert pods.weights() == undisturbed
        assert pods.job.started[index] == 2
        assert not pods.job.failures
        assert pods.fleet["recoveries"] == 0, "nothing was computed twice"


@pytest.mark.slow
def test_an_evicted_leading_pod_saves_the_run_and_all_go_on(folder: Path, undisturbed: str) -> None:
    with pods_of(folder, "leader-evicted") as pods:
        pods.trains()
        pods.job.evict(0)
        assert pods.weights() == undisturbed
        assert pods.job.started[0] == 2
        assert pods.starts == 2
        assert not pods.job.failures


@pytest.mark.slow
def test_a_deleted_job_saves_within_its_grace_and_the_next_submission_goes_on(
    folder: Path, undisturbed: str
) -> None:
    with pods_of(folder, "deleted") as pods:
        pods.trains()
        pods.job.delete()
        pods.wait(lambda: not pods.job.pods, "pods are left")
        assert list((pods.run_dir / "checkpoints").glob("step-*"))
        volume = pods.run_dir.parent
    with pods_of(folder, "deleted", volume=volume) as pods:
        assert pods.weights() == undisturbed
        assert pods.starts == 2


@pytest.mark.slow
def test_a_run_that_is_stopped_for_good_fails_its_job_and_is_not_started_again(folder: Path) -> None:
    with pods_of(folder, "stopped", "train.steps=100000") as pods:
        pods.trains()
        leader = str(pods.job.pods[0].first)
        words = ["python", "-m", "phalanx", "fleet", "stop", "/mnt/runs/stopped"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run(
            ["nsenter", "-t", leader, "-m", "-p", *words], env={**ENVIRONMENT, "PATH": path}, check=True
        )
        pods.wait(lambda: pods.job.state == "failed" and not pods.job.pods, "the job does not end")
        assert (pods.job.started[0], pods.starts) == (1, 1)
        assert list((pods.run_dir / "checkpoints").glob("step-*"))


def test_a_pod_whose_run_file_is_wrong_ends_the_job_at_once(folder: Path) -> None:
    with pods_of(folder, "wrong", 'data.path="/nowhere"') as pods:
        pods.wait(lambda: pods.job.state == "failed", "the job does not end")
        assert pods.job.started[0] == 1
        assert "/nowhere" in pods.job.logs
