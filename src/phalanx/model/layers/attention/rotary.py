"""Rotary position embeddings (Su et al., arXiv 2104.09864), scaled to longer contexts by position interpolation, Llama 3, YaRN or LongRoPE.

Pairs are element ``i`` and element ``i + head_dim / 2`` of a head, the layout of the published Llama and Qwen weights in Hugging Face
format, so that those load unchanged. (DeepSeek's latent attention documents its own layout.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.hardware.kernels.layer_kernel import layer_kernels
from phalanx.hardware.portable.correctly_rounded import log
from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.facts.shape import rotary_temperature
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec, RopeScalingSpec


def inverse_frequencies(
    spec: ModelSpec, device: torch.device, *, windowed: bool = False, length: int = 0
) -> Tensor:
    """Return the radians per position of each pair of rotated elements, fp32, scaled to longer contexts as
    ``spec.rope_scaling`` has it.

    ``windowed`` layers with a theta of their own are not scaled. ``length`` in tokens selects LongRoPE's long or
    short factors.
    """
    width = attention_kind(spec).rotated_width(spec)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width  # (pairs,)
    if windowed and spec.window_rope_theta:
        return 1.0 / spec.window_rope_theta**exponents
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        factors = scaling.long_factors if length > scaling.original_max_seq_len else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * spec.rope_theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _stretch_by_turns(frequencies, scaling, spec.rope_theta)
    return _stretch(frequencies, scaling)


def _stretch(frequencies: Tensor, scaling: RopeScalingSpec) -> Tensor:
    """Return the frequencies ``(pairs,)`` with low ones divided by ``factor`` and high ones unchanged, blended
    linearly in between by turns in the original context (arXiv 2407.21783).
    """
    # (pairs,): original context over wavelength
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Without a band between the two, the switch is hard.
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns >= low).float()
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _stretch_by_turns(frequencies: Tensor, scaling: RopeScalingSpec, theta: float) -> Tensor:
    """Return YaRN's frequencies (arXiv 2309.00071, section 3.2): like ``_stretch``, but blended linearly in the index
    of the pair, between those with ``beta_fast`` and ``beta_slow`` turns.
    """
    pairs = len(frequencies)

    def pair_that_turns(turns: float) -> float:
        return pairs * log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, 2 * pairs - 1)
    numbers = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)  # (pairs,)
    blend = ((numbers - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return blend * frequencies / scaling.factor + (1 - blend) * frequencies


def rotation(
    spec: ModelSpec, positions: Tensor, *, windowed: bool = False, length: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine at ``positions`` ``(seq,)``: each ``(seq, rotated elements)``, fp32; the table's second
    half repeats the first.

    ``windowed`` selects those of layers with a sliding window; ``length`` is that of the full sequence, in tokens.
    Scaled as ``spec.rope_scaling`` has it, and times its temperature, except for windows with a theta of their own.
    """
    frequencies = inverse_frequencies(spec, positions.device, windowed=windowed, length=length)
    angles = positions.float()[:, None] * frequencies[None, :]  # (seq, rotated elements / 2)
    angles = torch.cat((angles, angles), dim=-1)  # (seq, rotated elements)
    cos, sin = angles.cos(), angles.sin()
    stretched = not (windowed and spec.window_rope_theta)
    temperature = rotary_temperature(spec.rope_scaling) if stretched else 1.0
    return (cos, sin) if temperature == 1 else (cos * temperature, sin * temperature)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of ``x`` ``(batch, heads, seq, head_dim)`` by their positions' angles; keeps ``x``'s
    dtype.

    The tables ``(seq, rotated elements)`` determine the number of rotated elements. Others are unchanged. Returns a new
    tensor.
    """
    if cos.shape[-1] < x.shape[-1]:
        rotated, unrotated = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat((rotate(rotated, cos, sin), unrotated), dim=-1)  # (batch, heads, seq, head_dim)
    if x.device.type == "cpu" and x.dtype == cos.dtype == torch.float32 and not torch.compiler.is_compiling():
        return apply_function(_EagerRotation, x, cos, sin)
    first, second = x.chunk(2, dim=-1)  # (batch, heads, seq, head_dim / 2) each
    turned = torch.cat((-second, first), dim=-1)  # (batch, heads, seq, head_dim)
    return (x * cos + turned * sin).to(x.dtype)


class _EagerRotation(torch.autograd.Function):
    """Rotation for fp32 on a CPU, in one pass over memory forward and backward instead of a dozen."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return layer_kernels(x, cos, sin).turned(x, cos, sin)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return layer_kernels(upstream[0], cos, sin).turned(upstream[0], cos, sin, back=True), None, None
