"""Seconds of operations on one accelerator: matrix products, attention, and kernels bound by memory.

A matrix product is timed by a law with five fitted constants,

    t = launch + (compute^4 + memory^4)^(1/4)
    compute = 2 M' N' (K + K0) waste / (e P),     memory = bytes / (e_b W)

where M' and N' are M and N rounded up to tiles of 128, and ``waste`` is what the last, partly filled wave of tiles over
the multiprocessors loses. The power of four joins the two limits smoothly (their maximum is the roofline of Williams et al.,
2009; tile and wave quantization as in NVIDIA's "Matrix Multiplication Background User's Guide"). The constants come from
measurements (``phalanx.hardware.profile``), the peaks from the accelerator. All functions take scalars or arrays and
broadcast.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.hardware.cluster import HardwareError
from phalanx.hardware.profile import Profile

Numbers: TypeAlias = npt.ArrayLike
Seconds: TypeAlias = npt.NDArray[np.float64]

_TILE = 128
_POWER_HEADROOM = 0.975
"""Share of the power limit at which large products settle: 1.17 of 1.2 kW on GB200 (ai-dynamo/aiconfigurator's data)."""
_USUAL_WIDTHS, _LATENT_WIDTHS = 2 * 128, 192 + 128
"""Widths of a head's query and value together, in the measurements of attention."""
_OPERAND_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625}
"""Bytes of one number as a product reads it; four bits have a scale of one byte for every sixteen numbers (NVFP4)."""
_RESULT_BYTES = {"fp32": 4.0, "tf32": 4.0}


def matmul_s(
    profile: Profile,
    format: str,  # noqa: A002
    m: Numbers,
    n: Numbers,
    k: Numbers,
    batch: Numbers = 1,
    result_bytes: float = 0.0,
) -> Seconds:
    """Seconds of ``batch`` equal products (m, k) x (k, n) in one kernel; an empty product takes none.

    ``result_bytes`` are moved for each element of the result, where it is not just written in the usual format: an fp32 sum
    that is read and written takes eight. Raises ``HardwareError`` if the accelerator does not multiply in ``format``.
    """
    rate = sustained_flops(profile, format)
    fit = profile.constants.matmul[fitted_format(profile, format)]
    m, n, k, batch = (np.asarray(size, dtype=np.float64) for size in (m, n, k, batch))
    tiles = batch * np.ceil(m / _TILE) * np.ceil(n / _TILE)
    waste = _wave_waste(tiles, profile.accelerator.multiprocessors, fit.wave_share)
    compute = 2 * tiles * _TILE**2 * (k + fit.k_half) * waste / rate
    written = result_bytes or _RESULT_BYTES.get(format, 2.0)
    moved = batch * (_OPERAND_BYTES[format] * (m + n) * k + written * m * n)
    memory = moved / (fit.memory_efficiency * profile.accelerator.memory_bytes_per_s.value)
    return np.where(batch * m * n * k > 0, fit.launch_s + np.sqrt(np.hypot(compute**2, memory**2)), 0.0)


def grouped_matmul_s(
    profile: Profile,
    format: str,  # noqa: A002
    groups: Numbers,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    result_bytes: float = 0.0,
    streams: int = 0,
) -> Seconds:
    """Seconds of ``groups`` products (m, k) x (k, n), as a rank's experts take them: in one kernel, or one each on
    ``streams``.

    ``m`` is the mean of the groups' rows on the rank that is waited for: the caller multiplies its imbalance in.
    ``streams`` of 0 is one kernel.
    """
    single = matmul_s(profile, format, m, n, k, batch=groups, result_bytes=result_bytes)
    launch = profile.constants.matmul[fitted_format(profile, format)].launch_s
    starts = np.maximum(np.asarray(groups, dtype=np.float64) / streams, 1) if streams else 1.0
    seconds = launch * starts + (single - launch) / profile.constants.grouped_efficiency
    return np.where(single > 0, seconds, 0.0)


