"""The expert axis: the routed experts of each layer dealt over a few ranks, and perhaps each one's matrices divided.

A layer's experts lie on ``layout.expert`` ranks, folded over the inner axes of the mesh (``phalanx.run.layout``): the ranks
along tensor and context, which share a slot's tokens anyhow, and as many neighboring data-parallel ranks as are needed
beyond these. Each holds the same number of experts, whole, or with ``layout.expert_tensor`` some of their inner elements.
The tokens travel (``phalanx.parallel.expert.exchange``). Routers and shared experts are not dealt; the tensor axis cares for
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from phalanx.hardware.local.device import on_gpu
from phalanx.model.layers.experts.moe import Exchange, Experts, LocalExchange, MoE
from phalanx.model.transformer import Transformer
from phalanx.parallel.expert.exchange import DividedExperts, ExpertExchange
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.mesh.partition import DimSplit, Partition
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.spec import RunSpec

_DIVIDED = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dimension that ranks divide: that of an expert's inner elements. Of ``down_bias`` each adds a part to its share of the sum."""


def apply_experts(
    module: Transformer,
    mesh: Mesh,
    spec: RunSpec,  # noqa: ARG001  all axes are applied by the same call
    clock: CommClock,
) -> dict[str, Partition]:
    """Deals the experts of ``module``, on the meta device and not yet sharded, over the expert axes of ``mesh``.

    Afterwards their parameters are this rank's parts, and each mixture takes the tokens that this rank has, whatever the
    other axes made of them.

    Returns:
        Where the part of each of the experts' parameters lies, also if it is the whole.
    """
    exchange = _exchange(mesh, clock)
    partitions = {}
    for name, part in module.named_modules():
        if isinstance(part, MoE):
            part.exchange = exchange
            partitions.update(_cut(part.experts, f"{name}.experts", mesh))
    return partitions


def _exchange(mesh: Mesh, clock: CommClock) -> Exchange:
    layout = mesh.layout
    dealt: Exchange = LocalExchange()
    if layout.expert > 1:
        dealt = ExpertExchange(mesh.expert_group, layout.team, clock, apart=not on_gpu(mesh.device))
    if layout.expert_tensor == 1:
        return dealt
    return DividedExperts(SequenceComm(mesh.expert_tensor_group, clock), dealt)


def _cut(experts: Experts, prefix: str, mesh: Mesh) -> dict[str, Partition]:
    """Replaces the parameters of ``experts`` by this rank's parts."""
    partitions = {}
    for name, whole in list(experts.named_parameters()):
        partition = Partition(tuple(whole.shape), tuple(_splits(_DIVIDED[name], mesh)))
        setattr(experts, name, nn.Parameter(whole.new_empty(partition.part[1]), whole.requires_grad))
        partitions[f"{prefix}.{name}"] = partition
        if name == "down_bias":
            experts.result_start = partition.part[0][1]
    return partitions


def _splits(inner: int, mesh: Mesh) -> Iterator[DimSplit]:
    layout = mesh.layout
    if layout.expert > 1:
        yield DimSplit(0, mesh.expert_rank, layout.expert, mesh.expert_group)
    if layout.expert_tensor > 1:
        index = mesh.expert_mesh.get_local_rank("expert_tensor")
        yield DimSplit(inner, index, layout.expert_tensor, mesh.expert_tensor_group)
