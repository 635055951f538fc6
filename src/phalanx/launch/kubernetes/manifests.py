"""The manifests of a run: a JobSet (or a Job of Volcano), its run file, its token, and what keeps others from evicting too many of its pods.

Why each field is there:

* One Indexed Job, pod = node; spares are further indexes. A pod that is lost is replaced under its index, when it is gone for certain
  (``podReplacementPolicy: Failed``, the only value beside a ``podFailurePolicy``: kubernetes.io/docs/concepts/workloads/controllers/job).
* ``backoffLimitPerIndex`` (Kubernetes 1.33; it needs completionMode Indexed and restartPolicy Never): a node that fails again and again gives up alone, and the
  run continues without it, as long as ``fleet.min_nodes`` are left (``maxFailedIndexes``).
* ``podFailurePolicy``: a pod that was evicted, preempted or lost with its node does not count (condition DisruptionTarget), nor one that ended because the
  run was saved and continues (code 75); code 76 ends the job: the run was stopped for good, or has failed.
* ``successPolicy`` (Kubernetes 1.33): the job is done when index 0, which leads, has ended with code 0.
* The JobSet's ``failurePolicy`` is FailJobSet: once there is a policy, a failure that no rule matches restarts all jobs
  (pkg/controllers/failure_policy.go of JobSet 0.12).
* A PodDisruptionBudget for pods of a Job takes only ``minAvailable``, as a number (kubernetes.io/docs/tasks/run-application/configure-pdb).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TypeAlias

from phalanx.launch.engines.order import excluded_nodes, seconds_of
from phalanx.launch.kubernetes.request import (
    CONFIG_FOLDER,
    NODE_READER,
    TASK,
    PodRequest,
    constraint_of,
    merged,
    toleration_of,
    user_of,
)
from phalanx.process.exit_codes import EXIT_OVER, EXIT_STOPPED
from phalanx.run.read import launch_variables

_RETRIES = 10
JOBSET, VOLCANO_JOB = "jobset.x-k8s.io/v1alpha2", "batch.volcano.sh/v1alpha1"


def job_of(request: PodRequest, submission: str) -> Json:
    """The manifest of the job itself. Its name is the run's, so that a cluster takes it only once."""
    return _volcano_job(request, submission) if request.volcano else _job_set(request, submission)


def beside(request: PodRequest, token: str = "") -> list[Json]:
    """Return the manifests of what the job needs beside it: secret, disruption budget, and last the run file.

    The budget is left out if all pods may be lost. ``token`` is put into the secret; the run's
    processes authenticate by it. If it is empty, the secret has no data, and the leading pod makes a token.
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
                    # A pod that is not ready has no rank, so a drain of its node need not wait for it.
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",
                },
            }
        )
    # Last: no pod starts before its run file is there, and then the token is there too.
    return [*manifests, config]


def node_reader(account: str, namespace: str) -> list[Json]:
    """Return the manifests (ClusterRole, ClusterRoleBinding) by which pods of this service account may read node
    labels.

    An administrator creates them once. The account itself is included if it is the default one.
    """
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
    """Return the beginning of a manifest: version, kind, and metadata with the run's labels, directory and
    namespace.
    """
    metadata: Json = {
        "name": name,
        "labels": {**MANAGED, RUN_LABEL: request.name, **labels},
        "annotations": {DIRECTORY: request.run_dir},
    }
    if request.launch.namespace:
        metadata["namespace"] = request.launch.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job_set(request: PodRequest, submission: str) -> Json:
    """Return the run's JobSet, in its Kueue queue and priority class if it has them. It is never restarted as a
    whole.
    """
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
    """Return the indexed Job in a JobSet.

    A pod that ends is replaced under its index; a disruption or ``EXIT_STOPPED`` costs no retry, and ``EXIT_OVER``
    fails the job. It succeeds with index 0. The deadline is the time limit less the grace.
    """
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
                on_code("Ignore", EXIT_STOPPED),
            ]
        },
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": pod_template(request, submission),
    }
    if launch.time_limit:
        # At this deadline the pods get SIGTERM and their grace period.
        spec["activeDeadlineSeconds"] = max(1, math.floor(seconds_of(launch.time_limit) - launch.grace_s))
    return spec


def _volcano_job(request: PodRequest, submission: str) -> Json:
    """Return a Job of Volcano: failed pods are restarted, ``EXIT_OVER`` ends it, and the gang is the nodes without
    spares.

    RestartPod needs 1.11, partitionPolicy 1.14 (config/crd/volcano/bases/batch.volcano.sh_jobs.yaml).
    """
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


# The pod that runs the agent of one node: its command, probes, volumes and environment.
#
# All pods of a run have one template. They differ by their index, which a replacement keeps: it is the node's name in the
# fleet, and index 0 leads. Sources: kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle (probes, termination),
# /docs/concepts/workloads/controllers/job (completion index, restart policy), /docs/concepts/workloads/pods/downward-api.


Json: TypeAlias = dict[str, object]
CONTAINER = "agent"
RUN_LABEL = "phalanx.run/name"
"""The label of everything that belongs to a run: the name of its job."""
MANAGED = {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/managed-by": "phalanx-submit"}
"""Labels of everything that phalanx submit makes."""
DIRECTORY = "phalanx.run/directory"
"""The annotation that names the run directory."""
ALIVE_FILE = "/tmp/phalanx-alive"
"""A file that a pod's agent touches as long as it lives; the probes look at its age."""
_STARTED_WITHIN_S, _START_PERIOD_S = 600, 5
_SILENT_S, _PERIOD_S, _FAILURES = 60, 20, 3
_GROUP = 1000
"""The group of the image's user (Dockerfile)."""
TOKEN_KEY = "join"


