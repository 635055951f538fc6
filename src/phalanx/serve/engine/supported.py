"""Which models an engine can serve, and which requests."""

from __future__ import annotations

from phalanx.model.block import Block
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.transformer import Transformer
from phalanx.serve.engine.errors import EngineError, RequestError
from phalanx.traffic.requests import Request


def require_supported(model: Transformer, *, drafts: int = 0) -> None:
    """Raises EngineError for a model that cannot be served; the message says why and what to do."""
    if drafts > len(model.mtp):
        raise EngineError(
            f"{drafts} tokens cannot be drafted in a step: the model predicts {len(model.mtp)} ahead (model.mtp_depth)"
        )
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "the model's layers"
        core = block.attention.core
        if not isinstance(core, CausalCore):
            raise EngineError(
                f"layer {layer} divides attention over ranks or tiles, which the engine does not: build the model whole"
            )


def require_computable(request: Request, vocab: int, context: int) -> None:
    """Raises RequestError for a request that a model of ``vocab`` tokens and a ``context`` cannot compute."""
    if not request.prompt:
        raise RequestError("the prompt is empty: begin with the end-of-document token", "prompt")
    for field_name, tokens in (("prompt", request.prompt), ("told", request.told)):
        for token in tokens:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token id {token} is outside the model's vocabulary of {vocab}: encode with the run's own tokenizer",
                    field_name,
                )
    if request.max_tokens <= len(request.told):
        raise RequestError(
            f"max_tokens = {request.max_tokens}, and {len(request.told)} were told: ask for at least one more",
            "max_tokens",
        )
    length = len(request.prompt) + request.max_tokens
    if length > context:
        raise RequestError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones do not fit into a context of {context}: "
            "shorten the prompt, or ask for fewer tokens",
            "prompt" if len(request.prompt) >= context else "max_tokens",
        )
