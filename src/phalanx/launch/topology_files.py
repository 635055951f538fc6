"""Read topologies of a cluster or a file: TOML by hand, Slurm's switches and blocks, Topograph's JSON, the labels of Kubernetes nodes.

The format of a text is recognized by its content:

* Slurm: lines ``SwitchName=leaf1 Nodes=n[1-4]``, ``SwitchName=spine1 Switches=leaf[1-2]`` and ``BlockName=b1 Nodes=n[1-18]``, in topology.conf
  and from ``scontrol show topology`` (slurm.schedmd.com/topology.conf.html). Blocks are NVLink domains.
* Topograph's engine "graph": ``{"instances": [{"id", "network_layers": [leaf, spine, ...], "attributes": {"nvlink"}}]}``
  (docs.nvidia.com/topograph/engines/graph; from 1.0 the domain is in ``labels``).
* ``kubectl get nodes -o json``, with the labels that Topograph sets: from 1.0 ``fabric.topograph.run/tier-N``, tier 0 nearest to the node, and
  ``accelerator.topograph.run/domain`` (docs/reference/node-labels of NVIDIA/topograph), before ``network.topology.nvidia.com/{core,spine,leaf,accelerator}``.
* By hand::

      node_gb_per_s = 400          # network rate of one node in one direction
      taken = "n[7,12]"            # down, or used by others
      [[levels]]                   # widest first
      name = "pod"
      share = 0.5                  # of its nodes' rate that may leave a pod at once
      [[levels]]
      name = "rack"
      scale_up = true              # NVLink joins its nodes
      [nodes]
      "n[1-18]" = "pod-1.rack-1"   # the domains of these nodes
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeGuard

from phalanx.launch.engines.order import EngineError, run_tool
from phalanx.launch.placing import Domains, Level, Topology, TopologyError, expanded, from_domains
from phalanx.run.directory.files import read_named

# A cluster's own topology, and its nodes that are free.

_USABLE = ("idle", "mixed", "allocated", "completing")


def load_topology(place: str, partition: str = "", *, free_only: bool = False) -> Topology:
    """Return the topology that ``place`` names: ``slurm`` or ``kubernetes`` for the cluster that this machine uses,
    or a file.

    For Slurm only: nodes outside ``partition`` are taken, and with ``free_only`` also nodes that others use. Raises
    ``TopologyError`` if there is no topology in it, and ``EngineError`` if the cluster does not answer.
    """
    if place == "slurm":
        return _of_slurm(partition, free_only=free_only)
    if place == "kubernetes":
        return parse_topology(run_tool(["kubectl", "get", "nodes", "-o", "json"]), "kubectl get nodes")
    return read_topology(Path(place))


def _of_slurm(partition: str, *, free_only: bool) -> Topology:
    """Return the topology of Slurm's nodes; without switches or blocks, one of no levels.

    Nodes outside the partition or not usable are taken; with ``free_only``, all that are not idle. A node that
    no switch names is alone on each level. Raises ``EngineError``, also for no nodes, and ``TopologyError`` if
    a switch lies below itself.
    """
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
    # A star marks a node that does not respond; other marks announce a change of its state.
    taken = frozenset(name for name, state in states.items() if state not in usable)
    try:
        switches = from_slurm(run_tool(["scontrol", "show", "topology"]), "scontrol show topology")
    except EngineError:
        switches = from_domains({})  # topology/flat has nothing to show
    if not switches.nodes:
        return replace(from_domains(dict.fromkeys(states, ()), "sinfo"), taken=taken)
    strangers = {
        name: tuple(f"{name} alone" for _ in switches.levels)
        for name in states.keys() - switches.nodes.keys()
    }
    outside = frozenset(switches.nodes.keys() - states.keys())
    return replace(switches, nodes={**switches.nodes, **strangers}, taken=taken | outside)


# Formats of topologies.

Json: TypeAlias = dict[str, object]
_LABEL = "network.topology.nvidia.com/"
_LABELED = ("core", "spine", "leaf", "accelerator")
"""Topograph's levels, widest first."""
_SCALE_UP = "accelerator"
_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d+)")
_DOMAIN = "accelerator.topograph.run/domain"
_FIELD = re.compile(r"(\w+)=(\S*)")


def read_topology(path: Path) -> Topology:
    """Return the topology in a file. Raises ``TopologyError`` with what is wrong in it."""
    try:
        text = read_named(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"cannot read the topology {path}: {error}") from error
    return parse_topology(text, str(path))


