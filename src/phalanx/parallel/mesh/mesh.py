"""The mesh: a rank's coordinate on every axis, and the process groups of the axes.

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

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.parallel.mesh.machines import TwoLevels, ranks_in_a_machine
from phalanx.parallel.mesh.slots import Deal
from phalanx.parallel.mesh.torch_compat import group_timeout
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
