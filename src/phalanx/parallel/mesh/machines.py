"""Machines in the mesh: which ranks of a group stand in one machine, where links are an order of magnitude faster.

Ranks are numbered machine by machine, so with as many ranks on each machine, a rank's machine is its number divided by theirs. A
group whose ranks fill whole machines, or equal parts of them, has two levels: the ranks of one machine, and the ranks that stand at
the same place of all machines. What the ranks of a machine can combine first crosses the network once instead of once for each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.parallel.mesh.torch_compat import all_gather_single

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = -1
"""A rank's machine that it cannot tell from others."""


@dataclass(frozen=True)
class TwoLevels:
    """The process groups of a group of ranks that stand in several machines, as many in each."""

    inside: dist.ProcessGroup
    """The ranks in this rank's machine, in their order."""
    across: dist.ProcessGroup
    """The ranks at this rank's place in every machine, in the order of machines."""
    machine: int
    """This rank's machine, by its number among them."""

    @property
    def width(self) -> int:
        """Ranks of the group in each machine."""
        return self.inside.size()

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.across.size()


def ranks_in_a_machine(ranks: int, stride: int, machine_ranks: int) -> int:
    """The number of ranks that a group has in each of its machines; 1 where two levels are of no use, or are uneven.

    Args:
        ranks: Of the group, each ``stride`` above the one before; its first is a multiple of ``ranks * stride``, plus less
            than ``stride``.
        stride: 1 if no other axis varies faster.
        machine_ranks: Ranks of all groups on each machine; 0 if they are not equally many, or unknown.
    """
    if not machine_ranks or machine_ranks % stride or ranks * stride % machine_ranks:
        return 1
    width = machine_ranks // stride
    return width if width < ranks else 1


def count_machine_ranks(device: torch.device, boot_id: Path = BOOT_ID) -> int:
    """The number of ranks on each machine; 0 if it is not the same on all, or if ranks are not numbered machine by machine.

    A collective call of the default process group, of 8 bytes a rank. The kernel's boot identifier says which machine it is,
    since containers of one machine have names of their own. ``boot_id`` is the file with the identifier.
    """
    try:
        digest = int.from_bytes(hashlib.sha256(boot_id.read_bytes()).digest()[:7], "big")
    except OSError:
        digest = _UNKNOWN  # not Linux, or a sandbox; the others wait for this rank all the same
    mine = torch.tensor([digest], device=device)
    machines = torch.empty(dist.get_world_size(), dtype=mine.dtype, device=device)
    all_gather_single(machines, mine, None)
    found = machines.tolist()
    return 0 if _UNKNOWN in found else equal_runs(found)


def equal_runs(machines: list[int]) -> int:
    """The length of each run of equal numbers, if all runs are equally long and no number comes back; else 0."""
    width = next((i for i, machine in enumerate(machines) if machine != machines[0]), len(machines))
    starts = machines[::width]
    even = len(set(starts)) == len(starts) == len(machines) / width
    return width if even and all(machines[i] == starts[i // width] for i in range(len(machines))) else 0
