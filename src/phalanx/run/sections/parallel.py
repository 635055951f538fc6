"""``[parallel]``: the mesh that holds the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, LAYOUT, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class ParallelSpec:
    """How the fleet holds the model: a mesh of pipeline x replicate x shard x context x tensor, with experts folded over
    shard x context x tensor. How many copies, shards and stages there are changes no bit of the weights; the other degrees
    decide how sums are split."""

    ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Ranks (processes) to start on this machine; 0 means one per GPU, or cores / runtime.threads, but at least one replica."""
    sharding: Annotated[Literal["none", "zero2", "zero3"], FLEET] = "zero3"
    """Data-parallel sharding: "none" replicates everything; "zero2" shards gradients and optimizer state; "zero3" shards the
    weights too (FSDP)."""
    shard_ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Data-parallel ranks that one copy of the model is sharded over; fewer than all is hybrid sharding. 0 means all."""
    tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Tensor-parallel degree: ranks that share each matrix, and the sequence between the matrices."""
    async_tensor: Annotated[bool, FLEET] = False
    """If true, tensor-parallel communication overlaps with the matrix products; needs a GPU and runtime.compile."""
    context: Annotated[int, LAYOUT, POSITIVE] = 1
    """Context-parallel degree: ranks that share each sequence in attention."""
    context_mode: Annotated[Literal["ring", "allgather"], LAYOUT] = "ring"
    """How a rank gets the keys and values of the other ranks: passed around a ring, or by one all-gather."""
    pipeline: Annotated[int, FLEET, POSITIVE] = 1
    """Pipeline-parallel degree: ranks that hold consecutive stages of the layers."""
    pipeline_schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"], FLEET] = "1f1b"
    """Pipeline schedule: the order in which a slot's micro-batches pass through the stages."""
    pipeline_stages: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Stages (model chunks) on each pipeline rank; 0 means one for gpipe and 1f1b, two for the others."""
    pipeline_split: Annotated[tuple[int, ...], FLEET] = ()
    """Number of layers of each stage, from first to last; empty balances the stages by cost."""
    expert: Annotated[int, LAYOUT, POSITIVE] = 1
    """Expert-parallel degree: ranks that share a layer's experts, folded over tensor, context and shard in that order."""
    expert_tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Tensor-parallel degree of each expert's matrices: 1, or the same as tensor."""
