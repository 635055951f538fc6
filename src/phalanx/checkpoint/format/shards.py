"""Shards: the boxes that a rank holds, with their tensors, and which other ranks hold the same.

A training makes them from its parameters and optimizer state (``train/step/state.py``).
"""

from dataclasses import dataclass

import torch

from phalanx.checkpoint.format.boxes import Box


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks that hold the same box: this is copy ``index`` of ``count``; ``group`` tells sets of holders apart."""

    index: int = 0
    count: int = 1
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A box and the tensor that holds its elements, of the box's shape and dtype, on any device."""

    box: Box
    tensor: torch.Tensor
    copies: Copies = Copies()

    def part(self, box: Box) -> torch.Tensor:
        """The elements of ``box``, which lies within this shard, as a view."""
        return self.tensor if box == self.box else self.tensor[box.slices_in(self.box)]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of ``dtype_name``, for the dtypes of ``boxes.ITEMSIZE``."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype
