"""``[evaluation]`` and ``[sample]``: held-out text, and text that is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.run.fields import FLEET, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class EvalSpec:
    """Evaluation on held-out text."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps between evaluations; 0 means only at the end."""
    sequences: Annotated[int, FLEET, POSITIVE] = 64
    """Held-out sequences scored by an evaluation during the run, or all if there are fewer."""
    final_sequences: Annotated[int, FLEET, NOT_NEGATIVE] = 4096
    """Held-out sequences scored after the last step; 0 means all. The figure for xz is for all held-out text."""


@dataclass(frozen=True)
class SampleSpec:
    """The text that is generated when the run has ended."""

    prompt: Annotated[str, FLEET] = ""
    """Prompt that the sample continues; empty means no sample."""
    tokens: Annotated[int, FLEET, POSITIVE] = 120
    """Number of tokens to generate."""
    temperature: Annotated[float, FLEET, NOT_NEGATIVE] = 0.8
    """Sampling temperature; 0 takes the most likely token (greedy)."""
