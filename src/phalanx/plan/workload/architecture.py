"""The operations of a layer, as data: products, attention, what only moves memory, exchanges, and what backward needs.

A layer is a list of operations whose sizes are given per row (token) and divided as the layout divides them, so that a new
architecture is a new list and no new formula. ``phalanx.plan.step_cost.layer_costs`` turns the lists into seconds and bytes.

Rows: ``tokens`` are those of a micro-batch after the context axis, which a group of tensor ranks works on together; ``local``
are a rank's piece of them between products (sequence parallelism, arXiv 2205.05198); ``routed`` are the copies of tokens
that the rank's experts receive. What is kept for backward follows Korthikanti et al. (arXiv 2205.05198, section 4) with
fused attention (arXiv 2307.08691), which keeps its inputs, its result and one number for each row and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.model.facts.shape import is_mixture, score_widths
from phalanx.plan.workload.stacks import Stack, Workload
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

Rows = Literal["tokens", "local", "gathered", "routed"]
"""``gathered`` is kept as ``tokens`` by stacks that keep the gathered inputs of products, and as ``local`` by others."""
Axis = Literal["none", "tensor", "expert_tensor"]

_PERMUTING = 8
"""Kernels that sort tokens by expert: histogram, prefix sums, indices, and the copy."""

_PERMUTED = 1.43
"""Transformer Engine's fused permutation of tokens, counted as a row read and three written for each copy, over a kernel that moves
as much in order: 4.3 instead of 6.2 TB/s on B200 (MooreThreads/SimuMax v1.2, simu_tools/efficency_test/test_ce_permute_efficiency.py)."""
_FUSED_LOGIT_BYTES = 4
"""Scores and gradient in 16 bits: one kernel makes both of the loss."""

KINDS = ("dense", "mixture", "embedding", "head")
"""Kinds of parts of a stage: two kinds of layers, and the two ends of the model."""


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product (rows, inner) x (inner, columns)."""

    part: str
    rows: Rows
    columns: int
    inner: int
    columns_over: Axis = "none"
    inner_over: Axis = "none"
    experts: int = 0
    """More than 0 makes it a grouped product, with this many groups over all expert ranks."""


@dataclass(frozen=True)
class AttentionCore:
    """Causal attention over the whole sequence, its heads divided over tensor."""

    heads: int
    widths: int
    """Width of a head's query plus that of its value."""
    latent: bool = False
    """True if queries are wider than values."""
    part: str = "core"


@dataclass(frozen=True)
class Pointwise:
    """An operation limited by memory bandwidth: elements read and written for each row."""

    part: str
    rows: Rows
    forward: float
    backward: float
    over: Axis = "none"
    kernels: int = 1
    experts: int = 0
    """Experts of the model, where every expert on a rank launches so many kernels for itself."""


@dataclass(frozen=True)
class LayerExchange:
    """A collective on the way forward; backward does its mirror image.

    ``gather`` and ``scatter`` join and divide the sequence over tensor ranks; ``context`` fetches the others' keys and values;
    ``dispatch`` and ``combine`` carry tokens to their experts and back; ``expert_gather`` and ``expert_scatter`` join and
    divide routed tokens where experts' matrices are divided.
    """

    part: str
    kind: Literal["gather", "scatter", "context", "dispatch", "combine", "expert_gather", "expert_scatter"]
    width: int
    """Elements of a row."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that waits for backward, unless the part that makes it is computed again."""

    part: str
    """ "input" is always kept."""
    rows: Rows
    width: float
    over: Axis = "none"
    operand: bool = False
    """True if it is an operand of a product, which may be kept in the format of products."""
    bytes: int = 0
    """Bytes of an element, where the precision does not say."""
    beside: bool = False
    """True if it is a second form of a tensor: there is none where products are computed in the format of activations."""


LayerOperation = MatrixProduct | AttentionCore | Pointwise | LayerExchange


@dataclass(frozen=True)
class Layer:
    """All of one layer."""

    operations: tuple[LayerOperation, ...] = ()
    kept: tuple[KeptTensor, ...] = ()

    def __add__(self, other: Layer) -> Layer:
        return Layer(self.operations + other.operations, self.kept + other.kept)


