"""Small random models of `transformers`, and the same models here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from phalanx.checkpoint.interop.huggingface.config import spec_of
from phalanx.checkpoint.interop.huggingface.families.known import FAMILIES
from phalanx.checkpoint.interop.huggingface.names import parameter_name
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short enough that a head of 8 elements has frequencies in all three bands.
    "original_max_position_embeddings": 64,
}

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # else transformers gives the token no gradient
    # Far larger than usual, so that attention is not close to uniform and a wrong position would show.
    "initializer_range": 0.3,
}

NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
GEMMA2: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 10,
    "pad_token_id": None,
}
DENSE: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, all heads alike": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama, one key head": LlamaConfig(**{**SMALL, "num_key_value_heads": 1}),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, attention bias": LlamaConfig(**SMALL, attention_bias=True),
    "llama, all biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, wide heads": LlamaConfig(**SMALL, head_dim=24),
    "llama, stretched rotary": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, other eps": LlamaConfig(**SMALL, rms_norm_eps=1e-2),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, window in the last layer": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=11),
    "ministral": MinistralConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=8,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "llama, positions divided": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "smollm3": SmolLM3Config(**{**SMALL, "num_hidden_layers": 5}, no_rope_layer_interval=2),
    "qwen2, tied, stretched rotary": Qwen2Config(
        **SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "seed oss": SeedOssConfig(**SMALL, head_dim=16, **NO_DROPOUT),
    "seed oss, all biases": SeedOssConfig(
        **SMALL, head_dim=16, attention_out_bias=True, mlp_bias=True, **NO_DROPOUT
    ),
    "seed oss, no biases": SeedOssConfig(**SMALL, head_dim=16, attention_bias=False, **NO_DROPOUT),
    "gemma3": Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "gemma3, positions of full layers divided": Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    ),
    "gemma3, untied, scores by the heads' width": Gemma3TextConfig(
        **SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=10, tie_word_embeddings=False
    ),
    "olmo2": Olmo2Config(**SMALL),
    "olmo2, as many key heads, biases": Olmo2Config(
        **{**SMALL, "num_key_value_heads": 4}, attention_bias=True
    ),
    "olmo3": Olmo3Config(**{**SMALL, "num_hidden_layers": 5}, sliding_window=10),
    "gemma 2": Gemma2Config(**GEMMA2),
    "gemma 2, strong caps, another width of scores": Gemma2Config(
        **{**GEMMA2, "query_pre_attn_scalar": 24},
        attn_logit_softcapping=0.4,
        final_logit_softcapping=0.7,
        attention_bias=True,
    ),
    "gemma 2, no caps, windows everywhere": Gemma2Config(
        **GEMMA2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["sliding_attention"] * 3,
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3, windows by turns": Qwen3Config(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=16,
        use_sliding_window=True,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3, tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "qwen3, attention bias": Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
    "qwen3, dim no multiple of heads": Qwen3Config(**{**SMALL, "hidden_size": 30}, head_dim=16),
    "qwen3, stretched rotary": Qwen3Config(**SMALL, head_dim=16, rope_parameters=LLAMA3_ROPE),
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
DEEPSEEK: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
QWEN3_MOE: dict[str, Any] = {
    **SMALL,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}

DEEPSEEK_MIXTURE: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
QWEN2_MOE: dict[str, Any] = {
    **{key: value for key, value in QWEN3_MOE.items() if key != "head_dim"},
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 32,
}
MINIMAX_M2: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 16,
    "head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}
GLM4_MOE: dict[str, Any] = {**DEEPSEEK_MIXTURE, "head_dim": 12, "num_mtp_layers": 0}

DEEPSEEK_V2: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"},
    "routed_scaling_factor": 1.7,
    "topk_method": "group_limited_greedy",
}

MIXTURES: dict[str, Any] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "mixtral, window": MixtralConfig(**SMALL, num_local_experts=4, sliding_window=9),
    "mixtral, tied": MixtralConfig(
        **SMALL, num_local_experts=8, num_experts_per_tok=3, tie_word_embeddings=True
    ),
    "qwen3 moe": Qwen3MoeConfig(**QWEN3_MOE),
    "qwen3 moe, scores as they are": Qwen3MoeConfig(**{**QWEN3_MOE, "norm_topk_prob": False}),
    "qwen3 moe, every other layer": Qwen3MoeConfig(
        **{**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    ),
    "qwen3 moe, window": Qwen3MoeConfig(**QWEN3_MOE, use_sliding_window=True, sliding_window=9),
    "qwen2 moe": Qwen2MoeConfig(**QWEN2_MOE),
    "qwen2 moe, no biases, dense layers, scores that sum to one": Qwen2MoeConfig(
        **{**QWEN2_MOE, "num_hidden_layers": 4, "norm_topk_prob": True, "mlp_only_layers": [0]},
        qkv_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen2 moe, every other layer, windows": Qwen2MoeConfig(
        **{**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2},
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=3,
    ),
    "minimax m2": MiniMaxM2Config(**MINIMAX_M2, rope_parameters=PARTIAL),
    "minimax m2, rotated whole": MiniMaxM2Config(**MINIMAX_M2, tie_word_embeddings=True),
    "glm 4.5": Glm4MoeConfig(**GLM4_MOE, attention_bias=True, rope_parameters=PARTIAL),
    "glm 4.5, with query and key norms": Glm4MoeConfig(
        **{**GLM4_MOE, "n_shared_experts": 2}, use_qk_norm=True, rope_parameters=PARTIAL
    ),
    "olmoe": OlmoeConfig(
        **{**SMALL, "intermediate_size": 16}, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "deepseek v2": DeepseekV2Config(**DEEPSEEK_V2),
    "deepseek v2, greedy, other eps": DeepseekV2Config(
        **{**DEEPSEEK_V2, "topk_method": "greedy", "q_lora_rank": None}, rms_norm_eps=1e-3
    ),
    "dots 1": Dots1Config(**DEEPSEEK_MIXTURE, head_dim=12, attention_bias=True, sliding_window=None),
    "dots 1, windows": Dots1Config(**DEEPSEEK_MIXTURE, head_dim=12, sliding_window=8, max_window_layers=1),
    "deepseek v3": DeepseekV3Config(**DEEPSEEK),
    "deepseek v3, queries without a latent": DeepseekV3Config(**{**DEEPSEEK, "q_lora_rank": None}),
    "deepseek v3, one group, two shared experts": DeepseekV3Config(
        **{**DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False}
    ),
    "deepseek v3, rotary in halves": DeepseekV3Config(**DEEPSEEK, rope_interleave=False),
    "deepseek v3, yarn": DeepseekV3Config(
        **DEEPSEEK, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "deepseek v3, yarn without a temperature in the softmax": DeepseekV3Config(
        **DEEPSEEK, rope_parameters=YARN
    ),
}
GPT_OSS: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": {**YARN, "truncate": False},
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 4.0, 9.0],
}
PHI3: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "max_position_embeddings"},
    "partial_rotary_factor": 0.75,
    "pad_token_id": None,
}
GLM: dict[str, Any] = {**SMALL, "eos_token_id": [2, 3]}
"""Without end tokens of its own, transformers writes those of the published vocabulary."""
JOINED: dict[str, Any] = {
    "glm 4": Glm4Config(**GLM, head_dim=12, rope_parameters=PARTIAL),
    "glm": GlmConfig(**GLM, head_dim=12, rope_parameters=PARTIAL),
    "glm 4, no biases, rotated whole, tied": Glm4Config(
        **GLM,
        head_dim=16,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={**PARTIAL, "partial_rotary_factor": 1.0},
    ),
    "glm 4, stretched rotary": Glm4Config(
        **GLM, head_dim=16, rope_parameters={**YARN, "partial_rotary_factor": 0.5}
    ),
    "phi 3": Phi3Config(**{**SMALL, "pad_token_id": None}, sliding_window=9),
    "phi 3, partly rotated, tied": Phi3Config(**PHI3, tie_word_embeddings=True),
    "phi 3, short factors": Phi3Config(
        **PHI3,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters=LONGROPE,
    ),
    "phi 3, long factors": Phi3Config(
        **PHI3, max_position_embeddings=64, original_max_position_embeddings=8, rope_parameters=LONGROPE
    ),
    "phi 3, temperature": Phi3Config(
        **PHI3,
        max_position_embeddings=64,
        original_max_position_embeddings=8,
        rope_parameters={**LONGROPE, "attention_factor": 0.8},
    ),
}
"""Dense models whose queries, keys and values, and gates and values, are one tensor."""
MIXTURES |= {
    "gpt-oss": GptOssConfig(**GPT_OSS),
    "gpt-oss, clamped, no biases of attention": GptOssConfig(
        **{**GPT_OSS, "attention_bias": False}, swiglu_alpha=1.3, swiglu_limit=0.02
    ),
}
CONFIGS = {
    **DENSE,
    "llama, yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "olmo3, yarn in layers without a window": Olmo3Config(
        **{**SMALL, "num_hidden_layers": 3},
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    **JOINED,
    **MIXTURES,
}


EAGER_ALONE = ("gpt_oss", "gemma2")
"""Families for which `transformers` has no other attention."""


def hf_model(config: Any, seed: int = 0, attention: str = "sdpa") -> Any:
    """A model of `transformers` with random weights, gains and biases too."""
    torch.manual_seed(seed)
    attention = "eager" if config.model_type in EAGER_ALONE else attention
    # Gemma's gains are one more than the weights.
    gain = 0.0 if config.model_type.startswith("gemma") else 1.0
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if "bias" in name else gain))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


def in_our_words(named: Iterable[tuple[str, Tensor]], config: Any) -> dict[str, Tensor]:
    """Tensors that belong to parameters of `transformers`, by our names and as our parameters lie.

    Written apart from the importer: `transformers` fuses in memory what is published expert by expert.
    """
    ours: dict[str, Tensor] = {}
    for name, value in named:
        if name.endswith(("qkv_proj.weight", "mlp.gate_up_proj.weight")):
            ours |= _of_phi3(name.replace("model.layers", "blocks"), value, config)
        elif config.model_type == "gpt_oss" and (".mlp." in name or "sinks" in name):
            ours |= _of_gpt_oss(name.replace("model.layers", "blocks"), value)
        elif name.endswith("experts.gate_up_proj"):
            prefix = name.replace("model.layers", "blocks").replace("mlp.experts.gate_up_proj", "ffn.experts")
            ours[f"{prefix}.gate"], ours[f"{prefix}.up"] = value.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            ours[
                name.replace("model.layers", "blocks").replace("mlp.experts.down_proj", "ffn.experts.down")
            ] = value
        else:
            # In memory the names of mixtures are the same for all families.
            own = "layernorm" in name or "shared_expert." in name
            family = FAMILIES[config.model_type] if own else None
            published = name.replace("mlp.e_score", "mlp.gate.e_score")
            turned = _of_glm4 if config.model_type in ("glm", "glm4") else _in_halves
            ours[parameter_name(published, family)] = turned(name, value, config)
    return ours


def _of_glm4(name: str, value: Tensor, config: Any) -> Tensor:
    """The first rows of each head of queries and keys, from neighbors to halves."""
    if "q_proj" not in name and "k_proj" not in name:
        return value
    heads = value.view(-1, config.head_dim, *value.shape[1:])
    turned = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    pairs = heads[:, :turned]
    return torch.cat((pairs[:, 0::2], pairs[:, 1::2], heads[:, turned:]), dim=1).reshape(value.shape)


def _of_phi3(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Queries, keys and values, or gates and values, one after another."""
    block, _, rest = name.partition(".")[2].partition(".")
    if rest == "mlp.gate_up_proj.weight":
        parts = dict(zip(("ffn.gate", "ffn.up"), value.chunk(2), strict=True))
    else:
        width = config.hidden_size // config.num_attention_heads
        sizes = [width * config.num_attention_heads, *[width * config.num_key_value_heads] * 2]
        names = ("attention.query", "attention.key", "attention.value")
        parts = dict(zip(names, value.split(sizes), strict=True))
    return {f"blocks.{block}.{part}.weight": rows for part, rows in parts.items()}


