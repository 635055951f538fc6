"""Known model shapes by name.

Sources: Llama 3, arXiv 2407.21783, table 3 (and the published ``config.json`` files for vocabulary, rotary base
and scaling: 3.1 models carry the scaling); Qwen3-8B, arXiv 2505.09388, table 1 and its ``config.json``; GPT-3,
arXiv 2005.14165, table 2.1 (its shape: learned positions and LayerNorm are replaced by this project's rotary
embedding and RMSNorm). The 1T model is this project's own, in the proportions of Llama 3's largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from phalanx.run.spec import ModelSpec, RopeScalingSpec

_LLAMA3_VOCAB = 128_256
_LLAMA31 = RopeScalingSpec(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def _llama3(preset: str, layers: int, dim: int, heads: int, ffn_dim: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        preset=preset,
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=_LLAMA3_VOCAB,
        tie_embeddings=tied,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA31,
    )


PRESETS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "toy-4m": ModelSpec(preset="toy-4m", layers=4, dim=256, heads=4, kv_heads=2, tie_embeddings=True),
        "llama-100m": ModelSpec(
            preset="llama-100m",
            layers=12,
            dim=768,
            heads=12,
            kv_heads=4,
            vocab_size=16_384,
            tie_embeddings=True,
        ),
        "llama-1b": ModelSpec(
            preset="llama-1b", layers=16, dim=2048, heads=16, kv_heads=8, ffn_dim=8192, vocab_size=32_000
        ),
        "llama-3b": ModelSpec(
            preset="llama-3b", layers=28, dim=3072, heads=24, kv_heads=8, ffn_dim=8192, vocab_size=32_000
        ),
        "llama3-8b": _llama3("llama3-8b", 32, 4096, 32, 14_336),
        "llama3-70b": _llama3("llama3-70b", 80, 8192, 64, 28_672),
        "llama3-405b": _llama3("llama3-405b", 126, 16_384, 128, 53_248),
        "qwen3-8b": ModelSpec(
            preset="qwen3-8b",
            layers=36,
            dim=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn_dim=12_288,
            vocab_size=151_936,
            norm_eps=1e-6,
            qk_norm=True,
            rope_theta=1_000_000.0,
        ),
        "gpt3-175b": ModelSpec(
            preset="gpt3-175b",
            layers=96,
            dim=12_288,
            heads=96,
            ffn_dim=49_152,
            ffn="gelu",
            vocab_size=50_257,
            tie_embeddings=True,
            attention_bias=True,
            ffn_bias=True,
        ),
        "dense-1t": ModelSpec(
            preset="dense-1t",
            layers=160,
            dim=22_528,
            heads=176,
            kv_heads=16,
            head_dim=128,
            ffn_dim=76_800,
            vocab_size=131_072,
            rope_theta=500_000.0,
        ),
    }
)
