"""Reading statistics of layers: the first layer that was not finite, the layer with the largest value of a figure, one line for a log."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.observe.events import LayerStatistics

_BACKWARD = (".gradient_norm", ".update_norm", ".update_ratio")
"""Figures that are not finite in all earlier layers too, since gradients pass from the last layer to the first."""


def values_of(body: LayerStatistics, figure: str) -> dict[str, float]:
    """Return the values of a figure by layer, in the order of the model, without layers that lack it."""
    return {
        layer: value
        for layer, value in zip(body.layers, body.figures.get(figure, ()), strict=False)
        if value is not None
    }


def groups_of(body: LayerStatistics, figure: str) -> list[str]:
    """Return the groups that have a figure of this name, such as "attention" for "gradient_norm"."""
    ending = f".{figure}"
    return [name.removesuffix(ending) for name in body.figures if name.endswith(ending)]


def first_nonfinite(body: LayerStatistics) -> tuple[str, str] | None:
    """Return the layer and the figure in which the step was first not finite; ``None`` if all figures are finite.

    Weights and the forward pass come first, in the order of the model. Then come gradients, from the last layer to the first.
    """
    cells = list(_nonfinite_cells(body))
    forward = [cell for cell in cells if not cell[1].endswith(_BACKWARD)]
    backward = [cell for cell in cells if cell[1].endswith(".gradient_norm")]
    order = body.layers.index
    if forward:
        # A weight that is not finite makes the same layer's activations so: name the weight.
        return min(forward, key=lambda cell: (order(cell[0]), not cell[1].endswith(".weight_norm")))
    return max(backward, key=lambda cell: order(cell[0]), default=None)


def _nonfinite_cells(body: LayerStatistics) -> Iterator[tuple[str, str]]:
    """Yield layer and figure of each value that is not finite."""
    for figure in body.figures:
        for layer, value in values_of(body, figure).items():
            if not math.isfinite(value):
                yield layer, figure


def described_layer(layer: str) -> str:
    """Return a layer's name as text: "layer 3", "the embedding"."""
    return (
        f"layer {layer}" if layer[:1].isdigit() else f"the {layer}" if layer != "norm" else "the final norm"
    )


def describe_statistics(body: LayerStatistics) -> str:
    """Return the largest gradient, residual stream and logit, or the first layer that was not finite, as one line."""
    bad = first_nonfinite(body)
    if bad is not None:
        return f"{described_layer(bad[0])} is the first that is not finite ({bad[1]})"
    parts = []
    gradients = {
        (layer, group): value
        for group in groups_of(body, "gradient_norm")
        for layer, value in values_of(body, f"{group}.gradient_norm").items()
    }
    if gradients:
        layer, group = max(gradients, key=lambda cell: gradients[cell])
        place = described_layer(layer) + ("" if group == layer or layer == "norm" else f" {group}")
        parts.append(f"largest gradient {gradients[layer, group]:.3g} ({place})")
    for figure, name in (("residual.rms", "residual stream"), ("attention.largest_logit", "attention logit")):
        values = values_of(body, figure)
        if values:
            layer = max(values, key=lambda name: values[name])
            parts.append(f"{name} {values[layer]:.3g} ({described_layer(layer)})")
    return " · ".join(parts)
