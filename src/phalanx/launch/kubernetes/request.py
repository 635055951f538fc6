"""The request to a Kubernetes cluster for a run: names of its objects, volumes, a user's own pod fields, and what no cluster has.

The submitter does not see the run directory, which is on a volume of the pods. So the cluster itself keeps what a file keeps elsewhere: the
name of the job follows from the run directory, so that the API server refuses a second job of the same run.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from phalanx.launch.engines.order import EngineError, refuse_for, time_problems
from phalanx.launch.engines.submission import default_name
from phalanx.run.directory.files import read_small
from phalanx.run.read import launch_variables
from phalanx.run.spec import LaunchSpec, RunSpec

PORT = 29_400
"""The coordinator's port where the run file names none: each pod has an address of its own, so that any port is free."""
NODE_READER = "phalanx-node-labels"
"""The service account, and the ClusterRole, of pods that read the labels of their nodes."""
TASK = "node"
"""The name of the one group of pods, whose members are numbered."""
CONFIG_FOLDER = "/etc/phalanx"
"""Where the pods see the frozen run file."""
_LONGEST_NAME = 40
"""A pod is called NAME-node-0-INDEX-abcde, in at most 63 letters (JobSet 0.12, pkg/webhooks/jobset_webhook.go)."""
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|NoExecute|PreferNoSchedule))?"
)
_QUANTITY = re.compile(r"\d+(\.\d+)?([EPTGMk]i?|m)?")
_USER = re.compile(r"(\d+)(?::(\d+))?")
_NAMESPACE = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[a-zA-Z0-9][\w./-]*(:\d+/[\w./-]+)?(:[\w][\w.-]{0,127})?(@[a-z0-9]+:[0-9a-fA-F]{32,})?")
"""A reference of distribution (reference/regexp.go), without its rules for each part."""
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Mount:
    """A folder that the pods see, of a claim or of every node."""

    source: str
    """The claim's name, or a path on the nodes."""
    folder: str
    """The folder in the claim; empty for all of it."""
    target: str
    """Its absolute path in the pods."""

    @property
    def of_nodes(self) -> bool:
        """True for a path of every node, which is storage that all nodes have mounted."""
        return self.source.startswith("/")


@dataclass(frozen=True)
class PodRequest:
    """Everything about a run that is in its manifests."""

    name: str
    """The name of its objects in the cluster."""
    run_dir: str
    """Absolute, in the pods."""
    run_file: str
    """The frozen run file, as TOML."""
    nodes: int
    """Pods that hold ranks."""
    spares: int
    least_nodes: int
    """Nodes without which the run waits."""
    gpus: int
    port: int
    mounts: tuple[Mount, ...]
    launch: LaunchSpec
    metrics_port: int = 0
    """Port of the coordinator's metrics, and the one before that of an agent's; 0 for none (``observe.metrics_port``)."""
    pod_patch: Mapping[str, object] = field(default_factory=dict)
    """Fields of the pod template that are merged into it (``launch.pod_patch``)."""

    @property
    def account(self) -> str:
        """The service account of the pods; empty for the namespace's default."""
        return self.launch.service_account or (NODE_READER if self.launch.domain_labels else "")

    @property
    def pods(self) -> int:
        """All pods, spares included."""
        return self.nodes + self.spares

    @property
    def volcano(self) -> bool:
        """True if the manifests are for Volcano."""
        return self.launch.scheduler == "volcano"

    @property
    def leader(self) -> str:
        """The stable DNS name of the pod that leads, in the job's namespace.

        JobSet: <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, the subdomain being the JobSet's name, and published before the pod is
        ready (api/jobset/v1alpha2/jobset_types.go, Network). Volcano's plugin svc: <job>-<task>-<index>.<job>.
        """
        return f"{self.name}-{TASK}-{'' if self.volcano else '0-'}0.{self.name}"

    @property
    def digest(self) -> str:
        """The digest of the frozen run file: another run file is another object, and the one that a job uses is never changed."""
        return hashlib.sha256(self.run_file.encode()).hexdigest()[:8]


