"""Runs that are submitted to a cluster and followed there, by a real kubectl and a stand-in for the API server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.kubernetes.api_server import ApiServer, api_server, missing
from phalanx.cli.main import phalanx_command
from phalanx.launch.kubernetes.cluster import JOB_SETS, VOLCANO_JOBS, parse_jobs
from phalanx_process import RUN_FILE

pytestmark = [pytest.mark.servers, pytest.mark.skipif(bool(missing()), reason=missing())]
QUEUE = "research"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="/data/words"))
    monkeypatch.chdir(tmp_path)
    with api_server(tmp_path) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        found.add("persistentvolumeclaims", "runs", spec={"accessModes": ["ReadWriteMany"]})
        found.add("localqueues", QUEUE)
        yield found


def phalanx(*words: str, fails: bool = False) -> str:
    done = CliRunner().invoke(phalanx_command, [*words], catch_exceptions=False)
    assert bool(done.exit_code) == fails, done.output
    return " ".join(done.output.split())


def submit(*words: str, fails: bool = False) -> str:
    given = [
        "submit",
        "tiny.toml",
        "--on",
        "kubernetes",
        "--nodes",
        "2",
        "--image",
        "registry.example/phalanx:0.1",
    ]
    return phalanx(
        *given, "--set", 'launch.container_mounts=["runs:/runs"]', "--queue", QUEUE, *words, fails=fails
    )


def name_of(cluster: ApiServer) -> str:
    (job,) = cluster.of("jobsets")
    return str(job["metadata"]["name"])


def run_pods(cluster: ApiServer, name: str, phase: str = "Running", **status: Any) -> None:
    for index in range(2):
        labels = {"phalanx.run/name": name, "batch.kubernetes.io/job-completion-index": str(index)}
        pod = f"{name}-node-0-{index}-abcde"
        cluster.add(
            "pods",
            pod,
            metadata={"labels": labels},
            spec={"containers": [{"name": "agent"}]},
            status={"phase": phase, **status},
        )
        cluster.logs[pod] = f"this is index {index}\n"


def test_a_submission_creates_the_job_first_and_all_else_belongs_to_it(cluster: ApiServer) -> None:
    told = submit("--spares", "1")
    name = name_of(cluster)
    assert f"job {name}: 2 nodes and 1 spares, 2 ranks; run directory /runs/tiny-" in told
    assert cluster.asked[0] == f"POST jobsets/{name}"
    (job,) = cluster.of("jobsets")
    for plural in ("secrets", "configmaps", "poddisruptionbudgets"):
        (made,) = cluster.of(plural)
        assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert cluster.asked[-1].startswith("PATCH configmaps/"), "no pod starts before its token is there"
    (secret,) = cluster.of("secrets")
    assert re.fullmatch("[0-9a-f]{64}", secret["stringData"]["join"])


def test_what_a_dry_run_writes_is_what_kubectl_creates(cluster: ApiServer) -> None:
    submit("--dry-run", "--out", "run.yaml")
    assert not cluster.asked
    subprocess.run(["kubectl", "create", "-f", "run.yaml"], check=True, capture_output=True)
    assert f"is job {name_of(cluster)} already" in submit(fails=True)


def test_a_second_submission_is_refused_and_changes_nothing(cluster: ApiServer) -> None:
    submit()
    run_pods(cluster, name_of(cluster))
    asked = list(cluster.asked)
    told = submit(fails=True)
    assert f"is job {name_of(cluster)} already (running, 2 pods)" in told
    assert cluster.asked == asked


def test_a_failed_run_is_submitted_anew_and_a_finished_one_is_not(cluster: ApiServer) -> None:
    submit()
    (job,) = cluster.of("jobsets")
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "it has ended"}]}
    before = job["metadata"]["uid"]
    submit()
    (job,) = cluster.of("jobsets")
    assert job["metadata"]["uid"] != before
    job["status"] = {"terminalState": "Completed"}
    refused = submit("--queue", "nowhere", fails=True)
    assert "is finished" in refused
    assert "nowhere" in refused


def test_what_the_cluster_lacks_is_said_at_once_with_the_remedy(cluster: ApiServer) -> None:
    cluster.objects.clear()
    cluster.add("localqueues", "other")
    told = submit(fails=True)
    assert "there is no queue 'research' in this namespace: --queue with one of other" in told
    assert "there is no PersistentVolumeClaim 'runs'" in told
    cluster.add("persistentvolumeclaims", "runs", spec={"accessModes": ["ReadWriteOnce"]})
    assert "runs can be mounted as ReadWriteOnce, and 2 pods must write it" in submit(fails=True)
    assert not cluster.asked


def test_what_admission_refuses_leaves_nothing_behind(cluster: ApiServer) -> None:
    cluster.refuse["JobSet"] = 'admission webhook "vjobset.kb.io" denied the request: too many pods'
    assert "too many pods" in submit(fails=True)
    cluster.refuse = {"Secret": "secrets are forbidden here"}
    assert "secrets are forbidden here" in submit(fails=True)
    assert not cluster.of("jobsets")


def test_a_cluster_without_jobset_or_kueue_is_told_apart_from_one_that_is_not_reached(
    cluster: ApiServer,
) -> None:
    cluster.unknown = {"jobset.x-k8s.io"}
    assert "JobSet is not installed in this cluster" in submit(fails=True)
    cluster.unknown = {"kueue.x-k8s.io"}
    assert "Kueue is not installed in this cluster" in submit(fails=True)
    cluster.kubeconfig.write_text(cluster.kubeconfig.read_text().replace(str(cluster.port), "9"))
    assert "kubectl reaches no cluster: choose one by kubectl config use-context" in submit(fails=True)


def test_what_waits_says_why_in_the_words_of_its_queue_or_of_the_scheduler(cluster: ApiServer) -> None:
    submit()
    (job,) = cluster.of("jobsets")
    name = job["metadata"]["name"]
    assert f"job {name}: waits for 2 pods" in phalanx("runs", "--on", "kubernetes")
    owner = {"metadata": {"ownerReferences": [{"uid": job["metadata"]["uid"]}]}}
    quota = {
        "type": "QuotaReserved",
        "status": "False",
        "message": "insufficient unused quota for nvidia.com/gpu",
    }
    cluster.add("workloads", "w", **owner, status={"conditions": [quota]})
    assert "insufficient unused quota" in phalanx("status", name, "--on", "kubernetes")
    cluster.objects.pop(("workloads", "default", "w"))
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/5 nodes are available"}
    run_pods(cluster, name, "Pending", conditions=[unscheduled])
    assert "waits for 2 pods: pod" in (told := phalanx("status", name, "--on", "kubernetes"))
    assert "0/5 nodes are available" in told


def test_an_image_that_cannot_be_pulled_is_said_with_what_to_do_also_where_other_pods_have_it(
    cluster: ApiServer,
) -> None:
    submit()
    name = name_of(cluster)
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/none:1"'}
    run_pods(cluster, name, "Pending", containerStatuses=[{"state": {"waiting": waiting}}])
    told = phalanx("runs", "--on", "kubernetes")
    assert 'Back-off pulling image "registry/none:1" (launch.container_image: is it there' in told
    cluster.of("pods")[0]["status"] = {"phase": "Running"}
    assert "running, 2 pods: 1 there; pod " in (told := phalanx("runs", "--on", "kubernetes"))
    assert "Back-off pulling image" in told


def test_the_status_of_a_run_that_trains_is_asked_of_the_pod_that_leads(cluster: ApiServer) -> None:
    submit()
    name = name_of(cluster)
    run_pods(cluster, name)
    (job,) = cluster.of("jobsets")
    run_dir = job["metadata"]["annotations"]["phalanx.run/directory"]
    told = phalanx("status", name, "--on", "kubernetes", "--last", "3")
    assert (
        f"job {name} (kubernetes): running, 2 pods agent runs python -m phalanx status {run_dir} --last 3"
        in told
    )


def test_the_log_of_a_pod_is_that_of_its_index(cluster: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
    submit()
    name = name_of(cluster)
    assert f"job {name} has no pod of index 0: waits" in phalanx(
        "logs", name, "--on", "kubernetes", fails=True
    )
    run_pods(cluster, name)
    for index in (0, 1):
        phalanx("logs", name, "--on", "kubernetes", "--index", str(index))
        assert capfd.readouterr().out == f"this is index {index}\n"


def test_a_cancelled_run_takes_what_belongs_to_it_along(cluster: ApiServer) -> None:
    submit()
    name = name_of(cluster)
    told = phalanx("cancel", name, "--on", "kubernetes")
    assert f"job {name} saves and ends" in told
    assert "is cancelled; the same phalanx submit resumes" in told
    assert not any(
        cluster.of(plural) for plural in ("jobsets", "secrets", "configmaps", "poddisruptionbudgets")
    )
    assert f"there is no job {name} in this namespace" in phalanx(
        "status", name, "--on", "kubernetes", fails=True
    )
    assert "no run of Phalanx" in phalanx("runs", "--on", "kubernetes")


def test_a_run_that_is_ended_at_once_has_its_pods_deleted_too(cluster: ApiServer) -> None:
    submit()
    name = name_of(cluster)
    run_pods(cluster, name)
    phalanx("cancel", name, "--on", "kubernetes", "--now")
    assert not cluster.of("jobsets")
    assert not cluster.of("pods")


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("Pending", "waiting"),
        ("Running", "running"),
        ("Completed", "completed"),
        ("Aborted", "failed"),
        ("Failed", "failed"),
    ],
)
def test_the_phases_of_volcano_are_read(phase: str, state: str) -> None:
    text = f'{{"metadata": {{"name": "x"}}, "spec": {{"tasks": [{{"replicas": 3}}]}}, "status": {{"state": {{"phase": "{phase}"}}}}}}'
    (job,) = parse_jobs(text, VOLCANO_JOBS)
    assert (job.state, job.pods) == (state, 3)
    assert job.resource != JOB_SETS