def layers(workload: Workload, stack: Stack) -> dict[str, Layer]:
    """The operations of each of ``KINDS`` on one micro-batch."""
    model = workload.model
    attention = _norm(model) + (
        _attention(model, stack) if model.mla is None else _latent_attention(model, model.mla)
    )
    attention += _fused_core(workload) if stack.attention.flash else _core_in_memory(workload)
    attention += Layer(kept=(KeptTensor("input", "local", model.dim),))
    after = _after_attention(model)
    dense = attention + after + _feed_forward(model, model.ffn_dim, stack)
    mixture = attention + after + _mixture(model, model.moe, stack) if model.moe is not None else dense
    if stack.activations.dropout:
        masks = Layer(
            (Pointwise("out", "local", 4, 4),), (KeptTensor("out", "local", 2 * model.dim, bytes=1),)
        )
        dense, mixture = dense + masks, mixture + masks
    head = _head(model, stack)
    for _ in range(model.mtp_depth):
        ahead = MatrixProduct("projection", "local", model.dim, 2 * model.dim)
        head += (
            Layer((ahead,))
            + (mixture if is_mixture(model, model.layers - 1) else dense)
            + _head(model, stack)
        )
    embedding = Layer(
        (
            Pointwise("norm", "tokens", 2 * model.dim, 3 * model.dim),
            LayerExchange("norm", "scatter", model.dim),
        )
    )
    return {"dense": dense, "mixture": mixture, "embedding": embedding, "head": head}


def _norm(model: ModelSpec) -> Layer:
    # Read and write; backward reads the input and two gradients.
    dim = model.dim
    return Layer(
        (Pointwise("norm", "local", 2 * dim, 4 * dim),), (KeptTensor("norm", "gathered", dim, operand=True),)
    )


def _attention(model: ModelSpec, stack: Stack) -> Layer:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    turned = queries + keys
    # Apart: products with cosine and sine, the halves turned and joined, their sum, and a copy of it; backward the same way.
    turn_forward, turn_backward, turns = (12, 13, 12) if stack.attention.turns_apart else (2, 2, 2)
    operations = (
        LayerExchange("projection", "gather", model.dim),
        MatrixProduct("projection", "tokens", queries + 2 * keys, model.dim, columns_over="tensor"),
        Pointwise(
            "projection",
            "tokens",
            (turn_forward + 2 * model.qk_norm) * turned,
            (turn_backward + 4 * model.qk_norm) * turned,
            "tensor",
            kernels=turns + 2 * model.qk_norm,
        ),
        LayerExchange("core", "context", 2 * keys),
        AttentionCore(model.heads, score_widths(model)),
        MatrixProduct("out", "tokens", model.dim, queries, inner_over="tensor"),
        LayerExchange("out", "scatter", model.dim),
    )
    kept = (
        KeptTensor("projection", "tokens", queries + 2 * keys, "tensor"),
        *_attended(queries),
    )
    return Layer(operations, kept)


def _attended(width: int) -> tuple[KeptTensor, KeptTensor]:
    """Attention keeps its result for its own backward; a narrow output projection keeps it once more in its format."""
    return KeptTensor("core", "tokens", width, "tensor"), KeptTensor(
        "out", "tokens", width, "tensor", operand=True, beside=True
    )


def _latent_attention(model: ModelSpec, mla: MlaSpec) -> Layer:
    width = mla.nope_head_dim + mla.rope_head_dim
    queries, values = model.heads * width, model.heads * mla.value_head_dim
    latents = mla.query_rank + mla.kv_rank
    shared = mla.kv_rank + mla.rope_head_dim
    into_queries = mla.query_rank or model.dim
    operations = (
        MatrixProduct("projection", "local", mla.query_rank + shared, model.dim),
        Pointwise("norm", "local", 2 * latents, 4 * latents, kernels=2),
        LayerExchange("latent_up", "gather", latents + mla.rope_head_dim),
        MatrixProduct("latent_up", "tokens", queries, into_queries, columns_over="tensor"),
        MatrixProduct(
            "latent_up",
            "tokens",
            model.heads * (mla.nope_head_dim + mla.value_head_dim),
            mla.kv_rank,
            columns_over="tensor",
        ),
        Pointwise("latent_up", "tokens", 4 * queries, 4 * queries, "tensor", kernels=3),
        LayerExchange("core", "context", queries + values),
        AttentionCore(model.heads, score_widths(model), latent=True),
        MatrixProduct("out", "tokens", model.dim, values, inner_over="tensor"),
        LayerExchange("out", "scatter", model.dim),
    )
    kept = (
        KeptTensor("projection", "local", latents + mla.rope_head_dim),
        KeptTensor("norm", "gathered", latents, operand=True),
        KeptTensor("latent_up", "tokens", 2 * queries + values, "tensor"),
        *_attended(values),
    )
    return Layer(operations, kept)


