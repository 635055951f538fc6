"""``RunSpec``: the one description that planner, trainer, scheduler and dashboard read.

Every section below is a table of the run file (TOML); every field has a type, a default, a range and a
sentence. ``phalanx.run.read`` turns a file into a ``RunSpec`` and reports all mistakes at once;
``phalanx.run.check`` holds the rules that span several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, FRACTION, NOT_NEGATIVE, POSITIVE, Bound


@dataclass(frozen=True)
class RopeScalingSpec:
    """Llama 3's stretching of rotary frequencies to longer contexts (arXiv 2407.21783, section 3.4.1)."""

    factor: Annotated[float, Bound(at_least=1)] = 8.0
    """By how much low frequencies are divided."""
    low_freq_factor: Annotated[float, Bound(above=0)] = 1.0
    """Wavelengths longer than original_max_seq_len / this are fully stretched."""
    high_freq_factor: Annotated[float, Bound(above=0)] = 4.0
    """Wavelengths shorter than original_max_seq_len / this are left as they are."""
    original_max_seq_len: Annotated[int, POSITIVE] = 8192
    """Context length, in tokens, before stretching."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Dimensions are in elements."""

    preset: str = ""
    """Name of a known shape, such as "llama3-8b"; fields given beside it override it."""
    layers: Annotated[int, POSITIVE] = 4
    """Number of transformer blocks."""
    dim: Annotated[int, POSITIVE] = 256
    """Width of the residual stream."""
    heads: Annotated[int, POSITIVE] = 4
    """Query heads of each attention layer."""
    kv_heads: Annotated[int, NOT_NEGATIVE] = 0
    """Key/value heads (grouped-query attention); 0 means as many as query heads."""
    head_dim: Annotated[int, NOT_NEGATIVE] = 0
    """Width of one head; 0 means dim / heads."""
    ffn_dim: Annotated[int, NOT_NEGATIVE] = 0
    """Inner width of the feed-forward layer; 0 means 8/3 dim (swiglu) or 4 dim (gelu), rounded up to 64."""
    ffn: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward layer: gated with three matrices, or plain with two."""
    vocab_size: Annotated[int, NOT_NEGATIVE] = 0
    """Rows of the embedding; 0 means the tokenizer's vocabulary."""
    tie_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    norm_eps: Annotated[float, Bound(above=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head (Qwen3)."""
    attention_bias: bool = False
    """Whether the projections of attention have biases."""
    ffn_bias: bool = False
    """Whether the projections of the feed-forward layer have biases."""
    rope_theta: Annotated[float, Bound(above=1)] = 10000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScalingSpec | None = None
    """Stretching of the rotary embedding to longer contexts; absent means none."""
    init_std: Annotated[float, Bound(above=0)] = 0.02
    """Standard deviation of initial weights; output projections get init_std / sqrt(2 layers)."""


@dataclass(frozen=True)
class DataSpec:
    """Where tokens come from. The corpus's fingerprint, not its path, is part of the run's identity."""

    path: Annotated[str, FLEET] = ".cache/data/python-stdlib"
    """Folder of prepared token shards; prepared from the corpus when it does not exist."""
    corpus: Annotated[tuple[str, ...], FLEET] = ()
    """Texts to prepare the folder from: files, folders, or the name of a known corpus ("python-stdlib")."""
    tokenizer: Annotated[str, FLEET] = "bpe"
    """ "bpe" (trained on the corpus), "bytes", or the path of a tokenizer.json."""
    vocab_size: Annotated[int, FLEET, Bound(at_least=257)] = 4096
    """Vocabulary of a tokenizer that is trained."""
    held_out: Annotated[float, FLEET, Bound(above=0, below=0.5)] = 0.05
    """Fraction of the documents never trained on."""


@dataclass(frozen=True)
class TrainSpec:
    """How much is computed, and in which pieces."""

    steps: Annotated[int, Bound(at_least=1, at_most=10**9)] = 100
    """Number of optimiser steps."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Sequences per step, over the whole fleet."""
    seq_len: Annotated[int, POSITIVE] = 256
    """Tokens per sequence."""
    slots: Annotated[int, POSITIVE] = 8
    """Pieces that a batch is divided into; no more data-parallel ranks than slots can work at once."""
    micro_batch_size: Annotated[int, NOT_NEGATIVE] = 0
    """Sequences per forward pass within a slot; 0 means the whole slot at once."""
    reduction: Literal["reproducible", "fast"] = "reproducible"
    """ "reproducible" adds the slots' gradients in a fixed tree; "fast" leaves the order to the library."""
    on_nonfinite: Annotated[Literal["stop", "skip"], FLEET] = "stop"
    """What to do when the loss or the gradient is infinite or not a number: stop, or skip the step."""
    max_skipped: Annotated[int, FLEET, POSITIVE] = 10
    """Consecutive skipped steps after which the run stops all the same."""
    loss_chunk: Annotated[int, POSITIVE] = 2048
    """Tokens whose logits are held at once while the loss is computed."""


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101) and the clipping of its gradients."""

    name: Literal["adamw"] = "adamw"
    """The optimiser."""
    lr: Annotated[float, Bound(above=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, Bound(at_least=0, below=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Bound(at_least=0, below=1)] = 0.95
    """Decay of the squared gradient's running mean."""
    eps: Annotated[float, Bound(above=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled decay per unit of learning rate."""
    decay_norms: bool = False
    """Whether the gains of norms and biases are decayed too."""
    decay_embeddings: bool = False
    """Whether the token embedding is decayed too."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest gradient norm; 0 means no clipping."""


@dataclass(frozen=True)
class ScheduleSpec:
    """The learning rate over time, as a multiple of optimizer.lr."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Cosine to the floor; warm-up, stable, linear decay (arXiv 2404.06395); or constant."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Steps of linear warm-up from zero."""
    decay_fraction: Annotated[float, FRACTION] = 0.2
    """Last part of the run over which "wsd" decays."""
    floor: Annotated[float, FRACTION] = 0.1
    """Multiple of the peak at which the decay ends."""


@dataclass(frozen=True)
class PrecisionSpec:
    """Number formats. Master weights, moments and reductions are fp32 throughout."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of weights and activations in forward and backward; "auto" is bf16 on a GPU, fp32 on a CPU."""


@dataclass(frozen=True)
class RuntimeSpec:
    """What of the machine enters the bits."""

    seed: Annotated[int, Bound(at_least=0, at_most=2**63 - 1)] = 0
    """Fixes the initial weights and the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU when there is one."""
    threads: Annotated[int, Bound(at_least=1, at_most=1024)] = 1
    """CPU threads per rank. Part of the run, because a sum split over threads rounds differently."""
    compile: bool = False
    """Whether the transformer blocks are compiled with torch.compile."""


@dataclass(frozen=True)
class ParallelSpec:
    """How the fleet holds the model. Nothing here changes a bit of the weights."""

    ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Data-parallel ranks to start on this machine; 0 means one per GPU, or cores / runtime.threads."""
    sharding: Annotated[Literal["none", "zero2", "zero3"], FLEET] = "zero3"
    """ "none" replicates; "zero2" shards gradients and optimiser; "zero3" shards the weights too."""
    shard_ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Ranks that one copy of the model is sharded over (hybrid sharding when fewer than all); 0 means all."""


@dataclass(frozen=True)
class CheckpointSpec:
    """When the run's state is saved, and how much of it is kept."""

    every_steps: Annotated[int, FLEET, POSITIVE] = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are kept for ever; 0 means none."""
    timeout_s: Annotated[float, FLEET, Bound(above=0)] = 600.0
    """How long the commit waits for all ranks' files."""
    init_from: str = ""
    """A run directory or checkpoint whose weights the run starts from; empty means fresh weights. Resolved to one
    checkpoint when the run is first started."""


@dataclass(frozen=True)
class EvalSpec:
    """Evaluation on held-out text."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps between evaluations; 0 means only at the end."""
    sequences: Annotated[int, FLEET, POSITIVE] = 64
    """Held-out sequences of an evaluation during the run (fewer when there are fewer)."""
    final_sequences: Annotated[int, FLEET, NOT_NEGATIVE] = 4096
    """Of the evaluation after the last step; 0 means all. The figure for xz is for all held-out text."""


@dataclass(frozen=True)
class SampleSpec:
    """The text that is generated when the run has ended."""

    prompt: Annotated[str, FLEET] = ""
    """How the sample begins; empty means no sample."""
    tokens: Annotated[int, FLEET, POSITIVE] = 120
    """Length of the sample."""
    temperature: Annotated[float, FLEET, NOT_NEGATIVE] = 0.8
    """Temperature of sampling; 0 takes the likeliest token."""


@dataclass(frozen=True)
class ObserveSpec:
    """What is recorded, and where else it is sent."""

    log_every_steps: Annotated[int, FLEET, POSITIVE] = 1
    """Steps between entries of the event stream."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], FLEET] = ()
    """Trackers that get a copy of every metric (each is an optional extra)."""


@dataclass(frozen=True)
class RunSpec:
    """A whole run file."""

    name: Annotated[str, FLEET] = "run"
    """Names the run directory."""
    run_dir: Annotated[str, FLEET] = ""
    """The run directory itself; empty means runs/NAME-IDENTITY."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    observe: ObserveSpec = field(default_factory=ObserveSpec)
