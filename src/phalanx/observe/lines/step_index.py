"""``steps.bin``: the numbers of logged steps beside the event stream, so that nobody has to parse its text to draw a curve.

A line of the event stream about a step takes 0.7 kB and some microseconds to parse; forty runs of 100,000 steps are 3 GB. The index has a record of
96 bytes for each such line: where the line begins, how long it is, and the numbers that are drawn. It is only a cache: the stream stays the truth,
a reader holds records against their lines (``phalanx_watch/series/indexed.py``) and parses what has no record, and the file may be deleted at any time.

The records are of one size, each with a checksum over its own words. They are written in groups, when the newest group is full and at the end; a kill
costs the group, whose lines are then parsed. What cannot be written is left out: an index never costs a run anything.

    0   u8  offset of the line in events.jsonl        28  i4  attempt
    8   f8  t, unix seconds                           32  f8  tokens
    16  u4  length of the line, its newline included  40  f8  loss
    20  i4  step                                      48  f4  ten numbers in the order of ``FINE``
    24  u4  1 if the line has a ledger                88  u8  checksum
"""

from __future__ import annotations

import math
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from phalanx.observe.events import Step

Number = float | str | None
"""As JSON carries it: numbers that are not finite are words."""
Row = tuple[Number, ...]
"""A logged step: step, attempt, offset of its line, time, tokens, loss, the numbers of ``FINE``, and 1 if it has a ledger."""

FINE = (
    *("grad_norm", "lr", "tokens_per_s", "step_s", "mfu", "bits_per_byte", "goodput"),
    *("peak_memory_bytes", "balance", "data_wait_share"),
)
"""What is kept in single precision, which is more than any screen shows."""
MOST_STEP = 2**31 - 1
MOST_WHOLE = 2**53
"""Larger whole numbers are not exact in double precision; no run counts so far."""
TITLE = b"phalanx steps 1: see observe/lines/step_index.py\n"
TITLE += b"\0" * (96 - len(TITLE))
RECORD_BYTES = 96
GROUP = 64
"""Records that are written at once: 6 kB."""
_FIELDS = struct.Struct("<QdIiIidd10f")
_WORDS = struct.Struct("<11Q")
_SUM = struct.Struct("<Q")
_MASK = (1 << 64) - 1
MIXERS = tuple((0x9E3779B97F4A7C15 * (2 * place + 1) ** 3) & _MASK | 1 for place in range(11))
"""The checksum is the sum of a record's words, each times its own odd number, modulo 2^64: a changed word always changes it."""
SEED = 0x5048414C414E5821
_MOST_SINGLE = 3.4028234e38


def index_beside(events: Path) -> Path:
    """The index of the event stream at ``events``."""
    return events.with_name("steps.bin")


class LoggedStep(Protocol):
    """What is drawn of a ``Step``, as an event has it or as its line does."""

    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float | str: ...
    @property
    def grad_norm(self) -> float | str: ...
    @property
    def lr(self) -> float | str: ...
    @property
    def tokens_per_s(self) -> float | str: ...
    @property
    def step_s(self) -> float | str: ...
    @property
    def mfu(self) -> Number: ...
    @property
    def bits_per_byte(self) -> Number: ...
    @property
    def goodput(self) -> Number: ...
    @property
    def peak_memory_bytes(self) -> int | None: ...
    @property
    def balance(self) -> Number: ...
    @property
    def data_wait_s(self) -> float | str: ...
    @property
    def logged_s(self) -> float | str: ...


def row_of(found: LoggedStep, t: float, attempt: int, offset: int, has_ledger: bool) -> Row | None:
    """The row of a logged step; ``None`` if its numbers cannot be those of a run."""
    if not (0 <= found.step <= MOST_STEP and abs(attempt) <= MOST_STEP and 0 <= found.tokens <= MOST_WHOLE):
        return None
    memory = found.peak_memory_bytes
    return (
        *(found.step, attempt, offset, t, found.tokens, found.loss, found.grad_norm, found.lr),
        *(found.tokens_per_s, found.step_s, found.mfu, found.bits_per_byte, found.goodput),
        *(None if memory is None or abs(memory) > MOST_WHOLE else memory, found.balance),
        *(_share(found.data_wait_s, found.logged_s), float(has_ledger)),
    )


def _share(part: float | str, whole: float | str) -> float | None:
    if isinstance(part, str) or isinstance(whole, str) or not whole > 0:
        return None
    return part / whole


def encode_record(row: Row, length: int) -> bytes:
    """The record of a row whose line has ``length`` bytes. Raises ``ValueError``, ``TypeError`` or ``struct.error`` for what is no number."""
    step, attempt, offset, t, tokens, loss, *fine, has_ledger = row
    fields = _FIELDS.pack(
        *(offset, t, length, step, int(float(has_ledger or 0)), attempt, tokens, _number(loss or 0.0)),
        *map(_single, fine),
    )
    return fields + _SUM.pack(checksum(fields))


def _single(value: Number) -> float:
    if value is None:
        return math.nan
    value = _number(value)
    return math.copysign(math.inf, value) if abs(value) > _MOST_SINGLE else value


def _number(value: float | str) -> float:
    """The number, and of those that are none always the one that a line can say: processors make them with a sign too."""
    value = float(value)
    return math.nan if math.isnan(value) else value


def checksum(fields: bytes) -> int:
    """The checksum of a record without it."""
    return (SEED + sum(map(int.__mul__, _WORDS.unpack(fields), MIXERS))) & _MASK


class StepIndexWriter:
    """Appends records to an index; it is opened at the first group. Nothing raises: after a failure the index is left as it is."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """``anew``: the stream is empty, so what an index says is of another one."""
        self.path = path
        self._anew = anew
        self._waiting = bytearray()
        self._descriptor = -1
        self._given_up = False

    def add(self, body: Step, t: float, attempt: int, offset: int, length: int) -> None:
        """Notes a line about a step, of ``length`` bytes at ``offset``."""
        if self._given_up:
            return
        with suppress(TypeError, ValueError, OverflowError, struct.error):
            row = row_of(body, t, attempt, offset, bool(body.ledger))
            self._waiting += encode_record(row, length) if row else b""
        if len(self._waiting) >= GROUP * RECORD_BYTES:
            self._write()

    def close(self) -> None:
        """Writes what is waiting, and closes the file."""
        if self._waiting and not self._given_up:
            self._write()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
                self._descriptor = os.open(self.path, flags | (os.O_TRUNC if self._anew else 0), 0o644)
                self._anew = False
            size = os.fstat(self._descriptor).st_size
            before = b"\0" * (-size % RECORD_BYTES) if size else TITLE
            whole = before + self._waiting
            self._given_up = os.write(self._descriptor, whole) < len(whole)
        except OSError:
            self._given_up = True
        self._waiting.clear()
