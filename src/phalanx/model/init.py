"""Initialize weights with random numbers that do not depend on the layout.

Each element is a function of the seed, the parameter's name and the element's flat index in the full parameter, so a rank fills only
its own box. Matrices are normal with ``init_std``. Those that write into the residual stream are smaller by sqrt(2 layers), as in
GPT-2. Gains start at one (weights of norms at zero if these are offsets from one), biases and the routers' balance at zero. Each
matrix of a stack of experts is drawn like a single matrix.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec

# Elements filled at once: the int64 temporaries stay small, and a GPU is busy.
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 24


def flat_indices(
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    box: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return the index, in the flattened full tensor, of every element of a box: int64, of shape ``box``, on ``device``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(offset, box, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        along_dim = torch.arange(start, start + length, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) + along_dim * stride  # (box[0], ..., box[dim])
    return index.expand(box)  # (box[0], ..., box[-1])


def deviation(parameter: Parameter, spec: ModelSpec) -> float:
    """Return the standard deviation of a matrix's initial values: ``init_std``, divided by sqrt(2 layers) for the outputs of blocks."""
    return spec.init_std / math.sqrt(2 * spec.layers) if parameter.kind == "output" else spec.init_std


def _pieces(box: tuple[int, ...], chunk: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices that cut a box, in order, into pieces of at most ``chunk`` elements. Each is one slice for each
    of the first dimensions; the last slice may cover several rows, the others one.
    """
    row_elements = math.prod(box[1:])
    if row_elements > chunk:
        for row in range(box[0]):
            yield from ((slice(row, row + 1), *below) for below in _pieces(box[1:], chunk))
    else:
        rows = max(1, chunk // max(1, row_elements))
        yield from ((slice(row, min(row + rows, box[0])),) for row in range(0, box[0], rows))


@torch.no_grad()
def fill(out: Tensor, parameter: Parameter, offset: tuple[int, ...], spec: ModelSpec, seed: int) -> None:
    """Write the initial values of the box at ``offset`` of ``parameter`` into ``out``, which has the box's shape.

    Norms are 1 (0 with an offset), biases 0, others normal with their ``deviation``. Values depend on seed, name and
    position only.
    """
    if parameter.kind in ("norm", "bias", "balance"):
        out.fill_(1.0 if parameter.kind == "norm" and not spec.norm_offset else 0.0)
        return
    key, scale = stream_key(seed, parameter.name), deviation(parameter, spec)
    for slices in _pieces(tuple(out.shape), _CPU_CHUNK if out.device.type == "cpu" else _GPU_CHUNK):
        piece = out[slices]
        begin = [start + part.start for start, part in zip(offset, slices, strict=False)]
        box = tuple(piece.shape)
        index = flat_indices(parameter.shape, (*begin, *offset[len(begin) :]), box, out.device)
        piece.copy_(normal(key, index) * scale)


# Random numbers as a function of (seed, name, index), computed anywhere, in any order.
#
# The values of a pseudo-random generator with a running state depend on all earlier draws, and so on the layout of shards. Here
# element ``i`` of a tensor is ``mix(key + i * golden)``, where ``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood,
# OOPSLA 2014; constants: Stafford's variant 13) and the key is drawn from SHA-256 of the seed and the parameter's name. Only
# integer operations are used, so every device gives the same bits.
#
# Normal numbers come from a table of the inverse cumulative distribution, cut off at three standard deviations and rescaled to
# variance 1. It has 4096 points in fixed point and is interpolated linearly *in integers*. Logarithms and cosines (Box-Muller)
# would differ in the last bit between devices, and between the vector and scalar loops of one CPU.


_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CUTOFF = 3.0  # standard deviations
_TABLE_BITS = 12
_FRACTION_BITS = 30  # bits of a table step, and of the fixed-point values


def _signed(word: int) -> int:
    """Return a 64-bit word as the signed number of torch's int64 arithmetic (modulo 2^64)."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own ``>>`` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of the stream ``name`` in a run with ``seed``."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def keys_of(keys: Sequence[int], device: torch.device) -> Tensor:
    """Return keys of streams as an int64 tensor ``(n,)`` for ``random_words``."""
    return brought(torch.tensor([_signed(key) for key in keys], dtype=torch.int64), device)


def random_words(key: int | Tensor, index: Tensor) -> Tensor:
    """Return a uniformly distributed 64-bit word (as int64) for each element of the int64 tensor ``index``.

    ``key`` may be a tensor of ``keys_of``, in a shape that broadcasts with ``index``: one stream for each element.
    """
    x = index * _signed(_GOLDEN) + (key if isinstance(key, Tensor) else _signed(key))
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


@functools.cache
def normal_quantiles() -> tuple[int, ...]:
    """Return the quantiles of the normal truncated at ±3 and scaled to variance 1, at 4097 evenly spaced
    probabilities from 0 to 1, in units of 2^-30.

    No entry is so near the middle between two integers that mathematical libraries would round it differently.
    """
    normal = NormalDist()
    low, high = normal.cdf(-_CUTOFF), normal.cdf(_CUTOFF)
    density = math.exp(-_CUTOFF * _CUTOFF / 2) / math.sqrt(2 * math.pi)
    deviation = math.sqrt(1 - 2 * _CUTOFF * density / (high - low))
    steps = 1 << _TABLE_BITS
    inner = [normal.inv_cdf(low + (high - low) * i / steps) for i in range(1, steps)]
    return tuple(round(q / deviation * (1 << _FRACTION_BITS)) for q in (-_CUTOFF, *inner, _CUTOFF))


def normal(key: int, index: Tensor) -> Tensor:
    """Return a normal number for each element of ``index``: mean 0, variance 1, none beyond 3.04; fp64.

    The value is an integer times 2^-30, exact in fp64.
    """
    table = torch.tensor(normal_quantiles(), dtype=torch.int64, device=index.device)
    words = random_words(key, index)
    cell = _shift_right(words, 64 - _TABLE_BITS)
    fraction = _shift_right(words, 64 - _TABLE_BITS - _FRACTION_BITS) & ((1 << _FRACTION_BITS) - 1)
    left, right = table[cell], table[cell + 1]
    fixed = left + (((right - left) * fraction) >> _FRACTION_BITS)
    return fixed.double() * math.ldexp(1.0, -_FRACTION_BITS)
