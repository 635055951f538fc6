"""How the processes of a run ended, as whoever started them tells it to the user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How the ranks of a run ended."""

    status: str
    """"finished", "stopped" or "failed"."""
    failed_rank: int | None = None
    exit_code: int = 0
    message: str = ""
    """What the failed rank last printed."""
