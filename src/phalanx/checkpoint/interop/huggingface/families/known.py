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

from phalanx.checkpoint.interop.huggingface.families.dense import (
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.checkpoint.interop.huggingface.families.mixtures import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)

FAMILIES: Mapping[str, Family] = {
    **{
        family.model_type: family
        for family in (
            *(LLAMA, QWEN2, SEED_OSS, QWEN3, MISTRAL, SMOLLM3, OLMO2, OLMO3, GEMMA2, GEMMA3, GLM4),
            *(PHI3, GLM, MINISTRAL),
            *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, MINIMAX_M2, GLM4_MOE, DOTS1, OLMOE),
            *(GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2),
        )
    },
    "kimi_k2": DEEPSEEK_V3,
}
"""The families by ``model_type``; a model that several can express is written as the first."""

_GATED_DELTANET = "Gated DeltaNet (linear attention)"
_MAMBA2 = "Mamba-2 (state-space layers)"
MISSING_LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid"), _GATED_DELTANET),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTANET),
    "kimi_linear": "Kimi Delta Attention (linear attention)",
    "minimax": "Lightning Attention (linear attention)",
    **dict.fromkeys(("mamba2", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"), _MAMBA2),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "Mamba (state-space layers)"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "gated short convolutions"),
    "recurrent_gemma": "RG-LRU (a gated linear recurrence)",
    "rwkv": "RWKV (a linear recurrence)",
}
"""For ``model_type``s that are not read because layers of theirs are not attention: which these are."""