def _fused_core(workload: Workload) -> Layer:
    """One fp32 number for each row and head: the logarithm of the softmax's sum (arXiv 2307.08691, section 3.1)."""
    return Layer(kept=(KeptTensor("core", "tokens", workload.model.heads, "tensor", bytes=4),))


def _core_in_memory(workload: Workload) -> Layer:
    """Scores in memory: the softmax, a dropout mask and its result are kept, 5 bytes for each score (arXiv 2205.05198)."""
    scores = workload.model.heads * workload.seq_len
    # Written by the product, scaled and masked, normalized, dropped, read by the product.
    moved = Pointwise("core", "tokens", 8 * scores, 8 * scores, "tensor", kernels=4)
    return Layer((moved,), (KeptTensor("core", "tokens", 5 * scores, "tensor", bytes=1),))


def _after_attention(model: ModelSpec) -> Layer:
    # The residual sum, and in backward that of its gradients, reads two and writes one; twice in a layer.
    add = Pointwise("out", "local", 6 * model.dim, 6 * model.dim, kernels=2)
    return Layer((add,), (KeptTensor("residual", "local", model.dim),)) + _norm(model)


def _feed_forward(model: ModelSpec, inner: int, stack: Stack) -> Layer:
    gates = 2 if model.ffn == "swiglu" else 1
    operations = (
        LayerExchange("widen", "gather", model.dim),
        MatrixProduct("widen", "tokens", gates * inner, model.dim, columns_over="tensor"),
        Pointwise("activation", "tokens", (gates + 1) * inner, (2 * gates + 1) * inner, "tensor"),
        MatrixProduct("down", "tokens", model.dim, inner, inner_over="tensor"),
        LayerExchange("down", "scatter", model.dim),
    )
    kept = (
        KeptTensor("widen", "tokens", gates * inner, "tensor"),
        KeptTensor("activation", "tokens", inner, "tensor", operand=True),
        KeptTensor("activation", "tokens", _gate(model, stack) * inner, "tensor"),
    )
    return Layer(operations, kept)


def _gate(model: ModelSpec, stack: Stack) -> int:
    """1 where the activated gate is kept beside gate, values and their product, as it is unless one kernel does it all."""
    return int(model.ffn == "swiglu" and not stack.kernels.fused_pointwise)


def _mixture(model: ModelSpec, moe: MoeSpec, stack: Stack) -> Layer:
    gates = 2 if model.ffn == "swiglu" else 1
    dim, inner = model.dim, moe.ffn_dim
    split: Axis = "expert_tensor"
    into, back = (copies * dim for copies in _sorting(moe, stack))
    results = () if stack.experts.weighs_inside else (KeptTensor("combine", "routed", dim),)
    routed = Layer(
        (
            MatrixProduct("router", "local", moe.experts, dim),
            # Scores, the choice, its balance and its loss: some twenty small kernels (Megatron Core's TopKRouter).
            Pointwise("router", "local", 8 * moe.experts, 4 * moe.experts, kernels=20),
            # In backward the gradients of the router, of the experts and of those that are shared are added up.
            Pointwise("router", "local", 0, 3 * dim * (1 + (moe.shared > 0))),
            Pointwise("dispatch", "local", into, into, kernels=_PERMUTING),
            LayerExchange("dispatch", "dispatch", dim),
            LayerExchange("dispatch", "expert_gather", dim),
            MatrixProduct(
                "expert_widen", "routed", gates * inner, dim, columns_over=split, experts=moe.experts
            ),
            Pointwise("expert_activation", "routed", (gates + 1) * inner, (2 * gates + 1) * inner, split),
            MatrixProduct("expert_down", "routed", dim, inner, inner_over=split, experts=moe.experts),
            LayerExchange("combine", "expert_scatter", dim),
            LayerExchange("combine", "combine", dim),
            Pointwise("combine", "local", back, back, kernels=_PERMUTING),
        ),
        (
            KeptTensor("router", "local", 2 * moe.experts, bytes=4),
            # The router computes in the format of activations, whatever the experts do.
            KeptTensor("norm", "local", dim, beside=True),
            KeptTensor("dispatch", "routed", dim, operand=True),
            KeptTensor("expert_widen", "routed", gates * inner, split, operand=stack.experts.narrow_gates),
            KeptTensor("expert_activation", "routed", inner, split, operand=True),
            KeptTensor("expert_activation", "routed", _gate(model, stack) * inner, split),
            *results,
        ),
    )
    shared = _feed_forward(model, moe.shared * inner, stack) if moe.shared else Layer()
    return routed + shared + _apart(model, moe, stack)