def pod_template(request: PodRequest, submission: str) -> Json:
    """Return the template of all pods of a run, with the user's patch merged in last.

    ``submission`` is a word that is unique to this start of the run.
    """
    launch = request.launch
    spec: Json = {
        # A pod that ends is replaced under its index; backoffLimitPerIndex and podFailurePolicy allow no other policy.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_s),
        # Only to read the labels of its node.
        "automountServiceAccountToken": bool(launch.domain_labels),
        "enableServiceLinks": False,
        "securityContext": _pod_security(request),
        "containers": [_container(request, submission)],
        "volumes": _volumes(request),
    }
    if request.account:
        spec["serviceAccountName"] = request.account
    if constraint := constraint_of(launch):
        spec["nodeSelector"] = dict(word.split("=", 1) for word in constraint)
    if launch.tolerations:
        spec["tolerations"] = [toleration_of(text) for text in launch.tolerations]
    if affinity := _affinity(request):
        spec["affinity"] = affinity
    template: Json = {
        "metadata": {"labels": {**MANAGED, RUN_LABEL: request.name}, "annotations": _topology(request)},
        "spec": spec,
    }
    return merged(template, request.pod_patch)


def _topology(request: PodRequest) -> Json:
    """Return the annotations by which Kueue keeps units together; empty without ``launch.topology_label`` or for
    Volcano.

    It refuses slice-required-topology without slice-size (pkg/controller/jobframework/tas_validation.go).
    """
    launch = request.launch
    if not launch.topology_label or request.volcano:
        return {}
    return {
        "kueue.x-k8s.io/podset-slice-required-topology": launch.topology_label,
        "kueue.x-k8s.io/podset-slice-size": str(launch.unit),
    }


