"""The pod that runs the agent of one node: its command, probes, volumes and environment.

All pods of a run have one template. They differ by their index, which a replacement keeps: the index is the node's name in the fleet, and index 0
leads. Sources: kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle (probes, termination),
/docs/concepts/workloads/controllers/job (completion index, restart policy), /docs/concepts/workloads/pods/downward-api.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from phalanx.launch.kubernetes.request import (
    CONFIG_FOLDER,
    PodRequest,
    constraint_of,
    merged,
    toleration_of,
    user_of,
)
from phalanx.launch.placing import expanded
from phalanx.run.read import launch_variables

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
    """Return the template of all pods of a run, with the user's patch merged in.

    Args:
        submission: A word that is unique to this start of the run.
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
    """Return annotations by which Kueue keeps units together. It refuses slice-required-topology without slice-size
    (pkg/controller/jobframework/tas_validation.go)."""
    launch = request.launch
    if not launch.topology_label or request.volcano:
        return {}
    return {
        "kueue.x-k8s.io/podset-slice-required-topology": launch.topology_label,
        "kueue.x-k8s.io/podset-slice-size": str(launch.unit),
    }


def _container(request: PodRequest, submission: str) -> Json:
    """Return the container of a pod: the agent's command, probes by its touched file, mounts, ports and resources."""
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
        "securityContext": _container_security(),
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
    """Return the container's variables: the pod's address and node, the run's token, and the user's, private ones from their Secret."""

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
        variables.append({"name": "HOME", "value": "/tmp"})  # of a user that the image does not know
    for name, value in launch_variables(request.launch):
        # $(NAME) would be another variable's value: a run file means what it says.
        variables.append(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": request.launch.secrets, "key": name}}}
            if value is None
            else {"name": name, "value": value.replace("$(", "$$(")}
        )
    return variables


def _resources(request: PodRequest) -> Json:
    """Return requests and limits of the container, with its GPUs; CPUs are requested without a limit."""
    named = dict(text.split("=", 1) for text in request.launch.resources)
    if request.gpus:
        named[request.launch.gpu_resource] = str(request.gpus)
    # A limit of CPU would throttle an agent whose heartbeats others wait for.
    limits = {name: quantity for name, quantity in named.items() if name != "cpu"}
    return {kind: values for kind, values in (("requests", named), ("limits", limits)) if values}


def _pod_security(request: PodRequest) -> Json:
    user = user_of(request.launch)
    group = user[1] if user else _GROUP
    own: Json = {"runAsUser": user[0], "runAsGroup": user[1]} if user else {}
    return {
        **own,
        # What the Pod Security Standard "restricted" demands.
        "runAsNonRoot": user is None or user[0] != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": group,
        # Not changed in all files of a large volume at each start, only where the root has another group.
        "fsGroupChangePolicy": "OnRootMismatch",
    }


def _container_security() -> Json:
    # RDMA pins memory, which the limit of the node's container runtime allows: an added capability has no effect for other users than root.
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _volumes(request: PodRequest) -> list[Json]:
    """Return the volumes of a pod: its mounts, the run file, and shared memory up to the memory limit."""
    volumes: list[Json] = []
    for number, mount in enumerate(request.mounts):
        source: Json = (
            {"hostPath": {"path": mount.source, "type": "Directory"}}
            if mount.of_nodes
            else {"persistentVolumeClaim": {"claimName": mount.source}}
        )
        volumes.append({"name": f"mount-{number}", **source})
    volumes.append({"name": "run-file", "configMap": {"name": config_name(request)}})
    # NCCL and the loaders share memory, and a container has 64 MiB of it otherwise.
    named = dict(text.split("=", 1) for text in request.launch.resources)
    limit = {"sizeLimit": named["memory"]} if "memory" in named else {}
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", **limit}})
    return volumes


def _affinity(request: PodRequest) -> Json:
    """Return the rules that exclude nodes, and that keep pods without GPUs on nodes of their own if ``launch.exclusive``."""
    launch, host = request.launch, "kubernetes.io/hostname"
    rules: Json = {}
    if launch.exclude:
        away = {"key": host, "operator": "NotIn", "values": expanded(launch.exclude)}
        term = {"nodeSelectorTerms": [{"matchExpressions": [away]}]}
        rules["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": term}
    # Pods that take all GPUs of a node need no rule to be alone there, and the rule is dear with many pods
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
