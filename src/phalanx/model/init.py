"""Initializes weights so that their values do not depend on the layout.

Each element is a function of the seed, the parameter's name and the element's flat index in the whole parameter
(see ``phalanx.model.random_bits``), so a rank fills just the box that it holds. Matrices are normal with
``init_std``; those that write into the residual stream are smaller by sqrt(2 layers), as in GPT-2; gains start at
one (weights of norms at zero where these are offsets from one), biases and the routers' balance at zero. Each matrix of a
stack of experts is drawn like a matrix by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.model.random_bits import normal, stream_key
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec

# Elements filled at once: the int64 temporaries stay small, and a GPU has enough to do.
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 24


def flat_indices(
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    box: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """The index, in the flattened whole, of every element of a box in it: int64, of shape ``box``, on ``device``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(offset, box, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        here = torch.arange(start, start + length, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) + here * stride
    return index.expand(box)


def deviation(parameter: Parameter, spec: ModelSpec) -> float:
    """The standard deviation with which a matrix starts."""
    return spec.init_std / math.sqrt(2 * spec.layers) if parameter.kind == "output" else spec.init_std


def _pieces(box: tuple[int, ...], chunk: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a box into pieces of at most ``chunk`` elements."""
    rest = math.prod(box[1:])
    if rest > chunk:
        for row in range(box[0]):
            yield from ((slice(row, row + 1), *below) for below in _pieces(box[1:], chunk))
    else:
        rows = max(1, chunk // max(1, rest))
        yield from ((slice(row, min(row + rows, box[0])),) for row in range(0, box[0], rows))


@torch.no_grad()
def fill(out: Tensor, parameter: Parameter, offset: tuple[int, ...], spec: ModelSpec, seed: int) -> None:
    """Writes the initial values of the box at ``offset`` of ``parameter`` into ``out`` (its shape is the box's)."""
    if parameter.kind in ("norm", "bias", "balance"):
        out.fill_(1.0 if parameter.kind == "norm" and not spec.norm_offset else 0.0)
        return
    key, scale = stream_key(seed, parameter.name), deviation(parameter, spec)
    for where in _pieces(tuple(out.shape), _CPU_CHUNK if out.device.type == "cpu" else _GPU_CHUNK):
        piece = out[where]
        begin = [start + part.start for start, part in zip(offset, where, strict=False)]
        box = tuple(piece.shape)
        index = flat_indices(parameter.shape, (*begin, *offset[len(begin) :]), box, out.device)
        piece.copy_(normal(key, index) * scale)
