"""Layers and groups of parameters, by which norms are reported, and the figures of statistics.

A layer is a block of the model, the embedding, the final norm, the output projection or a prediction ahead. A group is what a layer's
parameters belong to: "attention", "feed_forward", "experts", "router", "norms", or the layer's own name where it has one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.run.kinds.operations import Parameter

NORMS = ("gradient_norm", "weight_norm", "update_norm", "update_ratio")
"""Figures of each group of parameters of a layer."""
RMS, KURTOSIS, LARGEST_LOGIT, DEAD_UNITS = (
    "residual.rms",
    "residual.kurtosis",
    "attention.largest_logit",
    "feed_forward.dead_units",
)
ACTIVATIONS = (RMS, KURTOSIS, LARGEST_LOGIT, DEAD_UNITS)
"""Figures of a forward pass."""
LARGEST_SHARE, ENTROPY, IDLE_EXPERTS = "router.largest_share", "router.entropy", "experts.idle"
"""Figures of the tokens of each expert."""

_GROUP_OF_PART = {"attention": "attention", "ffn": "feed_forward"}


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module by its name: "0" for ``blocks.0.ffn.up.weight``."""
    first, *rest = name.split(".")
    if first == "blocks":
        return rest[0]
    return f"mtp.{rest[0]}" if first == "mtp" else first


def layers_of(names: Iterable[str]) -> list[str]:
    """Return the layers of all parameters, in the order of the model: the embedding first, norm and head last."""
    layers = dict.fromkeys(map(layer_of, names))
    ends = [layer for layer in ("norm", "head") if layer in layers]
    return [*(layer for layer in layers if layer not in ends), *ends]


def group_of(name: str, kind: Parameter) -> str:
    """Return the group of a parameter: norms, router, experts, a part of a layer, or outside of layers the module's name."""
    first, *rest = name.split(".")
    if kind.kind == "norm":
        return "norms"
    if kind.kind == "router" or ".router." in name:
        return "router"
    if first not in ("blocks", "mtp"):
        return first
    inside = [part for part in rest[1:] if part != "block"]
    if inside[:1] == ["ffn"] and len(inside) > 1 and inside[1] in ("experts", "shared", "shared_gate"):
        return "experts"
    return _GROUP_OF_PART.get(inside[0], "other")


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one group of one layer, over all ranks."""

    layer: str
    group: str
    names: tuple[str, ...]
    elements: int


def parameter_groups(kinds: Mapping[str, Parameter]) -> list[ParameterGroup]:
    """Return all parameters of a model by layer and group, with their elements, without the biases that balance experts."""
    members: dict[tuple[str, str], list[str]] = {}
    for name, kind in kinds.items():
        if kind.kind != "balance":
            members.setdefault((layer_of(name), group_of(name, kind)), []).append(name)
    return [
        ParameterGroup(layer, group, tuple(names), sum(kinds[name].numel for name in names))
        for (layer, group), names in members.items()
    ]
