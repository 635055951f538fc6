"""Reads the line of a logged step straight into a row of numbers, ten times as fast as the general decoder.

A run of 100,000 steps has 100,000 such lines and a few thousand others. What the quick way does not understand (another kind, a type
that is not the usual one, a torn line) is left to ``phalanx.observe.events.decode``, which decides what it is.
"""

from __future__ import annotations

import msgspec

from phalanx.observe.events import Step
from phalanx.watch.series.table import MOST_STEP

Number = float | str | None
"""As JSON carries it: numbers that are not finite are words."""
Row = tuple[Number, ...]

_STEP = b'"kind":"Step"'
_LATEST_S = 1e10
_MOST_WHOLE = 2**53
"""Larger whole numbers are not exact in double precision; no run counts so far."""


class _StepLine(msgspec.Struct):
    """The fields of a ``Step`` that are kept."""

    kind: str
    t: float
    attempt: int
    step: int
    loss: float | str
    grad_norm: float | str
    lr: float | str
    tokens: int
    tokens_per_s: float | str
    step_s: float | str
    mfu: Number = None
    bits_per_byte: Number = None
    goodput: Number = None
    peak_memory_bytes: int | None = None
    balance: Number = None
    logged_s: float | str = 0.0
    data_wait_s: float | str = 0.0
    ledger: msgspec.Raw = msgspec.Raw(b"{}")


_DECODER = msgspec.json.Decoder(_StepLine)


def step_row(line: bytes, offset: int) -> Row | None:
    """The row of a logged step, in the order of ``table.ROW``; ``None`` if the line is not plainly one."""
    if _STEP not in line:
        return None
    try:
        found = _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if found.kind != "Step" or not 0 <= found.t < _LATEST_S:
        return None
    return _row(found, found.t, found.attempt, offset, len(found.ledger) > 2)


def row_of(body: Step, t: float, attempt: int, offset: int) -> Row | None:
    """The row of a step that the general decoder has read; ``None`` if its numbers cannot be those of a run."""
    return _row(body, t, attempt, offset, bool(body.ledger))


def _row(found: _StepLine | Step, t: float, attempt: int, offset: int, has_ledger: bool) -> Row | None:
    if not (0 <= found.step <= MOST_STEP and abs(attempt) <= MOST_STEP and 0 <= found.tokens <= _MOST_WHOLE):
        return None
    memory = found.peak_memory_bytes
    return (
        *(found.step, attempt, offset, t, found.tokens, found.loss, found.grad_norm, found.lr),
        *(found.tokens_per_s, found.step_s, found.mfu, found.bits_per_byte, found.goodput),
        *(None if memory is None or abs(memory) > _MOST_WHOLE else memory, found.balance),
        *(_share(found.data_wait_s, found.logged_s), float(has_ledger)),
    )


def _share(part: float | str, whole: float | str) -> float | None:
    if isinstance(part, str) or isinstance(whole, str) or not whole > 0:
        return None
    return part / whole
