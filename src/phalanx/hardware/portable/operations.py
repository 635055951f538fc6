"""Puts portable kernels in the place of PyTorch's, for all that a process computes on its CPU.

PyTorch finds the kernel of an operation through its dispatcher, below autograd, so a kernel that is registered there serves models, losses and
optimizers as they are, forward and backward (https://docs.pytorch.org/docs/2.11/library.html, ``torch.library.Library.impl``). Replaced are all operations
that are not rounded alike everywhere: products, attention, sums, softmax, elementary functions (``registered.cpp``), and what is composed of
them (``with_scalars.py``). Additions, multiplications, divisions and conversions are left to PyTorch: IEEE 754 states their bits.

Whether it holds on a machine is tried at the start of each process, by the bits of operations on numbers that are written down (``checks.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable import checks, library
from phalanx.hardware.portable.processor import unfit_processor
from phalanx.hardware.portable.with_scalars import KERNELS
from phalanx.run.rules import NotPortableError

_REMEDY = 'set runtime.numerics to "native", or train on another machine'
_ended: list[Callable[[], None]] = []
"""Withdraws what this process has registered; empty if nothing is."""


def begin() -> None:
    """Makes this process compute with portable numerics from now on; it may be called again.

    Raises ``NotPortableError`` if the machine or the installation do not allow it.
    """
    if _ended:
        return
    prepare()
    # oneDNN chooses its order of additions by the processor's caches.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    registered = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # "overriding a previously registered kernel", of which PyTorch warns once: that is what this is for
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in KERNELS.items():
            registered.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    withdraw = library.register("aten")
    _ended.extend((withdraw, registered._destroy))
    try:
        different = checks.differences(checks.digests())
    except BaseException:
        end()  # what is not checked is not computed with
        raise
    if different:
        end()
        raise NotPortableError(
            f"this machine computes {', '.join(different)} with other bits than portable numerics has, with PyTorch {torch.__version__}",
            f"{_REMEDY} or with another release of PyTorch; please report the processor and the release to the project",
        )


def begun() -> bool:
    """Whether this process computes with portable numerics."""
    return bool(_ended)


def end() -> None:
    """Gives PyTorch's own kernels back to this process, which computes natively from now on."""
    if _ended:
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
    while _ended:
        _ended.pop()()


def prepare() -> None:
    """Compiles and loads the kernels. Raises ``NotPortableError`` if the machine or the installation do not allow it."""
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
