"""How long a store is asked again for what may still succeed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long what may pass is tried again: ``retries`` times, with pauses that double from ``first_pause_s`` to
    ``longest_pause_s`` and are spread at random, and nothing is begun again after ``timeout_s``."""

    retries: int = 10
    first_pause_s: float = 0.1
    longest_pause_s: float = 15.0
    timeout_s: float = 180.0
