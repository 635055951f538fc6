"""Recomputation modes of a published row, translated to the planner's parts of a layer.

Sources name parts of a layer as their software does: Megatron's ``recompute_modules``, MaxText's policies, torchtitan's selective
checkpointing. A row that names none follows its recipe (``phalanx_plan.workload.recipes``); without one, several modes are tried.
"""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx_plan.workload.candidates import MODULES, RECOMPUTE, Recompute
from validation.runs import PublishedRun
from validation.software import RunSoftware

_NAMES = {**MODULES, "mla up-proj": MODULES["mla_up_proj"]}
"""Parts of a layer by the names of sources."""

_EVERY_SECOND_PRODUCT = Recompute(
    "every second product",
    frozenset({"norm", "out", "activation", "expert_activation"}),
    frozenset({"widen", "expert_widen"}),
)
"""torchtitan's selective checkpointing by operation: of a layer's seven products, the results of the first, third, fifth and seventh
are kept, and attention's (models/common: ``_apply_op_sac``). The small keys count with queries and values; the last product's
result is as large as the residual stream before it, which stands for it."""
_COMPILED_EVERY_SECOND_PRODUCT = replace(
    _EVERY_SECOND_PRODUCT, parts=_EVERY_SECOND_PRODUCT.parts | {"residual"}
)
"""The same compiled: backward does not need the last product's result, and a compiled graph keeps only results that it needs."""


def recompute_modes(
    run: PublishedRun, trained: RunSoftware, assumptions: list[str]
) -> tuple[tuple[Recompute, ...], tuple[int, ...]]:
    """Return the modes that a layout's ``recompute`` indexes, and the indices of those that agree with the row."""
    text = run.recompute.lower() or (trained.recipe.recompute if trained.recipe else "")
    named = {mode.name: index for index, mode in enumerate(RECOMPUTE)}
    if not text:
        return _open_modes(trained, assumptions, "recomputation")
    if "sac" in text or (text == "selective" and trained.habits.selects_products):
        mode = _COMPILED_EVERY_SECOND_PRODUCT if run.compiled else _EVERY_SECOND_PRODUCT
        return (*RECOMPUTE, mode), (len(RECOMPUTE),)
    if text == "selective" and "megatron" in trained.stack.name:
        return RECOMPUTE, (named["attention"],)
    if text in named:
        return RECOMPUTE, (named[text],)
    if text == "minimal":  # MaxText: the results of all products are kept
        return RECOMPUTE, (named["pointwise"],)
    if text == "qkv_proj_offloaded":
        parts = RECOMPUTE[named["full"]].parts - {"projection"}
        return (*RECOMPUTE, Recompute(text, parts)), (len(RECOMPUTE),)
    inside = re.sub(r"^selective\((.*)\)$", r"\1", text)
    names = [name.strip() for name in inside.split(",")]
    if not all(name in _NAMES for name in names):
        return _open_modes(trained, assumptions, f"recomputation called {run.recompute!r}")
    parts = frozenset().union(*(_NAMES[name] for name in names))
    if trained.habits.recomputes_activation:
        parts |= _NAMES["act"]
    return (*RECOMPUTE, Recompute(text, parts)), (len(RECOMPUTE),)


def _open_modes(
    trained: RunSoftware, assumptions: list[str], open_field: str
) -> tuple[tuple[Recompute, ...], tuple[int, ...]]:
    assumptions.append(f"{open_field}: the fastest that fits")
    usual = "selective" if trained.stack.attention.flash else "attention"
    return RECOMPUTE, tuple(i for i, mode in enumerate(RECOMPUTE) if mode.name in ("none", usual, "full"))
