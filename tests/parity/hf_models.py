"""Small random models of `transformers`, and the same models here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from phalanx.checkpoint.huggingface_config import parameter_name, spec_of
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
    # Far larger than usual, so that attention is not close to uniform and a wrong position would show.
    "initializer_range": 0.3,
}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, all heads alike": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama, one key head": LlamaConfig(**{**SMALL, "num_key_value_heads": 1}),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, attention bias": LlamaConfig(**SMALL, attention_bias=True),
    "llama, all biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, wide heads": LlamaConfig(**SMALL, head_dim=24),
    "llama, stretched rotary": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, other eps": LlamaConfig(**SMALL, rms_norm_eps=1e-2),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3, tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "qwen3, attention bias": Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
    "qwen3, dim no multiple of heads": Qwen3Config(**{**SMALL, "hidden_size": 30}, head_dim=16),
    "qwen3, stretched rotary": Qwen3Config(**SMALL, head_dim=16, rope_parameters=LLAMA3_ROPE),
}


def hf_model(config: Any, seed: int = 0, attention: str = "sdpa") -> Any:
    """A model of `transformers` with random weights, gains and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if "bias" in name else 1.0))
    return model


def our_model(model: Any) -> Transformer:
    """The same model here, with the same weights."""
    ours = Transformer(spec_of(model.config.to_dict()))
    weights = {parameter_name(name): value for name, value in model.named_parameters()}
    ours.load_state_dict(weights)
    return ours


def random_tokens(spec: ModelSpec, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    """int64 `(batch, seq)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (batch, seq), generator=generator)
