"""Asks a cluster for its topology and for the nodes that are free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.launch.engines.tools import EngineError, run_tool
from phalanx.launch.placing.topology import Topology, from_domains
from phalanx.launch.placing.topology_files import from_slurm, parse_topology, read_topology

_USABLE = ("idle", "mixed", "allocated", "completing")


def load_topology(place: str, partition: str = "", *, free_only: bool = False) -> Topology:
    """The topology that ``place`` names: ``slurm`` or ``kubernetes`` for the cluster that this machine uses, or a file.

    Args:
        place: As above.
        partition: Only the nodes of this Slurm partition.
        free_only: Counts nodes that others use as taken too, not only those that are down or drained.

    Raises:
        TopologyError: The file or answer describes no topology.
        EngineError: The cluster does not answer.
    """
    if place == "slurm":
        return _of_slurm(partition, free_only=free_only)
    if place == "kubernetes":
        return parse_topology(run_tool(["kubectl", "get", "nodes", "-o", "json"]), "kubectl get nodes")
    return read_topology(Path(place))


def _of_slurm(partition: str, *, free_only: bool) -> Topology:
    usable = ("idle",) if free_only else _USABLE
    words = ["sinfo", "-h", "-N", "-o", "%N %T", *(["-p", partition] if partition else [])]
    states: dict[str, str] = {}
    for line in run_tool(words).splitlines():
        name, _, state = line.partition(" ")
        states[name] = state
    if not states:
        raise EngineError(
            f"Slurm has no nodes{f' in a partition {partition!r}' if partition else ''}: `sinfo` lists what there is"
        )
    # A star marks a node that does not respond; other marks say what is about to happen to it.
    taken = frozenset(name for name, state in states.items() if state not in usable)
    try:
        known = from_slurm(run_tool(["scontrol", "show", "topology"]), "scontrol show topology")
    except EngineError:
        known = from_domains({})  # topology/flat has nothing to show
    if not known.nodes:
        return replace(from_domains(dict.fromkeys(states, ()), "sinfo"), taken=taken)
    strangers = {
        name: tuple(f"{name} alone" for _ in known.levels) for name in states.keys() - known.nodes.keys()
    }
    outside = frozenset(known.nodes.keys() - states.keys())
    return replace(known, nodes={**known.nodes, **strangers}, taken=taken | outside)
