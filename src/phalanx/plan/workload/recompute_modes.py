"""Recomputation of single parts of a layer, by the names that software gives them: ``core_attn+layernorm``.

The modes of ``phalanx.plan.workload.candidates`` are those of programs that offer a few. Others let their users name what is computed
again in backward: Megatron Core its ``recompute_modules``, whose names are understood beside the planner's own (``PARTS``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from phalanx.plan.workload.candidates import DENSE_PARTS, PARTS, Recompute
from phalanx.run.spec import ModelSpec

MODULES: Mapping[str, frozenset[str]] = {
    "core_attn": frozenset({"core"}),
    "attention": frozenset({"core"}),
    "norm": frozenset({"norm"}),
    "rmsnorm": frozenset({"norm"}),
    "layernorm": frozenset({"norm"}),
    "act": frozenset({"activation", "expert_activation"}),
    "moe_act": frozenset({"expert_activation"}),
    "mlp": frozenset({"widen", "activation", "down"}),
    "mla_up_proj": frozenset({"latent_up"}),
    "shared_expert": frozenset({"widen", "activation", "down"}),
    "shared_experts": frozenset({"widen", "activation", "down"}),
    "moe": frozenset({"router", "dispatch", "expert_widen", "expert_activation", "expert_down", "combine"}),
}
"""Parts of a layer by the names of Megatron's ``recompute_modules`` (megatron/core/transformer/transformer_config.py)."""


_LATENT = frozenset({"latent_up"})


def mode_of_parts(text: str) -> Recompute:
    """The mode that computes the parts named in ``text`` again, joined by "+". Raises ``ValueError`` with the names there are."""
    names = [name.strip() for name in text.split("+")]
    unknown = [name for name in names if name not in MODULES and name not in PARTS]
    if unknown:
        raise ValueError(
            f"recompute={text}: {unknown[0]!r} is no part of a layer: join some of {', '.join(_names())} with +"
        )
    parts = frozenset(chain.from_iterable(MODULES.get(name, frozenset({name})) for name in names))
    return Recompute(text, parts)


def parts_of(model: ModelSpec) -> frozenset[str]:
    """The parts of a layer that some layer of ``model`` has."""
    parts = frozenset(PARTS) if model.moe is not None else DENSE_PARTS
    return parts | _LATENT if model.mla is not None else parts - _LATENT


def with_modes(modes: tuple[Recompute, ...], texts: Iterable[str]) -> tuple[Recompute, ...]:
    """``modes`` and those that ``texts`` name by their parts."""
    known = {mode.name: mode for mode in modes}
    return (*modes, *(mode_of_parts(text) for text in dict.fromkeys(texts) if text not in known))


def _names() -> Iterator[str]:
    yield from dict.fromkeys((*MODULES, *PARTS))
