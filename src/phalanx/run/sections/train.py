"""``[train]``, ``[optimizer]`` and ``[schedule]``: the steps, the global batch, and what becomes of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, FRACTION, LATER, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class TrainSpec:
    """The length of training, the global batch, and how it is divided for gradient accumulation."""

    steps: Annotated[int, ValueRange(at_least=1, at_most=10**9)] = 100
    """Number of optimizer steps."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Global batch size: sequences per optimizer step, over all ranks."""
    seq_len: Annotated[int, POSITIVE] = 256
    """Tokens per sequence."""
    slots: Annotated[int, POSITIVE] = 8
    """Equal pieces that the global batch is divided into. Data-parallel ranks take slots, and a rank with several accumulates
    their gradients; at most this many data-parallel ranks have work."""
    micro_batch_size: Annotated[int, NOT_NEGATIVE] = 0
    """Sequences per forward and backward pass; a slot's micro-batches accumulate their gradients in order. 0 means the whole
    slot at once."""
    reduction: Literal["reproducible", "integer", "fast"] = "reproducible"
    """Sum of gradients over slots: "reproducible" adds them in a fixed binary tree, "integer" in whole numbers, which have no order:
    with either, the bits do not depend on the number of ranks, though they differ between the two; "fast" is a plain
    reduce-scatter, whose order the library chooses."""
    expert_sums: Annotated[Literal["micro-batch", "slot"], LATER] = "micro-batch"
    """What is added first where ranks share experts and slots have several micro-batches: with "micro-batch" the slots of each, so that a
    rank keeps one set of its experts' gradients; with "slot" the micro-batches of each, so that parallel.expert changes no bit, for a
    set of gradients for each slot that the ranks compute at once."""
    on_nonfinite: Annotated[Literal["stop", "skip"], FLEET] = "stop"
    """Action when the loss or the gradient is infinite or NaN: stop the run, or skip the step."""
    max_skipped: Annotated[int, FLEET, POSITIVE] = 10
    """Consecutive skipped steps after which the run stops even if on_nonfinite or on_spike is "skip"."""
    on_spike: Annotated[Literal["continue", "stop", "skip"], LATER] = "continue"
    """Action when a step's loss or gradient norm is far above that of the steps before: go on and say so; stop before the step, saved; or skip
    the step, so that its samples are left out. The checkpoint before a spike is kept."""
    spike_window: Annotated[int, LATER, ValueRange(at_least=8, at_most=1024)] = 128
    """Steps that say which loss and gradient norm are usual; half of them must be done before any step can be a spike."""
    spike_deviations: Annotated[float, LATER, ValueRange(above=0)] = 8.0
    """Deviations above the window's median (1.4826 times its median absolute deviation) from which a step is a spike."""
    document_mask: bool | None = None
    """If true, attention does not cross the ends of documents; positions are not reset there. Left out, it is true of packed datasets whose index
    asks for it, as all do that are prepared now, and else false; models of a user's own do without."""
    targets_within_documents: Annotated[bool, LATER] = False
    """If true, the token after the end of a document, the first of another one or padding, is no target. Always true of packed datasets."""
    end_of_document: Annotated[int, ValueRange(at_least=-1)] = -1
    """Token id that ends a document, for document_mask and targets_within_documents; -1 means the tokenizer's."""
    loss_chunk: Annotated[int, POSITIVE] = 2048
    """Tokens whose logits are in memory at once while the cross-entropy is computed (chunked loss)."""


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "adafactor", "muon", "shampoo", "soap"] = "adamw"
    """AdamW (arXiv 1711.05101), Adafactor (arXiv 1804.04235), Muon (Jordan et al. 2024, arXiv 2502.16982), Shampoo
    (arXiv 1802.09568) or SOAP (arXiv 2409.11321). The last three take matrices; the rest of the model gets AdamW."""
    lr: Annotated[float, ValueRange(above=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, ValueRange(at_least=0, below=1)] = 0.9
    """Decay of the first moment, the running mean of gradients (for Muon, the momentum of matrices)."""
    beta2: Annotated[float, ValueRange(at_least=0, below=1)] = 0.95
    """Decay of the second moment, the running mean of squared gradients (for Shampoo and SOAP, of the statistics of
    matrices too)."""
    eps: Annotated[float, ValueRange(above=0)] = 1e-8
    """Epsilon, added to the root of the second moment."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay: each step multiplies the weights by 1 - learning rate x weight_decay."""
    decay_norms: bool = False
    """If true, weight decay also applies to the gains of norms and to biases."""
    decay_embeddings: bool = False
    """If true, weight decay also applies to the token embedding."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 means no clipping."""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of AdamW's moments: bf16 is rounded stochastically, int8 by blocks (arXiv 2110.02861)."""
    newton_schulz_steps: Annotated[int, ValueRange(at_least=1, at_most=20)] = 5
    """Muon: Newton-Schulz iterations that orthogonalize an update."""
    precondition_every: Annotated[int, POSITIVE] = 10
    """Shampoo and SOAP: steps between recomputations of the preconditioner's roots or bases."""
    block_size: Annotated[int, POSITIVE] = 1024
    """Shampoo and SOAP: larger matrices are preconditioned in blocks of at most this many rows and columns."""


@dataclass(frozen=True)
class ScheduleSpec:
    """The learning rate over time, as a multiple of optimizer.lr."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warm-up: "cosine" to the floor; "wsd", stable and then a linear decay (warmup-stable-decay, arXiv
    2404.06395); or "constant"."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Steps of linear warm-up from zero."""
    decay_fraction: Annotated[float, FRACTION] = 0.2
    """Fraction of the run, at its end, over which "wsd" decays."""
    floor: Annotated[float, FRACTION] = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""
