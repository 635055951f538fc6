"""Description of a model family of ``transformers``, tables that families share, and the families whose layers are all dense.

A family has tables of fields, and functions for the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phalanx.checkpoint.interop.huggingface import layers

ConfigTable = Mapping[str, object]

COMMON = {
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
GROUPED = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
PATTERN = ("attention_pattern", "window")
DENSE = {"ffn": "swiglu", "mtp_depth": 0}
UNBIASED = {"attention_bias": False, "ffn_bias": False}

OPTIONAL = frozenset(
    {
        "kv_heads",
        "head_dim",
        "tie_embeddings",
        "norm_eps",
        "init_std",
        "attention_bias",
        "qkv_bias",
        "ffn_bias",
        "qk_norm",
        "rope_fraction",
        "moe.groups",
        "moe.groups_per_token",
        "mla.query_rank",
        "mtp_depth",
    }
)
"""Fields of ModelSpec that may be absent from a ``config.json``, with a defined meaning; all others of a family are required."""


@dataclass(frozen=True)
class Joint:
    """Layout of several parameters of a block in one published tensor: they are joined along their rows (within each matrix of a stack)."""

    parts: tuple[str, ...]
    """Names of the parameters, within the block."""
    by_turns: bool = False
    """True if rows of the parameters alternate; else all rows of one are followed by all rows of the next."""
    transposed: bool = False
    """True if the tensor's last two dimensions are those of the parameters in reverse order."""


@dataclass(frozen=True)
class Family:
    """Models of one class of ``transformers``; a field of a section is written ``moe.experts``."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Field of ModelSpec to field of ``config.json``."""
    fixed: ConfigTable
    """Fields of ModelSpec that have one value in all models of the family."""
    constants: ConfigTable = field(default_factory=dict)
    """Fields of ``config.json`` that are written with this value; reading accepts no other."""
    absent: ConfigTable = field(default_factory=dict)
    """Fields of ModelSpec whose value differs from our default if ``config.json`` omits them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a field of ``config.json``, by the one that is written."""
    stated: tuple[str, ...] = ()
    """Fields of ``constants`` that a ``config.json`` must have, because their absence means another value."""
    handled: tuple[str, ...] = ()
    """Fields of ModelSpec that ``read`` and ``write`` handle, or that have no effect in the family."""
    read: layers.Read = field(default_factory=layers.reads)
    write: layers.Write = field(default_factory=layers.writes)
    check: layers.Check = field(default_factory=layers.checks)
    own: tuple[str, ...] = ()
    """Fields of ``config.json`` that ``read`` and ``write`` handle, except those that many families have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a block's tensors that differ from those of ``names.py``."""
    joined: Mapping[str, Joint] = field(default_factory=dict)
    """Tensors of a block with several parameters, or one in another order, by their names."""
    stretches: tuple[str, ...] = ("llama3", "yarn", "linear")
    """Supported methods of rotary scaling."""
    rope: ConfigTable = field(default_factory=dict)
    """Parameters of the rotary embedding if ``config.json`` has none."""
    in_pairs: bool = False
    """True if the rotated rows of queries and keys are in pairs of neighbors, and not in halves."""
    written: bool = True
    """False if models of the family are written as another family with the same mathematics."""

    @property
    def in_block(self) -> Mapping[str, str]:
        """Names of a block's tensors that are the family's own, by ours."""
        return {**self.names, **{part: name for name, joint in self.joined.items() for part in joint.parts}}

    @property
    def sections(self) -> frozenset[str]:
        """Sections of ModelSpec that all models of the family have."""
        return frozenset(path.partition(".")[0] for path in (*self.fields, *self.fixed) if "." in path)


# Families whose layers are all dense.

