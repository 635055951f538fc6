"""Hugging Face's model families as tables of the fields of ModelSpec and ``config.json``, and the choice of one for a model.

A family can say some fields of a model and holds the others fixed: Mixtral has no shared experts, Qwen3 always
normalizes queries and keys. Both directions read the same tables, so that what is written is what is read back. Fields of
``ModelSpec`` that only training reads (the strength of a balance loss, say) and that a family has no word for appear in no
table: they are not written, and an imported model has their defaults. One of these is the weight of the load-balancing loss:
``router_aux_loss_coef`` weighs one loss over the routers of all layers together, ``moe.aux_loss`` the sum of a loss of each layer,
and no factor between them makes both the same.

Source: the configuration classes of transformers 4.51 to 5.x, and the published ``config.json`` of the models named.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

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
from phalanx.run.read import to_table
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

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


# The family that a model is written as: the first that can state all of its fields.
#
# A field that neither a family's tables nor its functions speak of is one that its models do not have, and must be at its default.


_SAID_FOR_ALL = frozenset(
    {
        *("preset", "factory", "factory_sha256", "mla", "moe", "rope_scaling", "rope_theta"),
        # Another order of roundings of the same function.
        "mla.absorbed",
        # Of training alone.
        *("lanes", "context_tiles", "mtp_loss", "init_std", "moe.bias_speed", "moe.aux_loss", "moe.z_loss"),
    }
)
_UNUSED_MIXTURE = MoeSpec(experts=2, per_token=1, ffn_dim=8, shared=1, score="sigmoid")


def flat(spec: ModelSpec) -> dict[str, object]:
    """All fields of a model, those of its sections as ``moe.experts``."""
    found: dict[str, object] = {}
    for name, value in to_table(spec).items():
        found |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        found[name] = value
    return found


_DEFAULTS: Mapping[str, object] = MappingProxyType(flat(ModelSpec(mla=MlaSpec(), moe=MoeSpec())))


def in_family_terms(spec: ModelSpec, family: Family) -> ModelSpec:
    """A dense model with latent attention as one whose layers are all dense layers before the first mixture."""
    if spec.mla is None or spec.moe is not None or "moe" not in family.sections:
        return spec
    return dataclasses.replace(spec, moe=dataclasses.replace(_UNUSED_MIXTURE, first_dense=spec.layers))


def unsayable(spec: ModelSpec, family: Family) -> list[str]:
    """Fields of a resolved model that ``family`` has no word for, or other values of, in a sentence each."""
    name = family.architecture.removesuffix("ForCausalLM")
    if not _has_its_kinds(spec, family):
        return [f"{name} has other kinds of layers"]
    fields = flat(in_family_terms(spec, family))
    silent = _SAID_FOR_ALL | {*family.fields, *family.said, *family.fixed}
    only = {path: _DEFAULTS[path] for path in fields if path in _DEFAULTS and path not in silent} | dict(
        family.fixed
    )
    problems = [
        f"{path} = {json.dumps(fields[path])}: {name} has only {json.dumps(value)}"
        for path, value in only.items()
        if path in fields and fields[path] != value
    ]
    problems += family.check(spec)
    if spec.rope_scaling is not None and spec.rope_scaling.kind not in family.stretches:
        problems.append(
            f'rope_scaling.kind = "{spec.rope_scaling.kind}": {name} has only {json.dumps(family.stretches)}'
        )
    if "moe.shared" in family.fields and not fields["moe.shared"]:
        problems.append(f"moe.shared = 0: {name} has routed and shared experts")
    return problems


def _has_its_kinds(spec: ModelSpec, family: Family) -> bool:
    if spec.mla is not None:
        return "mla" in family.sections
    return family.sections == ({"moe"} if spec.moe is not None else set())


@lru_cache(maxsize=16)
def family_for(spec: ModelSpec, wished: str = "") -> Family:
    """The family that a resolved model is written as; if none can say all of it, the one that lacks least.

    ``wished`` is the ``model_type`` to take if it can say all, such as that of the model's publisher.
    """
    wish = FAMILIES.get(wished)
    if wish is not None and wish.written and not unsayable(spec, wish):
        return wish
    near = [family for family in FAMILIES.values() if family.written and _has_its_kinds(spec, family)]

    def distance(family: Family) -> tuple[bool, bool, int]:
        problems = unsayable(spec, family)
        return bool(problems), family.fixed.get("qk_norm", spec.qk_norm) != spec.qk_norm, len(problems)

    return min(near, key=distance)
