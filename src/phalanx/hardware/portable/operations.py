"""Puts portable products, attention and square roots in the place of PyTorch's, for all that a process computes on its CPU.

PyTorch finds the kernel of an operation through its dispatcher, below autograd, so a kernel that is registered there serves models, losses and
optimizers as they are, forward and backward (https://docs.pytorch.org/docs/2.11/library.html, ``torch.library.Library.impl``). What is left to PyTorch are
element-wise functions and sums. Those are compiled into it for several instruction sets, of which an environment variable chooses the one that
every machine here has; and where they call MKL's vector functions, another variable asks MKL for its conditional numerical
reproducibility, under which those functions give the same bits on all processors. Square roots do not, even so (found by running a Haswell
in an emulator beside an AMD EPYC), so they are NumPy's, which are the processor's own, rounded as IEEE 754 says.

Whether all that holds on a machine is tried at the start of each process, by the bits of operations on numbers that are written down (``checks.py``).
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable import checks, library
from phalanx.run.rules.portable import ENVIRONMENT, NotPortableError

_registered: list[torch.library.Library] = []


def begin() -> None:
    """Makes this process compute with portable numerics from now on, for good; it may be called again.

    Raises ``NotPortableError`` if the machine, the environment or the installation do not allow it.
    """
    if _registered:
        return
    _require_processor()
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        _require_environment()
        _load()
    except NotPortableError:
        for name in missing:  # a process that computes natively after this keeps its own environment
            del os.environ[name]
        raise
    # oneDNN chooses its order of additions by the processor's caches.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    registered = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # "overriding a previously registered kernel": that is what this is for
        for name, kernel in KERNELS.items():
            registered.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    _registered.append(registered)
    different = checks.wrong()
    if different:
        raise NotPortableError(
            f"this machine computes {', '.join(different)} with other bits than portable numerics has, with PyTorch {checks.release()}: "
            'set runtime.numerics to "native", or train on another machine or with another release of PyTorch; '
            "please report the processor and the release to the project"
        )


def begun() -> bool:
    """Whether this process computes with portable numerics."""
    return bool(_registered)


def unfit_processor() -> str:
    """Why this processor has no portable numerics, as a clause; empty if it has."""
    if platform.machine() != "x86_64":
        return f"this one is {platform.machine()}"
    if not {"avx2", "fma"} <= _processor_flags():
        return f"this one is {platform.machine()} without them"
    return ""


def _require_processor() -> None:
    if reason := unfit_processor():
        raise NotPortableError(
            f'runtime.numerics = "portable" needs an x86-64 processor with AVX2 and FMA, and {reason}: '
            'set it to "native", or train on another machine'
        )


def _require_environment() -> None:
    wrong = {name: os.environ[name] for name, value in ENVIRONMENT.items() if os.environ[name] != value}
    capability = torch.backends.cpu.get_cpu_capability()
    if wrong or capability != "AVX2":
        present = (
            ", ".join(f"{name}={value}" for name, value in wrong.items())
            or f"PyTorch uses {capability} already"
        )
        needed = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        raise NotPortableError(
            f'runtime.numerics = "portable" needs these variables when the process starts: {needed}; {present}'
        )


def _load() -> None:
    try:
        library.load()
    except (NoHostKernelsError, OSError) as error:
        raise NotPortableError(
            f'runtime.numerics = "portable" needs its kernels compiled: {error}; install gcc or clang, or set it to "native"'
        ) from error


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _product(left: Tensor, right: Tensor) -> Tensor:
    return library.multiply(left, right)


def _vector_product(left: Tensor, right: Tensor) -> Tensor:
    return library.multiply(left, right.unsqueeze(-1)).squeeze(-1)


def _added(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``beta total + alpha left right``, as ``addmm`` and its kin have it: without ``total``, even a NaN of it, where ``beta`` is 0."""

    def compute(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = multiply(left, right)
        if alpha != 1:
            product *= alpha
        return product if beta == 0 else product.add_(total if beta == 1 else total * beta)

    return compute


def _inner_product(left: Tensor, right: Tensor) -> Tensor:
    return library.multiply(left.unsqueeze(0), right.unsqueeze(-1)).reshape(())


def _into(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The form of ``compute`` that writes its result to ``out``."""

    def write(*tensors: Tensor, out: Tensor, **factors: float) -> Tensor:
        result = compute(*tensors, **factors)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return write


def _in_place(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The form of ``compute`` that writes its result to its first operand."""

    def write(first: Tensor, *others: Tensor, **factors: float) -> Tensor:
        return first.copy_(compute(first, *others, **factors))

    return write


def _square_root(numbers: Tensor) -> Tensor:
    if numbers.dtype not in (torch.float32, torch.float64):
        return _square_root(numbers.float()).to(
            numbers.dtype if numbers.is_floating_point() else torch.float32
        )
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(numbers.numpy())))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _require_no_dropout(dropout_p)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return library.attend(query, key, value, attn_mask, factor, causal=is_causal)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_no_dropout(dropout_p)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return library.attend_backward(
        grad_out, query, key, value, out, logsumexp, attn_mask, factor, causal=is_causal
    )


def _require_no_dropout(probability: float) -> None:
    if probability:
        raise NotImplementedError(
            'portable numerics has attention without dropout: set runtime.numerics = "native"'
        )


KERNELS: dict[str, Callable[..., object]] = {
    "mm": _product,
    "mm.out": _into(_product),
    "bmm": _product,
    "bmm.out": _into(_product),
    "addmm": _added(_product),
    "addmm.out": _into(_added(_product)),
    "addmm_": _in_place(_added(_product)),
    "baddbmm": _added(_product),
    "baddbmm.out": _into(_added(_product)),
    "baddbmm_": _in_place(_added(_product)),
    "addmv": _added(_vector_product),
    "addmv.out": _into(_added(_vector_product)),
    "addmv_": _in_place(_added(_vector_product)),
    "dot": _inner_product,
    "sqrt": _square_root,
    "sqrt.out": _into(_square_root),
    "sqrt_": _in_place(_square_root),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""What is registered, by the names of PyTorch's operations."""