def attention_s(
    profile: Profile,
    format: str,  # noqa: A002
    flops: Numbers,
    backward: bool,
    widths: int = 0,
    latent: bool = False,
    tokens: Numbers = np.inf,
) -> Seconds:
    """Seconds of fused attention that does ``flops`` in this direction.

    Forward 4 s_q s_kv a d_h (half if causal); backward 2.5 times that, because it recomputes the scores (Dao 2023,
    arXiv 2307.08691, section 4.1). Each score takes an exponential in either direction, whatever the heads' width: where the
    special function units' rate is known, that part of the measured time is theirs, and the rest scales with width and format
    (arXiv 2603.05451, section 3: on Blackwell the two limits are alike at a width of 128). All of it takes
    (1 + half_tokens / tokens) times as long: what a block of queries begins and ends with does not shrink with the sequence.

    Args:
        profile: The accelerator and its constants.
        format: Format of the operands.
        flops: Floating-point operations.
        backward: True for the backward pass.
        widths: Widths of a head's query and value together; 0 means those that were measured.
        latent: True if queries are wider than values (latent attention).
        tokens: Length of the sequence, or of the piece of it that one kernel attends to.
    """
    fit = profile.constants.attention
    flops = np.asarray(flops, dtype=np.float64)
    measured = _LATENT_WIDTHS if latent else _USUAL_WIDTHS
    products_of_a_score = 5 if backward else 2
    exponential_rate = profile.accelerator.exponentials_per_s
    wide = "bf16" if "bf16" in profile.accelerator.flops and format != "fp32" else format
    each = 1 / min(fit.share(backward, latent) * _peak(profile, wide), _power_limited(profile, wide))
    softmax = 0.0
    if fit.exponentials_per_s and exponential_rate:
        waited = 1.0 if backward else fit.exponentials_forward
        each = max(each - waited / (products_of_a_score * measured * fit.exponentials_per_s), 0.0)
        softmax = waited / (products_of_a_score * (widths or measured) * exponential_rate.value)
    seconds = flops * (each * _peak(profile, wide) / _peak(profile, format) + softmax)
    seconds = seconds * (1 + fit.half_tokens / np.asarray(tokens, dtype=np.float64))
    return np.where(flops > 0, fit.launch_s + seconds, 0.0)


def memory_bound_s(profile: Profile, bytes: Numbers, kernels: Numbers = 1) -> Seconds:  # noqa: A002
    """Seconds of ``kernels`` kernels that read and write ``bytes`` in all."""
    rate = profile.constants.memory.efficiency * profile.accelerator.memory_bytes_per_s.value
    return (
        np.asarray(bytes, dtype=np.float64) / rate + np.asarray(kernels) * profile.constants.memory.kernel_s
    )


def host_copy_s(profile: Profile, bytes: Numbers) -> Seconds:  # noqa: A002
    """Seconds to copy ``bytes`` to or from the host's memory."""
    return np.asarray(bytes, dtype=np.float64) / profile.accelerator.host_bytes_per_s.value


def sustained_flops(profile: Profile, format: str) -> float:  # noqa: A002
    """FLOP/s that a large matrix product sustains: the fitted share of the peak, within the power limit."""
    fit = profile.constants.matmul[fitted_format(profile, format)]
    return min(fit.efficiency * _peak(profile, format), _power_limited(profile, format))


def fitted_format(profile: Profile, format: str) -> str:  # noqa: A002
    """Return the format whose fit is used for ``format``: itself if measured, else the nearest measured one.

    Raises ``HardwareError`` if there is none.
    """
    near = {"fp16": ("bf16",), "tf32": ("bf16", "fp32"), "fp32": ("tf32", "bf16"), "int8": ("fp8", "bf16")}
    options = (format, *near.get(format, ("bf16", "fp16", "fp32")))
    fitted = next((option for option in options if option in profile.constants.matmul), None)
    if fitted is None:
        raise HardwareError(
            f"profile {profile.constants.name!r} has no constants for {format!r}: it has {', '.join(profile.constants.matmul)}; "
            "calibrate the accelerator in this format"
        )
    return fitted


def _peak(profile: Profile, format: str) -> float:  # noqa: A002
    """Return peak operations per second in a format. Raises ``HardwareError`` if the accelerator lacks it."""
    peak = profile.accelerator.flops.get(format)
    if peak is None:
        formats = ", ".join(profile.accelerator.flops)
        raise HardwareError(
            f"{profile.accelerator.name} does not multiply in {format!r}: choose a precision among {formats}"
        )
    return peak.value


def _power_limited(profile: Profile, format: str) -> float:  # noqa: A002
    """Peak FLOP/s, or the rate at which the power limit is reached if that is lower; 0 W is a limit that is not known."""
    peak, joules = _peak(profile, format), profile.constants.joules_per_flop.get(format)
    power_w = profile.accelerator.power_w.value
    return min(peak, _POWER_HEADROOM * power_w / joules) if joules and power_w else peak


def _wave_waste(tiles: Seconds, multiprocessors: int, share: float) -> Seconds:
    """Time over that of tiles dealt evenly to multiprocessors: the last, partly filled wave takes as long as a full one."""
    if multiprocessors == 0 or share == 0:
        return np.ones_like(tiles)
    waves = np.maximum(tiles, 1) / multiprocessors
    return 1 + share * (np.ceil(waves) / waves - 1)
