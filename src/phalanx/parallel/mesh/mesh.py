"""The mesh: a rank's coordinate on every axis, the process groups of the axes, machines, and the partition of parameters.

``phalanx.run.layout`` says which degrees there are and which are legal; here they become groups of processes. The same
ranks are looked at in several ways:

- dense: ``pipeline x replicate x fsdp x tensor``, where ``fsdp`` is shard and context taken together, because parameters
  are the same on all ranks of a context group and so can be divided among them too;
- context and sequence: the ranks that share one slot's tokens, for attention and for whatever is summed over a slot;
- experts: ``pipeline x replicate x expert_shard x expert x expert_tensor``, for the mixtures' weights and tokens.

Each rank makes only the groups that it is in, a few dozen whatever the number of ranks; PyTorch's ``init_device_mesh`` goes
through all groups of the fleet on every rank, a hundred thousand at a hundred thousand ranks. The order is the same on all
ranks, so the members of a group meet.

The mesh is made once and passed to whoever needs it; nothing here is global.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.mesh.slots import Deal
from phalanx.parallel.mesh.torch_compat import all_gather_single, group_timeout, local_slice_of
from phalanx.run.fields import Problem
from phalanx.run.kinds.whole_model import key_copies
from phalanx.run.layout import Layout, layout_of, layout_problems
from phalanx.run.spec import RunSpec


class LayoutError(ValueError):
    """A run that cannot be laid out on the ranks that there are."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout, and its process groups."""

    layout: Layout
    device: torch.device
    rank: int
    """This rank's number among all."""
    dense: DeviceMesh
    stage_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    context_group: dist.ProcessGroup
    """The ranks that share each sequence."""
    sequence_group: dist.ProcessGroup
    """The ranks that share one slot's tokens: context and tensor together."""
    key_group: dist.ProcessGroup | None = None
    """The tensor ranks that hold the same key and value heads; ``None`` where each head has a rank of its own."""
    fsdp_levels: TwoLevels | None = None
    """The ranks that the dense parameters are sharded over, machine by machine, if they fill several alike."""
    expert_levels: TwoLevels | None = None
    """The same of the ranks that experts are sharded over."""

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
        """Number of the replica (copy of the weights) that this rank works on."""
        return int(self.dense.get_local_rank("replicate"))

    @property
    def shard_rank(self) -> int:
        """Number of this rank among the data-parallel ranks that share a replica."""
        return self.fsdp_rank // self.layout.context

    @property
    def data_rank(self) -> int:
        """Number of this rank among all data-parallel ranks, those that compute different slots."""
        return self.replica * self.layout.shard + self.shard_rank

    @property
    def pipeline_rank(self) -> int:
        """Number of this rank among those that share the layers."""
        return int(self.dense.get_local_rank("pipeline"))

    @property
    def context_rank(self) -> int:
        """Number of this rank among those that share a sequence."""
        return self.fsdp_rank % self.layout.context

    @property
    def tensor_rank(self) -> int:
        """Number of this rank among those that share a matrix."""
        return int(self.dense.get_local_rank("tensor"))

    @property
    def expert_rank(self) -> int:
        """Number of this rank among those that share a layer's experts."""
        return int(self.expert_mesh.get_local_rank("expert"))

    @property
    def fsdp_ranks(self) -> int:
        """Number of ranks that the dense parameters of a stage are sharded over."""
        return self.layout.shard * self.layout.context

    @property
    def fsdp_rank(self) -> int:
        """Number of this rank's share of the dense parameters."""
        return int(self.dense.get_local_rank("fsdp"))

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same share of each copy."""
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
        """The ranks that hold one stage of one replica between them."""
        return self.stage_mesh.get_group("stage")

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks that share a layer's experts; in the order of their tokens: by shard, then context, then tensor."""
        return self.expert_mesh.get_group("expert")

    @property
    def expert_tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share each expert's matrices."""
        return self.expert_mesh.get_group("expert_tensor")

    def deal(self, slots: int) -> Deal:
        """The assignment of ``slots`` to the ranks of this mesh."""
        return Deal(slots, self.layout.replicate, self.layout.shard, self.layout.team)


