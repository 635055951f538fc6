"""``[evaluation]``, ``[sample]`` and ``[expect]``: held-out text, text that is generated, and the weights that others have got."""

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


@dataclass(frozen=True)
class ExpectSpec:
    """The weights that a run has had elsewhere, with which the result is compared."""

    weights: Annotated[tuple[str, ...], FLEET] = ()
    """Each "RUN SHA256": the first 8 digits or more of a run's key, as in its directory's name, and the SHA-256 of its weights at the end. The key is that
    of the run's own fields and its data, so a changed run or another dataset is not compared."""
