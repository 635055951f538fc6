"""Starts a run's job on a Kubernetes cluster, and ends it: refuses what the cluster could never run, and leaves nothing behind of what it refuses.

The job is created first, so that the API server's refusal of a second one of the same name decides between two submitters. All else belongs to it
(ownerReferences) and is removed with it; its pods wait until their run file is there.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from phalanx.launch.engines.tools import EngineError
from phalanx.launch.kubernetes.kubectl import ANSWER_S, JOB_SETS, VOLCANO_JOBS, MissingKindError, kubectl
from phalanx.launch.kubernetes.manifests import beside, job_of, owned_by, text_of
from phalanx.launch.kubernetes.pod_template import CONTAINER, RUN_LABEL
from phalanx.launch.kubernetes.request import PodRequest
from phalanx.launch.kubernetes.standing import ClusterJob, job_named, parse_jobs, pod_of_index

_GONE_S = 900.0
"""Seconds in which the pods of a job have saved and gone."""


def preflight(request: PodRequest) -> list[str]:
    """What the cluster lacks for a run, all of it; empty if nothing. Raises ``EngineError`` if the run is there already, or no cluster is reached."""
    earlier = refuse_second(request)
    namespace, queue = request.launch.namespace, request.launch.partition
    wrong: list[str] = []
    if queue:
        wrong += _missing_queue(
            "queues.scheduling.volcano.sh" if request.volcano else "localqueues.kueue.x-k8s.io",
            queue,
            namespace,
        )
    for claim in dict.fromkeys(mount.source for mount in request.mounts if not mount.of_nodes):
        wrong += _unfit_claim(claim, request, namespace)
    if not wrong and earlier is None:
        # Whatever admission says, before anything is there. With a failed job of this name there, it would say that.
        kubectl(
            "create",
            "--dry-run=server",
            "-f",
            "-",
            namespace=namespace,
            stdin=json.dumps(job_of(request, "dry-run")),
        )
    return wrong


def refuse_second(request: PodRequest) -> ClusterJob | None:
    """The run's failed job, if there is one. Raises ``EngineError`` if its job is there and has not failed."""
    job = job_named(request.name, request.launch.namespace, [_resource(request)])
    if job is not None and job.state == "completed":
        raise EngineError(
            f"the run in {request.run_dir} is finished (job {job.name}); give another run_dir to train it once more"
        )
    if job is not None and not job.ended:
        raise EngineError(
            f"the run in {request.run_dir} is job {job.name} already ({job.sentence}): follow it with phalanx status {job.name} --on kubernetes, or "
            f"end it with phalanx cancel {job.name} --on kubernetes"
        )
    return job


def _missing_queue(resource: str, queue: str, namespace: str) -> Iterator[str]:
    try:
        names = kubectl(
            "get", resource, "-o", "jsonpath={.items[*].metadata.name}", namespace=namespace
        ).split()
    except MissingKindError as error:
        yield str(error)
        return
    except EngineError as error:
        if "orbidden" in str(error):
            return  # who may not list queues may still use one
        raise
    if queue not in names:
        yield f"launch.partition: there is no queue {queue!r} in this namespace: --queue with one of {', '.join(names) or 'none'}"


def _unfit_claim(claim: str, request: PodRequest, namespace: str) -> Iterator[str]:
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
    """Creates a run's job and what belongs to it. Raises ``EngineError``; then nothing of it is left."""
    namespace, resource = request.launch.namespace, _resource(request)
    earlier = refuse_second(request)
    if earlier is not None:
        end(earlier)
    manifest = job_of(request, submission)
    try:
        text = kubectl("create", "-f", "-", "-o", "json", namespace=namespace, stdin=json.dumps(manifest))
    except EngineError as error:
        if "AlreadyExists" in str(error):
            refuse_second(request)
        raise
    job = parse_jobs(text, resource)[0]
    owned = [owned_by(one, manifest, job.uid) for one in beside(request, token)]
    try:
        kubectl(
            *("apply", "--server-side", "--force-conflicts", "--field-manager=phalanx-submit", "-f", "-"),
            namespace=namespace,
            stdin=text_of(owned),
        )
    except EngineError:
        end(job, at_once=True)
        raise
    return job


def _resource(request: PodRequest) -> str:
    return VOLCANO_JOBS if request.volcano else JOB_SETS


# --- afterwards -----------------------------------------------------------------------------------


def end(job: ClusterJob, *, at_once: bool = False, wait: bool = True) -> None:
    """Deletes a job: its pods have their grace to save, unless ``at_once``; by default until all are gone. Raises ``EngineError``."""
    words = ["delete", job.resource, job.name, "--ignore-not-found"]
    if at_once:
        kubectl(*words, "--cascade=background", "--wait=false", namespace=job.namespace)
        kubectl(
            *(
                "delete",
                "pods",
                "-l",
                f"{RUN_LABEL}={job.name}",
                "--now",
                "--ignore-not-found",
                "--wait=false",
            ),
            namespace=job.namespace,
        )
        return
    patience = ["--wait=true", f"--timeout={_GONE_S:.0f}s"] if wait else ["--wait=false"]
    kubectl(*words, "--cascade=foreground", *patience, namespace=job.namespace, timeout_s=_GONE_S + ANSWER_S)


def ask_in_pod(job: ClusterJob, *words: str) -> str:
    """What ``phalanx WORDS`` prints in the pod that leads. Raises ``EngineError``."""
    pod = pod_of_index(job, 0)
    if pod is None:
        raise EngineError(f"job {job.name} has no pod that leads now")
    return kubectl(
        "exec", pod, "-c", CONTAINER, "--", "python", "-m", "phalanx", *words, namespace=job.namespace
    )


def print_logs(job: ClusterJob, *, index: int, follow: bool, last: int) -> int:
    """Prints what a pod has printed, as it comes if ``follow``; returns kubectl's exit code. Raises ``EngineError`` if there is no such pod."""
    pod = pod_of_index(job, index)
    if pod is None:
        raise EngineError(f"job {job.name} has no pod of index {index}: {job.sentence}")
    where = ["--namespace", job.namespace] if job.namespace else []
    words = [
        "kubectl",
        *where,
        "logs",
        pod,
        "-c",
        CONTAINER,
        f"--tail={last or -1}",
        *(["-f"] if follow else []),
    ]
    return subprocess.call(words)
