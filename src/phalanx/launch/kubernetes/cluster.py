"""A Kubernetes cluster through kubectl: a run's job submitted, looked at, and ended.

A submission refuses what the cluster could never run, and leaves nothing behind of what it refuses. The job is created first, so that the
API server's refusal of a second one of the same name decides between two submitters. All else belongs to it (ownerReferences) and is
removed with it; its pods wait until their run file is there.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.launch.engines.order import EngineError, run_tool
from phalanx.launch.kubernetes import manifests
from phalanx.launch.kubernetes.request import PodRequest

_GONE_S = 900.0
"""Longest time in which the pods of a job save and end."""


def preflight(request: PodRequest) -> list[str]:
    """Return everything that the cluster lacks for a run (queue, claims); empty if nothing.

    A completed job of the run is one of the problems. Without problems or a failed job of this name, it also creates the
    job as a dry run on the server. Raises ``EngineError`` for a refusal there, if the run's job waits or runs, or if no
    cluster is reached.
    """
    namespace, queue = request.launch.namespace, request.launch.partition
    earlier = job_named(request.name, namespace, [_resource(request)])
    wrong: list[str] = []
    if earlier is not None and earlier.state == "completed":
        wrong.append(_finished(request, earlier))
    elif earlier is not None and not earlier.ended:
        raise _second(request, earlier)
    if queue:
        wrong += _missing_queue(
            "queues.scheduling.volcano.sh" if request.volcano else "localqueues.kueue.x-k8s.io",
            queue,
            namespace,
        )
    for claim in dict.fromkeys(mount.source for mount in request.mounts if not mount.of_nodes):
        wrong += _unfit_claim(claim, request, namespace)
    if not wrong and earlier is None:
        # Admission may refuse it, which a dry run shows before anything is created. If a failed job has this name, the
        # dry run would only report that.
        manifest = json.dumps(manifests.job_of(request, "dry-run"))
        kubectl("create", "--dry-run=server", "-f", "-", namespace=namespace, stdin=manifest)
    return wrong


def refuse_second(request: PodRequest) -> ClusterJob | None:
    """Return the run's failed job, or ``None``. Raises ``EngineError`` if its job is running, waiting or completed."""
    job = job_named(request.name, request.launch.namespace, [_resource(request)])
    if job is not None and job.state == "completed":
        raise EngineError(_finished(request, job))
    if job is not None and not job.ended:
        raise _second(request, job)
    return job


def _finished(request: PodRequest, job: ClusterJob) -> str:
    """Return the problem of a run whose job has completed."""
    return f"the run in {request.run_dir} is finished (job {job.name}); give another run_dir to train it once more"


def _second(request: PodRequest, job: ClusterJob) -> EngineError:
    """Return the error for the submission of a run whose job waits or runs."""
    return EngineError(
        f"the run in {request.run_dir} is job {job.name} already ({job.sentence}): follow it with phalanx status {job.name} --on kubernetes, or "
        f"end it with phalanx cancel {job.name} --on kubernetes"
    )


def _missing_queue(resource: str, queue: str, namespace: str) -> Iterator[str]:
    """Yield the problem if a queue, or its kind, is not in the cluster; nothing if this user may not list queues.

    Raises ``EngineError`` for other errors.
    """
    try:
        names = kubectl(
            "get", resource, "-o", "jsonpath={.items[*].metadata.name}", namespace=namespace
        ).split()
    except MissingKindError as error:
        yield str(error)
        return
    except EngineError as error:
        if "orbidden" in str(error):
            return  # a user without permission to list queues may still use one
        raise
    if queue not in names:
        yield f"launch.partition: there is no queue {queue!r} in this namespace: --queue with one of {', '.join(names) or 'none'}"


