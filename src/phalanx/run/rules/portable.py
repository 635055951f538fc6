"""Rules of ``runtime.numerics = "portable"``: what its kernels do not compute is refused by its field, and what a rank's process needs.

Ranks of such a run multiply with kernels whose order of additions is stated (``phalanx.hardware.portable``), so that every x86-64 processor with
AVX2 gets the same bits from the same release of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec, RuntimeSpec

ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""What PyTorch and MKL read at their first use in a process: PyTorch's element-wise functions for AVX2, whatever else a processor
has (``aten/src/ATen/native/DispatchStub.cpp``), and MKL's functions with the same bits on all processors (oneMKL, "Conditional
Numerical Reproducibility")."""
_FACTORS = ("shampoo", "soap")


class NotPortableError(RuntimeError):
    """This process cannot compute with portable numerics; says why and what to do."""


def numerics_environment(runtime: RuntimeSpec) -> dict[str, str]:
    """The variables with which a rank's process starts."""
    return dict(ENVIRONMENT) if runtime.numerics == "portable" else {}


def problems(spec: RunSpec) -> Iterator[Problem]:
    """The fields of ``spec`` that portable numerics does not go with."""
    if spec.runtime.numerics != "portable":
        return
    optimizer = spec.optimizer.name
    for path, found in (
        ("runtime.device", "it is arithmetic of CPUs" if spec.runtime.device == "cuda" else ""),
        ("runtime.compile", "the compiler makes kernels of its own" if spec.runtime.compile else ""),
        ("precision.matmul", "8-bit products are not among its kernels" if spec.precision.matmul != "compute" else ""),
        (
            "optimizer.name",
            f"{optimizer} factors matrices with LAPACK, whose bits are the machine's" if optimizer in _FACTORS else "",
        ),
        ("model.factory", "what a model of your own computes is not known" if spec.model.factory else ""),
    ):  # fmt: skip
        if found:
            yield Problem(
                path,
                f"{found}, which portable numerics does not allow",
                'leave it at its default, or set runtime.numerics = "native"',
                ("runtime.numerics",),
            )