def _of_gpt_oss(name: str, value: Tensor) -> dict[str, Tensor]:
    """Sinks, and a mixture's tensors: gates and values by turns in the last dimension, and matrices transposed."""
    block, _, rest = name.partition(".mlp.")
    mixture = f"{block}.ffn"
    match rest:
        case "":
            return {name.replace("self_attn", "attention"): value}
        case "router.weight" | "router.bias":
            return {f"{mixture}.{rest.replace('bias', 'logit_bias')}": value}
        case "experts.gate_up_proj":
            return {
                f"{mixture}.experts.{part}": value[..., at::2].mT for at, part in enumerate(("gate", "up"))
            }
        case "experts.gate_up_proj_bias":
            return {
                f"{mixture}.experts.{part}_bias": value[:, at::2] for at, part in enumerate(("gate", "up"))
            }
        case "experts.down_proj":
            return {f"{mixture}.experts.down": value.mT}
        case _:
            return {f"{mixture}.experts.down_bias": value}


def _in_halves(name: str, value: Tensor, config: Any) -> Tensor:
    """Rows that are rotated, from neighbors `x0 y0 x1 y1` to halves `x0 x1 y0 y1`."""
    if not getattr(config, "rope_interleave", config.model_type == "deepseek_v2"):
        return value
    turned = config.qk_rope_head_dim
    if "q_proj" in name or "q_b_proj" in name:
        heads = value.view(config.num_attention_heads, -1, value.shape[1])
    elif "kv_a_proj_with_mqa" in name:
        heads = value.unsqueeze(0)
    else:
        return value
    fixed, pairs = heads[:, :-turned], heads[:, -turned:]
    return torch.cat((fixed, pairs[:, 0::2], pairs[:, 1::2]), dim=1).reshape(value.shape)


def our_model(model: Any) -> Transformer:
    """The same model here, with the same weights."""
    ours = Transformer(spec_of(model.config.to_dict()))
    biases = [(name, value) for name, value in model.named_buffers() if name.endswith("correction_bias")]
    ours.load_state_dict(in_our_words([*model.named_parameters(), *biases], model.config))
    return ours


def random_tokens(spec: ModelSpec, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    """int64 `(batch, seq)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (batch, seq), generator=generator)
