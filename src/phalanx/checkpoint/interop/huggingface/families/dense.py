"""Families whose layers are all dense."""

from dataclasses import replace

from phalanx.checkpoint.interop.huggingface.families.family import (
    ATTENTION_BIAS,
    COMMON,
    DENSE,
    GROUPED,
    PATTERN,
    Family,
    Joint,
)
from phalanx.checkpoint.interop.huggingface.layers import (
    all_rotated,
    gemma2_layers,
    no_window,
    phi3_layers,
    qwen2_layers,
    read_caps,
    read_layer_types,
    read_only_window,
    read_regular_windows,
    read_score_width,
    read_switched_window,
    read_two_biases,
    read_unrotated_layers,
    read_window_everywhere,
    reads,
    whole_heads,
    window_everywhere,
    write_caps,
    write_layer_types,
    write_score_width,
    write_switched_window,
    write_two_biases,
    write_unrotated_layers,
    write_window,
    writes,
)

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
    check=whole_heads,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    COMMON | GROUPED,
    DENSE | {"qk_norm": False, "attention_bias": False, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "kv_heads": 8},
    handled=PATTERN,
    read=read_window_everywhere(4096),
    write=write_window,
    check=window_everywhere,
)
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read=read_layer_types(4096, lambda _layer: True),
    write=write_layer_types,
    check=all_rotated,
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS | {"ffn_bias": "mlp_bias"},
    DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "kv_heads": 4, "tie_embeddings": True},
    handled=PATTERN,
    read=read_unrotated_layers,
    write=write_unrotated_layers,
    check=no_window,
    own=("no_rope_layers", "no_rope_layer_interval"),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    COMMON | GROUPED,
    DENSE | {"qk_norm": False, "qkv_bias": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "kv_heads": 32},
    handled=PATTERN,
    read=read_switched_window,
    write=write_switched_window,
    check=qwen2_layers,
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    COMMON | GROUPED | {"ffn_bias": "mlp_bias"},
    DENSE | {"qk_norm": False},
    absent={"norm_eps": 1e-6, "head_dim": 128, "kv_heads": 8},
    handled=("attention_bias", "qkv_bias"),
    read=read_two_biases,
    write=write_two_biases,
    own=("attention_bias", "attention_out_bias"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    DENSE | {"qk_norm": True, "ffn_bias": False},
    absent={"norm_eps": 1e-6, "head_dim": 128},
    handled=PATTERN,
    read=read_switched_window,
    write=write_switched_window,
    check=all_rotated,
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
    read=read_layer_types(4096, lambda layer: (layer + 1) % 4 != 0),
    write=write_layer_types,
    check=all_rotated,
    names=_AFTER,
)
_GEMMA_NAMES = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
    {
        "ffn": "geglu",
        "mtp_depth": 0,
        "ffn_bias": False,
        "norm_placement": "both",
        "qk_norm": False,
        "norm_offset": True,
        "scale_embeddings": True,
    },
    constants={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    absent={"norm_eps": 1e-6, "kv_heads": 4, "head_dim": 256, "tie_embeddings": True},
    handled=(*PATTERN, "score_width", "score_cap", "logit_cap"),
    read=reads(read_layer_types(4096, lambda layer: layer % 2 == 0), read_score_width, read_caps),
    write=writes(write_layer_types, write_score_width, write_caps),
    check=gemma2_layers,
    own=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    names=_GEMMA_NAMES,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    COMMON | GROUPED | ATTENTION_BIAS,
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
    handled=(*PATTERN, "window_rope_theta", "score_width"),
    read=reads(read_regular_windows, read_score_width),
    write=writes(write_layer_types, write_score_width),
    check=all_rotated,
    own=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    names=_GEMMA_NAMES,
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    COMMON | GROUPED | {"qkv_bias": "attention_bias", "rope_fraction": "partial_rotary_factor"},
    DENSE | {"qk_norm": False, "attention_bias": False, "ffn_bias": False, "norm_placement": "both"},
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
    DENSE | {"qk_norm": False, "attention_bias": False, "ffn_bias": False},
    absent={"norm_eps": 1e-5, "rope_fraction": 1.0},
    handled=PATTERN,
    read=read_only_window,
    write=write_window,
    check=phi3_layers,
    joined={
        "self_attn.qkv_proj.weight": Joint(
            ("attention.query.weight", "attention.key.weight", "attention.value.weight")
        ),
        "mlp.gate_up_proj.weight": Joint(("ffn.gate.weight", "ffn.up.weight")),
    },
    stretches=("longrope",),
)
