"""One line of a log, and the level of a text that names none.

A log is a file of JSON objects, one a line, in the order in which one process wrote them:

    {"t": 1732519237.123456, "level": "warning", "node": "node-1", "rank": 3, "epoch": 2, "attempt": 0, "step": 117, "text": "...", "process": "node-1-0"}

What is not known is null. Readers skip lines that are no such object: the last one of a writer that was killed, or a stranger's.

The last section separates the first failure from the failures that followed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
# matched text: printed by Python, PyTorch, NCCL and the system
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
"""Words, in lower case, of every line whose level is not information; most lines hold none of them."""
_GLOG = re.compile(rf"^{_PREFIX}\[?[EWD]\d")
# matched text: a captured stream carries no level, and the children of our processes write into it too
_OWN_WARNING = re.compile(
    r"^(?:warning: |unfit: |cannot |refused |no step for |leave epoch \d|first failure: |worker \d+ ended with code -?[1-9]|no coordinator)"
    r"|\bexited with code -?[1-9]|; (?:tries|trying) again|until it can$"
)
"""As Phalanx's own processes put it."""
_DEBUG = re.compile(rf"^{_PREFIX}(?:\[?DEBUG\b|D\d{{4}} )|\bNCCL TRACE\b")


class LogLine(msgspec.Struct, frozen=True):
    """Text that a process wrote at once: one line, or several that belong together, such as a traceback."""

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
    """True if it continues the record before it: the next exception of a chain, the rest of a line."""


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[LogLine] = msgspec.json.Decoder(LogLine)


def encode(line: LogLine) -> bytes:
    """Return the line as JSON, with its newline. Lone surrogates, which stand for bytes that are not UTF-8, are escaped."""
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        text = line.text.encode(errors="backslashreplace").decode()
        return _encoder.encode(msgspec.structs.replace(line, text=text)) + b"\n"


def decode(raw: bytes) -> LogLine | None:
    """Return the line in ``raw``; ``None`` if it cannot be decoded, or has an impossible time."""
    try:
        line = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return line if 0 <= line.t < _LATEST_S else None


def decode_lines(block: bytes) -> list[LogLine]:
    """Return the lines of a block, which begins and ends between two lines; those that ``decode`` refuses are left
    out.
    """
    try:
        lines = _decoder.decode_lines(block)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [line for raw in block.split(b"\n") if raw and (line := decode(raw)) is not None]
    return (
        lines
        if all(0 <= line.t < _LATEST_S for line in lines)
        else [x for x in lines if 0 <= x.t < _LATEST_S]
    )


def severity(level: str) -> int:
    """The rank of a level among ``LEVELS``; a word that is none of them counts as information."""
    return LEVELS.index(level) if level in LEVELS else 1


def level_of(text: str) -> Level:
    """Return the level of a text by words in its first line: a warning that mentions an error is a warning; "info"
    by default.
    """
    head = text[:_SEEN].partition("\n")[0]
    lowered = head.lower()
    if not any(hint in lowered for hint in _HINTS) and not _GLOG.match(head):
        return "info"
    if _OWN_WARNING.search(head):
        return "warning"
    if _ERROR.search(head):
        # A line that names itself a warning is one, even if it mentions an error.
        own = _WARNING.search(head[:80])
        return "warning" if own and not head.startswith("Traceback") else "error"
    if _WARNING.search(head):
        return "warning"
    return "debug" if _DEBUG.search(head) else "info"


# Find the failure that came first, from the error lines of all processes of a run.
#
# If a rank fails, all others fail too: their collectives break, connections are reset, the launcher ends them. Each logs an
# error, and the clocks of machines differ by more than the time between these errors. So the text of an error counts before its
# time. An error about a lost peer, a collective's timeout or a request to end is a consequence; any other is a cause. The
# earliest cause is the first failure, or without causes the earliest consequence. Of a chain of exceptions, the first one
# decides, because the others were raised while it was handled.
#
# A fleet survives many failures, so only the newest burst counts: the failures since the last minute in which nothing failed.


_QUIET_S = 60.0
_INNOCENT = 2
_ENDED = "its process "
"""The beginning of a launcher's line on the end of a process."""
_BEGUN = re.compile(r"process \d+ begins: ")
# matched text: printed by Python and PyTorch; "its process" is written by ended_text below
_FAILURE = re.compile(
    r"^(?:\[rank\d+\]:\s?)?(?:Traceback |[Ee]rror: |Fatal |its process |unfit: |(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)(?::|$))"
)
# matched text: errors of PyTorch, NCCL, Gloo and the system, which carry no code
_OF_ANOTHER = re.compile(
    r"[Cc]onnection (?:closed|reset|refused|was (?:closed|reset)|lost|aborted)|[Cc]onnectionReset|[Cc]onnectionRefused|[Bb]roken ?[Pp]ipe|reset by peer"
    r"|closed by (?:the )?(?:peer|remote)|[Ss]ocket (?:[Tt]imeout|closed)|[Rr]emote (?:process|peer)|remote_?error|ncclRemoteError|NCCL communicator was aborted"
    r"|[Pp]eer (?:closed|is gone|has gone|went away)|pair closure|(?:gloo|transport/tcp).{0,200}(?:[Tt]imeout|[Tt]imed out|error|closed)"
    r"|[Tt]imed out (?:waiting|after|while)|[Ww]atchdog|[Cc]ollective.{0,80}(?:aborted|time|broken|failed)|[Rr]ecv(?:Value|Bytes|Buf)? ?failed|[Ff]ailed to (?:recv|send|connect)"
    r"|[Rr]endezvous|DistNetworkError|DistStoreError|SIGTERM|by its launcher|its agent (?:is gone|has ended)|was told to end|another rank",
)
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s?)?[A-Za-z_][\w.]*(?::|$)")
_TRACE = "Traceback (most recent call last)"


