"""Replace PyTorch's kernels by portable ones for all that a process computes on its CPU, and check the bits of the process.

PyTorch finds the kernel of an operation through its dispatcher, below autograd, so a kernel that is registered there serves models, losses and
optimizers as they are, forward and backward (https://docs.pytorch.org/docs/2.11/library.html, ``torch.library.Library.impl``). Replaced are all operations
that are not rounded alike everywhere: products, attention, sums, softmax, elementary functions (``registered.cpp``), and what is composed of
them (``library.py``). Additions, multiplications, divisions and conversions are left to PyTorch: IEEE 754 states their bits.

Whether it holds on a machine is tried at the start of each process, by the bits of operations on numbers that are written down.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable import library
from phalanx.hardware.portable.build import unfit_processor
from phalanx.hardware.portable.library import KERNELS
from phalanx.run.rules import NotPortableError

_REMEDY = 'set runtime.numerics to "native", or train on another machine'
_ended: list[Callable[[], None]] = []
"""Withdraws what this process has registered; empty if nothing is."""


def begin() -> None:
    """Make this process compute with portable numerics from now on; a second call does nothing.

    Replaces PyTorch's kernels on CPUs and switches oneDNN off, then compares a check's bits. Raises
    ``NotPortableError`` if the machine or the installation do not allow it, if PyTorch refuses a kernel, or if bits
    differ; native kernels and oneDNN then stay.
    """
    if _ended:
        return
    prepare()
    # oneDNN chooses its order of additions by the processor's caches.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    registered = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # "overriding a previously registered kernel", a warning of PyTorch: the override is intended
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in KERNELS.items():
            registered.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    _ended.append(registered._destroy)
    try:
        _ended.append(library.register("aten"))
        different = differences(digests())
    except NoHostKernelsError as error:
        end()
        raise NotPortableError(f"portable numerics needs its kernels: {error}", _REMEDY) from error
    except BaseException:
        end()  # unchecked kernels must not be used
        raise
    if different:
        end()
        raise NotPortableError(
            f"this machine computes {', '.join(different)} with other bits than portable numerics has, with PyTorch {torch.__version__}",
            f"{_REMEDY} or with another release of PyTorch; please report the processor and the release to the project",
        )


def begun() -> bool:
    """Return True if this process computes with portable numerics."""
    return bool(_ended)


def end() -> None:
    """Restore PyTorch's own kernels and oneDNN in this process, which computes natively from now on; does nothing if it already does."""
    if _ended:
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
    while _ended:
        _ended.pop()()


def prepare() -> None:
    """Compile and load the kernels, without using them.

    Raises ``NotPortableError`` if the machine or the installation do not allow it.
    """
    if reason := unfit_processor():
        raise NotPortableError(
            f"portable numerics needs an x86-64 processor with AVX2 and FMA, or a 64-bit Arm one, and {reason}",
            _REMEDY,
        )
    try:
        library.load()
    except (NoHostKernelsError, OSError) as error:
        raise NotPortableError(
            f"portable numerics needs its kernels, which cannot be compiled (with gcc and g++): {error}",
            _REMEDY,
        ) from error


# Digests of known results, with which each process checks its kernels at its start.
#
# Inputs are integers times powers of two, so they are the same everywhere. The computations are the forward and backward
# functions of which models, losses and optimizers consist. The digests are the same for every processor, number of threads and
# release of PyTorch.


DIGESTS = {
    "products": "93642e40a68b78",
    "bf16 products": "cd102653e414a0",
    "8-bit formats": "4fb9243bad598b",
    "attention": "7a5156b5bf54bd",
    "square roots": "edeb7505ba82ef",
    "exponentials": "5955163e547881",
    "logarithms": "c72f9c62430d7f",
    "rotations": "969014cbafe13f",
    "activations": "ff01e7cabdf709",
    "softmax": "09864a2d15842a",
    "sums": "46538edfa0594c",
}
"""The digest of each computation."""


def computations() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the computations of the check: the name, and a function that returns its results on fixed numbers. They are
    products, conversions to 8-bit formats, attention, elementwise functions, softmax and sums.
    """
    spread, narrow = _numbers(48, 517, 0) / 2**6, _numbers(48, 517, 0).bfloat16()
    positive, weights = spread.abs() + 2**-12, _numbers(70, 517, 1) / 2**7
    heads = [_numbers(2 * 4 * 70, 24, seed).view(2, 4, 70, 24) / 2**7 for seed in (2, 3, 4)]
    yield "products", lambda: torch.cat((spread @ weights.t(), (spread.t() @ spread)[:48, :70]))
    yield "bf16 products", lambda: (narrow @ weights.bfloat16().t()).float()
    # Normal and subnormal numbers. Releases of PyTorch differ only beyond the largest number, which scales exclude.
    scaled = torch.stack((spread, spread / 2**8, spread / 2**12))
    yield (
        "8-bit formats",
        lambda: torch.stack([scaled.to(dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]),
    )
    yield "attention", lambda: _attention(heads)
    yield "square roots", lambda: torch.stack((positive.sqrt(), positive.rsqrt()))
    yield "exponentials", lambda: torch.stack((spread.exp(), spread.sigmoid(), spread.tanh()))
    yield "logarithms", lambda: torch.stack((positive.log(), positive.log2(), positive.log1p()))
    yield "rotations", lambda: torch.stack((spread.cos(), spread.sin(), 10000.0 ** (-positive / 2**5)))
    yield (
        "activations",
        lambda: torch.stack((F.silu(spread), F.gelu(spread), F.gelu(spread, approximate="tanh"))),
    )
    yield "softmax", lambda: torch.stack((spread.softmax(-1), spread.log_softmax(-1)))
    yield (
        "sums",
        lambda: torch.cat((spread.sum(0), spread.sum(1), spread.mean(-1), spread.square().sum().view(1))),
    )


def _attention(heads: list[Tensor]) -> Tensor:
    """Return the results and gradients of causal attention on ``heads``, concatenated."""
    query, key, value = (head.clone().requires_grad_() for head in heads)
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradients = torch.autograd.grad(out.square().sum(), (query, key, value))
    return torch.cat([tensor.detach().reshape(-1) for tensor in (out, *gradients)])


def _numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Whole numbers between -511 and 511, ``(rows, columns)``, fp32, by a linear congruence."""
    places = torch.arange(rows * columns, dtype=torch.int64) + seed * 7919
    mixed = (places * 1103515245 + 12345) % 2**31
    return ((mixed // 2**8) % 1023 - 511).view(rows, columns).float()


def digests() -> dict[str, str]:
    """Return the digest of each computation's bits in this process."""
    with torch.inference_mode(False):
        return {name: _digest(compute()) for name, compute in computations()}


def _digest(result: Tensor) -> str:
    return hashlib.sha256(result.detach().contiguous().numpy().tobytes()).hexdigest()[:14]


def differences(computed: Mapping[str, str]) -> list[str]:
    """Return the names of the computations whose digest is not the one that is written down."""
    return [name for name, digest in DIGESTS.items() if computed[name] != digest]