def _unfit_claim(claim: str, request: PodRequest, namespace: str) -> Iterator[str]:
    """Yield the problem if a PersistentVolumeClaim is missing, or only one pod can write it and there are several.

    Raises ``EngineError`` if the cluster does not answer.
    """
    text = kubectl(
        "get", "persistentvolumeclaims", claim, "-o", "json", "--ignore-not-found", namespace=namespace
    )
    if not text.strip():
        yield f"launch.container_mounts: there is no PersistentVolumeClaim {claim!r} in this namespace: kubectl get pvc"
        return
    modes = json.loads(text).get("spec", {}).get("accessModes", [])
    if request.pods > 1 and "ReadWriteMany" not in modes:
        yield (
            f"launch.container_mounts: {claim} can be mounted as {', '.join(modes)}, and {request.pods} pods must write it: a claim with "
            "ReadWriteMany"
        )


def submit(request: PodRequest, submission: str, token: str) -> ClusterJob:
    """Create a run's job and, owned by it, its run file, secret and disruption budget. An earlier failed job is
    deleted first.

    Raises ``EngineError``; what was created of the new job is then deleted, without waiting for it.
    """
    namespace, resource = request.launch.namespace, _resource(request)
    earlier = refuse_second(request)
    if earlier is not None:
        end(earlier)
    manifest = manifests.job_of(request, submission)
    try:
        text = kubectl("create", "-f", "-", "-o", "json", namespace=namespace, stdin=json.dumps(manifest))
    except EngineError as error:
        if "AlreadyExists" in str(error):
            refuse_second(request)
        raise
    job = parse_jobs(text, resource)[0]
    owned = [manifests.owned_by(part, manifest, job.uid) for part in manifests.beside(request, token)]
    try:
        kubectl(
            *("apply", "--server-side", "--force-conflicts", "--field-manager=phalanx-submit", "-f", "-"),
            namespace=namespace,
            stdin=manifests.text_of(owned),
        )
    except EngineError:
        end(job, at_once=True)
        raise
    return job


def _resource(request: PodRequest) -> str:
    return VOLCANO_JOBS if request.volcano else JOB_SETS


# --- afterwards -----------------------------------------------------------------------------------


def end(job: ClusterJob, *, at_once: bool = False, wait: bool = True) -> None:
    """Delete a job; its pods have their grace to save. By default wait until all are gone, at most 15 minutes.

    With ``at_once`` the pods are deleted without grace, and nothing is awaited. A missing job is no error.
    Raises ``EngineError``.
    """
    words = ["delete", job.resource, job.name, "--ignore-not-found"]
    if at_once:
        kubectl(*words, "--cascade=background", "--wait=false", namespace=job.namespace)
        pods = ["pods", "-l", f"{manifests.RUN_LABEL}={job.name}"]
        kubectl("delete", *pods, "--now", "--ignore-not-found", "--wait=false", namespace=job.namespace)
        return
    patience = ["--wait=true", f"--timeout={_GONE_S:.0f}s"] if wait else ["--wait=false"]
    kubectl(*words, "--cascade=foreground", *patience, namespace=job.namespace, timeout_s=_GONE_S + ANSWER_S)


def ask_in_pod(job: ClusterJob, *words: str) -> str:
    """Return the output of ``phalanx WORDS``, run in the pod of index 0, which leads. Raises ``EngineError``."""
    pod = pod_of_index(job, 0)
    if pod is None:
        raise EngineError(f"job {job.name} has no pod that leads now")
    command = ["python", "-m", "phalanx", *words]
    return kubectl("exec", pod, "-c", manifests.CONTAINER, "--", *command, namespace=job.namespace)


def print_logs(job: ClusterJob, *, index: int, follow: bool, last: int) -> int:
    """Print the output of a pod, continuously if ``follow``; return kubectl's exit code. Raises ``EngineError`` if there is no such
    pod.

    ``last`` 0 prints all lines.
    """
    pod = pod_of_index(job, index)
    if pod is None:
        raise EngineError(f"job {job.name} has no pod of index {index}: {job.sentence}")
    where = ["--namespace", job.namespace] if job.namespace else []
    shown = [f"--tail={last or -1}", *(["-f"] if follow else [])]
    return subprocess.call(["kubectl", *where, "logs", pod, "-c", manifests.CONTAINER, *shown])


# State of jobs and pods, read with kubectl. Errors name the remedy if it reaches no cluster, or if the cluster lacks a kind.
#
# The reason for which a job waits comes from its own conditions, its queue (Kueue's Workload), the scheduler of a pod, or the
# kubelet that cannot start a container.

