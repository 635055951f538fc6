"""The portable kernels: loaded and registered with PyTorch, and operations with scalars that are composed of them.

The kernels are C files, which define what is computed, and one C++ file (``registered.cpp``), which brings PyTorch's tensors to them through PyTorch's stable C
interface.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable.build import library_file, unfit_processor

_TESTED = "phalanx_portable"


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if it is not cached, and loaded once per process. Raises ``NoHostKernelsError`` or
    ``OSError`` if that fails.
    """
    library = ctypes.CDLL(str(library_file()))
    library.kernel_name.argtypes = [ctypes.c_int64]
    library.kernel_name.restype = ctypes.c_char_p
    pointer: Any = ctypes.c_void_p
    library.register_kernels.argtypes = [ctypes.c_char_p]
    library.register_kernels.restype = pointer
    library.withdraw_kernels.argtypes = [pointer]
    library.withdraw_kernels.restype = None
    for function in (library.power_fp32, library.power_fp64):
        function.argtypes = [pointer, pointer, pointer, ctypes.c_int64]
        function.restype = None
    library.layer_step.argtypes = [pointer, pointer, ctypes.c_int64]
    library.layer_step.restype = ctypes.c_int
    for function in (library.function_fp32, library.function_fp64):
        function.argtypes = [ctypes.c_int32, pointer, pointer, ctypes.c_int64]
        function.restype = None
    return library


def is_available() -> bool:
    """Return True if the processor can run the library and the library can be compiled and loaded."""
    try:
        return not unfit_processor() and bool(load())
    except (NoHostKernelsError, OSError):
        return False


def kernel_names() -> list[str]:
    """Return the operations of PyTorch that the library has kernels of, such as ``mm`` and ``sum.dim_IntList``."""
    names = map(load().kernel_name, itertools.count())
    return [name.decode() for name in itertools.takewhile(bool, names)]


def register(namespace: str) -> Callable[[], None]:
    """Register the kernels for the operations of ``namespace`` on CPUs, for the whole process; return a function that
    withdraws them.

    Raises ``NoHostKernelsError`` if the library cannot be compiled or PyTorch refuses a kernel, and ``OSError`` if the
    library cannot be loaded.
    """
    library = load()
    registered = library.register_kernels(namespace.encode())
    if not registered:
        raise NoHostKernelsError(f"PyTorch {torch.__version__} refuses a kernel")
    return functools.partial(library.withdraw_kernels, registered)


