"""Where a tensor begins in memory, as far as that decides bits.

A kernel for products may take another way, and so add in another order, where an operand or the result does not begin at a boundary of memory that it
likes (of oneMKL:
https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html). Memory that PyTorch
allocates always begins at one (measured in fp32 with MKL 2024.2 on an AMD EPYC: of 740 random products with an operand or the result 4 to 28 bytes behind
a boundary, 10 % had other bits; of 760 that were 16, 32 or 48 bytes behind one, none). A part of a larger tensor may not: the second of two parts of 7 x 33 numbers begins within a cache line if its rank has both,
and at a boundary if another rank has it alone. So where a layout decides whether a tensor is a part of another, it is copied unless it begins as
memory of its own does. Widths that are multiples of 64 bytes, as those of all large models are, are never copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ON_PROCESSORS = 64
"""Bytes: a cache line, at which PyTorch's memory begins (``c10/core/alignment.h``)."""
_ELSEWHERE = 256
"""Bytes: the largest alignment by which a GPU's library of products chooses among its ways (cuBLASLt's,
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t); PyTorch's memory begins at 512."""


def aligned(x: Tensor) -> Tensor:
    """``x`` without gaps in memory, and begun where memory of its own would: itself, or a copy."""
    boundary = _ON_PROCESSORS if x.device.type == "cpu" else _ELSEWHERE
    # By its place in its storage, which is memory of its own.
    begins_within = x.storage_offset() * x.element_size() % boundary
    return x.clone(memory_format=torch.contiguous_format) if begins_within else x.contiguous()
