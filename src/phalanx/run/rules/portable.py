"""Rules of ``runtime.numerics = "portable"``: what its kernels do not compute is refused by its field.

Ranks of such a run compute with kernels whose operations are stated (``phalanx.hardware.portable``), so that x86-64 processors with AVX2 and 64-bit
Arm processors get the same bits, with any number of threads and any release of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

ARITHMETIC = "portable 2"
"""The definition of portable numerics. A change of any bit makes another one, and with it other runs."""
_FACTORS = ("shampoo", "soap")


class NotPortableError(RuntimeError):
    """This process cannot compute with portable numerics; the message is the reason, and what to do about it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason


def problems(spec: RunSpec) -> Iterator[Problem]:
    """The fields of ``spec`` that portable numerics does not go with."""
    if spec.runtime.numerics != "portable":
        return
    for path, reason in not_portable(spec):
        yield Problem(
            path,
            f"{reason}, which portable numerics does not allow",
            'leave it at its default, or set runtime.numerics = "native"',
            ("runtime.numerics",),
        )


def not_portable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """The fields of ``spec`` that its kernels do not compute, each with the reason."""
    optimizer = spec.optimizer.name
    for path, reason in (
        ("runtime.device", "it is arithmetic of CPUs" if spec.runtime.device == "cuda" else ""),
        ("runtime.compile", "the compiler makes kernels of its own" if spec.runtime.compile else ""),
        ("precision.matmul", "8-bit products are not among its kernels" if spec.precision.matmul != "compute" else ""),
        (
            "optimizer.name",
            f"{optimizer} factors matrices with LAPACK, whose bits are the machine's" if optimizer in _FACTORS else "",
        ),
        ("model.factory", "what a model of your own computes is not known" if spec.model.factory else ""),
    ):  # fmt: skip
        if reason:
            yield path, reason
