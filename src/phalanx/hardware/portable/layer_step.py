"""Take a few fp32 or bf16 rows through a transformer's layers, each layer in a single call (``layer_step.c``).

A decoding step of one text does little in each operation, so calling them one by one costs as much as they do: some seventy calls a layer, and seven times all
threads are woken. The kernel computes with the functions of the other portable kernels, so that the bits are those of the modules under portable numerics.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.hardware.kernels.layer_kernel import Team
from phalanx.hardware.portable.library import load

MOST_ROWS = 48
"""Rows up to which a call a layer takes no longer than calls of operations."""
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
_NORMS = ("attention_norm", "ffn_norm", "query_norm", "key_norm")


@dataclass(frozen=True)
class LinearWeights:
    """A matrix ``(outputs, inputs)`` and a bias ``(outputs,)``."""

    matrix: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer with grouped-query attention and a SwiGLU: all fp32 or all bf16, on a CPU, contiguous."""

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    attention_norm: Tensor
    ffn_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    width: int
    """Elements of a head."""
    rotated: int
    """How many of these are rotated; 0 if the layer rotates none."""
    eps: float

    def tensors(self) -> Iterator[Tensor]:
        """Yield all matrices, biases and norms of the layer that exist."""
        for name in _LINEARS:
            linear: LinearWeights = getattr(self, name)
            yield linear.matrix
            if linear.bias is not None:
                yield linear.bias
        norms = (getattr(self, name) for name in _NORMS)
        yield from (norm for norm in norms if norm is not None)


class _Linear(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("outputs", _COUNT), ("inputs", _COUNT))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in _LINEARS),
        *((name, _POINTER) for name in _NORMS),
        *((name, _COUNT) for name in ("dim", "heads", "kv_heads", "width", "inner", "rotated")),
        ("eps", ctypes.c_float),
    )


class _CachedRow(ctypes.Structure):
    _fields_ = (("keys", _POINTER), ("values", _POINTER), ("stride", _COUNT), ("position", _COUNT))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("previous", "next", "cached")),
        ("scale", ctypes.c_float),
        ("narrow", ctypes.c_int32),
        *((name, _POINTER) for name in ("states", "mixed", "cos", "sin", "query", "key", "value")),
        *((name, _POINTER) for name in ("normed", "added", "gate", "up")),
        ("rows", _COUNT),
        ("taken", _COUNT * 5),
        ("failed", ctypes.c_int32),
        *((name, _POINTER) for name in ("barrier", "number", "members")),
    )


class CachedRows:
    """Keys and values of the rows of a step, whose attention the kernel computes, with scores that are multiplied by ``scale``."""

    def __init__(self, positions: Sequence[int], scale: float) -> None:
        """Make one row for each of ``positions`` in its text; a row sees itself and all rows before it. Scores are
        multiplied by ``scale``.
        """
        self.scale = scale
        self._rows = (_CachedRow * len(positions))()
        for row, position in zip(self._rows, positions, strict=True):
            row.position = position

    def point(self, texts: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Set a layer's keys and values: ``texts`` has those of each text, each ``(kv_heads, capacity, width)``, and
        its number of rows, in the order of rows. Addresses are stored, not data.
        """
        number = 0
        for keys, values, count in texts:
            first, second, stride = keys.data_ptr(), values.data_ptr(), keys.stride(0)
            for row in self._rows[number : number + count]:
                row.keys, row.values, row.stride = first, second, stride
            number += count

    @property
    def address(self) -> int:
        """Address of the rows for the kernel."""
        return ctypes.addressof(self._rows)


class LayerKernel:
    """The layers of a model or of a part of one, and memory for the rows of a step."""

    def __init__(self, layers: Sequence[LayerWeights], rows: int) -> None:
        """Prepare to use the matrices of ``layers`` where they are, and fp32 copies of gains and biases, with a
        workspace for steps of at most ``rows`` rows.

        All layers have the shapes and dtype of the first. Raises ``NoHostKernelsError`` or ``OSError``.
        """
        self._call = load().layer_step
        some = layers[0]
        self.dtype = some.up.matrix.dtype
        self._weights = layers
        self._wide: list[Tensor] = []  # fp32 copies of gains and biases
        self._layers = [self._layer(weights) for weights in layers]
        team = Team()
        self._parallel = team.parallel
        self._threads = team.threads(some.up.matrix.numel())
        dim, inner = len(some.attention_norm), len(some.up.matrix)
        widths = {
            **{name: len(getattr(some, name).matrix) for name in ("query", "key", "value")},
            "mixed": len(some.query.matrix),
            "normed": dim,
            "added": dim,
            "gate": inner,
            "up": inner,
        }
        # dtype and device are explicit, because the process may have other defaults
        self._memory = {
            name: torch.empty(rows, width, dtype=torch.float32, device="cpu")
            for name, width in widths.items()
        }
        self._step = _Step(
            **{name: tensor.data_ptr() for name, tensor in self._memory.items()},
            narrow=int(self.dtype == torch.bfloat16),
            barrier=team.barrier,
            number=team.number,
            members=team.members,
        )
        self._width = some.width

    def step(
        self, previous: int, states: Tensor, mixed: Tensor | CachedRows | None, cos: Tensor, sin: Tensor
    ) -> None:
        """Take ``states`` ``(rows, dim)`` in place from layer ``previous`` to the projections of the next one, which
        ``projected`` returns; -1 begins the first layer.

        ``mixed`` is the attention of ``previous``: its result ``(rows, heads * width)``, or the rows whose attention is
        computed here. ``cos`` and ``sin`` ``(rows, rotated)`` are those of the next layer. All are fp32, in a bf16
        model rounded to bf16. Raises ``MemoryError``. After the last layer, ``states`` are its result.
        """
        step, rows = self._step, len(states)
        step.previous = ctypes.addressof(self._layers[previous]) if previous >= 0 else None
        following = previous + 1 < len(self._layers)
        step.next = ctypes.addressof(self._layers[previous + 1]) if following else None
        step.cached = None
        if isinstance(mixed, CachedRows):
            step.cached, step.scale = mixed.address, mixed.scale
        elif mixed is not None:
            self._memory["mixed"][:rows] = mixed
        step.states, step.rows = states.data_ptr(), rows
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        if self._call(ctypes.addressof(step), self._parallel, self._threads):
            raise MemoryError("there is no memory for the workspace of a layer's kernel")

    def projected(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``(1, heads, rows, width)`` of the layer that was begun, in memory that the next call overwrites."""
        query, key, value = (
            self._memory[name][:rows].view(rows, -1, self._width).transpose(0, 1)[None].to(self.dtype)
            for name in ("query", "key", "value")
        )
        return query, key, value

    def _layer(self, weights: LayerWeights) -> _Layer:
        """Return the addresses of a layer's weights; biases and norms are widened to fp32 copies, which are kept."""

        def address(tensor: Tensor | None) -> int | None:
            if tensor is None:
                return None
            wide = tensor.detach().float().contiguous()
            self._wide.append(wide)
            return wide.data_ptr()

        linears: list[LinearWeights] = [getattr(weights, name) for name in _LINEARS]
        return _Layer(
            *(_Linear(each.matrix.data_ptr(), address(each.bias), *each.matrix.shape) for each in linears),
            *(address(getattr(weights, name)) for name in _NORMS),
            len(weights.attention_norm),
            len(weights.query.matrix) // weights.width,
            len(weights.key.matrix) // weights.width,
            weights.width,
            len(weights.up.matrix),
            weights.rotated,
            weights.eps,
        )