JOB_SETS, VOLCANO_JOBS = "jobsets.jobset.x-k8s.io", "jobs.batch.volcano.sh"
"""The kinds of a run's job, as kubectl names them."""
ANSWER_S = 60.0
"""Seconds in which an API server answers."""
_UNREACHED = (
    "connection refused",
    "was refused",
    "Unable to connect",
    "no configuration has been provided",
    "i/o timeout",
    "no such host",
    "couldn't get current server",
)
_NO_KIND = (
    "the server doesn't have a resource type",
    "no matches for kind",
    "could not find the requested resource",
)
_INSTALL = {
    JOB_SETS: "JobSet is not installed in this cluster (jobset.sigs.k8s.io/docs/installation), or take --set launch.scheduler='\"volcano\"'",
    VOLCANO_JOBS: "Volcano is not installed in this cluster (volcano.sh/en/docs/installation)",
    "localqueues.kueue.x-k8s.io": "Kueue is not installed in this cluster (kueue.sigs.k8s.io/docs/installation): leave --queue out",
    "queues.scheduling.volcano.sh": "Volcano is not installed in this cluster (volcano.sh/en/docs/installation)",
}


class MissingKindError(EngineError):
    """A cluster does not know a kind of object."""


def kubectl(*words: str, namespace: str = "", stdin: str | None = None, timeout_s: float = ANSWER_S) -> str:
    """Run kubectl and return its standard output. An empty ``namespace`` is that of its context.

    Raises ``MissingKindError`` if the cluster does not know the kind of object, else ``EngineError``, both with a
    remedy.
    """
    where = ["--namespace", namespace] if namespace else []
    try:
        return run_tool(["kubectl", *where, *words], stdin=stdin, timeout_s=timeout_s)
    except EngineError as error:
        message = str(error)
        if any(sign in message for sign in _NO_KIND):
            raise MissingKindError(
                next((remedy for kind, remedy in _INSTALL.items() if kind.split(".")[0] in message), message)
            ) from error
        if any(sign in message for sign in _UNREACHED):
            raise EngineError(
                f"kubectl reaches no cluster: choose one by kubectl config use-context NAME or KUBECONFIG; its output: {message[-300:]}"
            ) from error
        raise


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
    """Why it waits or has failed; empty if unknown."""
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

    @property
    def listing(self) -> str:
        """The job and its run directory, as ``phalanx runs --on kubernetes`` prints them."""
        return f"job {self.name}: {self.sentence}\n  {self.run_dir} in its pods"


def jobs(namespace: str = "") -> list[ClusterJob]:
    """Return the jobs that Phalanx submitted, also ended ones, with the reasons why they wait.

    Raises ``EngineError``, also if the cluster has neither kind of job.
    """
    return list(_read_jobs((JOB_SETS, VOLCANO_JOBS), namespace, "-l", _OURS))


def job_named(
    name: str, namespace: str = "", resources: Sequence[str] = (JOB_SETS, VOLCANO_JOBS)
) -> ClusterJob | None:
    """Return the job of this name, with the reason why it waits; ``None`` if there is none.

    Raises ``EngineError``, also if the cluster has none of the kinds ``resources``.
    """
    return next(_read_jobs(resources, namespace, name, "--ignore-not-found"), None)


def _read_jobs(resources: Sequence[str], namespace: str, *selection: str) -> Iterator[ClusterJob]:
    """Yield the selected jobs of these kinds, with the reasons why they wait. Raises ``EngineError``, also if the
    cluster has none of the kinds.
    """
    missing = []
    for resource in resources:
        try:
            text = kubectl("get", resource, *selection, "-o", "json", namespace=namespace)
        except MissingKindError as error:
            missing.append(error)
            continue
        yield from map(_with_reason, parse_jobs(text, resource) if text.strip() else ())
    if len(missing) == len(resources):
        raise missing[0]


def parse_jobs(text: str, resource: str) -> list[ClusterJob]:
    """The jobs in what ``kubectl get -o json`` printed: one, or a list."""
    read = json.loads(text)
    return [_job(item, resource) for item in read.get("items", [read])]


