"""Keys and values in one buffer, so that one message carries both."""

from __future__ import annotations

import math

import torch
from torch import Size, Tensor


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Both, flat, one after the other."""
    return torch.cat((key.flatten(), value.flatten()))


def unpack(packed: Tensor, key: Size, value: Size) -> tuple[Tensor, Tensor]:
    """Views of a packed buffer, with these shapes."""
    keys = math.prod(key)
    return packed[:keys].view(key), packed[keys:].view(value)
