"""The comparison of a finished run's weights with those that its run file expects (``[expect]``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

Comparison = Literal["equal", "different", "not expected"]
_ENTRY = re.compile(r"[0-9a-f]{8,64} [0-9a-f]{64}")


def problems(spec: RunSpec) -> Iterator[Problem]:
    """The entries that are no key and hash."""
    for number, entry in enumerate(spec.expect.weights):
        if not _ENTRY.fullmatch(entry):
            yield Problem(
                f"expect.weights[{number}]",
                f"{entry[:100]!r} is not a run's key and a hash",
                "8 to 64 hexadecimal digits of the key (the run directory's name ends with 8), a space, and the 64 of the weights' SHA-256",
            )


def compared(spec: RunSpec, key: str, weights_sha256: str) -> Comparison | None:
    """Return whether the run with ``key`` has the weights that ``spec`` expects; None if it expects nothing of any run."""
    if not spec.expect.weights:
        return None
    expected = (entry.split() for entry in spec.expect.weights)
    hashes = {sha256 for run, sha256 in expected if key.startswith(run)}
    if not hashes:
        return "not expected"
    return "equal" if weights_sha256 in hashes else "different"
