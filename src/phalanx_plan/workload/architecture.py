"""Operations of layers priced for a software stack: what each computes, moves, exchanges and keeps for backward.

A kind of layer lists its operations (``phalanx.run.kinds``). Their passes over memory, their kernels
and their kept tensors depend on the software. So a new kind of layer is a new list, a new stack a new set of facts, and
neither a new formula. ``phalanx_plan.step_cost.layer_costs`` turns the priced lists into seconds and bytes.

The kept tensors follow Korthikanti et al. (arXiv 2205.05198, section 4) with fused attention (arXiv 2307.08691), which
keeps its inputs, its result and one number for each row and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.run.kinds import block
from phalanx.run.kinds import operations as op
from phalanx.run.kinds.latent_attention import is_absorbed
from phalanx_plan.workload.stacks import Stack, TrainingWorkload

_PERMUTING = 8
"""Kernels that sort tokens by expert: histogram, prefix sums, indices, and the copy."""

_PERMUTED = 1.43
"""Transformer Engine's fused permutation of tokens, counted as a row read and three written for each copy, over a kernel that moves
as much in order: 4.3 instead of 6.2 TB/s on B200 (MooreThreads/SimuMax v1.2, simu_tools/efficency_test/test_ce_permute_efficiency.py)."""
_FUSED_LOGIT_BYTES = 4
"""Scores and gradient in 16 bits: one kernel makes both of the loss."""

KINDS = ("dense", "mixture", "embedding", "head")
"""Kinds of parts of a stage: two kinds of layers, and the two ends of the model."""

LayerOperation = op.MatrixProduct | op.AttentionCore | op.Pointwise | op.LayerExchange
"""The operations of a layer that take time."""


@dataclass(frozen=True)
class Layer:
    """All of one layer."""

    operations: tuple[LayerOperation, ...] = ()
    kept: tuple[op.KeptTensor, ...] = ()

    def __add__(self, other: Layer) -> Layer:
        return Layer(self.operations + other.operations, self.kept + other.kept)


def layers(workload: TrainingWorkload, stack: Stack) -> dict[str, Layer]:
    """Return, for each of ``KINDS``, the operations and kept tensors of one such layer on one micro-batch, as ``stack``
    carries them out.

    The head includes the operations that predict further tokens. No kind is empty: without experts, "mixture" is a
    dense layer too.
    """
    model = workload.model
    ahead = block.prediction_depths(model) * block.prediction_operations(model)
    work = {
        "dense": block.operations(model, mixed=False),
        "mixture": block.operations(model, mixed=True),
        "embedding": block.embedding_operations(model),
        "head": (*block.head_operations(model), *ahead),
    }
    return {
        kind: sum((_priced(operation, workload, stack) for operation in work[kind]), Layer())
        for kind in KINDS
    }


def _priced(operation: op.Operation, workload: TrainingWorkload, stack: Stack) -> Layer:
    """Convert one operation of the model to the kernels, exchanges and kept tensors with which ``stack`` carries it out."""
    match operation:
        case op.KeptTensor():
            return Layer(kept=(operation,))
        case op.MatrixProduct():
            return _product(operation, stack)
        case op.Norm():
            # Read and write; backward reads the input and two gradients.
            moved = op.Pointwise(
                operation.part,
                "local",
                2 * operation.width,
                4 * operation.width,
                kernels=operation.kernels,
                # The input's gradient, both sums over rows in two steps, and both added to sums over micro-batches.
                backward_kernels=5 * operation.kernels * stack.kernels.small_gradients,
            )
            return Layer(
                (moved,), (op.KeptTensor(operation.part, "gathered", operation.width, operand=True),)
            )
        case op.Rotation():
            return _rotation(operation, stack)
        case op.AttentionCore():
            return _core(operation, workload, stack)
        case op.Activation():
            return _activation(operation, stack)
        case op.Permutation():
            return _permutation(operation, stack)
        case op.AroundExperts():
            return _around_experts(operation, stack)
        case op.LossOfScores():
            # A soft cap reads and writes logits once more, and in backward its slope and their gradient.
            bent = (2, 3) if operation.capped else (0, 0)
            passes = (once + more for once, more in zip(_loss_passes(stack), bent, strict=True))
            forward, backward = (count * operation.scores for count in passes)
            return Layer((op.Pointwise("projection", "tokens", forward, backward, "tensor", kernels=6),))
        case op.Dropout():
            return _dropout(operation, stack)
        case op.Pointwise() | op.LayerExchange():
            return Layer((operation,))


def _product(product: op.MatrixProduct, stack: Stack) -> Layer:
    """Return a matrix product with its biases' gradients, if the stack has such kernels, and the output that it keeps."""
    biases = _biases(product) if stack.kernels.small_gradients and not product.wide else ()
    if not product.kept:
        return Layer((product, *biases))
    narrow = product.experts > 0 and stack.experts.narrow_gates
    own = product.columns - product.key_columns
    kept = [op.KeptTensor(product.part, product.rows, own, product.columns_over, operand=narrow)]
    if product.key_columns:
        kept.append(op.KeptTensor(product.part, product.rows, product.key_columns, "key_heads"))
    return Layer((product, *biases), tuple(kept))


