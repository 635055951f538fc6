"""Activation checkpointing: activations are recomputed in the backward pass instead of kept (Chen et al., arXiv 1604.06174).

Without it a block keeps some dozen tensors for backward, each as wide as the model or wider. ``full`` keeps a block's
input alone and computes the block twice. ``selective`` keeps the results that cost much time per byte, and recomputes only the
cheap rest (Korthikanti et al., arXiv 2205.05198); ``budget`` leaves the choice to the compiler, which solves a knapsack
problem for each block.

Recomputation does the same operations on the same numbers, so no bit changes: that includes the choices of a router, and
collectives, which all ranks of a group run again in the same order. PyTorch's non-reentrant checkpoint is put around a
block's ``forward`` rather than around the block, so that parameters keep their names, and so that whatever hooks the block
has (FSDP's gathering of weights) run once and stay outside. A compiled ``forward`` is recomputed as it is: one program, with or
without. ``selective`` cannot look into it, so ``phalanx.run.layout`` refuses the two together; ``budget`` is for compiled blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from phalanx.model.custom import blocks_of
from phalanx.parallel.mesh.torch_compat import (
    keep_activations_within,
    keep_selected_tensors_from_hooks,
    leave_profiler_out_of_selective_checkpoints,
)
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from torch._ops import OpOverload

ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Attention in one kernel: quadratic time, a result as wide as its queries."""
PRODUCTS = frozenset(
    {"mm", "bmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
)
"""Matrix products whose first argument is the left operand ``(..., m, k)`` and whose second is the right, ``(..., k, n)``."""
FUNCTIONAL_COLLECTIVES = "_c10d_functional"


def apply_recompute(module: nn.Module, spec: RunSpec) -> None:
    """Applies ``spec.memory.recompute`` to the blocks of ``module``: compiled ones if they are to be, not sharded yet."""
    how = spec.memory.recompute
    if how == "none":
        return
    if how == "budget":
        keep_activations_within(spec.memory.recompute_budget)
        return
    if how == "selective":
        leave_profiler_out_of_selective_checkpoints()
    contexts = noop_context_fn if how == "full" else partial(create_selective_checkpoint_contexts, policy)
    for block in blocks_of(module):
        # A block draws no random numbers, so no generator's state need be kept.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **keep_selected_tensors_from_hooks(),
        )


def policy(
    context: SelectiveCheckpointContext,  # noqa: ARG001  PyTorch's signature
    operation: OpOverload[..., object],
    *args: Tensor,
    **kwargs: object,  # noqa: ARG001
) -> CheckpointPolicy:
    """The selective policy: keeps the results of attention, of collectives, and of products that do not widen.

    A product's time per byte of its result is proportional to its inner dimension, which is the same for all products that read
    the residual stream; but the two that widen it to a feed-forward layer's inner width make up two thirds or more of the bytes
    that could be kept. Recomputing just these costs about as much time as recomputing every second product, and keeps a good
    deal less.
    """
    name = operation.overloadpacket.__name__
    if name in ATTENTION or operation.namespace == FUNCTIONAL_COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    operands = args[1:3] if name == "addmm" else args[:2] if name in PRODUCTS else ()
    if operands and not _widens(*operands):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _widens(left: Tensor, right: Tensor) -> bool:
    return right.shape[-1] > left.shape[-1]
