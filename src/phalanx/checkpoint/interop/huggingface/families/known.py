"""Hugging Face's model families as tables of the fields of ModelSpec and ``config.json``, and the choice of a family for a model.

A family can express some fields of a model and fixes the others: Mixtral has no shared experts, Qwen3 always normalizes queries and
keys. Both directions use the same tables, so that reading inverts writing. Fields of ``ModelSpec`` that only training reads, and that a
family cannot express, are in no table. They are not written, and an imported model has their defaults. One of these is the weight of the
load-balancing loss. ``router_aux_loss_coef`` weighs one loss over the routers of all layers, ``moe.aux_loss`` the sum of one loss per
layer, and no factor converts between them.

Source: the configuration classes of transformers 4.51 to 5.x, and the published ``config.json`` of the models named.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from phalanx.checkpoint.interop.huggingface.families.family import (
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
    Family,
)
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
"""Unsupported ``model_type``s, each with its layers that are not attention."""


# The family that a model is written as: the first that can express all of its fields.
#
# A field that is in none of a family's tables does not exist in its models, so it must have its default.


_HANDLED_FOR_ALL = frozenset(
    {
        *("preset", "factory", "factory_sha256", "mla", "moe", "rope_scaling", "rope_theta"),
        # Changes only the order of roundings.
        "mla.absorbed",
        # Used by training only.
        *("lanes", "context_tiles", "mtp_loss", "init_std", "moe.bias_speed", "moe.aux_loss", "moe.z_loss"),
    }
)
_UNUSED_MIXTURE = MoeSpec(experts=2, per_token=1, ffn_dim=8, shared=1, score="sigmoid")


def flat(spec: ModelSpec) -> dict[str, object]:
    """Return all fields of a model by name. Those of its sections are there twice: as ``moe.experts``, and as a table
    under the section's name.
    """
    fields: dict[str, object] = {}
    for name, value in to_table(spec).items():
        fields |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        fields[name] = value
    return fields


_DEFAULTS: Mapping[str, object] = MappingProxyType(flat(ModelSpec(mla=MlaSpec(), moe=MoeSpec())))


def in_family_terms(spec: ModelSpec, family: Family) -> ModelSpec:
    """Return a dense model with latent attention as one whose layers are all before the first mixture."""
    if spec.mla is None or spec.moe is not None or "moe" not in family.sections:
        return spec
    return dataclasses.replace(spec, moe=dataclasses.replace(_UNUSED_MIXTURE, first_dense=spec.layers))


def unsayable(spec: ModelSpec, family: Family) -> list[str]:
    """Return a sentence for each field of a resolved model that ``family`` cannot express, or only with other values.

    If the family has other kinds of layers, that is the only sentence. Empty if it can express all.
    """
    name = family.architecture.removesuffix("ForCausalLM")
    if not _has_its_kinds(spec, family):
        return [f"{name} has other kinds of layers"]
    fields = flat(in_family_terms(spec, family))
    silent = _HANDLED_FOR_ALL | {*family.fields, *family.handled, *family.fixed}
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
    """Return True if the family has latent attention or experts where the model has."""
    if spec.mla is not None:
        return "mla" in family.sections
    return family.sections == ({"moe"} if spec.moe is not None else set())


@lru_cache(maxsize=16)
def family_for(spec: ModelSpec, wished: str = "") -> Family:
    """Return the family that a resolved model is written as: one that can express all of it.

    If none can, return the one with the fewest problems, among those with its kinds of layers, and preferably its
    ``qk_norm``. ``wished`` is the preferred ``model_type``, such as that of the model's publisher; it is used if it
    can express the model.
    """
    preferred = FAMILIES.get(wished)
    if preferred is not None and preferred.written and not unsayable(spec, preferred):
        return preferred
    near = [family for family in FAMILIES.values() if family.written and _has_its_kinds(spec, family)]

    def distance(family: Family) -> tuple[bool, bool, int]:
        problems = unsayable(spec, family)
        return bool(problems), family.fixed.get("qk_norm", spec.qk_norm) != spec.qk_norm, len(problems)

    return min(near, key=distance)
