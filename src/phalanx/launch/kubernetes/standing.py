"""Reads what a Kubernetes cluster does with the jobs of runs: their state, why one waits, and their pods.

Why a job waits is said by whoever keeps it waiting: its own conditions, its queue (the Workload of Kueue), the scheduler of a pod, or the kubelet that
cannot start a container.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.launch.engines.tools import EngineError
from phalanx.launch.kubernetes.kubectl import JOB_SETS, VOLCANO_JOBS, MissingKindError, kubectl
from phalanx.launch.kubernetes.pod_template import DIRECTORY, RUN_LABEL

_OURS = "app.kubernetes.io/managed-by=phalanx-submit"
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Reasons why a container waits for its image, in the words of the kubelet (kubernetes/pkg/kubelet/images/types.go)."""
_NO_IMAGE = " (launch.container_image: is it there under this name, and may the nodes pull it? cancel and submit again with --image)"


@dataclass(frozen=True)
class ClusterJob:
    """The job of a run, as its cluster shows it."""

    name: str
    namespace: str
    resource: str
    """The kind of object, as kubectl names it."""
    state: str
    """ "waiting", "running", "completed" or "failed"."""
    reason: str
    """Why it waits or has failed; empty if nobody says."""
    pods: int
    """Pods that it should have."""
    run_dir: str
    """In its pods."""
    uid: str

    @property
    def ended(self) -> bool:
        """True if none of its pods will run any more."""
        return self.state in ("completed", "failed")

    @property
    def sentence(self) -> str:
        """The state of the job in words."""
        doing = {"waiting": f"waits for {self.pods} pods", "running": f"running, {self.pods} pods"}
        return doing.get(self.state, self.state) + (f": {self.reason}" if self.reason else "")


def jobs(namespace: str = "") -> list[ClusterJob]:
    """The jobs that Phalanx submitted, those that have ended too. Raises ``EngineError``."""
    found: list[ClusterJob] = []
    missing = []
    for resource in (JOB_SETS, VOLCANO_JOBS):
        try:
            text = kubectl("get", resource, "-l", _OURS, "-o", "json", namespace=namespace)
        except MissingKindError as error:
            missing.append(error)
            continue
        found += parse_jobs(text, resource)
    if len(missing) == 2:
        raise missing[0]
    return [_with_reason(job) for job in found]


def job_named(
    name: str, namespace: str = "", resources: Sequence[str] = (JOB_SETS, VOLCANO_JOBS)
) -> ClusterJob | None:
    """The job of this name; ``None`` if there is none. Raises ``EngineError``."""
    missing = []
    for resource in resources:
        try:
            text = kubectl("get", resource, name, "-o", "json", "--ignore-not-found", namespace=namespace)
        except MissingKindError as error:
            missing.append(error)
            continue
        if text.strip():
            return _with_reason(parse_jobs(text, resource)[0])
    if len(missing) == len(resources):
        raise missing[0]
    return None


def parse_jobs(text: str, resource: str) -> list[ClusterJob]:
    """The jobs in what ``kubectl get -o json`` printed: one, or a list."""
    read = json.loads(text)
    return [_job(item, resource) for item in read.get("items", [read])]


def _job(item: dict[str, Any], resource: str) -> ClusterJob:
    metadata, status = item["metadata"], item.get("status", {})
    if resource == JOB_SETS:
        template = item["spec"]["replicatedJobs"][0]["template"]["spec"]
        state, reason = _job_set_state(item["spec"], status)
        pods = int(template["completions"])
    else:
        # Volcano's phases: pkg/apis/batch/v1alpha1/job.go.
        phase = status.get("state", {}).get("phase", "Pending")
        ended = {"Completed": "completed", "Failed": "failed", "Terminated": "failed", "Aborted": "failed"}
        state = ended.get(
            phase, "running" if phase in ("Running", "Restarting", "Completing", "Terminating") else "waiting"
        )
        reason, pods = status.get("state", {}).get("message", ""), int(item["spec"]["tasks"][0]["replicas"])
    return ClusterJob(
        metadata["name"],
        metadata.get("namespace", ""),
        resource,
        state,
        reason,
        pods,
        metadata.get("annotations", {}).get(DIRECTORY, ""),
        metadata.get("uid", ""),
    )


def _job_set_state(spec: dict[str, Any], status: dict[str, Any]) -> tuple[str, str]:
    holds = {
        one["type"]: one.get("message", "")
        for one in status.get("conditions", [])
        if one.get("status") == "True"
    }
    for condition in ("Completed", "Failed"):
        if condition in holds or status.get("terminalState") == condition:
            return condition.lower(), holds.get(condition, "") if condition == "Failed" else ""
    if spec.get("suspend"):
        return "waiting", ""
    active = sum(one.get("active", 0) for one in status.get("replicatedJobsStatus", []))
    return ("running" if active else "waiting"), ""


def _with_reason(job: ClusterJob) -> ClusterJob:
    """The job, with what keeps it waiting: its queue, or the scheduler of a pod."""
    if job.ended:
        return job
    doing, reason = job.state, job.reason
    pods = pods_of(job)
    phases = Counter(pod["status"].get("phase", "Unknown") for pod in pods)
    why = next(filter(None, map(_why_pending, pods)), "")
    if phases["Running"]:
        doing, reason = "running", ""
        if phases["Running"] < job.pods:
            reason = f"{phases['Running']} there" + (f"; {why}" if why else "")
    elif not reason:
        reason = _queue_says(job) or why
    return ClusterJob(job.name, job.namespace, job.resource, doing, reason, job.pods, job.run_dir, job.uid)


def _queue_says(job: ClusterJob) -> str:
    """Why Kueue has not admitted a job: the condition QuotaReserved of its Workload; empty if there is none."""
    try:
        text = kubectl("get", "workloads.kueue.x-k8s.io", "-o", "json", namespace=job.namespace)
    except EngineError:
        return ""
    for item in json.loads(text).get("items", []):
        owners = {owner.get("uid") for owner in item["metadata"].get("ownerReferences", [])}
        if job.uid in owners:
            for one in item.get("status", {}).get("conditions", []):
                if one["type"] in ("QuotaReserved", "Admitted") and one["status"] == "False":
                    return str(one.get("message", ""))
    return ""


def _why_pending(pod: dict[str, Any]) -> str:
    for one in pod["status"].get("conditions", []):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return f"pod {pod['metadata']['name']}: {one.get('message', '')}"
    for container in pod["status"].get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            remedy = _NO_IMAGE if waiting.get("reason") in _IMAGE_REASONS else ""
            return f"pod {pod['metadata']['name']}: {waiting['message']}{remedy}"
    return ""


def pods_of(job: ClusterJob) -> list[dict[str, Any]]:
    """The pods of a job, the newest first. Raises ``EngineError``."""
    text = kubectl("get", "pods", "-l", f"{RUN_LABEL}={job.name}", "-o", "json", namespace=job.namespace)
    found: list[dict[str, Any]] = json.loads(text).get("items", [])
    return sorted(found, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)


def pod_of_index(job: ClusterJob, index: int) -> str | None:
    """The name of the newest pod of an index; ``None`` if there is none."""
    for pod in pods_of(job):
        labels, name = pod["metadata"].get("labels", {}), str(pod["metadata"]["name"])
        own = labels.get("batch.kubernetes.io/job-completion-index", name.rpartition("-")[2])
        if own == str(index):
            return name
    return None