def parse_topology(text: str, source: str) -> Topology:
    """Return the topology in ``text``: TOML, Slurm's file, or JSON of Topograph or kubectl, distinguished by content. Raises
    ``TopologyError``."""
    try:
        if text.lstrip().startswith("{"):
            return _from_json(json.loads(text), source)
        if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.MULTILINE):
            return from_slurm(text, source)
        return _from_toml(tomllib.loads(text), source)
    except TopologyError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise TopologyError(
            f"{source} is no topology: {error}. It can be TOML with [[levels]] and [nodes], Slurm's topology.conf, Topograph's JSON, or "
            "`kubectl get nodes -o json`"
        ) from error


# --- Slurm ----------------------------------------------------------------------------------------


def from_slurm(text: str, source: str) -> Topology:
    """Return the tree of Slurm's switches, or if there are blocks, only these as scale-up domains.

    ``text`` is topology.conf or ``scontrol show topology``. Nodes that no switch names are left out. Raises
    ``TopologyError`` if a switch lies below itself.
    """
    switches: dict[str, Json] = {}
    blocks: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line.partition("#")[0]))
        if "BlockName" in fields:
            blocks[fields["BlockName"]] = expanded(fields.get("Nodes", ""))
        elif "SwitchName" in fields:
            below = expanded(fields.get("Switches", ""))
            # scontrol also lists the nodes below a switch of switches.
            own = [] if below else expanded(fields.get("Nodes", ""))
            switches[fields["SwitchName"]] = {"below": below, "nodes": own}
    if blocks:
        inside = {name: (block,) for block, names in blocks.items() for name in names}
        return Topology((Level("block", scale_up=True),), inside, source=source)
    above = {below: name for name, switch in switches.items() for below in _strings(switch["below"])}
    nodes: dict[str, Domains] = {}
    for name, switch in switches.items():
        path = _path_to(name, above, source)
        nodes.update((node, path) for node in _strings(switch["nodes"]))
    return _of_equal_depth(nodes, source)


def _path_to(switch: str, above: Mapping[str, str], source: str) -> Domains:
    """Return the switches from the root down to ``switch``. Raises ``TopologyError`` for a cycle."""
    path = [switch]
    while path[-1] in above:
        path.append(above[path[-1]])
        if len(path) > len(above) + 1:
            raise TopologyError(f"{source}: switch {switch} is below itself")
    return tuple(reversed(path))


def _of_equal_depth(nodes: Mapping[str, Domains], source: str) -> Topology:
    """Return a tree without the roots that all share, and with leaves at one depth: a short path repeats its last domain. The last domain
    of a path is never removed as a root.

    Levels are called leaf, spine, core, level 4 to level 8, from the narrowest. Raises ``TopologyError`` for more.
    """
    while (
        nodes and all(len(path) > 1 for path in nodes.values()) and len({p[0] for p in nodes.values()}) == 1
    ):
        nodes = {name: path[1:] for name, path in nodes.items()}
    depth = max(map(len, nodes.values()), default=0)
    filled = {name: path + path[-1:] * (depth - len(path)) for name, path in nodes.items()}
    names = ("leaf", "spine", "core", *(f"level {number}" for number in range(4, 9)))
    levels = tuple(Level(name) for name in reversed(names[:depth]))
    return Topology(levels, filled, source=source)


# --- JSON -----------------------------------------------------------------------------------------


def _from_json(table: Json, source: str) -> Topology:
    """Return the topology in a table of Topograph or kubectl. Raises ``TopologyError`` for any other."""
    if "instances" in table:
        return _from_topograph(table, source)
    if "items" in table:
        return _from_kubernetes(table, source)
    raise TopologyError(
        f'{source}: this JSON has neither "instances" (Topograph) nor "items" (kubectl get nodes -o json)'
    )


def _from_topograph(table: Json, source: str) -> Topology:
    """Return the topology of Topograph's instances by their network layers, with NVLink domains if any has one.

    An instance without layers is in a domain of its own.
    """
    paths: dict[str, Domains] = {}
    racks: dict[str, str] = {}
    for instance in _tables(table["instances"]):
        name = str(instance["id"])
        layers = _strings(instance.get("network_layers", []))
        paths[name] = tuple(reversed(layers)) or (f"{name} alone",)
        fields = {**_table(instance.get("attributes")), **_table(instance.get("labels"))}
        rack = fields.get("nvlink") or fields.get(_LABEL + _SCALE_UP) or fields.get(_SCALE_UP)
        if rack:
            racks[name] = str(rack)
    network = _of_equal_depth(paths, source)
    return _with_racks(network, racks)