@functools.cache
def operations() -> Any:
    """Return the kernels as operations of a separate namespace, with PyTorch's schemas, for tests: PyTorch's own
    operations are unchanged.
    """
    definitions = torch.library.Library(_TESTED, "DEF")  # type: ignore[no-untyped-call]
    for name in kernel_names():
        packet, _, overload = name.partition(".")
        schema = str(getattr(getattr(torch.ops.aten, packet), overload or "default")._schema)
        definitions.define(schema.removeprefix("aten::"))  # type: ignore[no-untyped-call]
    register(_TESTED)
    operations.keep = definitions  # type: ignore[attr-defined]
    return getattr(torch.ops, _TESTED)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return ``base ** exponent`` by element, of equal shapes and dtypes, fp32 or fp64, contiguous.

    Raises ``NoHostKernelsError`` or ``OSError``.
    """
    base, exponent = base.contiguous(), exponent.contiguous()
    out = torch.empty_like(base)
    compute = load().power_fp64 if base.dtype == torch.float64 else load().power_fp32
    compute(base.data_ptr(), exponent.data_ptr(), out.data_ptr(), base.numel())
    return out


# Operations with a scalar argument, which PyTorch's stable C interface does not support, composed of other operations.
#
# Each is a sequence of operations with defined bits: products and functions of ``registered.cpp``, and additions,
# multiplications and divisions, which every processor rounds in the same way. PyTorch's own kernels of these operations round
# once or twice, depending on the compiler and the instruction set. bf16 and fp16 are computed in fp32 and rounded once. The
# formulas are from PyTorch's documentation of each operation.


_MAXIMUM_BITS = 63
"""Bits of an integer exponent."""
Kernel = Callable[..., Tensor]


def _in_place(compute: Kernel) -> Kernel:
    """Return the form of ``compute`` that writes its result to its first operand and returns that."""

    def write(first: Tensor, *others: object, **factors: object) -> Tensor:
        return first.copy_(compute(first, *others, **factors))

    return write


def _into(compute: Kernel) -> Kernel:
    """Return the form of ``compute`` that writes its result to ``out``, which is resized if its shape differs, and returns ``out``."""

    def write(*operands: object, out: Tensor, **factors: object) -> Tensor:
        result = compute(*operands, **factors)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return write


def _wide(compute: Kernel) -> Kernel:
    """Return ``compute`` for operands of any format: if they are bf16 or fp16 by promotion, they are widened to fp32
    and the result is rounded to that dtype.
    """

    def widened(*operands: object, **factors: object) -> Tensor:
        """Call ``compute``, on fp32 copies of the tensors if they promote to bf16 or fp16, and return the result in the promoted dtype."""
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            return compute(*operands, **factors)
        wide = (operand.float() if isinstance(operand, Tensor) else operand for operand in operands)
        return compute(*wide, **factors).to(dtype)

    return widened


def _added_product(multiply: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    """Return a function for ``beta total + alpha left right``, with ``multiply`` as the product. If ``beta`` is 0,
    ``total`` is not used, even if it is NaN.
    """

    def compute(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = multiply(left, right)
        if alpha != 1:
            product *= alpha
        return product if beta == 0 else product.add_(total if beta == 1 else total * beta)

    return compute


def _addcmul(total: Tensor, left: Tensor, right: Tensor, *, value: float = 1) -> Tensor:
    return total + (left * right if value == 1 else left * value * right)


def _addcdiv(total: Tensor, left: Tensor, right: Tensor, *, value: float = 1) -> Tensor:
    return total + (left / right if value == 1 else left * value / right)


def _lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Interpolate linearly by ``weight``, in the form that is exact at the nearer end."""
    difference = end - start
    if isinstance(weight, Tensor):
        from_start, from_end = start + difference * weight, end - difference * (1 - weight)
        return torch.where(weight.abs() < 0.5, from_start, from_end)
    return start + difference * weight if abs(weight) < 0.5 else end - difference * (1 - weight)


