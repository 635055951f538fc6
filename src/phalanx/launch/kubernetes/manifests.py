"""The manifests of a run: a JobSet (or a Job of Volcano), its run file, its token, and what keeps others from evicting too many of its pods.

Why each field is there:

* One Indexed Job, pod = node; spares are further indexes. A pod that is lost is replaced under its index, when it is gone for certain
  (``podReplacementPolicy: Failed``, the only value beside a ``podFailurePolicy``: kubernetes.io/docs/concepts/workloads/controllers/job).
* ``backoffLimitPerIndex`` (Kubernetes 1.33; it needs completionMode Indexed and restartPolicy Never): a node that fails again and again gives up alone, and the
  run goes on without it, as long as ``fleet.min_nodes`` are left (``maxFailedIndexes``).
* ``podFailurePolicy``: a pod that was evicted, preempted or lost with its node does not count (condition DisruptionTarget), nor one that ended because the
  run was saved and goes on (code 75); code 76 ends the job: the run was stopped for good, or has failed.
* ``successPolicy`` (Kubernetes 1.33): the job is done when index 0, which leads, has ended with code 0.
* The JobSet's ``failurePolicy`` is FailJobSet: once there is a policy, a failure that no rule matches restarts all jobs
  (pkg/controllers/failure_policy.go of JobSet 0.12).
* A PodDisruptionBudget for pods of a Job takes only ``minAvailable``, as a number (kubernetes.io/docs/tasks/run-application/configure-pdb).
"""

from __future__ import annotations

import json
import math

from phalanx.launch.engines.order import seconds_of
from phalanx.launch.kubernetes.pod_template import (
    DIRECTORY,
    MANAGED,
    RUN_LABEL,
    TOKEN_KEY,
    Json,
    config_name,
    pod_template,
    secret_name,
)
from phalanx.launch.kubernetes.request import NODE_READER, TASK, PodRequest

EXIT_GOES_ON, EXIT_OVER = 75, 76
"""Exit codes of a pod: the run was saved and goes on, so the pod is started again; the run is over, though not finished."""
_RETRIES = 10
JOBSET, VOLCANO_JOB = "jobset.x-k8s.io/v1alpha2", "batch.volcano.sh/v1alpha1"


def job_of(request: PodRequest, submission: str) -> Json:
    """The manifest of the job itself. Its name is the run's, so that a cluster takes it only once."""
    return _volcano_job(request, submission) if request.volcano else _job_set(request, submission)


def beside(request: PodRequest, token: str = "") -> list[Json]:
    """Return the manifests of what the job needs beside it: secret, run file, and a disruption budget if it has more pods than may
    be lost.

    Args:
        token: The secret by which the run's processes know each other; without one the leading pod makes it.
    """
    config = {
        **_head(request, "v1", "ConfigMap", config_name(request)),
        "immutable": True,
        "data": {"run.toml": request.run_file},
    }
    secret = {
        **_head(request, "v1", "Secret", secret_name(request)),
        "type": "Opaque",
        **({"stringData": {TOKEN_KEY: token}} if token else {}),
    }
    manifests = [secret]
    allowed = max(1, request.spares)
    if request.pods > allowed:
        manifests.append(
            {
                **_head(request, "policy/v1", "PodDisruptionBudget", request.name),
                "spec": {
                    "minAvailable": request.pods - allowed,
                    "selector": {"matchLabels": {RUN_LABEL: request.name}},
                    # A pod that is not ready holds no rank: who drains its node need not wait for it.
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",
                },
            }
        )
    # Last: no pod starts before its run file is there, and then the token is there too.
    return [*manifests, config]


def node_reader(account: str, namespace: str) -> list[Json]:
    """Return the manifests that an administrator creates once, so that pods of this service account may read the labels of their nodes."""
    name = NODE_READER
    kind = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    own: Json = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": account, "namespace": namespace, "labels": dict(MANAGED)},
    }
    return [
        *([own] if account == NODE_READER else []),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name, "labels": dict(MANAGED)},
            "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{name}-{namespace}-{account}", "labels": dict(MANAGED)},
            "roleRef": kind,
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        },
    ]


