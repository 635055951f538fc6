"""Matrices stored in mxfp4, as gpt-oss publishes its experts, read as if they were stored in full.

32 neighboring elements share a scale of 8 bits, a power of two, and have 4 bits each: a sign and one of eight magnitudes (Open
Compute Project, Microscaling Formats v1.0, section 5). A stack of matrices ``(experts, rows, columns)`` is published as
``NAME_blocks`` ``(experts, rows, columns / 32, 16)`` and ``NAME_scales`` ``(experts, rows, columns / 32)``, both of bytes, of which
the low half is the first element. Every value is exact in fp32. Unquantized the same stack is published with rows and columns exchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.folders import StoredTensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32
_BIAS = 127  # of the exponent


@dataclass(frozen=True)
class PackedStack:
    """A stack of matrices in blocks of mxfp4 that is read like one of shape ``(experts, columns, rows)``."""

    blocks: StoredTensor
    scales: StoredTensor

    def get_dtype(self) -> str:
        """The format of the numbers that are read."""
        return "F32"

    def get_shape(self) -> list[int]:
        """The shape of the stack as it is published unquantized."""
        experts, rows, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * _BLOCK, rows]

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        """A part of it, fp32."""
        assert isinstance(part, tuple), "a slice for each dimension"
        experts, columns, rows = part
        first = columns.start // _BLOCK
        around = (experts, rows, slice(first, -(-columns.stop // _BLOCK)))
        values = unpack(self.blocks[around], self.scales[around])
        begin = columns.start - first * _BLOCK
        return values[..., begin : begin + columns.stop - columns.start].transpose(1, 2)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``blocks`` ``(..., n, 16)`` with their ``scales`` ``(..., n)``, both uint8, as fp32 ``(..., 32 n)``."""
    table = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1)  # (..., n, 16, 2)
    values = table[halves.int()].flatten(-2)  # (..., n, 32)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - _BIAS).flatten(-2)


def unpacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a folder by name, with each pair of blocks and scales as the stack that they stand for.

    Raises HuggingFaceError for blocks without scales, or of other shapes or formats.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        stack = name.removesuffix("_blocks")
        scales = tensors.get(f"{stack}_scales")
        if scales is None:
            raise HuggingFaceError(f"{stack}_scales is missing; copy or download the folder again")
        *leading, size = blocks.get_shape()
        formats = {blocks.get_dtype(), scales.get_dtype()}
        if len(leading) != 3 or size != _BLOCK // 2 or scales.get_shape() != leading or formats != {"U8"}:
            raise HuggingFaceError(
                f"{name}: shape {blocks.get_shape()} with scales of shape {scales.get_shape()} is no stack in mxfp4; save "
                "the model unquantized (as bfloat16, say) and import that"
            )
        found[stack] = PackedStack(blocks, scales)
    return found