def with_pod_run_dir(spec: RunSpec) -> RunSpec:
    """Return the run with its directory as the pods see it; a relative or missing one is in the first container
    mount.

    Raises ``EngineError`` without a mount, or if the directory is in none.
    """
    mounts = mounts_of(spec.launch)
    if not mounts:
        raise EngineError(
            "launch.container_mounts: the pods need storage that they share: "
            "--set 'launch.container_mounts=[\"CLAIM:/runs\"]', CLAIM a PersistentVolumeClaim with ReadWriteMany, or a path that all nodes have mounted"
        )
    path = PurePosixPath(mounts[0].target) / (spec.run_dir or default_name(spec))
    if ".." in path.parts or not any(path.is_relative_to(mount.target) for mount in mounts):
        raise EngineError(
            f"run_dir: {path} is in no folder that the pods share ({', '.join(mount.target for mount in mounts)}): launch.container_mounts"
        )
    return replace(spec, run_dir=str(path))


def request_of(spec: RunSpec, run_file: str) -> PodRequest:
    """Return the request for a run with a known directory; ``run_file`` is the frozen run file.

    Raises ``EngineError`` with all findings of ``problems``, or for a mount or pod patch that cannot be used.
    """
    refuse_for(list(problems(spec)), "this run cannot start on Kubernetes")
    launch, fleet = spec.launch, spec.fleet
    return PodRequest(
        name=object_name(spec),
        run_dir=spec.run_dir,
        run_file=run_file,
        nodes=fleet.nodes,
        spares=fleet.spares,
        least_nodes=fleet.min_nodes,
        gpus=0 if spec.runtime.device == "cpu" else launch.gpus_per_node or fleet.workers_per_node,
        port=fleet.port or PORT,
        mounts=mounts_of(launch),
        launch=launch,
        metrics_port=spec.observe.metrics_port,
        pod_patch=read_pod_patch(Path(launch.pod_patch)) if launch.pod_patch else {},
    )


def object_name(spec: RunSpec) -> str:
    """Return the name of the run's objects, a DNS label: its name in lower case, and eight digits of a digest.

    The digest is that of the default directory's name, or else of the directory. Long names are cut.
    """
    own = default_name(replace(spec, run_dir=""))
    is_default = PurePosixPath(spec.run_dir).name == own
    digest = own[-8:] if is_default else hashlib.sha256(spec.run_dir.encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}".rstrip("-")
    return f"{words[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"


def mounts_of(launch: LaunchSpec) -> tuple[Mount, ...]:
    """Return the folders that the pods see, of CLAIM[/FOLDER]:/PATH or /PATH/ON/NODES:/PATH. Raises ``EngineError``
    for another form.
    """
    mounts = []
    for text in launch.container_mounts:
        source, _, target = text.partition(":")
        claim, _, folder = ("", "", "") if source.startswith("/") else source.partition("/")
        fits = source.startswith("/") or _CLAIM.fullmatch(claim)
        if (
            not fits
            or not target.startswith("/")
            or {":", ".."} & {*target, *PurePosixPath(source + target).parts}
        ):
            raise EngineError(
                f"launch.container_mounts: {text!r} is no folder of a pod: CLAIM:/PATH, CLAIM/FOLDER:/PATH, or /PATH/ON/NODES:/PATH"
            )
        mounts.append(Mount(claim or source, folder, target.rstrip("/") or "/"))
    return tuple(mounts)