def _with_racks(topology: Topology, racks: Mapping[str, str]) -> Topology:
    """Return the topology with NVLink domains (node -> domain) as its narrowest, scale-up level; unchanged if there
    are none.

    A node without one is alone.
    """
    if not racks:
        return topology
    levels = (*topology.levels, Level("rack", scale_up=True))
    nodes = {name: (*path, racks.get(name, f"{name} alone")) for name, path in topology.nodes.items()}
    return Topology(levels, nodes, source=topology.source)


def _from_kubernetes(table: Json, source: str) -> Topology:
    """Return the topology of nodes by their labels; a node without a label is alone on that level.

    Nodes that are not ready or not schedulable are taken.
    """
    labels: dict[str, Json] = {}
    taken: set[str] = set()
    for item in _tables(table["items"]):
        metadata, spec = _table(item["metadata"]), _table(item.get("spec"))
        name = str(metadata["name"])
        labels[name] = _table(metadata.get("labels"))
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in _tables(_table(item.get("status")).get("conditions", []))
        )
        if spec.get("unschedulable") or not ready:
            taken.add(name)
    used = _label_levels({key for own in labels.values() for key in own})
    nodes = {
        name: tuple(str(own.get(label, f"{name} alone")) for label in used.values())
        for name, own in labels.items()
    }
    levels = tuple(Level(level, scale_up=level == _SCALE_UP) for level in used)
    return Topology(levels, nodes, taken=frozenset(taken), source=source)


def _label_levels(present: set[str]) -> dict[str, str]:
    """Return level -> label, widest first, of the network labels that are ``present``; the newer names win if there
    are both.
    """
    tiers = sorted((int(match[1]) for key in present if (match := _TIER.fullmatch(key))), reverse=True)
    if not tiers and _DOMAIN not in present:
        return {level: _LABEL + level for level in _LABELED if _LABEL + level in present}
    levels = {f"tier-{tier}": f"fabric.topograph.run/tier-{tier}" for tier in tiers}
    return levels | ({_SCALE_UP: _DOMAIN} if _DOMAIN in present else {})


# --- TOML -----------------------------------------------------------------------------------------


def _from_toml(table: Json, source: str) -> Topology:
    """Return the topology of a TOML table: levels, nodes with their paths ("a.b"), taken nodes, and the rate.

    The rate is in GB/s there and in bytes/s here. Raises ``TopologyError`` for unknown fields, nodes or values, without [nodes], or for a
    node without a domain of each level. Raises ``ValueError`` for a malformed list of hosts or of tables.
    """
    unknown = sorted(table.keys() - {"node_gb_per_s", "taken", "levels", "nodes"})
    if unknown or "nodes" not in table:
        wrong = f"there is no field {unknown[0]!r}" if unknown else "there is no [nodes]"
        raise TopologyError(f"{source}: {wrong}; a topology has node_gb_per_s, taken, [[levels]] and [nodes]")
    levels = tuple(_level(level, source) for level in _tables(table.get("levels", [])))
    nodes: dict[str, Domains] = {}
    for hosts, path in _table(table["nodes"]).items():
        nodes.update((name, tuple(filter(None, str(path).split(".")))) for name in expanded(hosts))
    rate = table.get("node_gb_per_s", 0)
    if not _is_number(rate) or not 0 <= rate * 1e9 < math.inf:
        raise TopologyError(f"{source}: node_gb_per_s = {rate!r} is no rate in GB/s, as 400 is")
    taken = frozenset(expanded(str(table.get("taken", ""))))
    strangers = sorted(taken - nodes.keys())
    if strangers:
        raise TopologyError(f"{source}: taken: there is no node {strangers[0]}")
    return Topology(levels, nodes, rate * 1e9, taken, source)


def _level(table: Json, source: str) -> Level:
    """Return a level of a TOML table. Raises ``TopologyError`` for unknown fields or values."""
    unknown = sorted(table.keys() - {"name", "share", "scale_up"})
    if unknown or "name" not in table:
        wrong = f"there is no field {unknown[0]!r}" if unknown else "one has no name"
        raise TopologyError(f"{source}: levels: {wrong}; a level has name, share and scale_up")
    share, scale_up = table.get("share", 1.0), table.get("scale_up", False)
    if not _is_number(share) or not isinstance(scale_up, bool):
        raise TopologyError(f"{source}: level {table['name']}: share is a number and scale_up true or false")
    return Level(str(table["name"]), float(share), scale_up)


# --- parts of tables ------------------------------------------------------------------------------


def _table(value: object) -> Json:
    return dict(value) if isinstance(value, dict) else {}


def _tables(value: object) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("a list of tables was expected")
    return value


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a number, NaN and infinity included; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _strings(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError("a list of names was expected")
    return value
