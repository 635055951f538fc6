"""What an engine refuses."""

from __future__ import annotations


class RequestError(ValueError):
    """A request cannot be computed; the message says why and what to change, ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(ValueError):
    """A model cannot be served as asked; the message says why and what to change."""


class PartLostError(RuntimeError):
    """A process that had layers of the model is gone, and the engine computes nothing any more; the message says which and why."""
