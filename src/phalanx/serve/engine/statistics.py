"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStatistics:
    """How much an engine does and did."""

    running: int
    waiting: int
    pages_used: int
    pages: int
    rows_last_step: int
    cached_tokens: int
    """Tokens that were not computed because their pages were held, since the engine began."""
    preempted: int
    recomputed_pages: int
    swaps: int
    """How often other weights took over."""
    drafted: int
    """Tokens that were guessed and computed."""
    accepted: int
    """Guessed tokens that the model drew."""
