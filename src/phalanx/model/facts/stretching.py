"""Numbers that follow from how a rotary embedding is stretched: temperatures of attention, and where LongRoPE changes over."""

from __future__ import annotations

import math

from phalanx.run.spec import ModelSpec, RopeScalingSpec


def _temperature(factor: float, strength: float) -> float:
    """By how much attention is sharpened over a context ``factor`` times as long (arXiv 2309.00071, equation 22)."""
    return 0.1 * strength * math.log(factor) + 1.0


def rotary_temperature(scaling: RopeScalingSpec | None) -> float:
    """The factor of the rotary tables: 1, but for YaRN and LongRoPE (arXiv 2402.13753, as in Phi-3: arXiv 2404.14219)."""
    if scaling is not None and scaling.kind == "longrope":
        return scaling.temperature or math.sqrt(
            1 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len)
        )
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.temperature:
        return scaling.temperature
    above, below = scaling.mscale or 1.0, scaling.mscale_all_dim
    return _temperature(scaling.factor, above) / _temperature(scaling.factor, below)


def softmax_temperature(scaling: RopeScalingSpec | None) -> float:
    """The factor of latent attention's scores: 1, but for DeepSeek's YaRN with ``mscale_all_dim``."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def longest_short(spec: ModelSpec) -> int:
    """Tokens of the longest sequence that is rotated by LongRoPE's short factors; 0 if its length changes nothing."""
    scaling = spec.rope_scaling
    return scaling.original_max_seq_len if scaling is not None and scaling.kind == "longrope" else 0
