"""The result of a finished run, as it is compared, printed and written to ``result.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a finished run. Fields with a default may be missing from a file of an older version."""

    run_dir: str = ""
    step: int
    loss: float | None = None
    """Training loss of the last step whose loss was finite, in nats a token."""
    tokens: int = 0
    """Training tokens over the whole run."""
    tokens_per_s: float | None = None
    """Tokens per second in the median step."""
    mfu: float | None = None
    peak_flops_per_s: float = 0.0
    """The rate of all ranks together that counts as 100% MFU."""
    peak_source: str = ""
    held_out_loss: float | None = None
    """Nats a token, in the last evaluation; ``None`` if the dataset holds no text out."""
    bits_per_byte: float | None = None
    """Bits needed for a byte of the held-out text."""
    xz_bits_per_byte: float | None = None
    """The same for ``xz -9`` on that text."""
    ranks: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """Measured device memory by kind, on the rank that holds most of it."""
    layout: dict[str, int] = field(default_factory=dict)
    """The degree of each parallel axis."""
    weights_sha256: str

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def read_result(table: Mapping[str, object]) -> RunResult | None:
    """The result in a JSON object; ``None`` if it is not that of a finished run."""
    try:
        return msgspec.convert(table, RunResult)
    except msgspec.ValidationError:
        return None
