"""``RunSpec``: the one description that planner, trainer, scheduler and dashboard read.

Every section below is a table of the run file (TOML); every field has a type, a default, a range and a
sentence. ``phalanx.run.read`` turns a file into a ``RunSpec`` and reports all mistakes at once;
``phalanx.run.check`` holds the rules that span several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, FRACTION, LAYOUT, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class RopeScalingSpec:
    """Stretching of rotary frequencies to longer contexts: Llama 3's (arXiv 2407.21783, section 3.4.1) or YaRN
    (arXiv 2309.00071)."""

    kind: Literal["llama3", "yarn"] = "llama3"
    """Which of the two."""
    factor: Annotated[float, ValueRange(at_least=1)] = 8.0
    """By how much low frequencies are divided."""
    original_max_seq_len: Annotated[int, POSITIVE] = 8192
    """Context length, in tokens, before stretching."""
    low_freq_factor: Annotated[float, ValueRange(above=0)] = 1.0
    """Llama 3: wavelengths longer than original_max_seq_len / this are fully stretched."""
    high_freq_factor: Annotated[float, ValueRange(above=0)] = 4.0
    """Llama 3: wavelengths shorter than original_max_seq_len / this are left as they are."""
    beta_fast: Annotated[float, ValueRange(above=0)] = 32.0
    """YaRN: frequencies that turn more often than this within original_max_seq_len are left as they are."""
    beta_slow: Annotated[float, ValueRange(above=0)] = 1.0
    """YaRN: frequencies that turn less often than this within original_max_seq_len are fully stretched."""
    mscale: Annotated[float, NOT_NEGATIVE] = 0.0
    """YaRN: strength of the attention temperature in the rotary tables (DeepSeek's `mscale`); 0 means 1."""
    mscale_all_dim: Annotated[float, NOT_NEGATIVE] = 0.0
    """YaRN: strength of the attention temperature in the softmax scale (DeepSeek's `mscale_all_dim`); 0 means none."""


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are expanded from a
    small latent; part of each head carries no position, part is rotated and shared by all heads."""

    query_rank: Annotated[int, NOT_NEGATIVE] = 0
    """Width of the queries' latent; 0 means that queries are projected directly."""
    kv_rank: Annotated[int, POSITIVE] = 64
    """Width of the latent that keys and values are expanded from."""
    nope_head_dim: Annotated[int, POSITIVE] = 32
    """Elements of a head's query and key that are not rotated."""
    rope_head_dim: Annotated[int, POSITIVE] = 16
    """Elements of a head's query and key that are rotated; the key's are shared by all heads."""
    value_head_dim: Annotated[int, POSITIVE] = 32
    """Elements of a head's value."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: each token is sent to a few of many feed-forward layers (arXiv 1701.06538, 2401.06066)."""

    experts: Annotated[int, ValueRange(at_least=2)] = 8
    """Routed experts of a layer."""
    per_token: Annotated[int, POSITIVE] = 2
    """Experts that each token is sent to; none is ever dropped."""
    ffn_dim: Annotated[int, NOT_NEGATIVE] = 0
    """Inner width of one expert; 0 means model.ffn_dim."""
    shared: Annotated[int, NOT_NEGATIVE] = 0
    """Experts that every token passes through; together one feed-forward layer of shared x ffn_dim."""
    first_dense: Annotated[int, NOT_NEGATIVE] = 0
    """The first so many layers have a dense feed-forward layer of model.ffn_dim."""
    every: Annotated[int, POSITIVE] = 1
    """Of the layers after first_dense, every so-many-th is a mixture, the last of each such group; the rest are dense."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become scores."""
    normalize: bool = True
    """Whether the scores of the chosen experts are scaled to sum to one."""
    scale: Annotated[float, ValueRange(above=0)] = 1.0
    """Multiplies the chosen scores (DeepSeek's routed_scaling_factor)."""
    groups: Annotated[int, POSITIVE] = 1
    """Groups that the experts are divided into for group-limited routing (DeepSeek-V3)."""
    groups_per_token: Annotated[int, POSITIVE] = 1
    """Groups that a token's experts may come from."""
    balance_bias: bool = False
    """Whether a bias on the scores, moved after each step against each expert's load, balances it without a loss
    (arXiv 2408.15664)."""
    bias_speed: Annotated[float, NOT_NEGATIVE] = 1e-3
    """By how much that bias moves in a step."""
    aux_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the balance loss of the Switch Transformer (arXiv 2101.03961, equation 4), per micro-batch."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the router's z-loss (ST-MoE, arXiv 2202.08906, equation 5), per micro-batch."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Dimensions are in elements."""

    preset: str = ""
    """Name of a known shape, such as "llama3-8b"; fields given beside it override it."""
    factory: str = ""
    """A model of your own: "package.module:name" of a class or function that makes it from this section, keeping to
    layers, dim and vocab_size; empty means the transformer that this section describes."""
    factory_sha256: str = ""
    """Digest of that model's source; filled in when the run is first started, so that other source is another run."""
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
    norm_eps: Annotated[float, ValueRange(above=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalized per head (Qwen3)."""
    attention_bias: bool = False
    """Whether the projections of attention have biases."""
    ffn_bias: bool = False
    """Whether the projections of the feed-forward layer have biases."""
    rope_theta: Annotated[float, ValueRange(above=1)] = 10000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScalingSpec | None = None
    """Stretching of the rotary embedding to longer contexts; absent means none."""
    mla: MlaSpec | None = None
    """Multi-head latent attention instead of grouped-query attention; absent means the latter."""
    moe: MoeSpec | None = None
    """Mixture of experts in the feed-forward layers; absent means a dense model."""
    mtp_depth: Annotated[int, NOT_NEGATIVE] = 0
    """Extra layers that each predict one token further ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    mtp_loss: Annotated[float, NOT_NEGATIVE] = 0.3
    """Weight of the mean loss of those predictions."""
    init_std: Annotated[float, ValueRange(above=0)] = 0.02
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
    vocab_size: Annotated[int, FLEET, ValueRange(at_least=257)] = 4096
    """Vocabulary of a tokenizer that is trained."""
    held_out: Annotated[float, FLEET, ValueRange(above=0, below=0.5)] = 0.05
    """Fraction of the documents never trained on."""


@dataclass(frozen=True)
class TrainSpec:
    """How much is computed, and in which pieces."""

    steps: Annotated[int, ValueRange(at_least=1, at_most=10**9)] = 100
    """Number of optimizer steps."""
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
    document_mask: bool = False
    """Whether attention stops at the ends of documents; positions go on counting."""
    end_of_document: Annotated[int, ValueRange(at_least=-1)] = -1
    """The token that ends a document, for document_mask; -1 means the tokenizer's."""
    loss_chunk: Annotated[int, POSITIVE] = 2048
    """Tokens whose logits are held at once while the loss is computed."""


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer and the clipping of its gradients."""

    name: Literal["adamw", "adafactor", "muon", "shampoo", "soap"] = "adamw"
    """AdamW (arXiv 1711.05101), Adafactor (arXiv 1804.04235), Muon (Jordan et al. 2024, arXiv 2502.16982), Shampoo
    (arXiv 1802.09568) or SOAP (arXiv 2409.11321). The last three take matrices; the rest of the model gets AdamW."""
    lr: Annotated[float, ValueRange(above=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, ValueRange(at_least=0, below=1)] = 0.9
    """Decay of the gradient's running mean (Muon's momentum for matrices)."""
    beta2: Annotated[float, ValueRange(at_least=0, below=1)] = 0.95
    """Decay of the squared gradient's running mean (for Shampoo and SOAP, of the statistics of matrices too)."""
    eps: Annotated[float, ValueRange(above=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled decay per unit of learning rate."""
    decay_norms: bool = False
    """Whether the gains of norms and biases are decayed too."""
    decay_embeddings: bool = False
    """Whether the token embedding is decayed too."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest gradient norm; 0 means no clipping."""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of AdamW's moments: bf16 is rounded stochastically, int8 by blocks (arXiv 2110.02861)."""
    newton_schulz_steps: Annotated[int, ValueRange(at_least=1, at_most=20)] = 5
    """Muon: iterations that make a matrix orthogonal."""
    precondition_every: Annotated[int, POSITIVE] = 10
    """Shampoo and SOAP: steps between new roots or bases of the preconditioner."""
    block_size: Annotated[int, POSITIVE] = 1024
    """Shampoo and SOAP: larger matrices are preconditioned in blocks of at most this many rows and columns."""


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
    """Number formats. Master weights, router, norms, loss and reductions are fp32 throughout."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of weights and activations in forward and backward; "auto" is bf16 on a GPU, fp32 on a CPU."""
    matmul: Literal["compute", "fp8-tensorwise", "fp8-rowwise", "mxfp8"] = "compute"
    """Format of the operands of the blocks' matrix products; emulated where the hardware lacks it."""


@dataclass(frozen=True)
class MemorySpec:
    """What is computed again or kept elsewhere to save an accelerator's memory. Nothing here changes a bit."""

    recompute: Annotated[Literal["none", "full", "selective", "budget"], FLEET] = "none"
    """Activations of a block computed again in backward: none; all; all but the results of costly operations; or as
    many as recompute_budget says (the last needs runtime.compile)."""
    recompute_budget: Annotated[float, FLEET, FRACTION] = 0.5
    """Fraction of a block's activations that "budget" may keep."""
    offload_activations: Annotated[Literal["none", "host", "file"], FLEET] = "none"
    """Where what backward needs of each block waits."""
    offload_optimizer: Annotated[Literal["none", "host", "file"], FLEET] = "none"
    """Where the optimizer's state lives between updates."""
    offload_path: Annotated[str, FLEET] = ".cache/offload"
    """Folder of offloaded files, on a fast local disk; each rank makes its own files in it and removes them."""


@dataclass(frozen=True)
class RuntimeSpec:
    """What of the machine enters the bits."""

    seed: Annotated[int, ValueRange(at_least=0, at_most=2**63 - 1)] = 0
    """Fixes the initial weights and the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU when there is one."""
    threads: Annotated[int, ValueRange(at_least=1, at_most=1024)] = 1
    """CPU threads per rank. Part of the run, because a sum split over threads rounds differently."""
    compile: bool = False
    """Whether the transformer blocks are compiled with torch.compile."""


@dataclass(frozen=True)
class ParallelSpec:
    """How the fleet holds the model: a mesh of pipeline x replicate x shard x context x tensor, with experts folded over
    shard x context x tensor. How many copies, shards and stages there are changes no bit of the weights; the other degrees
    decide how sums are split."""

    ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Ranks to start on this machine; 0 means one per GPU, or cores / runtime.threads, but at least one replica."""
    sharding: Annotated[Literal["none", "zero2", "zero3"], FLEET] = "zero3"
    """ "none" replicates; "zero2" shards gradients and optimizer; "zero3" shards the weights too."""
    shard_ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Data-parallel ranks that one copy of the model is sharded over (hybrid sharding when fewer than all); 0 means
    all."""
    tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Ranks that share each matrix, and the sequence between the matrices."""
    async_tensor: Annotated[bool, FLEET] = False
    """Whether communication of the tensor axis overlaps with its matrix products; needs a GPU and runtime.compile."""
    context: Annotated[int, LAYOUT, POSITIVE] = 1
    """Ranks that share each sequence in attention."""
    context_mode: Annotated[Literal["ring", "allgather"], LAYOUT] = "ring"
    """How the keys and values of the others are come by: passed round in a ring, or all gathered at once."""
    pipeline: Annotated[int, FLEET, POSITIVE] = 1
    """Ranks that share the layers, one after another."""
    pipeline_schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"], FLEET] = "1f1b"
    """In which order the micro-batches of a slot pass through the stages."""
    pipeline_stages: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Stages on each pipeline rank; 0 means one for gpipe and 1f1b, two for the others."""
    pipeline_split: Annotated[tuple[int, ...], FLEET] = ()
    """Layers of each stage, from first to last; empty balances them by cost."""
    expert: Annotated[int, LAYOUT, POSITIVE] = 1
    """Ranks that share a layer's experts, folded over tensor, context and shard in that order."""
    expert_tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Ranks that share each expert's matrices: 1, or as many as tensor."""


@dataclass(frozen=True)
class CheckpointSpec:
    """When the run's state is saved, and how much of it is kept."""

    every_steps: Annotated[int, FLEET, POSITIVE] = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are kept for ever; 0 means none."""
    timeout_s: Annotated[float, FLEET, ValueRange(above=0)] = 600.0
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
    memory_at_step: Annotated[int, FLEET, NOT_NEGATIVE] = 2
    """In which step of each attempt memory is measured by kind; 0 means never."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], FLEET] = ()
    """Trackers that get a copy of every metric (each is an optional extra)."""


@dataclass(frozen=True)
class FleetSpec:
    """How a fleet of nodes is watched and kept in formation. Nothing here changes a bit."""

    nodes: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Nodes that hold ranks; 0 means no fleet: the ranks are plain processes of one machine."""
    spares: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Nodes more, whose workers are warm and hold no rank."""
    workers_per_node: Annotated[int, FLEET, POSITIVE] = 1
    """Workers, and so ranks, of each node."""
    min_nodes: Annotated[int, FLEET, POSITIVE] = 1
    """With fewer nodes than this the run waits, its state safe in memory and on disk."""
    heartbeat_s: Annotated[float, FLEET, ValueRange(above=0)] = 5.0
    """Between two signs of life of an agent."""
    lease_s: Annotated[float, FLEET, ValueRange(above=0)] = 15.0
    """An agent silent for so long is lost."""
    worker_lease_s: Annotated[float, FLEET, ValueRange(above=0)] = 1.0
    """A worker silent for so long towards its own agent hangs, and is replaced."""
    confirm_s: Annotated[float, FLEET, NOT_NEGATIVE] = 2.0
    """An agent whose connection broke may come back for so long, unless a peer reports a broken collective."""
    stall_s: Annotated[float, FLEET, ValueRange(above=0)] = 120.0
    """When no step has ended for so long, and for ten times a usual step, the hang is diagnosed."""
    snapshot_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 1
    """Steps between copies of the state in host memory; 0 means none."""
    audit_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Steps between audits, in which one slot is computed twice, on two nodes; 0 means never."""
    health_checks: Annotated[bool, FLEET] = True
    """Whether nodes are checked before they take part, and again whenever a worker of theirs has died or hung."""
    straggler_window_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps after which ranks' computing times are compared; one that is slow in most windows is replaced by a spare. 0
    means never."""
    port: Annotated[int, FLEET, ValueRange(at_least=0, at_most=65535)] = 0
    """Where the coordinator listens; 0 means any free port."""


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
    memory: MemorySpec = field(default_factory=MemorySpec)
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    fleet: FleetSpec = field(default_factory=FleetSpec)
