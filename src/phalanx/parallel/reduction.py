"""Adds up slot gradients in tree order while the backward pass runs, and leaves each rank its share of the sum.

With a sharded model, FSDP2 hands every parameter group's gradient to a reduce-scatter after each backward pass
(``FSDPModule.set_custom_reduce_scatter`` is PyTorch's extension point for it). Ours is an all-to-all: the rank that
owns a share of the parameters receives that share of *every* slot's gradient, unsummed, and adds in the order of
``phalanx.parallel.slots``. The volume on the wire is that of a reduce-scatter. After the last round, copies of the
weights in other replicas exchange what is left of their trees the same way, and share the sums by an all-gather:
the volume of an all-reduce when a replica's slots fill a whole subtree.

``Step`` tells the reducers which slots the current backward pass computes; it is the only state they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm_clock import CommClock
from phalanx.parallel.mesh import DataMesh
from phalanx.parallel.slots import Deal, SlotTree
from phalanx.parallel.torch_compat import AllGather, ReduceScatter, all_gather_single


@dataclass
class Step:
    """Where the ranks of a replica are in the current step."""

    round_slots: tuple[int | None, ...] = ()
    """The slots whose gradients the current backward pass yields, by shard rank; ``None`` is to be ignored."""
    last_round: bool = False
    """Whether the sum is due after this backward pass."""


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


@dataclass
class TreeReducer:
    """Sums one flat gradient over all slots of a step.

    Each parameter group has one, since their trees grow side by side.
    """

    mesh: DataMesh
    deal: Deal
    step: Step
    tree: SlotTree[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = SlotTree(self.deal.slots, _add)

    def push(self, gradients: Sequence[Tensor]) -> None:
        """Takes in this round's gradients of the share that this rank owns, one for each shard rank."""
        for slot, gradient in zip(self.step.round_slots, gradients, strict=True):
            if slot is not None:
                self.tree.push(slot, gradient)

    def keep(self) -> None:
        """Copies what the tree holds out of buffers that it shares with gradients already added."""
        self.tree.nodes = {
            node: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            for node, value in self.tree.nodes.items()
        }

    def finish(self, out: Tensor) -> None:
        """Writes the sum over all slots of the fleet into ``out``; the tree is empty afterwards."""
        if self.mesh.replicas == 1:
            out.copy_(self.tree.take_root())
            return
        exchange(self.tree, self.deal, self.mesh, out)

    def clear(self) -> None:
        """Forgets a step that was broken off."""
        self.tree.nodes.clear()


def exchange(tree: SlotTree[Tensor], deal: Deal, mesh: DataMesh, out: Tensor) -> None:
    """Adds up the trees of all replicas and writes the sum into ``out``, on every replica.

    Replica *j* becomes responsible for the *j*-th piece: it receives that piece of every node that any replica was
    left with, adds them in tree order, and the pieces are gathered.
    """
    replicas, nodes = mesh.replicas, deal.forest(mesh.replica)
    piece = -(-out.numel() // replicas)
    padded = out.new_zeros((replicas, len(nodes), piece))
    for position, node in enumerate(nodes):
        flat = out.new_zeros(replicas * piece)
        flat[: out.numel()] = tree.nodes.pop(node).reshape(-1)
        padded[:, position] = flat.view(replicas, piece)
    forests = [deal.forest(replica) for replica in range(replicas)]
    counts = [len(forest) * piece for forest in forests]
    received = out.new_empty(sum(counts))
    dist.all_to_all_single(
        received, padded.view(-1), counts, [len(nodes) * piece] * replicas, group=mesh.replicate_group
    )
    for forest, part in zip(forests, torch.split(received, counts), strict=True):
        for node, value in zip(forest, part.view(len(forest), piece), strict=True):
            tree.push_node(node, value)
    total = out.new_empty(replicas * piece)
    all_gather_single(total, tree.take_root().contiguous(), mesh.replicate_group)
    out.copy_(total[: out.numel()].view_as(out))


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP parameter group, by all-to-all and addition in tree order.

    Until the last round of a step its output means nothing; whoever drives the step drops the gradients that FSDP
    makes of it.
    """

    def __init__(self, reducer: TreeReducer, clock: CommClock) -> None:
        self.reducer, self.clock = reducer, clock

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised buffer; zeros would be written over anyway."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002  the operation is a sum, whatever FSDP would have asked for
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """``input_tensor`` ``(ranks * share,)`` is this rank's slot; ``output_tensor`` ``(share,)`` is the sum."""
        received = torch.empty_like(input_tensor)
        with self.clock.measure():
            dist.all_to_all_single(received, input_tensor, group=group)
        self.reducer.push(received.view(group.size(), -1).unbind(0))
        if self.reducer.step.last_round:
            with self.clock.measure():
                self.reducer.finish(output_tensor)
        else:
            self.reducer.keep()
            output_tensor.zero_()


class TimedAllGather(AllGather):
    """FSDP's own all-gather, with the time that a CPU spends in it measured."""

    def __init__(self, clock: CommClock) -> None:
        self.clock = clock

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work | None:
        """Concatenates every rank's ``input_tensor`` ``(n,)`` in ``output_tensor`` ``(ranks * n,)``."""
        with self.clock.measure():
            all_gather_single(output_tensor, input_tensor, group)
        return None
