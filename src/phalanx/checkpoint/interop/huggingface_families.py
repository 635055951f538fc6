"""Hugging Face's model families, each as tables: which field of ModelSpec is which field of ``config.json``.

A family can say some fields of a model and holds the others fixed: Mixtral has no shared experts, Qwen3 always
normalizes queries and keys. Both directions read the same tables, so that what is written is what is read back. Fields of
``ModelSpec`` that only training reads (the strength of a balance loss, say) and that a family has no word for appear in no
table: they are not written, and an imported model has their defaults. One of these is the weight of the load-balancing loss:
``router_aux_loss_coef`` weighs one loss over the routers of all layers together, ``moe.aux_loss`` the sum of a loss of each layer,
and no factor between them makes both the same.

Source: the configuration classes of transformers 4.51 to 5.x, and the published ``config.json`` of the models named.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.checkpoint.interop.huggingface_layers import (
    Check,
    Read,
    Write,
    all_rotated,
    all_said,
    best_of_groups,
    heads_as_wide_as_the_model,
    no_window,
    nothing_read,
    nothing_written,
    qwen2_layers,
    read_early_windows,
    read_greedy_groups,
    read_last_windows,
    read_latent,
    read_layer_types,
    read_regular_windows,
    read_rotated_width,
    read_score_width,
    read_shared_width,
    read_sparse_step,
    read_switched_window,
    read_two_biases,
    read_unrotated_layers,
    read_window_everywhere,
    read_window_if_switched_on,
    reads,
    whole_heads,
    window_everywhere,
    write_early_windows,
    write_greedy_groups,
    write_latent,
    write_layer_types,
    write_score_width,
    write_shared_width,
    write_sparse_step,
    write_switched_window,
    write_two_biases,
    write_unrotated_layers,
    write_window,
    write_window_switch,
    writes,
)

ConfigTable = Mapping[str, object]

_COMMON = {
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
_GROUPED = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_ATTENTION_BIAS = {"attention_bias": "attention_bias"}
_PATTERN = ("attention_pattern", "window")
_DENSE = {"ffn": "swiglu", "mtp_depth": 0}
_DEEPSEEK_MIXTURE = {
    "moe.ffn_dim": "moe_intermediate_size",
    "moe.experts": "n_routed_experts",
    "moe.per_token": "num_experts_per_tok",
    "moe.shared": "n_shared_experts",
    "moe.first_dense": "first_k_dense_replace",
    "moe.normalize": "norm_topk_prob",
    "moe.scale": "routed_scaling_factor",
    "moe.groups": "n_group",
    "moe.groups_per_token": "topk_group",
}
_OLMO = {"qk_norm": True, "qk_norm_width": "all", "norm_placement": "after"}
_AFTER = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
_SIGMOID_ROUTER = {"moe.score": "sigmoid", "moe.every": 1}
_SOFTMAX_ROUTER = {
    "moe.score": "softmax",
    "moe.scale": 1.0,
    "moe.shared": 0,
    "moe.groups": 1,
    "moe.balance_bias": False,
}

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
"""Fields of ModelSpec whose absence from a ``config.json`` has a meaning; all others of a family must be there."""


@dataclass(frozen=True)
class Family:
    """The models of one class of ``transformers``; a field of a section is written ``moe.experts``."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Field of ModelSpec to field of ``config.json``."""
    fixed: ConfigTable
    """Fields of ModelSpec that have one value in all models of the family."""
    constants: ConfigTable = field(default_factory=dict)
    """Fields of ``config.json`` that are written with this value, and read with no other."""
    absent: ConfigTable = field(default_factory=dict)
    """Fields of ModelSpec that are not ours by default where ``config.json`` does not speak of them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a field of ``config.json``, by the one that is written."""
    stated: tuple[str, ...] = ()
    """Fields of ``constants`` that must be in a ``config.json``, since their absence means another value."""
    said: tuple[str, ...] = ()
    """Fields of ModelSpec that ``read`` and ``write`` treat, or that mean nothing to the family."""
    read: Read = nothing_read
    write: Write = nothing_written
    check: Check = all_said
    own: tuple[str, ...] = ()
    """Fields of ``config.json`` that ``read`` and ``write`` treat, but for those that many families have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a block's tensors that are not those of ``huggingface_names.py``."""
    written: bool = True
    """False for a family whose models are written as another, which computes the same."""

    @property
    def sections(self) -> frozenset[str]:
        """The sections of ModelSpec that all of its models have."""
        return frozenset(path.partition(".")[0] for path in (*self.fields, *self.fixed) if "." in path)


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS | {"ffn_bias": "mlp_bias"},
    _DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6},
    check=whole_heads,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _COMMON | _GROUPED,
    _DENSE | {"qk_norm": False, "attention_bias": False, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "kv_heads": 8},
    said=_PATTERN,
    read=read_window_everywhere(4096),
    write=write_window,
    check=window_everywhere,
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS | {"ffn_bias": "mlp_bias"},
    _DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "kv_heads": 4, "tie_embeddings": True},
    said=_PATTERN,
    read=read_unrotated_layers,
    write=write_unrotated_layers,
    check=no_window,
    own=("no_rope_layers", "no_rope_layer_interval"),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _COMMON | _GROUPED,
    _DENSE | {"qk_norm": False, "qkv_bias": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "kv_heads": 32},
    said=_PATTERN,
    read=read_switched_window,
    write=write_switched_window,
    check=qwen2_layers,
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    _COMMON | _GROUPED | {"ffn_bias": "mlp_bias"},
    _DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "head_dim": 128, "kv_heads": 8},
    said=("attention_bias", "qkv_bias"),
    read=read_two_biases,
    write=write_two_biases,
    own=("attention_bias", "attention_out_bias"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS,
    _DENSE | {"qk_norm": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "head_dim": 128},
    said=_PATTERN,
    read=read_switched_window,
    write=write_switched_window,
    check=all_rotated,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _COMMON
    | _GROUPED
    | {
        "moe.ffn_dim": "intermediate_size",
        "moe.experts": "num_local_experts",
        "moe.per_token": "num_experts_per_tok",
    },
    _DENSE
    | _SOFTMAX_ROUTER
    | {
        "qk_norm": False,
        "attention_bias": False,
        "ffn_bias": False,
        "moe.normalize": True,
        "moe.first_dense": 0,
        "moe.every": 1,
    },
    constants={"router_jitter_noise": 0.0},
    absent={"norm_eps": 1e-5, "rope_theta": 1e6},
    said=_PATTERN,
    read=read_window_everywhere(None),
    write=write_window,
    check=window_everywhere,
    names={
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.gate": "block_sparse_moe.experts.*.w1.weight",
        "ffn.experts.up": "block_sparse_moe.experts.*.w3.weight",
        "ffn.experts.down": "block_sparse_moe.experts.*.w2.weight",
    },
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _COMMON
    | _GROUPED
    | _ATTENTION_BIAS
    | {
        "moe.ffn_dim": "moe_intermediate_size",
        "moe.experts": "num_experts",
        "moe.per_token": "num_experts_per_tok",
        "moe.normalize": "norm_topk_prob",
    },
    _DENSE | _SOFTMAX_ROUTER | {"qk_norm": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6},
    aliases={"num_experts": "num_local_experts"},
    said=("moe.first_dense", "moe.every", *_PATTERN),
    read=reads(read_sparse_step, read_window_if_switched_on),
    write=writes(write_sparse_step, write_window_switch),
    check=window_everywhere,
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _COMMON
    | _GROUPED
    | {
        "qkv_bias": "qkv_bias",
        "moe.ffn_dim": "moe_intermediate_size",
        "moe.experts": "num_experts",
        "moe.per_token": "num_experts_per_tok",
        "moe.normalize": "norm_topk_prob",
    },
    _DENSE
    | {path: value for path, value in _SOFTMAX_ROUTER.items() if path != "moe.shared"}
    | {"qk_norm": False, "attention_bias": False, "ffn_bias": False, "moe.shared_gate": True},
    absent={"norm_eps": 1e-6, "kv_heads": 16, "qkv_bias": True, "moe.normalize": False},
    said=("moe.first_dense", "moe.every", "moe.shared", *_PATTERN),
    read=reads(read_sparse_step, read_shared_width, read_early_windows),
    write=writes(write_sparse_step, write_shared_width, write_early_windows),
    check=qwen2_layers,
    own=("shared_expert_intermediate_size",),
    names={
        f"ffn.shared.{matrix}.weight": f"mlp.shared_expert.{matrix}_proj.weight"
        for matrix in ("gate", "up", "down")
    },
)
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _COMMON
    | _GROUPED
    | {
        "rope_fraction": "partial_rotary_factor",
        "moe.ffn_dim": "intermediate_size",
        "moe.experts": "num_local_experts",
        "moe.per_token": "num_experts_per_tok",
    },
    _DENSE
    | _SIGMOID_ROUTER
    | {
        "qk_norm": True,
        "qk_norm_width": "all",
        "attention_bias": False,
        "ffn_bias": False,
        "moe.normalize": True,
        "moe.scale": 1.0,
        "moe.shared": 0,
        "moe.groups": 1,
        "moe.first_dense": 0,
    },
    constants={
        "router_jitter_noise": 0.0,
        # Of the publisher's own code.
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    },
    absent={
        "norm_eps": 1e-6,
        "kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "moe.balance_bias": True,
    },
    said=("moe.balance_bias",),
    read=read_rotated_width,
    own=("rotary_dim", "attn_type_list"),
    names={
        **MIXTRAL.names,
        "ffn.router.bias": "block_sparse_moe.e_score_correction_bias",
    },
)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _COMMON
    | _GROUPED
    | _DEEPSEEK_MIXTURE
    | {
        "qkv_bias": "attention_bias",
        "qk_norm": "use_qk_norm",
        "rope_fraction": "partial_rotary_factor",
        "mtp_depth": "num_nextn_predict_layers",
    },
    {"ffn": "swiglu", "attention_bias": False, "ffn_bias": False} | _SIGMOID_ROUTER,
    absent={
        "norm_eps": 1e-5,
        "kv_heads": 8,
        "rope_fraction": 0.5,
        "mtp_depth": 1,
        "moe.balance_bias": True,
    },
    aliases={"num_nextn_predict_layers": "num_mtp_layers", "n_routed_experts": "num_local_experts"},
    said=("moe.balance_bias",),
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS | _DEEPSEEK_MIXTURE,
    _DENSE | {"qk_norm": True, "ffn_bias": False} | _SIGMOID_ROUTER,
    absent={"norm_eps": 1e-6, "moe.balance_bias": True},
    aliases={"n_routed_experts": "num_local_experts"},
    said=("moe.balance_bias", *_PATTERN),
    read=read_last_windows,
    write=write_layer_types,
    check=all_rotated,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _COMMON
    | _DEEPSEEK_MIXTURE
    | {
        "mla.query_rank": "q_lora_rank",
        "mla.kv_rank": "kv_lora_rank",
        "mla.nope_head_dim": "qk_nope_head_dim",
        "mla.rope_head_dim": "qk_rope_head_dim",
        "mla.value_head_dim": "v_head_dim",
        "mtp_depth": "num_nextn_predict_layers",
    },
    {"ffn": "swiglu", "ffn_bias": False} | _SIGMOID_ROUTER,
    constants={
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    # The bias is in every published model; one that was never moved is zero, and changes nothing.
    absent={"norm_eps": 1e-6, "moe.balance_bias": True},
    aliases={"num_nextn_predict_layers": "num_mtp_layers", "n_routed_experts": "num_local_experts"},
    said=("kv_heads", "head_dim", "moe.balance_bias", "mla.norm_eps"),
    read=read_latent,
    write=write_latent,
)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {
        ours: theirs
        for ours, theirs in DEEPSEEK_V3.fields.items()
        if ours not in ("mtp_depth", "moe.groups", "moe.groups_per_token", "moe.normalize")
    },
    {
        "ffn": "swiglu",
        "ffn_bias": False,
        "moe.score": "softmax",
        "moe.every": 1,
        "moe.normalize": False,
        "moe.balance_bias": False,
    },
    constants={
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    absent={"norm_eps": 1e-6},
    said=(
        *("kv_heads", "head_dim", "mla.norm_eps"),
        *("moe.groups", "moe.groups_per_token", "moe.group_score"),
    ),
    read=reads(read_latent, read_greedy_groups),
    write=writes(write_latent, write_greedy_groups),
    check=best_of_groups,
    own=("topk_method", "n_group", "topk_group"),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS,
    _DENSE | _OLMO | {"ffn_bias": False},
    absent={"norm_eps": 1e-5},
    names=_AFTER,
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS,
    _DENSE | _OLMO | {"ffn_bias": False},
    absent={"norm_eps": 1e-5, "rope_theta": 5e5},
    said=(*_PATTERN, "window_rope_theta"),
    read=read_layer_types(4096, lambda layer: (layer + 1) % 4 != 0),
    write=write_layer_types,
    check=all_rotated,
    names=_AFTER,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _COMMON | _GROUPED | _ATTENTION_BIAS,
    {
        "ffn": "geglu",
        "mtp_depth": 0,
        "ffn_bias": False,
        "norm_placement": "both",
        "qk_norm": True,
        "norm_offset": True,
        "scale_embeddings": True,
    },
    constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    absent={
        "norm_eps": 1e-6,
        "kv_heads": 4,
        "head_dim": 256,
        "tie_embeddings": True,
        "rope_theta": 1e6,
        "window_rope_theta": 1e4,
    },
    said=(*_PATTERN, "window_rope_theta", "score_width"),
    read=reads(read_regular_windows, read_score_width),
    write=writes(write_layer_types, write_score_width),
    check=all_rotated,
    own=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    names={
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _COMMON
    | _ATTENTION_BIAS
    | {
        "kv_heads": "num_key_value_heads",
        "moe.ffn_dim": "intermediate_size",
        "moe.experts": "num_experts",
        "moe.per_token": "num_experts_per_tok",
        "moe.normalize": "norm_topk_prob",
    },
    _DENSE
    | _SOFTMAX_ROUTER
    | {
        "qk_norm": True,
        "qk_norm_width": "all",
        "ffn_bias": False,
        "moe.first_dense": 0,
        "moe.every": 1,
    },
    constants={"clip_qkv": None},
    absent={"norm_eps": 1e-5, "moe.normalize": False},
    said=("head_dim",),
    check=heads_as_wide_as_the_model,
)

FAMILIES: Mapping[str, Family] = {
    **{
        family.model_type: family
        for family in (
            *(LLAMA, QWEN2, SEED_OSS, QWEN3, MISTRAL, SMOLLM3, OLMO2, OLMO3, GEMMA3),
            *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, MINIMAX_M2, GLM4_MOE, DOTS1, OLMOE, DEEPSEEK_V3, DEEPSEEK_V2),
        )
    },
    "kimi_k2": DEEPSEEK_V3,
}
"""The families by ``model_type``; a model that several can express is written as the first."""
