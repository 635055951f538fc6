"""Decoding with weights that are read for each pass, from host memory or disk: the bound in closed form.

With ``r_l`` and ``c_l`` the seconds to read and to compute layer l, and k buffers, reading layer l begins when layer l - 1
has been read and layer l - k computed; computing it when it has been read and layer l - 1 computed. For equal layers a pass
takes the larger of both sums, so tokens a second are at most ``B (1 + a) / max(W / BW, t_compute(B))``.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.model.facts.shape import numbered_parameters
from phalanx.run.spec import ModelSpec


def pass_s(read_s: Sequence[float], compute_s: Sequence[float], buffers: int = 2, passes: int = 8) -> float:
    """Seconds of one pass in the long run, by the recurrence; the reader runs on into the next pass."""
    layers = len(read_s)
    read_end: list[float] = []
    compute_end: list[float] = []
    for turn in range(layers * passes):
        layer = turn % layers
        free = compute_end[turn - buffers] if turn >= buffers else 0.0
        read_end.append(max(read_end[-1] if turn else 0.0, free) + read_s[layer])
        compute_end.append(max(read_end[-1], compute_end[-1] if turn else 0.0) + compute_s[layer])
    half = layers * (passes // 2)
    return (compute_end[-1] - compute_end[half - 1]) / (passes - passes // 2)


def tokens_per_s(
    rows: float, streamed_bytes: float, bytes_per_s: float, compute_s: float, accepted: float = 0.0
) -> float:
    """Upper bound of tokens a second of ``rows`` requests."""
    return rows * (1 + accepted) / max(streamed_bytes / bytes_per_s, compute_s)


def touched_experts(experts: float, per_token: float, rows: float) -> float:
    """Mean number of ``experts`` that at least one of ``rows`` tokens chooses, if each chooses ``per_token`` uniformly."""
    touched: float = experts * (1 - (1 - per_token / experts) ** rows)
    return touched


def streamed_bytes(model: ModelSpec, bytes_per_weight: float, rows: float) -> float:
    """Bytes of blocks that a pass of ``rows`` reads: all of them, but of experts those that the rows touch."""
    total = 0.0
    for part, number in numbered_parameters(model):
        if part.section == "block":
            met = 1.0
            if part.stacked:
                met = touched_experts(part.shape[0], part.per_token, rows) / part.shape[0]
            total += number * part.numel * met * bytes_per_weight
    return total
