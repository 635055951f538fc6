"""The placement of a run's state: the part of each tensor that this rank holds, and the ranks that hold the same part.

The tensor, expert and pipeline axes divide the model's parameters before FSDP does (``phalanx.parallel.mesh.mesh``); this
table composes both, for code that works on whole tensors: initial values, checkpoints, the hash of the weights and the norm of
the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.shards import Copies, Shard, dtype_name
from phalanx.observe.ledger import Bucket
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh, Partition
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.reduction.data_parallel import DataParallel, local
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import RunSpec
from phalanx.train.optimizers.optimizer import Optimizer, StatePart
from phalanx.train.step.slot import SlotRunner


@dataclass(frozen=True)
class Placement:
    """This rank's parts of the model's parameters."""

    mesh: Mesh
    kinds: Mapping[str, Parameter]
    """Every parameter and balance bias of the whole model, in the canonical order."""
    partitions: Mapping[str, Partition]
    """The division of those parameters of this rank that the tensor and expert axes divide or copy."""

    @property
    def parameter_count(self) -> int:
        """Number of elements of the whole model's parameters."""
        return sum(kind.numel for kind in self.kinds.values() if kind.kind != "balance")

    @property
    def routers(self) -> list[str]:
        """The names of all routers of the whole model, in the order of layers."""
        return [name.removesuffix(".weight") for name, kind in self.kinds.items() if kind.kind == "router"]

    def partition(self, name: str) -> Partition:
        """The division of a parameter before FSDP divides it."""
        return self.partitions.get(name) or Partition(self.kinds[name].shape)

    def owns(self, name: str) -> bool:
        """True on one of the ranks that hold the same part of a parameter: the one that counts in sums over ranks."""
        return self.mesh.rank == self.holders(name)[0]

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the same part of a parameter as this one, this one included, in ascending order."""
        kind = self.kinds[name]
        if kind.stacked:
            return self._holders_of_experts
        if kind.kind == "balance":
            return self._holders_of_biases
        return self._holders_by_copies[self.partition(name).copies]

    # As many ranks as replicas, or as the whole fleet: they are listed once for all parameters, not at every step for each.

    @cached_property
    def _holders_of_experts(self) -> tuple[int, ...]:
        place = self.mesh.expert_mesh.get_coordinate()
        assert place is not None, "every rank has a place"
        return _ascending(self.mesh.expert_mesh.mesh[place[0], :, place[2], place[3], place[4]])

    @cached_property
    def _holders_of_biases(self) -> tuple[int, ...]:
        return _ascending(self.mesh.dense.mesh[self.mesh.pipeline_rank])

    @cached_property
    def _holders_by_copies(self) -> Mapping[int, tuple[int, ...]]:
        """The holders of this rank's parts of dense parameters, by the number of tensor ranks that hold the same."""
        mesh = self.mesh
        found = {}
        for copies in {1, *(partition.copies for partition in self.partitions.values())}:
            first = mesh.tensor_rank // copies * copies
            found[copies] = _ascending(
                mesh.dense.mesh[mesh.pipeline_rank, :, mesh.fsdp_rank, first : first + copies]
            )
        return found

    def shard(self, prefix: str, name: str, tensor: Tensor) -> Shard:
        """This rank's shard of a tensor that is laid out like parameter ``name``, for a checkpoint."""
        partition = self.partition(name)
        offset, shape = partition.local_slice(tensor)
        if 0 in shape:
            offset = (0,) * len(shape)
        holders = self.holders(name)
        box = Box(f"{prefix}/{name}", dtype_name(tensor.dtype), partition.full_shape, offset, shape)
        return Shard(
            box, local(tensor.detach()), Copies(holders.index(self.mesh.rank), len(holders), holders)
        )

    def state_shard(self, name: str, part: StatePart) -> Shard:
        """This rank's shard of the optimizer's state, for a checkpoint."""
        shape = tuple(part.tensor.shape)
        offset = (0,) * len(shape) if 0 in shape else part.offset
        mesh = self.mesh.stage_mesh
        alone = mesh.mesh[self.mesh.pipeline_rank, :, mesh.get_local_rank("stage")]
        holders = self.holders(part.like) if part.like else tuple(int(rank) for rank in alone.tolist())
        return Shard(
            Box(name, dtype_name(part.tensor.dtype), part.whole, offset, shape),
            part.tensor,
            Copies(holders.index(self.mesh.rank), len(holders), holders),
        )

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gathers a tensor that is laid out like parameter ``name``. A collective call of all ranks of a stage and replica."""
        part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return self.partition(name).gather(part)


def _ascending(ranks: Tensor) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in ranks.flatten().tolist()))


# The result of building a rank's model: the model with everything that is needed to run steps on it.


@dataclass(frozen=True)
class Built:
    """A model on one rank, with memory allocated but not yet filled."""

    spec: RunSpec
    """The resolved run."""
    model: DataParallel
    placement: Placement
    """Where this rank's parts lie in the whole tensors."""
    runner: SlotRunner
    """Forward and backward of a slot, with or without a pipeline."""
    optimizer: Optimizer
    rounds: list[Round]
    """The slots that this rank computes in each step, in order."""
    waits: Mapping[Bucket, CommClock]
    """Stopwatch per communication axis: exposed communication time of forward and backward, by ledger bucket."""
    flops_per_token: int
    """Training FLOP per token of the whole model."""
