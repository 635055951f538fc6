"""Families with mixtures of experts."""

from phalanx.checkpoint.interop.huggingface import layers
from phalanx.checkpoint.interop.huggingface.families.family import (
    ATTENTION_BIAS,
    COMMON,
    DENSE,
    GROUPED,
    PATTERN,
    UNBIASED,
    Family,
    Joint,
)

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
_ONLY_MIXTURES = {"moe.first_dense": 0, "moe.every": 1}
_SIGMOID_ROUTER = {"moe.score": "sigmoid", "moe.every": 1}
_SOFTMAX_ROUTER = {
    "moe.score": "softmax",
    "moe.scale": 1.0,
    "moe.shared": 0,
    "moe.groups": 1,
    "moe.balance_bias": False,
}


def _experts(ffn_dim: str, experts: str) -> dict[str, str]:
    """Return the fields of mixtures of ``experts`` of width ``ffn_dim``, by these names of ``config.json``."""
    return {"moe.ffn_dim": ffn_dim, "moe.experts": experts, "moe.per_token": "num_experts_per_tok"}


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    COMMON | GROUPED | _experts("intermediate_size", "num_local_experts"),
    DENSE
    | _SOFTMAX_ROUTER
    | {
        "qk_norm": False,
        **UNBIASED,
        "moe.normalize": True,
        **_ONLY_MIXTURES,
    },
    constants={"router_jitter_noise": 0.0},
    absent={"norm_eps": 1e-5, "rope_theta": 1e6},
    aliases={"num_local_experts": "num_experts"},
    handled=PATTERN,
    read=layers.read_window_everywhere(None),
    write=layers.write_window,
    check=layers.window_everywhere,
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
    COMMON
    | GROUPED
    | ATTENTION_BIAS
    | {
        **_experts("moe_intermediate_size", "num_experts"),
        "moe.normalize": "norm_topk_prob",
    },
    DENSE | _SOFTMAX_ROUTER | {"qk_norm": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6},
    aliases={"num_experts": "num_local_experts"},
    handled=("moe.first_dense", "moe.every", *PATTERN),
    read=layers.reads(layers.read_sparse_step, layers.read_window_if_switched_on),
    write=layers.writes(layers.write_sparse_step, layers.write_window_switch),
    check=layers.window_everywhere,
)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    COMMON
    | GROUPED
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
    handled=("moe.balance_bias",),
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS | _DEEPSEEK_MIXTURE,
    DENSE | {"qk_norm": True, "ffn_bias": False} | _SIGMOID_ROUTER,
    absent={"norm_eps": 1e-6, "moe.balance_bias": True},
    aliases={"n_routed_experts": "num_local_experts"},
    handled=("moe.balance_bias", *PATTERN),
    read=layers.read_last_windows,
    write=layers.write_layer_types,
    check=layers.all_rotated,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    COMMON
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
    # Every published model has the bias; one that was never moved is zero and has no effect.
    absent={"norm_eps": 1e-6, "moe.balance_bias": True},
    aliases={"num_nextn_predict_layers": "num_mtp_layers", "n_routed_experts": "num_local_experts"},
    handled=("kv_heads", "head_dim", "moe.balance_bias", "mla.norm_eps"),
    read=layers.read_latent,
    write=layers.write_latent,
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
    aliases={"n_routed_experts": "num_experts"},
    handled=(
        *("kv_heads", "head_dim", "mla.norm_eps"),
        *("moe.groups", "moe.groups_per_token", "moe.group_score"),
    ),
    read=layers.reads(layers.read_latent, layers.read_greedy_groups),
    write=layers.writes(layers.write_latent, layers.write_greedy_groups),
    check=layers.best_of_groups,
    own=("topk_method", "n_group", "topk_group"),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    COMMON
    | ATTENTION_BIAS
    | {
        "kv_heads": "num_key_value_heads",
        **_experts("intermediate_size", "num_experts"),
        "moe.normalize": "norm_topk_prob",
    },
    DENSE
    | _SOFTMAX_ROUTER
    | {
        "qk_norm": True,
        "qk_norm_width": "all",
        "ffn_bias": False,
        **_ONLY_MIXTURES,
    },
    constants={"clip_qkv": None},
    absent={"norm_eps": 1e-5, "moe.normalize": False},
    aliases={"num_experts": "num_local_experts"},
    handled=("head_dim",),
    check=layers.heads_as_wide_as_the_model,
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    COMMON
    | GROUPED
    | {
        "qkv_bias": "qkv_bias",
        **_experts("moe_intermediate_size", "num_experts"),
        "moe.normalize": "norm_topk_prob",
    },
    DENSE
    | {path: value for path, value in _SOFTMAX_ROUTER.items() if path != "moe.shared"}
    | {"qk_norm": False, **UNBIASED, "moe.shared_gate": True},
    absent={"norm_eps": 1e-6, "kv_heads": 16, "qkv_bias": True, "moe.normalize": False},
    handled=("moe.first_dense", "moe.every", "moe.shared", *PATTERN),
    read=layers.reads(layers.read_sparse_step, layers.read_shared_width, layers.read_early_windows),
    write=layers.writes(layers.write_sparse_step, layers.write_shared_width, layers.write_early_windows),
    check=layers.checks(layers.heads_as_wide_as_the_model, layers.all_rotated),
    own=("shared_expert_intermediate_size",),
    names={
        f"ffn.shared.{matrix}.weight": f"mlp.shared_expert.{matrix}_proj.weight"
        for matrix in ("gate", "up", "down")
    },
)
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    COMMON
    | GROUPED
    | {
        "rope_fraction": "partial_rotary_factor",
        **_experts("intermediate_size", "num_local_experts"),
    },
    DENSE
    | _SIGMOID_ROUTER
    | {
        "qk_norm": True,
        "qk_norm_width": "all",
        **UNBIASED,
        "moe.normalize": True,
        "moe.scale": 1.0,
        "moe.shared": 0,
        "moe.groups": 1,
        "moe.first_dense": 0,
    },
    constants={
        "router_jitter_noise": 0.0,
        # From the publisher's code.
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
    aliases={"num_local_experts": "num_experts"},
    handled=("moe.balance_bias",),
    read=layers.read_rotated_width,
    own=("rotary_dim", "attn_type_list"),
    names={
        **MIXTRAL.names,
        "ffn.router.bias": "block_sparse_moe.e_score_correction_bias",
    },
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    COMMON
    | GROUPED
    | ATTENTION_BIAS
    | {
        "swiglu_gain": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
        **_experts("intermediate_size", "num_local_experts"),
    },
    _SOFTMAX_ROUTER
    | {
        "ffn": "swiglu-clamped",
        "mtp_depth": 0,
        "qk_norm": False,
        "sinks": True,
        "ffn_bias": True,
        "moe.router_bias": True,
        "moe.normalize": True,
        **_ONLY_MIXTURES,
    },
    absent={
        "norm_eps": 1e-5,
        "head_dim": 64,
        "kv_heads": 8,
        "attention_bias": True,
        "swiglu_gain": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
    },
    aliases={"num_local_experts": "num_experts"},
    handled=PATTERN,
    read=layers.read_layer_types(128, lambda layer: layer % 2 == 0),
    write=layers.write_layer_types,
    check=layers.all_rotated,
    own=("experts_per_token", "initial_context_length"),
    names={
        "attention.sinks": "self_attn.sinks",
        "ffn.router.weight": "mlp.router.weight",
        "ffn.router.logit_bias": "mlp.router.bias",
        "ffn.experts.down_bias": "mlp.experts.down_proj_bias",
    },
    joined={
        "mlp.experts.gate_up_proj": Joint(
            ("ffn.experts.gate", "ffn.experts.up"), by_turns=True, transposed=True
        ),
        "mlp.experts.gate_up_proj_bias": Joint(
            ("ffn.experts.gate_bias", "ffn.experts.up_bias"), by_turns=True
        ),
        "mlp.experts.down_proj": Joint(("ffn.experts.down",), transposed=True),
    },
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
