"""Errors of an engine."""

from __future__ import annotations

NOT_EXACT = (
    "exact numerics are computed by kernels for CPUs: serve with --numerics fast, or with --device cpu"
)
"""Why exact numerics are refused on a GPU."""
ONLY_STREAMED = "--stream reads weights into the host's memory, where the CPU computes with them: leave out --stream, or --device"
"""Why streamed weights are refused on a GPU."""


class RequestError(ValueError):
    """A request cannot be computed; the message says why and what to change, ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(ValueError):
    """A model cannot be served as asked; the message says why and what to change."""


class NotExactError(EngineError):
    """This process cannot compute with exact numerics; the message has the reason and the remedy."""


class PartLostError(RuntimeError):
    """A process that had layers of the model is gone, and the engine computes nothing any more; the message says which and why."""


class DeviceMemoryError(EngineError):
    """A GPU has no memory for what was asked of it; the message says for what, and what would help."""