def problems(spec: RunSpec) -> Iterator[str]:
    """Yield the fields that a Kubernetes cluster cannot fulfill, or that are written wrongly, each with the remedy."""
    launch = spec.launch
    yield from _not_for_pods(launch)
    if not launch.container_image:
        yield "launch.container_image: the pods need an image with Phalanx in it: --image REGISTRY/phalanx:VERSION (docs/fleet/kubernetes.md describes the build)"
    elif not _IMAGE.fullmatch(launch.container_image):
        yield f"launch.container_image: {launch.container_image!r} is no name of an image: --image REGISTRY/NAME:VERSION, or NAME@sha256:DIGEST"
    if launch.namespace and not _NAMESPACE.fullmatch(launch.namespace):
        yield f"launch.namespace: {launch.namespace!r} is no name: up to 63 lowercase letters, digits and inner hyphens (kubectl get namespaces)"
    pods = spec.fleet.nodes + spec.fleet.spares
    if launch.topology_label and not launch.unit:
        yield "launch.topology_label: how many nodes belong together? --set launch.unit=N; phalanx place prices units"
    # pkg/cache/scheduler/tas_flavor_snapshot.go of Kueue 0.19 finds no domains for a count that is no multiple of the slice's.
    elif launch.topology_label and pods % launch.unit:
        yield (
            f"fleet.nodes + fleet.spares = {pods} is no multiple of launch.unit = {launch.unit}, and {launch.scheduler} places whole units: "
            f"--spares {spec.fleet.spares + launch.unit - pods % launch.unit}"
        )
    if launch.topology_label and launch.scheduler == "volcano" and not launch.topology_label.isdecimal():
        yield f"launch.topology_label: {launch.topology_label!r}: Volcano knows tiers of HyperNodes by number, such as 1"
    if launch.scheduler == "kueue" and launch.topology_label and not launch.partition:
        yield "launch.topology_label: the labels of nodes are Kueue's, and it sees only jobs in a queue: --queue"
    if launch.time_limit and launch.scheduler == "volcano":
        yield "launch.time_limit: a Job of Volcano has no time limit; take it out"
    else:
        yield from time_problems(launch)
    labels = [*launch.domain_labels, *([launch.topology_label] if launch.topology_label else [])]
    for label in (*labels, *(word.partition("=")[0] for word in constraint_of(launch))):
        if not _LABEL.fullmatch(label):
            yield f"launch: {label!r} is no label of a node, as fabric.topograph.run/tier-0 is"
    yield from _written_wrongly(launch)


def _not_for_pods(launch: LaunchSpec) -> Iterator[str]:
    """Yield the fields that are set but have no meaning on Kubernetes, each with the remedy."""
    fields = {
        "hosts": (launch.hosts, "the cluster chooses them"),
        "account": (launch.account, "a queue is charged: --queue"),
        "reservation": (launch.reservation, "choose nodes by their labels: --constraint LABEL=VALUE"),
        "prologue": (launch.prologue, "put what it does into the image"),
        "options": (launch.options, "change what --dry-run writes, and give it to kubectl create"),
        "most_lost_ms": (
            launch.most_lost_ms,
            "no verdict is made of the nodes of pods; phalanx place --topology kubernetes prices them",
        ),
    }
    for name, (value, remedy) in fields.items():
        if value:
            yield f"launch.{name} = {value!r} is no request to Kubernetes: {remedy}"


def _written_wrongly(launch: LaunchSpec) -> Iterator[str]:
    """Yield the malformed variables, secrets, resources, tolerations, constraints and users."""
    for name, value in launch_variables(launch):
        if not name.isidentifier():
            yield f"launch.environment: {name!r} is no name of a variable"
        elif value is None and not launch.secrets:
            yield f"launch.environment: {name} has no value: make a Secret with it (kubectl create secret generic), and name it in launch.secrets"
    if launch.secrets and not _CLAIM.fullmatch(launch.secrets):
        yield f"launch.secrets: {launch.secrets!r} is no name of a Secret, as tracker-keys is; a file of secrets stays on this machine"
    for resource in launch.resources:
        name, _, quantity = resource.partition("=")
        if not _LABEL.fullmatch(name) or not _QUANTITY.fullmatch(quantity):
            yield f"launch.resources: {resource!r} is not NAME=QUANTITY, as memory=1Ti is"
    for toleration in launch.tolerations:
        if not _TOLERATION.fullmatch(toleration):
            yield f"launch.tolerations: {toleration!r} is not KEY[=VALUE][:EFFECT], as dedicated=training:NoSchedule is"
    for word in constraint_of(launch):
        if "=" not in word:
            yield f"launch.constraint: {word!r} is not LABEL=VALUE"
    if launch.run_as and not _USER.fullmatch(launch.run_as):
        yield f"launch.run_as: {launch.run_as!r} is not UID or UID:GID"


def constraint_of(launch: LaunchSpec) -> list[str]:
    """The labels that nodes must have, each as LABEL=VALUE."""
    return [word.strip() for word in launch.constraint.split(",") if word.strip()]