def _biases(product: op.MatrixProduct) -> tuple[op.Pointwise, ...]:
    """The bias of a product, always a single operation: backward it is summed over rows, and added to its sum.

    Forward the next kernel adds it, except in the part "projection", which has a kernel for it.
    """
    apart = product.part == "projection"
    return (
        op.Pointwise(
            product.part,
            product.rows,
            2 * product.columns * apart,
            product.columns,
            product.columns_over,
            kernels=int(apart),
            backward_kernels=2,
        ),
    )


def _rotation(rotation: op.Rotation, stack: Stack) -> Layer:
    """Price the rotation of positions and the norms of queries and keys; nothing without rotary positions."""
    # Separate kernels: products with cosine and sine, the rotated halves, their sum, and a copy; backward likewise.
    if not stack.attention.rotary:
        return Layer()
    forward, backward, kernels = (12, 13, 12) if stack.attention.turns_apart else (2, 2, 2)
    normed = bool(rotation.norms)
    moved = op.Pointwise(
        "projection",
        "tokens",
        forward * rotation.width + 2 * normed * rotation.total_width,
        backward * rotation.width + 4 * normed * rotation.total_width,
        "tensor",
        kernels=kernels + len(rotation.norms),
    )
    return Layer((moved,))


def _core(core: op.AttentionCore, workload: TrainingWorkload, stack: Stack) -> Layer:
    """Attention, which keeps its result for its own backward; a narrow output projection keeps it once more in its
    format.

    Without flash attention, the scores are also moved and kept.
    """
    width = core.heads * core.value_width
    result = op.KeptTensor("core", "tokens", width, "tensor")
    operand = op.KeptTensor("out", "tokens", width, "tensor", operand=True, beside=True)
    if stack.attention.flash:
        # One fp32 number for each row and head: the logarithm of the softmax's sum (arXiv 2307.08691, section 3.1).
        sums = op.KeptTensor("core", "tokens", core.heads, "tensor", bytes=4)
        fused = Layer((core, *_capping(core, workload)), (result, sums, operand))
        return fused + _unfused(core, workload) if stack.attention.keeps_scores else fused
    # Scores in memory: written by the product, scaled and masked, normalized, dropped, read by the product.
    scores = core.heads * workload.seq_len
    moved = op.Pointwise("core", "tokens", 8 * scores, 8 * scores, "tensor", kernels=4)
    # The softmax, a dropout mask and its result: 5 bytes for each score (arXiv 2205.05198).
    softmax = op.KeptTensor("core", "tokens", 5 * scores, "tensor", bytes=1)
    return Layer((core, moved), (result, softmax, operand))


def _unfused(core: op.AttentionCore, workload: TrainingWorkload) -> Layer:
    """Price what fused attention would not move and keep, where no fused kernel takes fewer key than query heads.

    Softmax's results are kept, and a copy of keys and values for each query head. With sinks, caps or divided sequences, attention copies
    keys and values for a fused kernel and keeps none of it, or computes scores again (``phalanx.model.layers.attention.attend``).
    """
    model = workload.model
    keys = 1 if is_absorbed(model) else model.kv_heads
    if keys == core.heads or core.capped or model.sinks or model.context_tiles:
        return Layer()
    scores = round(core.heads * core.keys(workload.seq_len))
    copies = (core.heads - keys) * core.widths
    return Layer(
        (op.Pointwise("core", "undivided", 8 * scores, 8 * scores, "tensor", kernels=4),),
        (op.KeptTensor("core", "undivided", scores + copies, "tensor"),),
    )


def _capping(core: op.AttentionCore, workload: TrainingWorkload) -> tuple[op.Pointwise, ...]:
    """Memory traffic of soft-capped scores, which no fused kernel computes: half of the square, in fp32, a few rows at a time.

    They are scaled, capped, masked, summed, normalized and narrowed. Backward computes them again, with their slopes
    (``phalanx.model.layers.attention.attend``).
    """
    scores = round(core.heads * core.keys(workload.seq_len) / 2)
    return (
        (op.Pointwise("core", "tokens", 16 * scores, 26 * scores, "tensor", kernels=10),)
        if core.capped
        else ()
    )


