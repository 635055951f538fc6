"""The data-parallel mesh: ``replicate x shard``.

``shard`` ranks share one copy of the weights between them (ZeRO); ``replicate`` counts the copies. Pure replication
is ``R x 1``, ZeRO over all ranks ``1 x R``, hybrid sharding anything between. The mesh is made once and passed to
whoever needs it; nothing here is global.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.parallel.slots import Deal
from phalanx.run.check import check_ranks
from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec


class LayoutError(ValueError):
    """A run that cannot be laid out on the ranks that there are."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


@dataclass(frozen=True)
class DataMesh:
    """This rank's place in the data-parallel mesh, and its process groups."""

    device: torch.device
    mesh: DeviceMesh
    """Two dimensions named ``replicate`` and ``shard``."""

    @property
    def replicas(self) -> int:
        """Number of copies of the weights."""
        return self.mesh.size(0)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that share one copy."""
        return self.mesh.size(1)

    @property
    def replica(self) -> int:
        """Which copy this rank works on."""
        return self.mesh.get_local_rank("replicate")

    @property
    def shard_rank(self) -> int:
        """Which share of the copy this rank holds."""
        return self.mesh.get_local_rank("shard")

    @property
    def rank(self) -> int:
        """This rank's number in the mesh, replica by replica."""
        return self.replica * self.shard_ranks + self.shard_rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shard_ranks

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks of this replica."""
        return self.mesh["shard"]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of this replica's ranks."""
        return self.mesh.get_group("shard")

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold the same share of each copy."""
        return self.mesh.get_group("replicate")

    def deal(self, slots: int) -> Deal:
        """How ``slots`` are dealt over this mesh."""
        return Deal(slots, self.replicas, self.shard_ranks)


def build_mesh(spec: RunSpec, ranks: int, device: torch.device) -> DataMesh:
    """The mesh for a run on all ``ranks`` of the default process group.

    Raises ``LayoutError`` when the run does not allow that number of ranks.
    """
    problems = list(check_ranks(spec, ranks))
    if problems:
        raise LayoutError(problems)
    shard_ranks = 1 if spec.parallel.sharding == "none" else spec.parallel.shard_ranks or ranks
    mesh = init_device_mesh(
        device.type, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard")
    )
    return DataMesh(device, mesh)