def owned_by(manifest: Json, job: Json, uid: str) -> Json:
    """Return the manifest with ``job`` as its owner: deleting the job deletes it too."""
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": _name(job), "uid": uid}
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return {**manifest, "metadata": {**metadata, "ownerReferences": [owner]}}


def text_of(manifests: list[Json]) -> str:
    """Manifests as kubectl reads them: a stream of YAML documents, each of which is JSON. What begins with a brace, kubectl takes for JSON alone."""
    return "".join(f"---\n{json.dumps(manifest, indent=1)}\n" for manifest in manifests)


def _name(manifest: Json) -> object:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return metadata["name"]


def _head(request: PodRequest, version: str, kind: str, name: str, **labels: str) -> Json:
    metadata: Json = {
        "name": name,
        "labels": {**MANAGED, RUN_LABEL: request.name, **labels},
        "annotations": {DIRECTORY: request.run_dir},
    }
    if request.launch.namespace:
        metadata["namespace"] = request.launch.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job_set(request: PodRequest, submission: str) -> Json:
    """Return the run's JobSet, in its Kueue queue if it has one."""
    launch, labels = request.launch, dict[str, str]()
    if launch.partition:
        labels["kueue.x-k8s.io/queue-name"] = launch.partition
    if launch.qos:
        labels["kueue.x-k8s.io/priority-class"] = launch.qos
    head = _head(request, JOBSET, "JobSet", request.name)
    metadata = head["metadata"]
    assert isinstance(metadata, dict)
    metadata["labels"] = {**metadata["labels"], **labels}
    job: Json = {"spec": _indexed_job(request, submission), "metadata": {"labels": {RUN_LABEL: request.name}}}
    return {
        **head,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": 0, "rules": [{"name": "ended", "action": "FailJobSet"}]},
            "replicatedJobs": [{"name": TASK, "replicas": 1, "template": job}],
        },
    }


def _indexed_job(request: PodRequest, submission: str) -> Json:
    """Return the indexed Job in a JobSet: pods are replaced unless their exit code ends the run; the time limit leaves the grace."""
    launch = request.launch

    def on_code(action: str, code: int) -> Json:
        return {
            "action": action,
            "onExitCodes": {"containerName": "agent", "operator": "In", "values": [code]},
        }

    spec: Json = {
        "completionMode": "Indexed",
        "completions": request.pods,
        "parallelism": request.pods,
        "backoffLimitPerIndex": _RETRIES,
        "maxFailedIndexes": max(0, request.pods - request.least_nodes),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                on_code("FailJob", EXIT_OVER),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                on_code("Ignore", EXIT_GOES_ON),
            ]
        },
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": pod_template(request, submission),
    }
    if launch.time_limit:
        # Then the pods are asked to end, and have their grace.
        spec["activeDeadlineSeconds"] = max(1, math.floor(seconds_of(launch.time_limit) - launch.grace_s))
    return spec


def _volcano_job(request: PodRequest, submission: str) -> Json:
    """Return a Job of Volcano. RestartPod needs 1.11, partitionPolicy 1.14 (config/crd/volcano/bases/batch.volcano.sh_jobs.yaml)."""
    launch = request.launch
    task: Json = {
        "name": TASK,
        "replicas": request.pods,
        "policies": [
            {"exitCode": EXIT_OVER, "action": "TerminateJob"},
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartPod"},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "template": pod_template(request, submission),
    }
    if launch.topology_label:
        task["partitionPolicy"] = {
            "totalPartitions": request.pods // launch.unit,
            "partitionSize": launch.unit,
            "networkTopology": {"mode": "hard", "highestTierAllowed": int(launch.topology_label)},
        }
    spec: Json = {
        "schedulerName": "volcano",
        # The gang is the nodes that hold ranks; spares may come later.
        "minAvailable": request.nodes,
        "maxRetry": 1000,
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
        "tasks": [task],
    }
    if launch.partition:
        spec["queue"] = launch.partition
    if launch.qos:
        spec["priorityClassName"] = launch.qos
    return {**_head(request, VOLCANO_JOB, "Job", request.name), "spec": spec}