@dataclass(frozen=True)
class FirstFailure:
    """The failure that came first, and why it is taken for that."""

    line: LogLine
    evidence: tuple[str, ...]
    followers: tuple[LogLine, ...] = ()
    """One failure of each other process of the same burst."""


def who(line: LogLine) -> str:
    """Return the process that wrote a line, in words."""
    name = f"rank {line.rank}" if line.rank is not None else line.process or "a process"
    return f"{name} on {line.node}" if line.node and not name.startswith(line.node) else name


def what_happened(text: str) -> str:
    """Return the error that a text is about: without a traceback its first line, or "".

    Of a traceback, the message of the first exception of its chain, perhaps of several lines. If it has no message,
    return the last line.
    """
    lines = text.splitlines()
    if not any(_TRACE in line for line in lines):
        return lines[0] if lines else ""
    traced = False
    for number, line in enumerate(lines):
        traced = traced or _TRACE in line
        if traced and _TRACE not in line and not line.startswith(" ") and _EXCEPTION.match(line):
            message = [line]
            for more in lines[number + 1 :]:
                if not more or _TRACE in more:
                    break
                message.append(more)
            return "\n".join(message)
    return lines[-1]


def comes_of_another(text: str) -> bool:
    """Return True if the text of an error shows that another process failed before."""
    return _OF_ANOTHER.search(what_happened(text)[:4000]) is not None


def first_failure(lines: Iterable[LogLine]) -> FirstFailure | None:
    """Return the first failure of the newest burst among the errors of all processes of a run, in any order;
    ``None`` if nothing failed.

    One failure counts for each process. Causes and kills come before ends without a message, and those before
    what follows from another failure; among equals the earliest is first. Other processes' failures and the
    evidence are attached.
    """
    failures = _newest_burst(sorted((line for line in lines if _is_failure(line)), key=lambda line: line.t))
    if not failures:
        return None
    own: dict[str, LogLine] = {}
    for line in failures:
        key = line.process or who(line)
        # Keep the earliest failure of each process, unless that is a consequence and a later one is not. An exit line has no
        # cause.
        if key not in own or (
            _guilt(own[key]) == _INNOCENT and not says_its_end(line) and _guilt(line) < _INNOCENT
        ):
            own[key] = line
    ranked = sorted(own.values(), key=lambda line: (_guilt(line), line.t))
    first, others = ranked[0], ranked[1:]
    return FirstFailure(
        first, tuple(_evidence(first, others)), tuple(sorted(others, key=lambda line: line.t))
    )


def _guilt(line: LogLine) -> int:
    """Return 0 for an error that may be a cause, or a kill; 1 for a bare end with an exit code; ``_INNOCENT`` for
    what follows from another failure.
    """
    if comes_of_another(line.text):
        return _INNOCENT
    # matched text: written by ended_text below; a line of a log has no other field for it
    return 1 if line.text.startswith(f"{_ENDED}ended with code") else 0


def _is_failure(line: LogLine) -> bool:
    return line.level == "error" and _FAILURE.match(line.text) is not None


def _newest_burst(failures: Sequence[LogLine]) -> Sequence[LogLine]:
    """Return the failures after the last gap longer than ``_QUIET_S``, or all; ``failures`` are in order of time."""
    for number in range(len(failures) - 1, 0, -1):
        if failures[number].t - failures[number - 1].t > _QUIET_S:
            return failures[number:]
    return failures


def _evidence(first: LogLine, others: Sequence[LogLine]) -> Iterable[str]:
    """Yield sentences on why ``first`` is taken for the cause: its kind, how many others failed by themselves and
    how much later, and how many followed.
    """
    if comes_of_another(first.text):
        yield "every error speaks of a lost peer, a timeout or an order to end; this one is the earliest, and its cause has left no word"
    else:
        yield "its error does not come of losing another process"
    causes = [line for line in others if not comes_of_another(line.text)]
    if causes:
        yield f"{len(causes)} more failed by themselves, the next {min(c.t for c in causes) - first.t:.3f} s after it: {_named(causes)}"
    if followers := [line for line in others if comes_of_another(line.text)]:
        yield f"{len(followers)} failed because another process had: {_named(followers)}"


def _named(lines: Sequence[LogLine], most: int = 4) -> str:
    names = [who(line) for line in lines]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ended_text(how: str) -> str:
    """Return the text of a launcher's line on the end of a process; ``how`` begins with "ended with code" or "was killed by"."""
    return f"{_ENDED}{how}"


def begun_text(process: int, command: str) -> str:
    """The text of the first line of a process."""
    return f"process {process} begins: {command}"


def says_its_beginning(line: LogLine) -> bool:
    """Return True for the line that marks the beginning of a process; lines before it are of another one under the same name."""
    return _BEGUN.match(line.text) is not None


def says_its_end(line: LogLine) -> bool:
    """Return True for the line that marks the end of a process."""
    return line.text.startswith(_ENDED)
