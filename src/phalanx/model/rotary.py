"""Rotary position embeddings (Su et al., arXiv 2104.09864), with Llama 3's stretching of low frequencies.

Pairs are element ``i`` and element ``i + head_dim / 2`` of a head, the layout of the published Llama and Qwen
weights in Hugging Face format, so that those load unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.run.spec import ModelSpec, RopeScalingSpec


def inverse_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Radians per position of each pair: ``(head_dim / 2,)``, fp32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    return frequencies if spec.rope_scaling is None else _stretch(frequencies, spec.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScalingSpec) -> Tensor:
    """Divides low frequencies by ``factor``, keeps high ones, blends linearly between (arXiv 2407.21783)."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotation(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine at ``positions`` ``(seq,)``: each ``(seq, head_dim)``, fp32, both halves alike."""
    angles = positions.float()[:, None] * inverse_frequencies(spec, positions.device)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``(batch, heads, seq, head_dim)`` turned by its positions' angles; keeps ``x``'s dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
