"""Repeated data: a loss surface on ``unique_tokens`` of text that is read again when it ends.

Muennighoff et al. 2023 (arXiv:2305.16264), equations 5 and 6: the n-th reading of a token is worth less, and so is a parameter beyond
those that the unique text can fill. Both decay exponentially; the constants (R*_D, R*_N of appendix A) were checked on 2026-11-23.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.plan.scaling.laws import MUENNIGHOFF, LossSurface

REPEATS = 15.387756
"""R*_D: after so many repetitions a further one is worth 1/e of a first reading."""
EXCESS = 5.309743
"""R*_N: the same of parameters, in multiples of those that the unique text fills."""


def effective(unique: float, whole: float, decay: float) -> float:
    """The worth of ``whole``, of which ``unique`` is new: all of it up to ``unique``, at most ``(1 + decay) * unique``."""
    if whole <= unique:
        return whole
    return unique * (1 + decay * -math.expm1(-(whole / unique - 1) / decay))


@dataclass(frozen=True)
class RepeatedData:
    """A law on limited text. With as many tokens as there are, and the size that suits them, it is the law itself."""

    surface: LossSurface
    unique_tokens: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token after ``tokens`` tokens, of which at most ``unique_tokens`` are new."""
        # The size that the unique text fills is that of the law which the constants were fitted with.
        filled = MUENNIGHOFF.law.optimal_size(self.unique_tokens)
        worth = effective(filled, parameters, EXCESS)
        return self.surface.loss(worth, effective(self.unique_tokens, tokens, REPEATS))
