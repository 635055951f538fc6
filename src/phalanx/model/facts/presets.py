"""Known model shapes by name.

Sources: Llama 3, arXiv 2407.21783, table 3 (and the published ``config.json`` files for vocabulary, rotary base
and scaling: 3.1 models carry the scaling); Qwen3-8B, arXiv 2505.09388, table 1 and its ``config.json``; Phi-4, arXiv
2412.08905, and Gemma 2, arXiv 2408.00118, table 1, with their ``config.json``; GPT-3,
arXiv 2005.14165, table 2.1 (its shape: learned positions and LayerNorm are replaced by this project's rotary
embedding and RMSNorm). The 1T model is this project's own, in the proportions of Llama 3's largest.

Mixtures of experts: Mixtral 8x7B, arXiv 2401.04088, table 1; Qwen3-30B-A3B, arXiv 2505.09388, table 2; DeepSeek-V3, arXiv
2412.19437, section 4.2; Kimi K2, arXiv 2507.20534, table 2; each with its ``config.json``. Kimi's rotary scaling is that of its
first release (128 k tokens). DeepSeek-V3 was trained with one prediction ahead. Its published total leaves this out, and so does the
preset (``mtp_depth = 1`` adds it). gpt-oss 20b and 120b, arXiv 2508.10925, table 1, with their ``config.json``.

Switch-C, arXiv 2101.03961, table 9, is an encoder and a decoder of 15 layers each. Here its 30 layers make one decoder, without
cross-attention, with rotary embedding and RMSNorm instead of T5's, GELU instead of ReLU, and no token is dropped.

The 100T model is this project's own, for planning: latent attention and group-limited routing as in DeepSeek-V3, with more experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec

_LLAMA3_VOCAB = 128_256
_DEEPSEEK_MLA = MlaSpec(query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
_LLAMA31 = RopeScalingSpec(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def _llama3(layers: int, dim: int, heads: int, ffn_dim: int, *, tied: bool = False) -> ModelSpec:
    """Return a Llama 3.1 model: 8 key heads, its vocabulary, theta and rotary scaling. ``tied`` ties the head to the embedding."""
    return ModelSpec(
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


def _deepseek_yarn(factor: float, beta_fast: float) -> RopeScalingSpec:
    """Return the YaRN scaling of DeepSeek's models, from a context of 4096 tokens, with equal temperatures that cancel in the tables."""
    return RopeScalingSpec(
        kind="yarn",
        factor=factor,
        original_max_seq_len=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )


def _gpt_oss(layers: int, experts: int) -> ModelSpec:
    """Return a gpt-oss model: the two sizes differ only in ``layers`` and ``experts``."""
    return ModelSpec(
        layers=layers,
        dim=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn_dim=2880,
        ffn="swiglu-clamped",
        vocab_size=201_088,
        sinks=True,
        attention_bias=True,
        ffn_bias=True,
        rope_theta=150_000.0,
        rope_scaling=RopeScalingSpec(kind="yarn", factor=32.0, original_max_seq_len=4096, truncate=False),
        attention_pattern=("window", "full"),
        window=128,
        moe=MoeSpec(experts=experts, per_token=4, ffn_dim=2880, router_bias=True),
    )


