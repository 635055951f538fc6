"""One line of a log, and the level of a text that does not say its own.

A log is a file of JSON objects, one a line, in the order in which one process said them:

    {"t": 1732519237.123456, "level": "warning", "node": "node-1", "rank": 3, "epoch": 2, "attempt": 0, "step": 117, "text": "...", "process": "node-1-0"}

What is not known is null. Readers skip lines that are no such object: the last one of a writer that was killed, or a stranger's.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the least serious on."""
_LATEST_S = 1e10
_SEEN = 600
"""The level shows in so many first characters."""
_PREFIX = r"(?:\[rank\d+\]:\s?)?"
_ERROR = re.compile(
    rf"^{_PREFIX}(?:Traceback \(most recent|[Ee]rror\b|[Ff]atal\b|E\d{{4}} |\[E\d*[: ]|(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)(?::|$))"
    r"|\b(?:ERROR|FATAL|CRITICAL)\b|Traceback \(most recent|\b[Ee]rror:|Segmentation fault|terminate called|core dumped"
    r"|Assertion .{1,200} failed|\bCUDA error\b|\bSIG(?:SEGV|ABRT|BUS|KILL)\b|[Oo]ut of memory"
)
_WARNING = re.compile(rf"\bWARN(?:ING)?\b|[Ww]arning\b:?|^{_PREFIX}(?:W\d{{4}} |\[W\d*[: ])")
_HINTS = (
    *(
        "err",
        "warn",
        "fatal",
        "traceback",
        "exce",
        "inter",
        "crit",
        "segm",
        "term",
        "dump",
        "asser",
        "sig",
        "memory",
        "debug",
        "trace",
    ),
    *(
        "unfit",
        "cannot",
        "refused",
        "no step",
        "leave",
        "fail",
        "ended",
        "coordinator",
        "again",
        "exited",
        "until",
    ),
)
"""What the lower case of any line holds that is more, or less, than information; most lines hold none of it."""
_GLOG = re.compile(rf"^{_PREFIX}\[?[EWD]\d")
_OWN_WARNING = re.compile(
    r"^(?:warning: |unfit: |cannot |refused |no step for |leave epoch \d|first failure: |worker \d+ ended with code -?[1-9]|no coordinator)"
    r"|\bexited with code -?[1-9]|; (?:tries|trying) again|until it can$"
)
"""As Phalanx's own processes put it."""
_DEBUG = re.compile(rf"^{_PREFIX}(?:\[?DEBUG\b|D\d{{4}} )|\bNCCL TRACE\b")


class LogLine(msgspec.Struct, frozen=True):
    """What a process said at once: one line, or several that belong together, such as a traceback."""

    t: float
    """Unix seconds, by the clock of its machine."""
    level: str
    node: str | None
    """The node's name in a fleet, else the machine's."""
    rank: int | None
    epoch: int | None
    """The epoch of the fleet's membership; none outside a fleet."""
    attempt: int
    step: int | None
    """The step that the process was in."""
    text: str
    process: str = ""
    """The process among those of the attempt: ``rank-00003``, ``coordinator``, a node's name, or that and the number of its worker."""
    goes_on: bool | UnsetType = UNSET
    """True if it goes on with what the process said just before: the next exception of a chain, the rest of a line."""


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[LogLine] = msgspec.json.Decoder(LogLine)


def encode(line: LogLine) -> bytes:
    """The line as JSON, with its newline. Lone surrogates, which stand for bytes that are not UTF-8, are escaped."""
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        text = line.text.encode(errors="backslashreplace").decode()
        return _encoder.encode(msgspec.structs.replace(line, text=text)) + b"\n"


def decode(raw: bytes) -> LogLine | None:
    """The line that ``raw`` holds; ``None`` if it holds none, or one of no time that a clock shows."""
    try:
        line = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return line if 0 <= line.t < _LATEST_S else None


def decode_lines(block: bytes) -> list[LogLine]:
    """The lines of a block, which begins and ends between two lines; others are left out."""
    try:
        found = _decoder.decode_lines(block)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [line for raw in block.split(b"\n") if raw and (line := decode(raw)) is not None]
    return (
        found
        if all(0 <= line.t < _LATEST_S for line in found)
        else [x for x in found if 0 <= x.t < _LATEST_S]
    )


def severity(level: str) -> int:
    """The rank of a level among ``LEVELS``; a word that is none of them counts as information."""
    return LEVELS.index(level) if level in LEVELS else 1


def level_of(text: str) -> Level:
    """The level of a text by what it says, as far as its first line shows."""
    head = text[:_SEEN].partition("\n")[0]
    lowered = head.lower()
    if not any(hint in lowered for hint in _HINTS) and not _GLOG.match(head):
        return "info"
    if _OWN_WARNING.search(head):
        return "warning"
    if _ERROR.search(head):
        # A line that calls itself a warning is one, whatever error it warns of.
        own = _WARNING.search(head[:80])
        return "warning" if own and not head.startswith("Traceback") else "error"
    if _WARNING.search(head):
        return "warning"
    return "debug" if _DEBUG.search(head) else "info"
