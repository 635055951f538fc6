"""The kernels of ``layers.c``: operations around a layer's products, in one pass over memory on a CPU, with the bits of PyTorch's operations.

PyTorch makes a pass over memory for each operation, and these layers have a dozen of them around little arithmetic. The work is dealt over
the threads of the OpenMP runtime that PyTorch has loaded, as its own is. They stand for chains of single operations on elements (``REFERENCE``), which round each
by itself wherever an element lies; that is tried when a process first uses them, as of the optimizer's (``choose.py``).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError, compiled

# PyTorch's OpenMP threads, among which C kernels divide their work. A second OpenMP runtime would compete with them.

_TEAM_LEAST_SHARE = 1 << 16
"""Elements of a matrix for which another thread is woken."""


class Team:
    """Entries of the OpenMP runtime that PyTorch uses; ``None`` (one thread) if it has another interface."""

    def __init__(self) -> None:
        """Look up the entries of the process's OpenMP runtime; all are None if one is missing."""
        entries = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
        runtime = _openmp()
        symbols = [getattr(runtime, name, None) for name in entries]
        usable: list[ctypes.c_void_p | None] = [
            ctypes.cast(symbol, ctypes.c_void_p) for symbol in symbols if symbol is not None
        ]
        if len(usable) < len(entries):
            usable = [None] * len(entries)
        self.parallel: ctypes.c_void_p | None = usable[0]
        self.barrier: ctypes.c_void_p | None = usable[1]
        self.number: ctypes.c_void_p | None = usable[2]
        self.members: ctypes.c_void_p | None = usable[3]

    def threads(self, elements: int) -> int:
        """Return the number of threads for a matrix of so many elements."""
        if self.parallel is None:
            return 1
        return min(torch.get_num_threads(), 1 + elements // _TEAM_LEAST_SHARE)


def _openmp() -> ctypes.CDLL:
    """Return PyTorch's own library, through which the loader finds its OpenMP runtime; the whole process for a build without that file.

    Python loads PyTorch locally, so its runtime is among the global symbols only of builds that load it globally, as those for x86-64 do.
    """
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return ctypes.CDLL(None)


_SOURCE = Path(__file__).with_name("layers.c")
_LEAST_SHARE = 1 << 14
"""Elements for which another thread is woken, and which it takes at once."""
_SCALE, _MULTIPLY, _STRAIGHTEN = range(3)


class LayerKernels:
    """Elementwise chains of layers by PyTorch's operations, each of which rounds once. A subclass has the same bits.

    Tensors are fp32 on a CPU; ``x`` and ``gradient`` of ``scaled`` to ``straightened`` are contiguous ``(..., d)``, ``inverse``
    and ``along`` ``(..., 1)``.
    """

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """Return ``x`` ``(b, h, s, e)`` times ``cos``, and its halves, exchanged and the new first one negated, times
        ``sin``, both ``(s, e)``, as a new tensor.

        With ``back``, ``x`` is the gradient of such a result, and returned is that of its argument.
        """
        if back:
            turning = (x * sin).chunk(2, -1)
            return x * cos + torch.cat((turning[1], -turning[0]), -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def scaled(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        """Return ``(x inverse) weight``."""
        return (x * inverse).mul_(weight)

    def multiplied(self, gradient: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
        """Return ``gradient (x inverse)``."""
        return gradient * (x * inverse)

    def straightened(
        self, gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, along: Tensor
    ) -> Tensor:
        """Return ``(gradient weight - (x inverse) along) inverse``."""
        return (gradient * weight).sub_((x * inverse).mul_(along)).mul_(inverse)


REFERENCE = LayerKernels()


class HostLayerKernels(LayerKernels):
    """The compiled ones. Raises ``NoHostKernelsError`` if they cannot be compiled or loaded."""

    def __init__(self) -> None:
        """Compile the kernels, unless they are cached, and load them. Raises ``NoHostKernelsError``."""
        try:
            library = ctypes.CDLL(str(compiled(_SOURCE)))
            self._turn, self._norm = library.turn, library.norm
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._turn.argtypes = [*[pointer] * 4, *[count] * 4, pointer, number, count, pointer, count]
        self._norm.argtypes = [number, *[pointer] * 6, *[count] * 3, pointer, count]
        self._turn.restype = self._norm.restype = None
        self._parallel = Team().parallel

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """Rotate the halves of ``x`` ``(b, h, s, e)`` by tables ``(s, e)``, in one pass, into a new tensor; other
        shapes by the reference. ``back`` is the transposed rotation.
        """
        if x.dim() != 4 or cos.dim() != 2:  # a single head, or another shape that no layer uses
            return super().turned(x, cos, sin, back=back)
        if x.stride(-1) != 1:
            x = x.contiguous()
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
        batch, heads, length, width = x.shape
        strides = (ctypes.c_int64 * 6)(*x.stride()[:3], *out.stride()[:3])
        at_once, threads = _shares(heads * width, batch * length)
        self._turn(
            *(tensor.data_ptr() for tensor in (x, cos, sin, out)),
            *(batch, heads, length, width),
            strides,
            int(back),
            *(at_once, self._parallel, threads),
        )
        return out

    def scaled(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        return self._of_rows(_SCALE, x, x, inverse, weight, inverse)

    def multiplied(self, gradient: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
        return self._of_rows(_MULTIPLY, x, gradient, inverse, inverse, inverse)

    def straightened(
        self, gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, along: Tensor
    ) -> Tensor:
        return self._of_rows(_STRAIGHTEN, x, gradient, inverse, weight, along)

    def _of_rows(
        self, kind: int, x: Tensor, y: Tensor, inverse: Tensor, weight: Tensor, along: Tensor
    ) -> Tensor:
        """Compute the row operation ``kind`` (scaled, multiplied or straightened) in one pass, into a new tensor like ``x``."""
        out = x.new_empty(x.shape)
        at_once, threads = _shares(x.shape[-1], inverse.numel())
        tensors = [*(tensor.contiguous() for tensor in (x, y, inverse, weight, along)), out]
        self._norm(
            kind,
            *(tensor.data_ptr() for tensor in tensors),
            inverse.numel(),
            x.shape[-1],
            *(at_once, self._parallel, threads),
        )
        return out


def _shares(width: int, rows: int) -> tuple[int, int]:
    """How many rows of ``width`` elements a thread takes at once, and how many threads are woken."""
    at_once = max(1, _LEAST_SHARE // max(1, width))
    return at_once, min(torch.get_num_threads(), -(-rows // at_once))


def layer_kernels(*tensors: Tensor) -> LayerKernels:
    """Return the compiled kernels if all ``tensors`` are plain fp32 ones and the kernels have the reference's bits on
    this machine; else the reference.
    """
    if all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32 for tensor in tensors
    ):
        return _tried()
    return REFERENCE


@functools.cache
def _tried() -> LayerKernels:
    """Return the host's kernels if they compile and have the reference's bits, else the reference. Cached."""
    try:
        kernels = HostLayerKernels()
    except NoHostKernelsError:  # the optimizer's kernels have logged the reason
        return REFERENCE
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        sizes = torch.empty(shape, dtype=torch.float64).uniform_(-70, 40, generator=generator).exp2()
        return (sizes * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)).float()

    return kernels if same_bits(kernels, draw(3, 5, 4, 38), draw(5, 38), draw(5, 38)) else REFERENCE


def same_bits(kernels: LayerKernels, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return True if all ``kernels`` have the reference's bits on these numbers: ``x`` ``(b, s, h, e)``, of which
    heads are turned, and tables ``(s, e)``.
    """
    heads, rows = x.transpose(1, 2), x.flatten(0, 2)
    gradient, inverse, along, weight = rows.flip(0), rows[:, :1].abs(), rows[:, 1:2], rows[0]

    def results(of: LayerKernels) -> list[Tensor]:
        """Return the results of all kernels on the test's tensors."""
        return [
            of.turned(heads, cos, sin),
            of.turned(heads, cos, sin, back=True),
            of.scaled(rows, inverse, weight),
            of.multiplied(gradient, rows, inverse),
            of.straightened(gradient, rows, inverse, weight, along),
        ]

    pairs = zip(results(kernels), results(REFERENCE), strict=True)
    return all(torch.equal(_bits(first), _bits(other)) for first, other in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """Their bits, but that all that is no number is the same one: which of them comes out of two is the processor's affair."""
    return tensor.masked_fill(tensor.isnan(), torch.nan).contiguous().view(torch.int32)
