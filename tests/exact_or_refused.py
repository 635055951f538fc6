"""What tests of exact serving assert on any processor: the bits are equal, or the product refuses and names the operation and what to do.

No test asserts which processor it runs on. A test that serves with exact numerics asserts equal bits as if they could be had everywhere. Where the product
refuses, ``skip_refused`` checks the refusal's words and skips the test with them as its reason; ``conftest.py`` puts it around every test and fixture. Few
rows may also go through the model's modules, which have the bits by definition: ``skip_modules``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import pytest

from phalanx.serve.engine.errors import NotExactError

_REFUSAL = re.compile(
    r".*\w.*: on this machine, .+ so numerics cannot be exact: serve with (fewer processes|--numerics fast)",
    re.DOTALL,
)
T = TypeVar("T")


@contextmanager
def skip_refused() -> Iterator[None]:
    """Skip the test if the product refuses exact numerics on this processor; fail it if the refusal names no operation or no remedy."""
    try:
        yield
    except NotExactError as refusal:
        _skip([refusal])
    except ExceptionGroup as group:  # Hypothesis raises one of several examples that end at different lines
        refused, others = group.split(NotExactError)
        if refused is None or others is not None:
            raise
        _skip(refused.exceptions)


def _skip(refusals: Sequence[Exception]) -> NoReturn:
    for refusal in refusals:
        if not _REFUSAL.match(str(refusal)):
            pytest.fail(f"names no operation, or no remedy: {refusal}")
    pytest.skip(f"refused on this processor: {refusals[0]}")


def skip_modules(kernel: T | None) -> T:
    """Return the kernel of few rows, or its attention; skip the test where its probes found other bits and PyTorch's operations compute instead."""
    if kernel is None:
        pytest.skip(
            "on this processor PyTorch's operations compute few rows, since the kernel's bits are others"
        )
    return kernel
