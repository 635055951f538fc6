"""Shards: a rank's boxes with their tensors, and the other ranks that have the same boxes.

Training makes them from its parameters and optimizer state (``train/step/state.py``).
"""

from dataclasses import dataclass

import torch

from phalanx.checkpoint.format.boxes import Box


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks with the same box: this is copy ``index`` of ``count``; ``group`` distinguishes sets of ranks."""

    index: int = 0
    count: int = 1
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A box and the tensor with its elements, of the box's shape and dtype, on any device."""

    box: Box
    tensor: torch.Tensor
    copies: Copies = Copies()

    def part(self, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, which is within this shard, as a view."""
        return self.tensor if box == self.box else self.tensor[box.slices_in(self.box)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of ``dtype_name``, for the dtypes of ``boxes.ITEMSIZE``. Raises AttributeError or TypeError for another name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype
