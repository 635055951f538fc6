"""Start-up time: how long a run of N nodes takes from its launch to its first step, a closed form for each phase.

What every node does by itself (the interpreter, imports from its own disk) takes as long on one node as on 25,000. What goes through one place
takes N times as long: files of a shared file system, the coordinator's event loop, the store in which ranks meet; and more where that place looks
at all nodes again for some of them. The agents attach while their workers import, so the longer of the two counts. The costs of one node were measured with ``bench.fleet.start``; those that no test on one machine
can show are published figures. The time until a scheduler gives the nodes is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.hardware.cluster import Fact
from phalanx_plan.whole_run.goodput import RecoveryPhase

_BENCH = "bench.fleet.start, 2026-11-25, one core of a shared machine"
Files = Literal["local", "shared"]
"""Where Python and its packages lie: on each node (its disk, a container image that is there), or on one file system for all."""


class StartError(ValueError):
    """A start that cannot be; the message names the argument."""


@dataclass(frozen=True)
class StartCosts:
    """Costs of a start, of one node, one rank, or one call."""

    agent_import_s: Fact
    worker_import_s: Fact
    file_calls: Fact
    """Calls of one node that name a file."""
    file_bytes: Fact
    """Bytes of files that one node reads."""
    file_calls_per_s: Fact
    """Calls that a shared file system answers in a second, for all nodes."""
    file_bytes_per_s: Fact
    """The same."""
    host_s: Fact
    """One login by ssh that starts Python; every host has two."""
    hosts_at_once: int
    """Logins by ssh at a time."""
    attach_s: Fact
    """The coordinator's event loop for one agent."""
    attach_s_per_node: Fact
    """More for each agent that is there already."""
    form_s: Fact
    """The coordinator's event loop for one node's place, orders and answer in the first epoch."""
    form_s_per_node: Fact
    """More for each node of the fleet."""
    store_connect_s: Fact
    """The store's thread for one rank's connection."""
    store_call_s: Fact
    """The same for one call."""
    store_calls: int
    """Calls of one rank to the store."""
    proof_s: Fact
    """One rank's time to check another's proof of the token."""
    group_s: Fact
    """Time of a communicator for each rank in it."""


MEASURED = StartCosts(
    agent_import_s=Fact(0.4, _BENCH),
    worker_import_s=Fact(3.5, f"{_BENCH}; PyTorch for CPUs"),
    file_calls=Fact(41_000, f"{_BENCH}: an agent and one worker, whose files the node keeps for the others"),
    file_bytes=Fact(0.73e9, f"{_BENCH}: files read, and libraries mapped; PyTorch for CPUs"),
    file_calls_per_s=Fact(
        500e3,
        "mdtest stat at 240 threads, Dell HPC Lustre Storage with EDR, figure 12: one metadata server's best",
    ),
    file_bytes_per_s=Fact(2e12, "Llama 3, arXiv:2407.21783, section 3.3.1: 2 TB/s sustained"),
    host_s=Fact(0.5, "an sshd on loopback, 2026-11-25"),
    hosts_at_once=32,  # ``launch.engines.bare``
    attach_s=Fact(
        1.0e-3, f"{_BENCH}: 500 to 6,000 agents; more threads' time with TLS, as much of the event loop's"
    ),
    attach_s_per_node=Fact(0.08e-6, f"{_BENCH}: all nodes are looked at in every turn"),
    form_s=Fact(0.13e-3, _BENCH),
    form_s_per_node=Fact(0.10e-6, f"{_BENCH}: all nodes are looked at in every turn"),
    store_connect_s=Fact(33e-6, f"{_BENCH}: TCPStore"),
    store_call_s=Fact(25e-6, f"{_BENCH}: TCPStore"),
    store_calls=16,  # an assumption: two for each group of a mesh of several axes
    proof_s=Fact(4e-6, _BENCH),
    group_s=Fact(
        3e-3, "MegaScale, arXiv:2402.15627: communicators of over 10,000 GPUs in under 30 s; taken as linear"
    ),
)


