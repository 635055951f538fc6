"""What opening a served model gives: an engine, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.run.spec import ModelSpec
from phalanx.serve.gateway.worker import Engine, Identity, Streaming


@dataclass(frozen=True)
class OpenedEngine:
    """An engine of a run or a pack, and what it computes."""

    engine: Engine
    identity: Identity
    spec: ModelSpec
    step: int | None = None
    """The step whose weights compute; ``None`` for those of a pack."""
    note: str = ""
    """What whoever started the server is told."""
    streaming: Callable[[], Streaming] | None = None
    """What streaming has done so far, where weights are streamed."""
    trouble: Callable[[], str] | None = None
    """Why nothing can be computed any more, empty if it can, where that depends on other processes; from any thread."""
