"""The mesh: a rank's coordinate on every axis, the process groups of the axes, machines, and the partition of parameters.

``phalanx.run.layout`` defines the legal degrees; this module makes process groups of them. The same ranks are seen in three ways:

- dense: ``pipeline x replicate x fsdp x tensor``. ``fsdp`` joins shard and context: parameters are the same on all ranks of a
  context group, so they can be sharded over it too.
- context and sequence: the ranks that share one slot's tokens, for attention and for sums over a slot.
- experts: ``pipeline x replicate x expert_shard x expert x expert_tensor``, for the mixtures' weights and tokens.

Each rank makes only the groups that it is in, a few dozen for any number of ranks. PyTorch's ``init_device_mesh`` visits all groups
of the fleet on every rank. The order is the same on all ranks, so the members of a group meet.

The mesh is made once and passed on; it is not global.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phalanx.parallel.divisions import Deal, LocalSlice
from phalanx.parallel.torch_compat import all_gather_single, group_timeout, local_slice_of
from phalanx.process.this_process import host_name
from phalanx.run.fields import Problem
from phalanx.run.kinds.whole_model import key_copies
from phalanx.run.layout import Layout, layout_of, layout_problems
from phalanx.run.spec import RunSpec


class LayoutError(ValueError):
    """The run cannot be laid out on the available ranks; ``problems`` has the fields and the remedies."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates in the layout, and its process groups."""

    layout: Layout
    device: torch.device
    rank: int
    """Global rank."""
    dense: DeviceMesh
    stage_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    context_group: dist.ProcessGroup
    """The ranks that share each sequence."""
    sequence_group: dist.ProcessGroup
    """The ranks that share one slot's tokens: context and tensor together."""
    key_group: dist.ProcessGroup | None = None
    """The tensor ranks that have the same key and value heads; ``None`` if each head is on one rank only."""
    fsdp_levels: TwoLevels | None = None
    """The dense FSDP ranks by machine, if they fill several machines equally."""
    expert_levels: TwoLevels | None = None
    """The ranks over which experts are sharded, by machine, likewise."""
    contiguous: bool = False
    """True if the slots of each rank are neighbors in the batch (ZeRO-1)."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.ranks

    @property
    def replicas(self) -> int:
        """Number of copies of the weights."""
        return self.layout.replicate

    @property
    def replica(self) -> int:
        """Index of the replica (copy of the weights) that this rank works on."""
        return int(self.dense.get_local_rank("replicate"))

    @property
    def shard_rank(self) -> int:
        """Index of this rank among the data-parallel ranks that share a replica."""
        return self.fsdp_rank // self.layout.context

    @property
    def data_rank(self) -> int:
        """Index of this rank among all data-parallel ranks, which compute different slots."""
        return self.replica * self.layout.shard + self.shard_rank

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank among those that share the layers."""
        return int(self.dense.get_local_rank("pipeline"))

    @property
    def context_rank(self) -> int:
        """Index of this rank among those that share a sequence."""
        return self.fsdp_rank % self.layout.context

    @property
    def tensor_rank(self) -> int:
        """Index of this rank among those that share a matrix."""
        return int(self.dense.get_local_rank("tensor"))

    @property
    def expert_rank(self) -> int:
        """Index of this rank among those that share a layer's experts."""
        return int(self.expert_mesh.get_local_rank("expert"))

    @property
    def fsdp_ranks(self) -> int:
        """Number of ranks over which the dense parameters of a stage are sharded."""
        return self.layout.shard * self.layout.context

    @property
    def fsdp_rank(self) -> int:
        """Index of this rank's share of the dense parameters."""
        return int(self.dense.get_local_rank("fsdp"))

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that have the same share of each replica."""
        return self.dense.get_group("replicate")

    @property
    def pipeline_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks that share the layers, twice: one group for each direction of messages."""
        return self.dense.get_group("pipeline"), self.stage_mesh.get_group("pipeline")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share each matrix."""
        return self.dense.get_group("tensor")

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The ranks that together have one stage of one replica."""
        return self.stage_mesh.get_group("stage")

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks that share a layer's experts, in the order of their tokens: by shard, then context, then tensor."""
        return self.expert_mesh.get_group("expert")

    @property
    def expert_tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share each expert's matrices."""
        return self.expert_mesh.get_group("expert_tensor")

    def deal(self, slots: int) -> Deal:
        """Return the assignment of ``slots`` to the ranks of this mesh."""
        layout = self.layout
        return Deal(slots, layout.replicate, layout.shard, layout.team, self.contiguous)