def _activation(activation: op.Activation, stack: Stack) -> Layer:
    """Return an activation's memory traffic. It keeps its result for the next product; without fusion also the activated gate."""
    part, rows, width, over = activation.part, activation.rows, activation.width, activation.over
    inputs = 2 if activation.gated else 1
    moved = op.Pointwise(part, rows, (inputs + 1) * width, (2 * inputs + 1) * width, over)
    kept = [op.KeptTensor(part, rows, width, over, operand=True)]
    if activation.gated and not stack.kernels.fused_pointwise:
        # Unless one kernel does it all, the activated gate is kept beside gate, values and their product.
        kept.append(op.KeptTensor(part, rows, width, over))
    return Layer((moved,), tuple(kept))


def _permutation(permutation: op.Permutation, stack: Stack) -> Layer:
    """Price the sorting of tokens by expert, or back; only the way back may keep its tokens."""
    into, back = _sorting(permutation.copies, stack)
    copied = (into if permutation.part == "dispatch" else back) * permutation.width
    moved = op.Pointwise(permutation.part, "local", copied, copied, kernels=_PERMUTING)
    if permutation.part == "dispatch" or stack.experts.weighs_inside:
        return Layer((moved,))
    # The gradients of the routing weights need the experts' results.
    return Layer((moved,), (op.KeptTensor("combine", "routed", permutation.width),))


def _sorting(copies: int, stack: Stack) -> tuple[float, float]:
    """Rows read and written for each token: into the order of experts, and back, by the stack's way of dispatch."""
    if stack.experts.dispatch == "hybrid":  # its own kernel sorts what has come
        return 2 * copies, 2 * copies
    # The rows that an all-to-all brings are in the order of ranks and are sorted once more.
    moved = 1 + 3 * copies + (2 * copies if stack.experts.dispatch == "every copy" else 0)
    fused = _PERMUTED * moved
    # Else each copy is weighted (read, written) and added to a sum that is cleared, read and written.
    return (
        (fused, fused)
        if stack.experts.fused_permutation
        else (4 * copies, 2 * copies + 2 * copies + 3 * copies + 1)
    )


def _around_experts(around: op.AroundExperts, stack: Stack) -> Layer:
    """Return the experts' padding, activation clamps and weighted biases, each only if the stack computes it in separate kernels."""
    outer, inner = around.outer, around.inner
    # Gates and values are clamped and joined; backward they are masked by what was clamped, and joined.
    clamps = Layer(
        (op.Pointwise("expert_activation", "routed", 8 * inner, 10 * inner, "expert_tensor", kernels=3),),
        (op.KeptTensor("expert_activation", "routed", 2 * inner, "expert_tensor"),),
    )
    # Weighted in fp32, added, joined, to 16 bits; backward the same way, with sums for weights and biases.
    biases = Layer(
        (op.Pointwise("expert_down", "routed", 14 * outer, 18 * outer, kernels=2, experts=around.experts),)
    )
    # Rows read and written into the experts, and out of them; backward the same for their gradients.
    padding = Layer((op.Pointwise("dispatch", "routed", 4 * outer, 4 * outer, kernels=2),))
    separate = (
        (stack.experts.clamps_apart, clamps),
        (stack.experts.weighs_biases, biases),
        (stack.experts.pads_apart, padding),
    )
    return sum((layer for is_separate, layer in separate if is_separate), Layer())


def _dropout(dropout: op.Dropout, stack: Stack) -> Layer:
    """Price dropout, which keeps its masks; nothing if the stack has none."""
    if not stack.activations.dropout:
        return Layer()
    results = dropout.results
    masks = op.KeptTensor("out", "local", results * dropout.width, bytes=1)
    # One kernel adds bias, dropout and residual: those of the sum are counted.
    return Layer((op.Pointwise("out", "local", 2 * results, 2 * results, kernels=0),), (masks,))


def _loss_passes(stack: Stack) -> tuple[float, float]:
    """Number of reads and writes of a score of two bytes for the loss, and for its gradient.

    The stack's own numbers if it has them, else those of a chunked, a fused, a compiled or a plain loss.
    """
    if stack.loss.passes is not None:
        return stack.loss.passes
    if stack.loss.chunk:
        return 6, 1
    if stack.loss.logit_bytes <= _FUSED_LOGIT_BYTES:  # read for the sum; read and overwritten by its gradient
        return 2, 2
    if stack.kernels.fused_pointwise:
        # To fp32, the maximum, exponentials and their sum; the gradient, to 16 bits.
        return 12, 5
    # Each of these steps and a division is a separate pass: 38 bytes forward, 14 backward. All traffic of eager code is counted
    # three times.
    return 19 / 3, 7 / 3
