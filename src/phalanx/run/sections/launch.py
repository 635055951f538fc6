"""``[launch]``: how `phalanx submit` starts the run on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, NOT_NEGATIVE, ValueRange


@dataclass(frozen=True)
class LaunchSpec:
    """Start of the run on a cluster by `phalanx submit`: the engine, the request to it, and the placement of ranks in the network. Nothing
    here changes a bit of the weights."""

    engine: Annotated[str, FLEET] = ""
    """Engine that gives nodes: "slurm", "kubernetes", "ssh", "local", or one that another installed package offers; empty means that --on names it."""
    hosts: Annotated[str, FLEET] = ""
    """File of the hosts to start agents on by ssh, one a line: [user@]host[:port] [name=NODE] [address=HOST] [domain=POD/RACK]."""
    partition: Annotated[str, FLEET] = ""
    """Slurm partition, or several, as big,small, of which the first that can starts the job; LocalQueue of Kueue or queue of Volcano; empty means
    the cluster's default, with Kueue no queue at all."""
    account: Annotated[str, FLEET] = ""
    """Account that is charged; empty means the user's own."""
    qos: Annotated[str, FLEET] = ""
    """Slurm quality of service, or the priority class of Kueue or Kubernetes; empty means the default."""
    time_limit: Annotated[str, FLEET] = ""
    """Longest time of one job, as 2d, 12h, 90m or Slurm's D-HH:MM:SS; the run saves launch.grace_s before and queues again (under Kubernetes it
    ends, and the same command continues). Empty means the partition's limit."""
    constraint: Annotated[str, FLEET] = ""
    """Features that the nodes must have, in Slurm's words, or under Kubernetes labels, as LABEL=VALUE,LABEL=VALUE."""
    reservation: Annotated[str, FLEET] = ""
    """Slurm reservation to use."""
    exclude: Annotated[str, FLEET] = ""
    """Nodes not to use, as n[1-4,7]."""
    gpus_per_node: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """GPUs to request on each node; 0 means one for each worker, or none if runtime.device is cpu."""
    exclusive: Annotated[bool, FLEET] = True
    """If true, nodes are not shared with other jobs."""
    grace_s: Annotated[float, FLEET, ValueRange(at_least=1, at_most=3600)] = 120.0
    """Seconds before the end of its time, or before it is preempted, in which the run saves and ends."""
    container_image: Annotated[str, FLEET] = ""
    """Container image that the agents run in (Slurm: the plugin Pyxis must be installed; Kubernetes needs one); empty means none."""
    container_mounts: Annotated[tuple[str, ...], FLEET] = ()
    """Folders that the container sees, as FROM:TO. Under Kubernetes FROM is a PersistentVolumeClaim, as CLAIM or CLAIM/FOLDER, or an absolute path
    on every node; relative paths of the run file begin in the first TO."""
    namespace: Annotated[str, FLEET] = ""
    """Kubernetes namespace; empty means that of kubectl's context."""
    scheduler: Annotated[Literal["kueue", "volcano"], FLEET] = "kueue"
    """Scheduler of a Kubernetes cluster that the manifests are for: a JobSet, with Kueue's labels if launch.partition names a queue, or a Job of
    Volcano."""
    topology_label: Annotated[str, FLEET] = ""
    """Kubernetes: nodes of a unit (launch.unit) get the same value of this node label, such as fabric.topograph.run/tier-0 (with Volcano: the number
    of the highest tier that a unit may span). Empty means that units may lie anywhere."""
    domain_labels: Annotated[tuple[str, ...], FLEET] = ()
    """Kubernetes: node labels that name a node's network domains, from the widest to the narrowest; each pod reads those of its node."""
    resources: Annotated[tuple[str, ...], FLEET] = ()
    """Kubernetes: further resources of a pod, as NAME=QUANTITY: cpu=64, memory=1Ti, rdma/hca=8."""
    gpu_resource: Annotated[str, FLEET] = "nvidia.com/gpu"
    """Kubernetes: name of the resource that launch.gpus_per_node counts."""
    tolerations: Annotated[tuple[str, ...], FLEET] = ()
    """Kubernetes: taints that the pods tolerate, as KEY[=VALUE][:EFFECT]."""
    service_account: Annotated[str, FLEET] = ""
    """Kubernetes: service account of the pods, which may name secrets for pulling the image; empty means the namespace's default."""
    run_as: Annotated[str, FLEET] = ""
    """Kubernetes: user and group of the pods' processes, as UID or UID:GID; empty means those of the image."""
    pod_patch: Annotated[str, FLEET] = ""
    """Kubernetes: JSON or TOML file with fields of a pod template, as metadata.annotations or spec.runtimeClassName, that are merged into the pods'."""
    environment: Annotated[tuple[str, ...], FLEET] = ()
    """Variables for agents and workers, as NAME=VALUE, or as NAME for the value that it has where phalanx submit is called. Never write
    secrets into a run file: use NAME."""
    secrets: Annotated[str, FLEET] = ""
    """File of NAME=VALUE lines, of mode 600, whose variables agents and workers get; under Kubernetes, name of a Secret with them."""
    prologue: Annotated[tuple[str, ...], FLEET] = ()
    """Shell lines that run on the first node before the agents start, such as module load cuda."""
    options: Annotated[tuple[str, ...], FLEET] = ()
    """Further options for the engine as they are, such as --licenses=lustre for sbatch."""
    cluster: Annotated[str, FLEET] = "h100"
    """Kind of the nodes, for the price of their placement: a name of `phalanx hardware`, or a TOML file."""
    shares: Annotated[tuple[str, ...], FLEET] = ()
    """Part of its nodes' rate that may leave a domain at once, as leaf=0.5 for a level of the network; levels that are not named are
    non-blocking."""
    most_lost_ms: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Milliseconds of a step that the nodes which an engine gave, or which join later, may lose on slow uplinks: with more, the run does not
    start on them, or they do not join. 0 means any; the loss is only reported."""
    unit: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Nodes that are kept together below one switch; 0 means those that the axes inside a slot span. `phalanx place` prices others."""
    order: Annotated[Literal["data", "pipeline"], FLEET] = "data"
    """Neighbors in the network: the data-parallel ranks of a stage, or the stages of a replica. `phalanx place` prices both."""
