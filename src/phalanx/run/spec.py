"""``RunSpec``: the one description that planner, trainer, scheduler and dashboard read.

Every section is a table of the run file (TOML), declared in ``phalanx.run.sections``; every field has a type, a default, a range and a
sentence. ``phalanx.run.read`` turns a file into a ``RunSpec`` and reports all mistakes at once;
``phalanx.run.rules`` holds the rules that span several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, LATER, NOT_NEGATIVE, POSITIVE, ValueRange
from phalanx.run.sections.fleet import FleetSpec
from phalanx.run.sections.launch import LaunchSpec
from phalanx.run.sections.monitoring import (
    EvalSpec,
    ObserveSpec,
    PromptSpec,
    SpikeSpec,
    StatisticsSpec,
    TaskSpec,
)
from phalanx.run.sections.training import (
    CheckpointSpec,
    DataSpec,
    ExpectSpec,
    MemorySpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RuntimeSpec,
    SampleSpec,
    ScheduleSpec,
    SourceSpec,
    TrainSpec,
)

# ``[model]``, with its subtables: the transformer, which belongs to the run.


@dataclass(frozen=True)
class RopeScalingSpec:
    """Stretching of rotary frequencies to longer contexts: position interpolation (arXiv 2306.15595), Llama 3's (arXiv 2407.21783, section
    3.4.1), YaRN (arXiv 2309.00071) or LongRoPE (arXiv 2402.13753)."""

    kind: Literal["llama3", "yarn", "longrope", "linear"] = "llama3"
    """The method: "llama3", "yarn", "longrope" or "linear" (position interpolation)."""
    factor: Annotated[float, ValueRange(at_least=1)] = 8.0
    """Factor by which low frequencies are divided; linear: by which all are; LongRoPE: by which the context is stretched, for the temperature
    alone."""
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
    truncate: Annotated[bool, LATER] = True
    """YaRN: true if the blend begins and ends at whole numbers of pairs; gpt-oss leaves them as they are."""
    short_factors: Annotated[tuple[float, ...], LATER] = ()
    """LongRoPE: the divisor of each frequency in sequences of at most original_max_seq_len tokens. A run takes one set of factors, by
    train.seq_len; generation takes the other when the text has become longer."""
    long_factors: Annotated[tuple[float, ...], LATER] = ()
    """LongRoPE: the divisor of each frequency in longer sequences."""
    temperature: Annotated[float, LATER, NOT_NEGATIVE] = 0.0
    """YaRN and LongRoPE: factor of the rotary tables; 0 means that it follows: YaRN's from factor and mscale, LongRoPE's is
    sqrt(1 + log(factor) / log(original_max_seq_len))."""
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
    norm_eps: Annotated[float, LATER, NOT_NEGATIVE] = 0.0
    """Epsilon of the norms of latents; 0 means model.norm_eps."""
    absorbed: Annotated[bool, LATER] = False
    """If true, heads attend to the latents themselves, and the matrix that would expand them is multiplied with queries and results
    instead: the same function with other roundings. Training then does more work, and a token that is served with the bits of training
    far less behind a long text, which is expanded anew for each token otherwise."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: each token is sent to a few of many feed-forward layers (arXiv 1701.06538, 2401.06066)."""

    experts: Annotated[int, ValueRange(at_least=2)] = 8
    """Number of routed experts in each mixture layer."""
    per_token: Annotated[int, POSITIVE] = 2
    """Experts that each token is routed to (top-k); tokens are never dropped."""
    ffn_dim: Annotated[int, NOT_NEGATIVE] = 0
    """Hidden width of one expert's feed-forward layer; 0 means model.ffn_dim."""
    shared: Annotated[int, NOT_NEGATIVE] = 0
    """Number of shared experts, which process every token; computed as one feed-forward layer of width shared x ffn_dim."""
    shared_gate: Annotated[bool, LATER] = False
    """If true, the shared experts' result is weighed by a sigmoid of each token's product with one row of weights (Qwen2-MoE)."""
    first_dense: Annotated[int, NOT_NEGATIVE] = 0
    """Number of layers at the start of the model that keep a dense feed-forward layer of width model.ffn_dim."""
    every: Annotated[int, POSITIVE] = 1
    """Distance between mixture layers after first_dense: with 2, every second layer is a mixture and the rest are dense.
    The mixture is the last layer of each group."""
    router_bias: Annotated[bool, LATER] = False
    """If true, the router's logits have a bias for each expert, which is trained (gpt-oss)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    normalize: bool = True
    """If true, the scores of the chosen experts are scaled to sum to one."""
    scale: Annotated[float, ValueRange(above=0)] = 1.0
    """Factor that multiplies the scores of the chosen experts (DeepSeek's routed_scaling_factor)."""
    groups: Annotated[int, POSITIVE] = 1
    """Number of groups that the experts are divided into for group-limited routing (DeepSeek-V3)."""
    groups_per_token: Annotated[int, POSITIVE] = 1
    """Number of groups that one token's experts may come from."""
    group_score: Annotated[Literal["two-best", "best"], LATER] = "two-best"
    """Score of a group: the sum of the scores of its two best experts (DeepSeek-V3), or that of the best (DeepSeek-V2)."""
    balance_bias: bool = False
    """If true, experts are balanced without an auxiliary loss: a bias per expert, added to the scores when experts are
    chosen, moves after each step against that expert's load (arXiv 2408.15664)."""
    bias_speed: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Amount by which balance_bias moves in one step."""
    aux_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the load-balancing loss of the Switch Transformer (arXiv 2101.03961, equation 4), per micro-batch."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the router's z-loss (ST-MoE, arXiv 2202.08906, equation 5), per micro-batch."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Dimensions are in elements."""

    preset: str = ""
    """Name of a known shape, such as "llama3-8b", or the path of a run directory, whose model is taken (such as an imported one); fields
    beside it override it."""
    factory: str = ""
    """A model of your own: "package.module:name" of a class or function that makes it from this section, keeping to
    layers, dim, vocab_size and tie_embeddings; empty means the transformer that this section describes."""
    factory_sha256: str = ""
    """Digest of that model's source; filled in when the run is first started, so that other source is another run."""
    layers: Annotated[int, ValueRange(at_least=1, at_most=4096)] = 4
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
    """Hidden width of the feed-forward layer; 0 means 8/3 dim (swiglu) or 4 dim (gelu), rounded up to 64."""
    lanes: Annotated[int, LATER, ValueRange(at_least=0, at_most=1024)] = 0
    """Equal parts that heads, inner elements and vocabulary are cut into, each computed by itself: a power of two. The weights then
    have the same bits for every parallel.tensor that divides it. 0: none, and parallel.tensor decides how sums are split."""
    context_tiles: Annotated[int, LATER, ValueRange(at_least=0, at_most=1024)] = 0
    """Equal parts that each sequence is cut into, each computed by itself: a power of two. The weights then have the same bits for
    every parallel.context that divides it. 0: none, and parallel.context decides how sums are split."""
    ffn: Literal["swiglu", "gelu", "geglu", "swiglu-clamped"] = "swiglu"
    """Feed-forward layer: "swiglu" is gated and has three matrices, "gelu" is plain and has two; "geglu" is gated by a GELU, in
    the approximation with tanh (Gemma). "swiglu-clamped" is gate x sigmoid(swiglu_gain x gate) x (values + 1), of gates and values that
    are clamped to swiglu_limit (gpt-oss)."""
    swiglu_gain: Annotated[float, LATER, ValueRange(above=0)] = 1.702
    """Factor in the sigmoid of "swiglu-clamped"."""
    swiglu_limit: Annotated[float, LATER, ValueRange(above=0)] = 7.0
    """Largest gate, and largest value of either sign, of "swiglu-clamped"."""
    vocab_size: Annotated[int, NOT_NEGATIVE] = 0
    """Vocabulary size, the rows of the embedding; 0 means the tokenizer's."""
    tie_embeddings: bool = False
    """If true, the output projection shares its weights with the input embedding."""
    norm_eps: Annotated[float, ValueRange(above=0)] = 1e-5
    """Epsilon of RMSNorm, added to the mean square."""
    qk_norm: bool = False
    """If true, queries and keys are RMS-normalized per head (Qwen3)."""
    qk_norm_width: Annotated[Literal["head", "all"], LATER] = "head"
    """Elements that qk_norm normalizes together: those of a "head", or of "all" heads (OLMo 2), which tensor ranks cannot divide."""
    norm_placement: Annotated[Literal["before", "after", "both"], LATER] = "before"
    """Place of a block's norms: "before" attention and feed-forward layer, "after" them and before the residual sum (OLMo 2), or "both"."""
    norm_offset: Annotated[bool, LATER] = False
    """If true, the gain of a norm is 1 + its weight, which starts at 0 (Gemma)."""
    scale_embeddings: Annotated[bool, LATER] = False
    """If true, the embeddings of tokens are multiplied by the root of dim (Gemma)."""
    score_width: Annotated[int, LATER, NOT_NEGATIVE] = 0
    """Width whose inverse root multiplies attention's scores (Gemma's query_pre_attn_scalar); 0 means head_dim."""
    score_cap: Annotated[float, LATER, NOT_NEGATIVE] = 0.0
    """Soft cap c of attention's scores, each of which becomes c tanh(score / c) (Gemma 2); 0 means none."""
    logit_cap: Annotated[float, LATER, NOT_NEGATIVE] = 0.0
    """Soft cap of the logits of the vocabulary, in the loss too (Gemma 2's final_logit_softcapping); 0 means none."""
    sinks: Annotated[bool, LATER] = False
    """If true, each query head has a learned logit in the softmax's denominator, so that its weights may sum to less than one
    (attention sinks, gpt-oss)."""
    attention_bias: bool = False
    """If true, the query, key, value and output projections have biases."""
    qkv_bias: Annotated[bool, LATER] = False
    """If true, the query, key and value projections have biases, and the output projection has none (Qwen2)."""
    ffn_bias: bool = False
    """If true, the projections of the feed-forward layer have biases; with a mixture, those of each expert."""
    rope_theta: Annotated[float, ValueRange(above=1)] = 10000.0
    """Base of the rotary embedding's wavelengths."""
    rope_fraction: Annotated[float, LATER, ValueRange(above=0, at_most=1)] = 1.0
    """Fraction of a head's elements that is rotated, the first ones (partial rotary embedding, as in GLM-4.5)."""
    attention_pattern: Annotated[tuple[Literal["full", "window", "no-position"], ...], LATER] = ()
    """Attention of the layers in turn, repeated over the model: "full", "window" (a sliding window of model.window tokens), or
    "no-position" (full, and nothing is rotated, NoPE, arXiv 2305.19466); empty means full in all."""
    window: Annotated[int, LATER, NOT_NEGATIVE] = 0
    """Tokens that a token sees in layers with a sliding window, itself among them; 0 if there are no such layers."""
    window_rope_theta: Annotated[float, LATER, NOT_NEGATIVE] = 0.0
    """Base of the rotary wavelengths of layers with a sliding window, which are then not stretched (Gemma 3, OLMo 3); 0 means that
    they are rotated as all others."""
    rope_scaling: RopeScalingSpec | None = None
    """Stretching of the rotary embedding to longer contexts (Llama 3 or YaRN); absent means none."""
    mla: MlaSpec | None = None
    """Multi-head latent attention instead of grouped-query attention; absent means the latter."""
    moe: MoeSpec | None = None
    """Mixture of experts in the feed-forward layers; absent means a dense model."""
    mtp_depth: Annotated[int, ValueRange(at_least=0, at_most=64)] = 0
    """Multi-token prediction: extra layers that each predict one token further ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    mtp_loss: Annotated[float, NOT_NEGATIVE] = 0.3
    """Weight of the mean loss of those extra predictions."""
    init_std: Annotated[float, ValueRange(above=0)] = 0.02
    """Standard deviation of the initial weights; output projections get init_std / sqrt(2 layers)."""


__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EvalSpec",
    "ExpectSpec",
    "FleetSpec",
    "LaunchSpec",
    "MemorySpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "ObserveSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "PromptSpec",
    "RopeScalingSpec",
    "RunSpec",
    "RuntimeSpec",
    "SampleSpec",
    "ScheduleSpec",
    "SourceSpec",
    "TaskSpec",
    "TrainSpec",
]


@dataclass(frozen=True)
class RunSpec:
    """A run file."""

    name: Annotated[str, FLEET] = "run"
    """Name of the run; the run directory is named after it."""
    run_dir: Annotated[str, FLEET] = ""
    """Path of the run directory; empty means runs/NAME-IDENTITY."""
    unfilled: Annotated[tuple[str, ...], FLEET] = ()
    """Paths of fields whose default nobody has confirmed, as `phalanx plan layout --model NAME --out` writes them. The run is refused until each is
    given by --set, or written into the file and removed from this list."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    spike: SpikeSpec = field(default_factory=SpikeSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    memory: MemorySpec = field(default_factory=MemorySpec)
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    expect: ExpectSpec = field(default_factory=ExpectSpec)
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    statistics: StatisticsSpec = field(default_factory=StatisticsSpec)
    fleet: FleetSpec = field(default_factory=FleetSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
