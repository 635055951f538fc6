"""Which models an engine can serve."""

from __future__ import annotations

from phalanx.model.block import Block
from phalanx.model.layers.attention import CausalCore
from phalanx.model.transformer import Transformer
from phalanx.serve.engine.errors import EngineError


def require_supported(model: Transformer, *, exact: bool) -> None:
    """Raises EngineError for a model that cannot be served, exactly if asked; the message says why and what to do."""
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "the model's layers"
        core = block.attention.core
        if not isinstance(core, CausalCore):
            raise EngineError(
                f"layer {layer} divides attention over ranks or tiles, which the engine does not: build the model whole"
            )
        if exact and core.score.cap:
            raise EngineError(
                "model.score_cap bends scores by products whose rows depend on each other, so numerics cannot be exact: serve with "
                "numerics fast"
            )