def toleration_of(text: str) -> dict[str, object]:
    """Return the toleration of KEY[=VALUE][:EFFECT]. Raises ``EngineError`` for another form."""
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise EngineError(f"launch.tolerations: {text!r} is not KEY[=VALUE][:EFFECT]")
    condition = (
        {"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]}
    )
    return {"key": match["key"], **condition, **({"effect": match["effect"]} if match["effect"] else {})}


def user_of(launch: LaunchSpec) -> tuple[int, int] | None:
    """User and group of the pods' processes; ``None`` for those of the image."""
    match = _USER.fullmatch(launch.run_as)
    return None if match is None else (int(match[1]), int(match[2] or match[1]))


# Pod patch: a file with the user's fields, merged into the pod template, such as annotations, volumes, a runtime class, CPU
# limits.
#
# Tables are merged field by field, and null removes a field (RFC 7386, JSON merge patch). In lists of entries with a ``name``,
# such as containers, volumes and env, entries of one name are merged, as in kubectl's strategic merge; other lists are
# appended. A patch of fields that a fleet depends on is refused.

_LAUNCHERS = object()
_OWNED: dict[str, object] = {
    "metadata": {"labels": {"phalanx.run/name": _LAUNCHERS}},
    "spec": {
        "restartPolicy": _LAUNCHERS,
        "containers": [
            {"name": "agent", **dict.fromkeys(("command", "startupProbe", "livenessProbe"), _LAUNCHERS)}
        ],
    },
}
"""A pod template of the fields that a patch may not change, each with a value that no file contains."""


def read_pod_patch(path: Path) -> dict[str, object]:
    """Read the user's patch of the pod template from a JSON or TOML file.

    Raises ``EngineError`` if it cannot be read, has other fields than metadata and spec, or changes a field of the
    launcher's.
    """
    try:
        text = read_small(path.expanduser(), follow=True).decode()
        patch: object = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"launch.pod_patch: cannot read {path}: {error}") from error
    if not isinstance(patch, dict) or not patch.keys() <= {"metadata", "spec"}:
        raise EngineError(
            f"launch.pod_patch: {path} has other fields than metadata and spec of a pod template"
        )
    for field_path in _changed(_OWNED, merged(_OWNED, patch)):
        raise EngineError(
            f"launch.pod_patch: {path} changes {field_path}, which is the launcher's; take it out"
        )
    return patch


def merged(table: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of ``table`` with a patch merged in, recursively: ``None`` removes a field, and entries of
    lists are matched by name.
    """
    fields = dict(table)
    for key, part in patch.items():
        if part is None:
            fields.pop(key, None)
        else:
            fields[key] = _merged(fields.get(key), part)
    return fields


def _merged(value: object, patch: object) -> object:
    """Return ``value`` with ``patch`` merged in: tables by field, lists by the names of their entries, others
    replaced.

    Entries without a match are appended.
    """
    if isinstance(value, dict) and isinstance(patch, dict):
        return merged(value, patch)
    if not isinstance(value, list) or not isinstance(patch, list):
        return patch
    named = {name: entry for entry in patch if (name := _name_of(entry)) is not None}
    kept = [
        merged(entry, named.pop(name)) if (name := _name_of(entry)) in named else entry for entry in value
    ]
    unnamed = [entry for entry in patch if _name_of(entry) is None]
    return [*kept, *unnamed, *named.values()]


def _name_of(entry: object) -> str | None:
    """Return the name of a list's entry; ``None`` if it has none that is text."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None


def _changed(template: object, result: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the fields of a template that a patch has changed in its ``result``, with the names of entries of lists."""
    if isinstance(template, dict):
        fields = result if isinstance(result, dict) else {}
        for key, value in template.items():
            yield from _changed(value, fields.get(key), (*path, key))
    elif isinstance(template, list):
        entries = result if isinstance(result, list) else [None] * len(template)
        for entry, patched in zip(template, entries, strict=False):  # added entries are at the end
            yield from _changed(entry, patched, (*path, str(_name_of(entry))))
    elif result != template:
        yield ".".join(path)