def _apart(model: ModelSpec, moe: MoeSpec, stack: Stack) -> Layer:
    """What experts' padding, activation and biases take where the kernels around them do not do it on their way."""
    dim, inner = model.dim, moe.ffn_dim
    # Gates and values are clamped and joined; backward they are masked by what was clamped, and joined.
    clamps = Layer(
        (Pointwise("expert_activation", "routed", 8 * inner, 10 * inner, "expert_tensor", kernels=3),),
        (KeptTensor("expert_activation", "routed", 2 * inner, "expert_tensor"),),
    )
    # Weighted in fp32, added, joined, to 16 bits; backward the same way, with sums for weights and biases.
    biases = Layer((Pointwise("expert_down", "routed", 14 * dim, 18 * dim, kernels=2, experts=moe.experts),))
    # Rows read and written into the experts, and out of them; backward the same for their gradients.
    padding = Layer((Pointwise("dispatch", "routed", 4 * dim, 4 * dim, kernels=2),))
    asked = (
        (stack.experts.clamps_apart, clamps),
        (stack.experts.weighs_biases, biases),
        (stack.experts.pads_apart, padding),
    )
    return sum((layer for is_asked, layer in asked if is_asked), Layer())


def _sorting(moe: MoeSpec, stack: Stack) -> tuple[float, float]:
    """Rows read and written for each token: into the order of experts, and back."""
    copies = moe.per_token
    if stack.experts.dispatch == "hybrid":  # its own kernel sorts what has come
        return 2 * copies, 2 * copies
    # Of an all-to-all, what it brings is in the order of ranks and sorted once more.
    moved = 1 + 3 * copies + (2 * copies if stack.experts.dispatch == "every copy" else 0)
    fused = _PERMUTED * moved
    # Else each copy is weighted (read, written) and added to a sum that is cleared, read and written.
    return (
        (fused, fused)
        if stack.experts.fused_permutation
        else (4 * copies, 2 * copies + 2 * copies + 3 * copies + 1)
    )


def _loss_passes(stack: Stack) -> tuple[float, float]:
    """Number of reads and writes of a score of two bytes for the loss, and for its gradient."""
    if stack.loss.passes is not None:
        return stack.loss.passes
    if stack.loss.chunk:
        return 6, 1
    if stack.loss.logit_bytes <= _FUSED_LOGIT_BYTES:  # read for the sum; read and overwritten by its gradient
        return 2, 2
    if stack.kernels.fused_pointwise:
        # To fp32, the maximum, exponentials and their sum; the gradient, to 16 bits.
        return 12, 5
    # Each of these steps and a division by itself: 38 bytes forward, 14 backward. All that eager code moves is counted thrice.
    return 19 / 3, 7 / 3


def _head(model: ModelSpec, stack: Stack) -> Layer:
    scores = model.vocab_size
    forward, backward = (passes * scores for passes in _loss_passes(stack))
    operations = (
        LayerExchange("projection", "gather", model.dim),
        MatrixProduct("projection", "tokens", scores, model.dim, columns_over="tensor"),
        Pointwise("projection", "tokens", forward, backward, "tensor", kernels=6),
    )
    return _norm(model) + Layer(operations, (KeptTensor("input", "local", model.dim),))