class _Groups:
    """This rank's process groups. All axes on which the rank is alone share one group of size 1.

    A gloo group costs three threads and a listening socket, even with one member, and half of a layout's axes have degree 1. Larger
    groups are not shared: on a GPU, operations of one group wait for each other.
    """

    def __init__(self) -> None:
        self._single: dist.ProcessGroup | None = None

    def along(self, ranks: torch.Tensor, dim: int) -> dist.ProcessGroup:
        """Make the process group of the ranks that differ from this rank only in dimension ``dim`` of ``ranks``.

        A collective of these ranks. All groups of this rank alone are one group.
        """
        if ranks.shape[dim] == 1 and self._single is not None:
            return self._single
        lines = ranks.movedim(dim, -1).flatten(0, -2)  # (lines, ranks of a line)
        (members,) = lines[(lines == dist.get_rank()).any(1)].tolist()
        group = dist.new_group(members, timeout=group_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        if len(members) == 1:
            self._single = group
        return group

    def view(self, device: torch.device, **degrees: int) -> DeviceMesh:
        """Return all ranks as a mesh of ``degrees``, the last varying fastest."""
        ranks = torch.arange(dist.get_world_size()).view(*degrees.values())  # (*degrees,)
        groups = [self.along(ranks, dim) for dim in range(ranks.ndim)]
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(degrees))

    def levels(self, ranks: int, line: int, stride: int, machine_ranks: int) -> TwoLevels | None:
        """Return both levels of the groups of ``line`` ranks that are ``stride`` apart; ``None`` if one level suffices.

        A collective if there are two.
        """
        width = ranks_in_a_machine(line, stride, machine_ranks)
        if width == 1:
            return None
        grid = torch.arange(ranks).view(-1, line // width, width, stride)  # (lines, machines, width, stride)
        inside, across = self.along(grid, 2), self.along(grid, 1)
        return TwoLevels(inside, across, dist.get_rank(across))


def build_mesh(spec: RunSpec, ranks: int, device: torch.device, *, machine_ranks: int = 0) -> Mesh:
    """Build the mesh of a run on all ``ranks`` of the default process group. A collective.

    Args:
        spec: The run.
        ranks: Size of the default process group.
        device: Device of this rank.
        machine_ranks: Ranks on each machine; 0 if unknown or irrelevant.

    Raises:
        LayoutError: The run does not allow that number of ranks.
    """
    problems = layout_problems(spec, ranks)
    if problems:
        raise LayoutError(problems)
    layout = layout_of(spec.parallel, ranks)
    outer = {"pipeline": layout.pipeline, "replicate": layout.replicate}
    groups = _Groups()
    dense = groups.view(device, **outer, fsdp=layout.shard * layout.context, tensor=layout.tensor)
    stage = groups.view(device, **outer, stage=layout.shard * layout.model_ranks)
    experts = groups.view(
        device,
        **outer,
        expert_shard=layout.expert_shard,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )
    slots = layout.pipeline * layout.data_ranks
    # (slots, context, tensor)
    context = groups.along(torch.arange(ranks).view(slots, layout.context, layout.tensor), 1)
    # (slots, ranks of a slot)
    sequence = groups.along(torch.arange(ranks).view(slots, layout.model_ranks), 1)
    copies = key_copies(spec.model, layout.tensor)
    # (lines, copies)
    keys = groups.along(torch.arange(ranks).view(-1, copies), 1) if 1 < copies < layout.tensor else None
    return Mesh(
        *(layout, device, dist.get_rank(), dense, stage, experts, context, sequence, keys),
        fsdp_levels=groups.levels(ranks, layout.shard * layout.context, layout.tensor, machine_ranks),
        expert_levels=groups.levels(
            ranks, layout.expert_shard, layout.expert * layout.expert_tensor, machine_ranks
        ),
        contiguous=spec.parallel.sharding == "zero1",
    )


# Machines in the mesh: the ranks of a group that share one machine, where links are an order of magnitude faster.
#
# Ranks are numbered machine by machine. If all machines have equally many, a rank's machine is its number divided by that count. A
# group that fills complete machines, or equal parts of them, has two levels: the ranks inside a machine, and the ranks with the same
# position in all machines. Values that a machine combines first cross the network once per machine instead of once per rank.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = -1
"""Placeholder for a machine that could not be identified."""
_NAME_BYTES = 64
"""Length of a host name in Linux (``HOST_NAME_MAX``)."""


@dataclass(frozen=True)
class TwoLevels:
    """Process groups of ranks that are on several machines, equally many on each."""

    inside: dist.ProcessGroup
    """The ranks on this rank's machine, in their order."""
    across: dist.ProcessGroup
    """The ranks at this rank's position on every machine, in the order of machines."""
    machine: int
    """Index of this rank's machine."""

    @property
    def width(self) -> int:
        """Number of ranks of the group on each machine."""
        return self.inside.size()

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.across.size()


def ranks_in_a_machine(ranks: int, stride: int, machine_ranks: int) -> int:
    """Return the number of ranks of a group on each of its machines; 1 if two levels are of no use, or are uneven.

    Args:
        ranks: Size of the group. Its ranks are ``stride`` apart; its first is a multiple of ``ranks * stride``, plus less than
            ``stride``.
        stride: 1 if no other axis varies faster.
        machine_ranks: Ranks of all groups on each machine; 0 if they are not equally many, or unknown.
    """
    if not machine_ranks or machine_ranks % stride or ranks * stride % machine_ranks:
        return 1
    width = machine_ranks // stride
    return width if width < ranks else 1


@dataclass(frozen=True)
class RankMachines:
    """The machines of the ranks of the default process group."""

    machines: tuple[int, ...]
    """By rank, the index of its machine, in the order of their first ranks."""
    names: tuple[str, ...]
    """Host name of each machine; with the first rank behind it where several machines have one name."""
    are_identified: bool = True
    """False if a rank could not read which machine it is on. All such ranks count as one machine."""

    @property
    def ranks_each(self) -> int:
        """Ranks on each machine; 0 if it differs or is unknown, or if ranks are not numbered machine by machine."""
        return equal_runs(list(self.machines)) if self.are_identified else 0

    def measured_by(self, rank: int) -> int | None:
        """Return the index of the machine whose first rank ``rank`` is; ``None`` if an earlier rank is on its machine."""
        machine = self.machines[rank]
        return machine if self.machines.index(machine) == rank else None


def find_machines(device: torch.device, boot_id: Path = BOOT_ID) -> RankMachines:
    """Return the machine of every rank and the machines' names, in the order of their first ranks.

    A collective of the default process group, of 72 bytes a rank. Machines are identified by the kernel's boot
    identifier in the file ``boot_id``, because containers of one machine have different host names. Ranks without one
    count as one machine, and the result is marked. Equal host names get the first rank appended.
    """
    try:
        digest = int.from_bytes(hashlib.sha256(boot_id.read_bytes()).digest()[:7], "big")
    except OSError:
        digest = _UNKNOWN  # not Linux, or a sandbox; take part in the collective anyway
    name = host_name().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    own = torch.from_numpy(np.concatenate(([digest], np.frombuffer(name, np.int64)))).to(device)
    gathered = torch.empty(dist.get_world_size() * len(own), dtype=own.dtype, device=device)
    all_gather_single(gathered, own, None)
    rows = gathered.cpu().numpy().reshape(-1, len(own))  # (ranks, 1 + words of the name)
    _, firsts, inverse = np.unique(rows[:, 0], return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # machines by their first rank
    names = [rows[first, 1:].tobytes().rstrip(b"\0").decode(errors="replace") for first in firsts[order]]
    shared = {name for name, count in Counter(names).items() if count > 1}
    return RankMachines(
        tuple(np.argsort(order)[inverse.ravel()].tolist()),
        tuple(
            f"{name} (rank {first})" if name in shared else name
            for name, first in zip(names, firsts[order], strict=True)
        ),
        are_identified=bool((rows[:, 0] != _UNKNOWN).all()),
    )


def equal_runs(machines: list[int]) -> int:
    """Return the length of each run of equal numbers if all runs are equally long and no number recurs; else 0."""
    width = next((i for i, machine in enumerate(machines) if machine != machines[0]), len(machines))
    starts = machines[::width]
    even = len(set(starts)) == len(starts) == len(machines) / width
    return width if even and all(machines[i] == starts[i // width] for i in range(len(machines))) else 0


# Partition of a parameter over the tensor and expert axes: the position of a rank's part in the full parameter.
#
# The tensor and expert axes leave each rank with plain tensors that are parts of the full ones; FSDP2 then shards these parts.
# ``Partition`` records the first division, which FSDP2 does not see. Initial values, checkpoints, hashes and norms use it to refer
# to the full parameter. Pieces are as even as possible: piece *i* of *n* of a size *s* begins at ``i * s // n``.


def piece(size: int, index: int, count: int) -> range:
    """Return the indices of piece ``index`` of ``count`` of a dimension."""
    return range(index * size // count, (index + 1) * size // count)


@dataclass(frozen=True)
class DimSplit:
    """One dimension of a parameter, divided over the ranks of ``group``; this rank has piece ``index`` of ``count``."""

    dim: int
    index: int
    count: int
    group: dist.ProcessGroup
    copies: int = 1
    """Number of neighbors in ``group`` with the same piece; the group has ``count * copies`` ranks."""


@dataclass(frozen=True)
class Partition:
    """Division of a parameter of shape ``full_shape`` over the tensor and expert axes."""

    full_shape: tuple[int, ...]
    splits: tuple[DimSplit, ...] = ()
    copy: int = 0
    """Index of this rank among those of these axes that have the same part."""
    copies: int = 1

    @property
    def part(self) -> LocalSlice:
        """Return this rank's part as a slice of the full parameter, before FSDP shards it."""
        offset, shape = [0] * len(self.full_shape), list(self.full_shape)
        for split in self.splits:
            indices = piece(self.full_shape[split.dim], split.index, split.count)
            offset[split.dim], shape[split.dim] = indices.start, len(indices)
        return LocalSlice(tuple(offset), tuple(shape))

    def local_slice(self, tensor: Tensor) -> LocalSlice:
        """Return this rank's slice of the full parameter, given a tensor that is laid out like the parameter."""
        begin, _ = self.part
        offset, shape = local_slice_of(tensor)
        return LocalSlice(tuple(a + b for a, b in zip(begin, offset, strict=True)), shape)
