"""The kernel of ``layer.h``: takes a few fp32 or bf16 rows from one layer's attention to the next layer's in a single call.

A decoding step of one text does little in each operation, so calling them one by one costs as much as they do: some seventy calls a layer, and seven
times all threads are woken. Here it is one call and one time. Between its products it does what PyTorch's operations do, rounding as they do; whether it
does, the caller tries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.hardware.kernels.rows.attention import RowTable
from phalanx.hardware.kernels.rows.product import RowKernel

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True)
class Affinity:
    """A product's matrix ``(outputs, inputs)`` and bias ``(outputs,)``, and the block of the inner dimension by which it adds."""

    matrix: Tensor
    bias: Tensor | None
    block: int


@dataclass(frozen=True)
class LayerWeights:
    """A layer with grouped-query attention and a SwiGLU: all of one format on a CPU, fp32 or bf16, contiguous, in whole vectors of eight."""

    query: Affinity
    key: Affinity
    value: Affinity
    output: Affinity
    gate: Affinity
    up: Affinity
    down: Affinity
    attention_norm: Tensor
    ffn_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    width: int
    """Elements of a head."""
    rotated: int
    """How many of these are rotated; 0 if the layer rotates none."""
    eps: float

    def products(self) -> Iterator[Affinity]:
        """In the order of ``layer.h``."""
        yield from (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)

    def tensors(self) -> Iterator[Tensor]:
        """All that it multiplies with or adds."""
        for product in self.products():
            yield from (one for one in (product.matrix, product.bias) if one is not None)
        norms = (self.attention_norm, self.ffn_norm, self.query_norm, self.key_norm)
        yield from (one for one in norms if one is not None)


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("w", "bias")),
        *((name, _COUNT) for name in ("outputs", "inputs", "block")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "ffn_norm", "query_norm", "key_norm")),
        *((name, _COUNT) for name in ("dim", "heads", "kept", "width", "inner", "rotated")),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ended", "begun", "attention", "states", "mixed", "cos", "sin")),
        *((name, _POINTER) for name in ("query", "key", "value", "normed", "inner", "added", "gate", "up")),
        ("rows", _COUNT),
        ("next", _COUNT * 4),
        *((name, _POINTER) for name in ("barrier", "number", "members")),
        ("threads", _COUNT),
    )


class LayerSteps:
    """The layers of a model or of a part of one, and memory for the rows of a step."""

    def __init__(self, kernel: RowKernel, layers: list[LayerWeights], rows: int) -> None:
        """Reads ``layers``, which lie where they are for as long as this does, with at most ``rows`` rows."""
        self.layers, self._made = layers, [_of(layer) for layer in layers]
        some = layers[0]
        self.dtype = some.up.matrix.dtype
        library = kernel.library
        self._call = library.half_layer_step if self.dtype == torch.bfloat16 else library.layer_step
        self._call.argtypes, self._call.restype = [_POINTER, _POINTER], None
        self._parallel = kernel.team.parallel
        dim, inner, heads = len(some.attention_norm), len(some.up.matrix), len(some.query.matrix)

        def kept(wide: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(rows, wide, dtype=dtype, device="cpu")

        self._query, self._key, self._value = (
            kept(len(one.matrix)) for one in (some.query, some.key, some.value)
        )
        self._mixed = kept(heads)
        # What products read is fp32 in any format.
        read = kept(dim, torch.float32), kept(max(inner, heads), torch.float32)
        self._scratch = [*read, *map(kept, (dim, inner, inner))]
        team = kernel.team
        self.threads = team.threads(some.up.matrix.numel())
        """Threads at most among which a step is divided."""
        self._step = _Step(
            **{
                name: tensor.data_ptr()
                for name, tensor in zip(
                    ("query", "key", "value", "normed", "inner", "added", "gate", "up"),
                    (self._query, self._key, self._value, *self._scratch),
                    strict=True,
                )
            },
            barrier=team.barrier,
            number=team.number,
            members=team.members,
            threads=self.threads,
        )
        self._width = some.width

    def go(
        self, ended: int, states: Tensor, mixed: Tensor | RowTable | None, cos: Tensor, sin: Tensor
    ) -> None:
        """Takes ``states`` ``(rows, dim)`` in place to the layer behind ``ended`` (-1: into the first), whose attention gave ``mixed`` ``(rows, heads *
        width)``, or is computed here; ``cos`` and ``sin`` ``(rows, rotated)`` are the next layer's. All are in the format of the layers."""
        step, rows = self._step, len(states)
        step.ended = ctypes.addressof(self._made[ended]) if ended >= 0 else None
        step.begun = ctypes.addressof(self._made[ended + 1]) if ended + 1 < len(self._made) else None
        step.states, step.rows = states.data_ptr(), rows
        step.attention = mixed.address if isinstance(mixed, RowTable) else None
        step.mixed = (mixed if isinstance(mixed, Tensor) else self._mixed).data_ptr()
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        self._call(ctypes.addressof(step), self._parallel)

    def projected(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(1, heads, rows, width)`` of the layer that was begun, in memory that the next call overwrites."""
        query, key, value = (
            held[:rows].view(rows, -1, self._width).transpose(0, 1)[None]
            for held in (self._query, self._key, self._value)
        )
        return query, key, value

    def activated(self) -> Tensor:
        """The inner elements ``(inner,)`` of the first row of the layer that was ended, fp32, in memory that the next call overwrites."""
        inner = len(self.layers[0].up.matrix)
        row = self._scratch[1][0, :inner]
        if self.dtype == torch.float32:
            return row
        # ``arrange`` of bf16.h: of sixty-four neighbors, four times sixteen, even ones before odd ones, each a vector beside those of the other sixty-fours.
        turns = inner // 64
        whole = row[: turns * 64].view(4, 2, turns, 8).permute(2, 0, 3, 1).reshape(-1)
        return torch.cat((whole, row[turns * 64 :]))


def _of(layer: LayerWeights) -> _Layer:
    def place(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    matrices = [
        _Matrix(place(one.matrix), place(one.bias), *one.matrix.shape, one.block) for one in layer.products()
    ]
    return _Layer(
        *matrices,
        *map(place, (layer.attention_norm, layer.ffn_norm, layer.query_norm, layer.key_norm)),
        len(layer.attention_norm),
        len(layer.query.matrix) // layer.width,
        len(layer.key.matrix) // layer.width,
        layer.width,
        len(layer.up.matrix),
        layer.rotated,
        layer.eps,
    )