_OLMO = {"qk_norm": True, "qk_norm_width": "all", "norm_placement": "after"}
_AFTER = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS | {"ffn_bias": "mlp_bias"},
    DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6},
    check=layers.whole_heads,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    COMMON | GROUPED,
    DENSE | {"qk_norm": False, **UNBIASED},
    absent={"norm_eps": 1e-6, "kv_heads": 8},
    handled=PATTERN,
    read=layers.read_window_everywhere(4096),
    write=layers.write_window,
    check=layers.window_everywhere,
)
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read=layers.read_layer_types(4096, lambda _layer: True),
    write=layers.write_layer_types,
    check=layers.all_rotated,
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS | {"ffn_bias": "mlp_bias"},
    DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "kv_heads": 4, "tie_embeddings": True},
    handled=PATTERN,
    read=layers.read_unrotated_layers,
    write=layers.write_unrotated_layers,
    check=layers.no_window,
    own=("no_rope_layers", "no_rope_layer_interval"),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    COMMON | GROUPED,
    DENSE | {"qk_norm": False, "qkv_bias": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "kv_heads": 32},
    handled=PATTERN,
    read=layers.read_switched_window,
    write=layers.write_switched_window,
    check=layers.checks(layers.heads_as_wide_as_the_model, layers.all_rotated),
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    COMMON | GROUPED | {"ffn_bias": "mlp_bias"},
    DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "head_dim": 128, "kv_heads": 8},
    handled=("attention_bias", "qkv_bias"),
    read=layers.read_two_biases,
    write=layers.write_two_biases,
    own=("attention_bias", "attention_out_bias"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    DENSE | {"qk_norm": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "head_dim": 128},
    handled=PATTERN,
    read=layers.read_switched_window,
    write=layers.write_switched_window,
    check=layers.all_rotated,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    DENSE | _OLMO | {"ffn_bias": False},
    absent={"norm_eps": 1e-5},
    names=_AFTER,
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    DENSE | _OLMO | {"ffn_bias": False},
    absent={"norm_eps": 1e-5, "rope_theta": 5e5},
    handled=(*PATTERN, "window_rope_theta"),
    read=layers.read_layer_types(4096, lambda layer: (layer + 1) % 4 != 0),
    write=layers.write_layer_types,
    check=layers.all_rotated,
    names=_AFTER,
)
_GEMMA = {
    "ffn": "geglu",
    "mtp_depth": 0,
    "ffn_bias": False,
    "norm_placement": "both",
    "qk_norm": False,
    "norm_offset": True,
    "scale_embeddings": True,
}
_GEMMA_CONSTANTS = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
_GEMMA_NAMES = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    _GEMMA,
    constants=_GEMMA_CONSTANTS,
    absent={"norm_eps": 1e-6, "kv_heads": 4, "head_dim": 256, "tie_embeddings": True},
    handled=(*PATTERN, "score_width", "score_cap", "logit_cap"),
    read=layers.reads(
        layers.read_layer_types(4096, lambda layer: layer % 2 == 0), layers.read_score_width, layers.read_caps
    ),
    write=layers.writes(layers.write_layer_types, layers.write_score_width, layers.write_caps),
    check=layers.checks(layers.whole_heads, layers.all_rotated),
    own=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    names=_GEMMA_NAMES,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    _GEMMA | {"qk_norm": True},
    constants=_GEMMA_CONSTANTS | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    absent={
        "norm_eps": 1e-6,
        "kv_heads": 4,
        "head_dim": 256,
        "tie_embeddings": True,
        "rope_theta": 1e6,
        "window_rope_theta": 1e4,
    },
    handled=(*PATTERN, "window_rope_theta", "score_width"),
    read=layers.reads(layers.read_regular_windows, layers.read_score_width),
    write=layers.writes(layers.write_layer_types, layers.write_score_width),
    check=layers.all_rotated,
    own=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    names=_GEMMA_NAMES,
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    COMMON | GROUPED | {"qkv_bias": "attention_bias", "rope_fraction": "partial_rotary_factor"},
    DENSE | {"qk_norm": False, **UNBIASED, "norm_placement": "both"},
    absent={
        "norm_eps": 1.5625e-7,
        "kv_heads": 2,
        "head_dim": 128,
        "qkv_bias": True,
        "rope_fraction": 0.5,
    },
    names={
        "attention_post_norm.weight": "post_self_attn_layernorm.weight",
        "ffn_post_norm.weight": "post_mlp_layernorm.weight",
    },
    joined={"mlp.gate_up_proj.weight": Joint(("ffn.gate.weight", "ffn.up.weight"))},
    in_pairs=True,
)
GLM = replace(
    GLM4,
    model_type="glm",
    architecture="GlmForCausalLM",
    fixed={path: value for path, value in GLM4.fixed.items() if path != "norm_placement"},
    names={},
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    COMMON | GROUPED | {"rope_fraction": "partial_rotary_factor"},
    DENSE | {"qk_norm": False, **UNBIASED},
    absent={"norm_eps": 1e-5, "rope_fraction": 1.0},
    handled=PATTERN,
    read=layers.read_only_window,
    write=layers.write_window,
    check=layers.checks(layers.heads_as_wide_as_the_model, layers.window_everywhere),
    joined={
        "self_attn.qkv_proj.weight": Joint(
            ("attention.query.weight", "attention.key.weight", "attention.value.weight")
        ),
        "mlp.gate_up_proj.weight": Joint(("ffn.gate.weight", "ffn.up.weight")),
    },
    stretches=("longrope",),
)
