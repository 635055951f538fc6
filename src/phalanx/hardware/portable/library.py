"""Loads the portable kernels and registers them with PyTorch.

The kernels are C files, which define what is computed, and one C++ file (``registered.cpp``), which brings PyTorch's tensors to them through PyTorch's stable C
interface.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable.build import library_file
from phalanx.hardware.portable.processor import unfit_processor

_TESTED = "phalanx_portable"


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if need be. Raises ``NoHostKernelsError`` or ``OSError`` if it cannot be had."""
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
    """Registers the kernels for the operations of ``namespace`` on CPUs; the result withdraws them. Raises ``NoHostKernelsError``."""
    library = load()
    registered = library.register_kernels(namespace.encode())
    if not registered:
        raise NoHostKernelsError(f"PyTorch {torch.__version__} refuses a kernel")
    return functools.partial(library.withdraw_kernels, registered)


@functools.cache
def operations() -> Any:
    """Return the kernels as operations of a namespace of their own, with PyTorch's schemas: what PyTorch computes itself stays as it is."""
    definitions = torch.library.Library(_TESTED, "DEF")  # type: ignore[no-untyped-call]
    for name in kernel_names():
        packet, _, overload = name.partition(".")
        schema = str(getattr(getattr(torch.ops.aten, packet), overload or "default")._schema)
        definitions.define(schema.removeprefix("aten::"))  # type: ignore[no-untyped-call]
    register(_TESTED)
    operations.keep = definitions  # type: ignore[attr-defined]
    return getattr(torch.ops, _TESTED)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return ``base ** exponent`` by element, of equal shapes and dtypes, fp32 or fp64, contiguous."""
    base, exponent = base.contiguous(), exponent.contiguous()
    out = torch.empty_like(base)
    compute = load().power_fp64 if base.dtype == torch.float64 else load().power_fp32
    compute(base.data_ptr(), exponent.data_ptr(), out.data_ptr(), base.numel())
    return out