@dataclass(frozen=True)
class Start:
    """The phases of a start in their order, with where their costs come from."""

    nodes: int
    phases: tuple[RecoveryPhase, ...]
    hidden: str
    """The phase that another one hides, which goes on at the same time."""

    @property
    def total_s(self) -> float:
        """Seconds from the launch to the first step."""
        return sum(phase.duration_s for phase in self.phases if phase.name != self.hidden)


def start(
    nodes: int,
    workers: int = 8,
    *,
    files: Files = "local",
    by_ssh: bool = False,
    restore_s: float = 0.0,
    warmup_s: float = 0.0,
    costs: StartCosts = MEASURED,
) -> Start:
    """The start of a run.

    Args:
        nodes: Nodes, spares included.
        workers: Of each node.
        files: Where Python lies.
        by_ssh: The launcher logs into every node, first to check it, then to start it.
        restore_s: To read the checkpoint (``checkpoint_tiers``); 0 for a run that begins.
        warmup_s: Compilation and the first step's own excess.
        costs: Those of one node; the measured ones by default.

    Raises:
        StartError: There are no nodes or workers, or a time is negative.
    """
    if nodes < 1 or workers < 1:
        raise StartError(f"a run has a node and a worker at least: {nodes=}, {workers=}")
    if restore_s < 0 or warmup_s < 0:
        raise StartError(f"seconds cannot be negative: {restore_s=}, {warmup_s=}")
    ranks = nodes * workers
    rounds = 2 * math.ceil(nodes / costs.hosts_at_once) if by_ssh else 0
    attaching = nodes * (costs.attach_s.value + nodes * costs.attach_s_per_node.value)
    forming = nodes * (costs.form_s.value + nodes * costs.form_s_per_node.value)
    storm_s = storm(nodes, costs) if files == "shared" else 0.0
    importing = max(costs.worker_import_s.value, storm_s)
    meeting = ranks * (
        costs.store_connect_s.value
        + costs.store_calls * costs.store_call_s.value
        + 2 * costs.proof_s.value
        + costs.group_s.value * (ranks > 1)
    )
    phases = (
        RecoveryPhase("launch", rounds * costs.host_s.value, costs.host_s.source),
        RecoveryPhase("agents import", costs.agent_import_s.value, costs.agent_import_s.source),
        RecoveryPhase(
            "workers import",
            importing,
            costs.file_calls_per_s.source if storm_s else costs.worker_import_s.source,
        ),
        RecoveryPhase("agents attach", attaching, costs.attach_s.source),
        RecoveryPhase("epoch is formed", forming, costs.form_s.source),
        RecoveryPhase("ranks meet", meeting, costs.group_s.source),
        RecoveryPhase("checkpoint", restore_s, "its size over the storage's rate"),
        RecoveryPhase("warm-up", warmup_s, "given"),
    )
    return Start(nodes, phases, "agents attach" if attaching < importing else "workers import")


def storm(nodes: int, costs: StartCosts) -> float:
    """Seconds until a shared file system has served the imports of all nodes, which come at once: its calls, or its bytes."""
    calls = nodes * costs.file_calls.value / costs.file_calls_per_s.value
    return max(calls, nodes * costs.file_bytes.value / costs.file_bytes_per_s.value)


def read_s(checkpoint_bytes: float, nodes: int, storage_bytes_per_s: float, node_bytes_per_s: float) -> float:
    """Seconds to read a checkpoint of which every node reads its share: by the storage's rate for all, or one node's, whichever is slower.

    Raises ``StartError`` for a rate that is not above 0.
    """
    if not (storage_bytes_per_s > 0 and node_bytes_per_s > 0 and nodes > 0):
        raise StartError(f"a rate must be above 0: {storage_bytes_per_s=}, {node_bytes_per_s=}, {nodes=}")
    return max(checkpoint_bytes / storage_bytes_per_s, checkpoint_bytes / nodes / node_bytes_per_s)
