"""``[statistics]``: what is measured of each layer during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.run.fields import FLEET, NOT_NEGATIVE


@dataclass(frozen=True)
class StatisticsSpec:
    """Statistics of each layer: norms of gradients, weights and updates, activations, routers."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 100
    """Steps between two measurements of every layer; a step that is not finite is measured too. 0 means never. A measured step takes
    up to a third longer."""