def _job(item: dict[str, Any], resource: str) -> ClusterJob:
    """Return the job that an item of kubectl's JSON describes, a JobSet or else a Job of Volcano."""
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
        metadata.get("annotations", {}).get(manifests.DIRECTORY, ""),
        metadata.get("uid", ""),
    )


def _job_set_state(spec: dict[str, Any], status: dict[str, Any]) -> tuple[str, str]:
    """Return state and reason of a JobSet: completed, failed (with its message), waiting or running.

    It waits if it is suspended or has no active pods.
    """
    holds = {
        entry["type"]: entry.get("message", "")
        for entry in status.get("conditions", [])
        if entry.get("status") == "True"
    }
    for condition in ("Completed", "Failed"):
        if condition in holds or status.get("terminalState") == condition:
            return condition.lower(), holds.get(condition, "") if condition == "Failed" else ""
    if spec.get("suspend"):
        return "waiting", ""
    active = sum(entry.get("active", 0) for entry in status.get("replicatedJobsStatus", []))
    return ("running" if active else "waiting"), ""


def _with_reason(job: ClusterJob) -> ClusterJob:
    """Return the job with its state and reason by its pods. Unchanged if it has ended.

    If a pod runs, the job is running, and the reason counts the pods if some are missing. Otherwise the reason
    is the cluster's own, else Kueue's, else that of a pending pod. Raises ``EngineError`` if the cluster does
    not answer.
    """
    if job.ended:
        return job
    state, reason = job.state, job.reason
    pods = pods_of(job)
    phases = Counter(pod["status"].get("phase", "Unknown") for pod in pods)
    pending_reason = next(filter(None, map(_why_pending, pods)), "")
    if phases["Running"]:
        state, reason = "running", ""
        if phases["Running"] < job.pods:
            reason = f"{phases['Running']} there" + (f"; {pending_reason}" if pending_reason else "")
    elif not reason:
        reason = _queue_says(job) or pending_reason
    return replace(job, state=state, reason=reason)


def _queue_says(job: ClusterJob) -> str:
    """Return why Kueue has not admitted a job: the message of QuotaReserved or Admitted in its Workload.

    Empty if neither is False, there is no Workload, or they cannot be listed.
    """
    try:
        text = kubectl("get", "workloads.kueue.x-k8s.io", "-o", "json", namespace=job.namespace)
    except EngineError:
        return ""
    for item in json.loads(text).get("items", []):
        owners = {owner.get("uid") for owner in item["metadata"].get("ownerReferences", [])}
        if job.uid in owners:
            for condition in item.get("status", {}).get("conditions", []):
                if condition["type"] in ("QuotaReserved", "Admitted") and condition["status"] == "False":
                    return str(condition.get("message", ""))
    return ""


def _why_pending(pod: dict[str, Any]) -> str:
    """Return why a pod is not scheduled or its container does not start; empty if neither is reported."""
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"pod {pod['metadata']['name']}: {condition.get('message', '')}"
    for container in pod["status"].get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            remedy = _NO_IMAGE if waiting.get("reason") in _IMAGE_REASONS else ""
            return f"pod {pod['metadata']['name']}: {waiting['message']}{remedy}"
    return ""


def pods_of(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the pods of a job as kubectl's JSON, the newest first. Raises ``EngineError``."""
    text = kubectl(
        "get", "pods", "-l", f"{manifests.RUN_LABEL}={job.name}", "-o", "json", namespace=job.namespace
    )
    pods: list[dict[str, Any]] = json.loads(text).get("items", [])
    return sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)


def pod_of_index(job: ClusterJob, index: int) -> str | None:
    """Return the name of the newest pod of an index; ``None`` if there is none. Raises ``EngineError`` if the
    cluster does not answer.
    """
    for pod in pods_of(job):
        labels, name = pod["metadata"].get("labels", {}), str(pod["metadata"]["name"])
        own = labels.get("batch.kubernetes.io/job-completion-index", name.rpartition("-")[2])
        if own == str(index):
            return name
    return None
