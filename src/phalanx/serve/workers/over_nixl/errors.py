"""What cannot be done over NIXL."""

from __future__ import annotations

from phalanx.serve.engine.errors import EngineError


class NixlError(EngineError):
    """NIXL is not there, does not begin, or did not bring what it was asked for; the message says which. What was to come can come another way."""
