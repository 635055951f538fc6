"""Statistics of layers as one line of the log."""

from __future__ import annotations

from phalanx.observe.display.state import describe_statistics
from phalanx.observe.events import LayerStatistics


def test_the_final_norm_is_named_without_its_only_group() -> None:
    body = LayerStatistics(
        5, ["0", "norm"], {"attention.gradient_norm": [0.1, None], "norms.gradient_norm": [0.2, 0.4]}
    )
    assert describe_statistics(body) == "largest gradient 0.4 (the final norm)"