def _power(base: Tensor | float, exponent: Tensor | float) -> Tensor:
    """Return ``base ** exponent`` in PyTorch's result dtype: bf16 and fp16 are computed in fp32, integers by repeated
    squaring, which overflows silently. Raises ``RuntimeError`` for complex numbers and negative powers of integers.
    """
    dtype = torch.result_type(base, exponent)
    _require_real(dtype)
    if not dtype.is_floating_point:
        return _integer_power(base, exponent, dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if isinstance(base, Tensor) and not isinstance(exponent, Tensor):
        base = base.to(wide)
        simple = _simple_power(base, exponent)
        if simple is not None:
            return simple.to(dtype)
    bases, exponents = _broadcast(_tensor(base, wide), _tensor(exponent, wide))
    return power(bases, exponents).to(dtype)


def _require_real(dtype: torch.dtype) -> None:
    """Raise RuntimeError for complex numbers."""
    if dtype.is_complex:
        raise RuntimeError(
            "portable numerics has no complex numbers: "
            'compute with real ones, or set runtime.numerics = "native"'
        )


def _tensor(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype)


def _broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(left.shape, right.shape)  # type: ignore[no-untyped-call]
    return left.expand(shape), right.expand(shape)


def _simple_power(base: Tensor, exponent: float) -> Tensor | None:
    """Return ``base`` to the power of 1, 2, 3, -1, -2, 0.5 or -0.5 by products, reciprocals and roots, as a new
    tensor; None for any other exponent.
    """
    square = base * base
    if exponent == 2:
        return square
    if exponent == 3:
        return square * base
    if exponent == 1:
        return base.clone()
    if exponent == 0.5:
        return base.sqrt()
    if exponent == -0.5:
        return base.rsqrt()
    if exponent == -1:
        return base.reciprocal()
    return square.reciprocal() if exponent == -2 else None


def _integer_power(base: Tensor | float, exponent: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return integer powers in ``dtype`` by repeated squaring, which overflows silently.

    Raises ``RuntimeError`` if an exponent is negative, as PyTorch does for a scalar.
    """
    bases, exponents = _broadcast(_tensor(base, dtype), _tensor(exponent, torch.int64))
    if bool((exponents < 0).any()):
        raise RuntimeError("integers to negative integer powers are not allowed")
    result = torch.ones_like(bases)
    for bit in range(_MAXIMUM_BITS):
        if not bool((exponents >> bit).any()):
            break
        result = torch.where((exponents >> bit & 1).bool(), result * bases, result)
        bases = bases * bases
    return result


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.exp().log1p() / beta)


def _softplus_slope(slope: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, slope, slope * scaled.sigmoid())


def _logaddexp(left: Tensor, right: Tensor) -> Tensor:
    largest = torch.maximum(left, right)
    rest = (torch.minimum(left, right) - largest).exp().log1p()
    return torch.where(largest.isinf(), largest, largest + rest)


def _vector_norm(
    x: Tensor,
    ord: float = 2,  # noqa: A002 (PyTorch's name of the argument)
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the ``ord``-norm (0, infinite or any other order) over ``dim`` (None or empty: all), in the dtype of
    ``x`` or ``dtype``; bf16 and fp16 are computed in fp32.
    """
    numbers = x if dtype is None else x.to(dtype)
    _require_real(numbers.dtype)
    wide = numbers.float() if numbers.dtype in (torch.bfloat16, torch.float16) else numbers
    dims = dim or list(range(x.dim()))
    if math.isinf(ord):
        extreme = torch.amax if ord > 0 else torch.amin
        result = extreme(wide.abs(), dims, keepdim)
    elif ord == 0:
        result = (wide != 0).to(wide.dtype).sum(dims, keepdim)
    elif ord == 1:
        result = wide.abs().sum(dims, keepdim)
    elif ord == 2:
        result = (wide * wide).sum(dims, keepdim).sqrt()
    else:
        result = wide.abs().pow(ord).sum(dims, keepdim).pow(1 / ord)
    return result.to(numbers.dtype)


def _three_forms(name: str, compute: Kernel, overload: str = "", into: str = "out") -> dict[str, Kernel]:
    """An operation, its form in place, and the one with an argument ``out``."""
    end = f".{overload}" if overload else ""
    return {f"{name}{end}": compute, f"{name}_{end}": _in_place(compute), f"{name}.{into}": _into(compute)}


def _slope_into(slope: Tensor, x: Tensor, beta: float, threshold: float, *, grad_input: Tensor) -> Tensor:
    return _into(_wide(_softplus_slope))(slope, x, beta, threshold, out=grad_input)


KERNELS: dict[str, Kernel] = {
    **_three_forms("addmm", _added_product(torch.mm)),
    **_three_forms("baddbmm", _added_product(torch.bmm)),
    **_three_forms("addmv", _added_product(torch.mv)),
    **_three_forms("addcmul", _wide(_addcmul)),
    **_three_forms("addcdiv", _wide(_addcdiv)),
    **_three_forms("lerp", _wide(_lerp), "Scalar", "Scalar_out"),
    **_three_forms("lerp", _wide(_lerp), "Tensor", "Tensor_out"),
    "pow.Tensor_Scalar": _power,
    "pow.Tensor_Scalar_out": _into(_power),
    "pow_.Scalar": _in_place(_power),
    "pow.Tensor_Tensor": _power,
    "pow.Tensor_Tensor_out": _into(_power),
    "pow_.Tensor": _in_place(_power),
    "pow.Scalar": _power,
    "pow.Scalar_out": _into(_power),
    "softplus": _wide(_softplus),
    "softplus.out": _into(_wide(_softplus)),
    "softplus_backward": _wide(_softplus_slope),
    "softplus_backward.grad_input": _slope_into,
    "logaddexp": _wide(_logaddexp),
    "logaddexp.out": _into(_wide(_logaddexp)),
    "linalg_vector_norm": _vector_norm,
    "linalg_vector_norm.out": _into(_vector_norm),
}
"""The kernels by the names of PyTorch's operations."""