_SHAPES = {
    "toy-4m": ModelSpec(layers=4, dim=256, heads=4, kv_heads=2, tie_embeddings=True),
    "llama-100m": ModelSpec(
        layers=12,
        dim=768,
        heads=12,
        kv_heads=4,
        vocab_size=16_384,
        tie_embeddings=True,
    ),
    "llama-1b": ModelSpec(layers=16, dim=2048, heads=16, kv_heads=8, ffn_dim=8192, vocab_size=32_000),
    "llama-3b": ModelSpec(layers=28, dim=3072, heads=24, kv_heads=8, ffn_dim=8192, vocab_size=32_000),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "qwen3-8b": ModelSpec(
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
    "phi-4": ModelSpec(
        layers=40,
        dim=5120,
        heads=40,
        kv_heads=10,
        ffn_dim=17_920,
        vocab_size=100_352,
        rope_theta=250_000.0,
    ),
    "gemma2-27b": ModelSpec(
        layers=46,
        dim=4608,
        heads=32,
        kv_heads=16,
        head_dim=128,
        ffn_dim=36_864,
        ffn="geglu",
        vocab_size=256_000,
        tie_embeddings=True,
        norm_eps=1e-6,
        norm_placement="both",
        norm_offset=True,
        scale_embeddings=True,
        score_width=144,
        score_cap=50.0,
        logit_cap=30.0,
        attention_pattern=("window", "full"),
        window=4096,
    ),
    "gpt3-175b": ModelSpec(
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
        layers=160,
        dim=22_528,
        heads=176,
        kv_heads=16,
        head_dim=128,
        ffn_dim=76_800,
        vocab_size=131_072,
        rope_theta=500_000.0,
    ),
    "toy-moe": ModelSpec(
        layers=4,
        dim=256,
        heads=4,
        mla=MlaSpec(kv_rank=64, nope_head_dim=32, rope_head_dim=16, value_head_dim=32),
        moe=MoeSpec(
            experts=8,
            per_token=2,
            ffn_dim=256,
            shared=1,
            first_dense=1,
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    "mixtral-8x7b": ModelSpec(
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=8,
        ffn_dim=14_336,
        vocab_size=32_000,
        rope_theta=1_000_000.0,
        moe=MoeSpec(experts=8, per_token=2, aux_loss=0.02),
    ),
    "qwen3-30b-a3b": ModelSpec(
        layers=48,
        dim=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn_dim=6144,
        vocab_size=151_936,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1_000_000.0,
        moe=MoeSpec(experts=128, per_token=8, ffn_dim=768, aux_loss=0.001),
    ),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "deepseek-v3": ModelSpec(
        layers=61,
        dim=7168,
        heads=128,
        ffn_dim=18_432,
        vocab_size=129_280,
        norm_eps=1e-6,
        rope_scaling=_deepseek_yarn(factor=40.0, beta_fast=32.0),
        mla=_DEEPSEEK_MLA,
        moe=MoeSpec(
            experts=256,
            per_token=8,
            ffn_dim=2048,
            shared=1,
            first_dense=3,
            score="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            balance_bias=True,
        ),
        init_std=0.006,
    ),
    "kimi-k2": ModelSpec(
        layers=61,
        dim=7168,
        heads=64,
        ffn_dim=18_432,
        vocab_size=163_840,
        norm_eps=1e-6,
        rope_theta=50_000.0,
        rope_scaling=_deepseek_yarn(factor=32.0, beta_fast=1.0),
        mla=_DEEPSEEK_MLA,
        moe=MoeSpec(
            experts=384,
            per_token=8,
            ffn_dim=2048,
            shared=1,
            first_dense=1,
            score="sigmoid",
            scale=2.827,
            balance_bias=True,
        ),
    ),
    "switch-1.6t": ModelSpec(
        layers=30,
        dim=2080,
        heads=32,
        head_dim=64,
        ffn_dim=6144,
        ffn="gelu",
        vocab_size=32_128,
        tie_embeddings=True,
        norm_eps=1e-6,
        moe=MoeSpec(experts=2048, per_token=1, normalize=False, aux_loss=0.01),
    ),
    "moe-100t": ModelSpec(
        layers=128,
        dim=16_384,
        heads=128,
        ffn_dim=65_536,
        vocab_size=262_144,
        norm_eps=1e-6,
        rope_theta=500_000.0,
        mla=MlaSpec(query_rank=3072, kv_rank=1024, nope_head_dim=128, rope_head_dim=64, value_head_dim=128),
        moe=MoeSpec(
            experts=4096,
            per_token=8,
            ffn_dim=4096,
            shared=1,
            first_dense=4,
            score="sigmoid",
            scale=2.5,
            groups=64,
            groups_per_token=4,
            balance_bias=True,
        ),
        init_std=0.006,
    ),
}
PRESETS: Mapping[str, ModelSpec] = MappingProxyType(
    {name: replace(shape, preset=name) for name, shape in _SHAPES.items()}
)