class _Groups:
    """Makes this rank's process groups; every axis along which it is alone gets the same group of one.

    Each gloo group costs three threads and a listening socket, also one that has nobody to talk to, and half of a layout's
    axes are of that kind. Groups of several are not shared: on a GPU what goes through one waits for what went before.
    """

    def __init__(self) -> None:
        self._alone: dist.ProcessGroup | None = None

    def along(self, ranks: torch.Tensor, dim: int) -> dist.ProcessGroup:
        """The group of the ranks that stand in one line with this rank along dimension ``dim`` of ``ranks``."""
        if ranks.shape[dim] == 1 and self._alone is not None:
            return self._alone
        lines = ranks.movedim(dim, -1).flatten(0, -2)
        (mine,) = lines[(lines == dist.get_rank()).any(1)].tolist()
        group = dist.new_group(mine, timeout=group_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        if len(mine) == 1:
            self._alone = group
        return group

    def view(self, device: torch.device, **degrees: int) -> DeviceMesh:
        """All ranks as a mesh of ``degrees``, the last fastest."""
        ranks = torch.arange(dist.get_world_size()).view(*degrees.values())
        groups = [self.along(ranks, dim) for dim in range(ranks.ndim)]
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(degrees))

    def levels(self, ranks: int, line: int, stride: int, machine_ranks: int) -> TwoLevels | None:
        """Both levels of the groups of ``line`` ranks that are ``stride`` apart; ``None`` where one level does."""
        width = ranks_in_a_machine(line, stride, machine_ranks)
        if width == 1:
            return None
        grid = torch.arange(ranks).view(-1, line // width, width, stride)  # (lines, machines, width, stride)
        inside, across = self.along(grid, 2), self.along(grid, 1)
        return TwoLevels(inside, across, dist.get_rank(across))


def build_mesh(spec: RunSpec, ranks: int, device: torch.device, *, machine_ranks: int = 0) -> Mesh:
    """The mesh for a run on all ``ranks`` of the default process group.

    Args:
        spec: The run.
        ranks: Of the default process group.
        device: Of this rank.
        machine_ranks: Ranks on each machine; 0 if that is unknown, or makes no difference.

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
    context = groups.along(torch.arange(ranks).view(slots, layout.context, layout.tensor), 1)
    sequence = groups.along(torch.arange(ranks).view(slots, layout.model_ranks), 1)
    copies = key_copies(spec.model, layout.tensor)
    keys = groups.along(torch.arange(ranks).view(-1, copies), 1) if 1 < copies < layout.tensor else None
    return Mesh(
        *(layout, device, dist.get_rank(), dense, stage, experts, context, sequence, keys),
        fsdp_levels=groups.levels(ranks, layout.shard * layout.context, layout.tensor, machine_ranks),
        expert_levels=groups.levels(
            ranks, layout.expert_shard, layout.expert * layout.expert_tensor, machine_ranks
        ),
    )


# Machines in the mesh: which ranks of a group share one machine, where links are an order of magnitude faster.
#
# Ranks are numbered machine by machine, so with as many ranks on each machine, a rank's machine is its number divided by theirs. A
# group whose ranks fill whole machines, or equal parts of them, has two levels: the ranks of one machine, and the ranks that stand at
# the same place of all machines. What the ranks of a machine can combine first crosses the network once instead of once for each.


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


# Partition of a parameter over the tensor and expert axes: the position of a rank's part in the full parameter.
#
# The tensor and expert axes leave each rank with plain tensors that are parts of the whole; FSDP2 then divides these parts
# and knows of nothing else. A ``Partition`` keeps what FSDP2 does not know, so that initial values, checkpoints, hashes and
# norms can speak of the whole parameter: for each dimension that is divided, which piece of how many this is, and among
# which ranks. Pieces are as even as can be: piece *i* of *n* of a size *s* begins at ``i * s // n``.


def piece(size: int, index: int, count: int) -> range:
    """The indices of piece ``index`` of ``count`` of a dimension."""
    return range(index * size // count, (index + 1) * size // count)


@dataclass(frozen=True)
class DimSplit:
    """One dimension of a parameter, divided over the ranks of ``group``; this rank has piece ``index`` of ``count``."""

    dim: int
    index: int
    count: int
    group: dist.ProcessGroup
    copies: int = 1
    """Neighbors in ``group`` that hold the same piece; the group has ``count * copies`` ranks."""


@dataclass(frozen=True)
class Partition:
    """The division of a parameter of shape ``whole`` over the tensor and expert axes."""

    whole: tuple[int, ...]
    splits: tuple[DimSplit, ...] = ()
    copy: int = 0
    """Number of this rank among those of these axes that hold the same part."""
    copies: int = 1

    @property
    def part(self) -> LocalSlice:
        """This rank's part, before FSDP divides it."""
        offset, shape = [0] * len(self.whole), list(self.whole)
        for split in self.splits:
            indices = piece(self.whole[split.dim], split.index, split.count)
            offset[split.dim], shape[split.dim] = indices.start, len(indices)
        return LocalSlice(tuple(offset), tuple(shape))

    def local_slice(self, tensor: Tensor) -> LocalSlice:
        """The part of the whole that this rank holds of a tensor that is laid out like the parameter."""
        begin, _ = self.part
        offset, shape = local_slice_of(tensor)
        return LocalSlice(tuple(a + b for a, b in zip(begin, offset, strict=True)), shape)

    def gather(self, part: Tensor) -> Tensor:
        """All-gathers the whole from the ranks' parts (not divided by FSDP). A collective of the splits' groups."""
        for split in self.splits:
            size = self.whole[split.dim]
            longest = -(-size // split.count)
            shape = list(part.shape)
            shape[split.dim] = longest
            padded = part.new_zeros(shape)
            padded.narrow(split.dim, 0, part.shape[split.dim]).copy_(part)
            pieces = [torch.empty_like(padded) for _ in range(split.count * split.copies)]
            dist.all_gather(pieces, padded, group=split.group)
            part = torch.cat(
                [
                    other.narrow(split.dim, 0, len(piece(size, index, split.count)))
                    for index, other in enumerate(pieces[:: split.copies])
                ],
                split.dim,
            )
        return part
