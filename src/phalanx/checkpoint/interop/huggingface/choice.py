"""The family that a model is written as: the first that can say all of its fields.

A field that neither a family's tables nor its functions speak of is one that its models do not have, and must be at its default.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.checkpoint.interop.huggingface.families.known import FAMILIES
from phalanx.run.read import to_table
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

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