def _container(request: PodRequest, submission: str) -> Json:
    """Return the container of a pod: the command of its agent, variables, mounts, ports and resources.

    The probes compare the age of a file that the agent touches.
    """
    launch = request.launch
    index = "$(VC_TASK_INDEX)" if request.volcano else "$(JOB_COMPLETION_INDEX)"
    command = ["python", "-m", "phalanx", "pod", f"{CONFIG_FOLDER}/run.toml", "--index", index]
    command += ["--coordinator", f"{request.leader}:{request.port}", "--host", "$(POD_IP)"]
    command += ["--submission", submission, "--alive", ALIVE_FILE]
    for label in launch.domain_labels:
        command += ["--domain-label", label]
    # The age of the file, in the image's shell: far cheaper than a Python process each time.
    alive = f"[ $(($(date +%s) - $(stat -c %Y {ALIVE_FILE}))) -lt {_SILENT_S} ]"
    asks = {"exec": {"command": ["sh", "-c", alive]}}
    mounts: list[Json] = [
        {
            "name": f"mount-{number}",
            "mountPath": mount.target,
            **({"subPath": mount.folder} if mount.folder else {}),
        }
        for number, mount in enumerate(request.mounts)
    ]
    return {
        "name": CONTAINER,
        "image": launch.container_image,
        "command": command,
        "workingDir": request.mounts[0].target,
        "env": _environment(request),
        **({"envFrom": [{"secretRef": {"name": launch.secrets}}]} if launch.secrets else {}),
        "ports": list(_ports(request)),
        "resources": _resources(request),
        "startupProbe": {
            **asks,
            "periodSeconds": _START_PERIOD_S,
            "failureThreshold": _STARTED_WITHIN_S // _START_PERIOD_S,
            "timeoutSeconds": 5,
        },
        "livenessProbe": {
            **asks,
            "periodSeconds": _PERIOD_S,
            "failureThreshold": _FAILURES,
            "timeoutSeconds": 10,
        },
        # RDMA pins memory, which the limit of the node's container runtime allows: an added capability has no effect for other
        # users than root.
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            *mounts,
            {"name": "run-file", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        # The last lines of a failed agent's log are in the pod's status, which outlives its node.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _ports(request: PodRequest) -> Iterator[Json]:
    """Yield ports by the names that deploy/kubernetes/pod-monitor.yaml scrapes; all pods have one template, so each declares the
    coordinator's too."""
    yield {"name": "coordinator", "containerPort": request.port}
    if request.metrics_port:
        yield {"name": "metrics-fleet", "containerPort": request.metrics_port}
        yield {"name": "metrics-node", "containerPort": request.metrics_port + 1}


def _environment(request: PodRequest) -> list[Json]:
    """Return the container's variables: the pod's address and node, the run's token, and the user's.

    Private ones come from the Secret ``launch.secrets``. "$(" in a value is escaped.
    """

    def of_field(path: str) -> Json:
        return {"fieldRef": {"fieldPath": path}}

    secret = {"name": secret_name(request), "key": TOKEN_KEY, "optional": True}
    variables: list[Json] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "POD_IP", "valueFrom": of_field("status.podIP")},
        {"name": "NODE_NAME", "valueFrom": of_field("spec.nodeName")},
        # Without a value in the secret the leading pod makes the token, in the run directory.
        {"name": "PHALANX_RUN_TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]
    if request.launch.run_as:
        variables.append({"name": "HOME", "value": "/tmp"})  # for a user that the image lacks
    for name, value in launch_variables(request.launch):
        # Kubernetes would replace $(NAME) by another variable's value; values of a run file are literal.
        variables.append(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": request.launch.secrets, "key": name}}}
            if value is None
            else {"name": name, "value": value.replace("$(", "$$(")}
        )
    return variables


def _resources(request: PodRequest) -> Json:
    """Return requests and limits of the container: ``launch.resources`` and its GPUs. CPUs are requested without a
    limit.
    """
    named = dict(text.split("=", 1) for text in request.launch.resources)
    if request.gpus:
        named[request.launch.gpu_resource] = str(request.gpus)
    # A limit of CPU would throttle an agent whose heartbeats others wait for.
    limits = {name: quantity for name, quantity in named.items() if name != "cpu"}
    return {kind: values for kind, values in (("requests", named), ("limits", limits)) if values}


def _pod_security(request: PodRequest) -> Json:
    """Return the security context of a pod: user and group of ``launch.run_as``, and the volumes' group.

    Without a user the image's own is used, which must not be root.
    """
    user = user_of(request.launch)
    group = user[1] if user else _GROUP
    own: Json = {"runAsUser": user[0], "runAsGroup": user[1]} if user else {}
    return {
        **own,
        # Required by the Pod Security Standard "restricted".
        "runAsNonRoot": user is None or user[0] != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": group,
        # Not changed in all files of a large volume at each start, only where the root has another group.
        "fsGroupChangePolicy": "OnRootMismatch",
    }


def _volumes(request: PodRequest) -> list[Json]:
    """Return the volumes of a pod: its mounts (claims or host paths), the run file, and shared memory up to the
    memory limit.
    """
    volumes: list[Json] = []
    for number, mount in enumerate(request.mounts):
        source: Json = (
            {"hostPath": {"path": mount.source, "type": "Directory"}}
            if mount.of_nodes
            else {"persistentVolumeClaim": {"claimName": mount.source}}
        )
        volumes.append({"name": f"mount-{number}", **source})
    volumes.append({"name": "run-file", "configMap": {"name": config_name(request)}})
    # NCCL and the loaders share memory, of which a container has 64 MiB by default.
    named = dict(text.split("=", 1) for text in request.launch.resources)
    limit = {"sizeLimit": named["memory"]} if "memory" in named else {}
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", **limit}})
    return volumes


def _affinity(request: PodRequest) -> Json:
    """Return the rules that exclude ``launch.exclude``, and with ``launch.exclusive`` keep two pods of this run,
    if they have no GPUs, off one node.

    Empty if neither applies.
    """
    launch, host = request.launch, "kubernetes.io/hostname"
    rules: Json = {}
    if excluded := excluded_nodes(launch):
        away = {"key": host, "operator": "NotIn", "values": excluded}
        term = {"nodeSelectorTerms": [{"matchExpressions": [away]}]}
        rules["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": term}
    # Pods that use all GPUs of a node need no rule to be alone there, and the rule is expensive with many pods
    # (kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node, inter-pod affinity).
    if launch.exclusive and not request.gpus:
        apart = {"labelSelector": {"matchLabels": {RUN_LABEL: request.name}}, "topologyKey": host}
        rules["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return rules


def config_name(request: PodRequest) -> str:
    """The name of the object that holds the run file."""
    return f"{request.name}-{request.digest}"


def secret_name(request: PodRequest) -> str:
    """The name of the object that holds the run's token."""
    return f"{request.name}-token"
