"""The end of a log: what a process said last, from its own file and from that of its descriptors, in the order of time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from phalanx.observe.logs.first_failure import says_its_beginning, says_its_end
from phalanx.observe.logs.line import LogLine, decode_lines
from phalanx.observe.logs.log_file import set_aside
from phalanx.run.directory.files import open_regular

_BLOCK = 64 << 10


def raw_of(path: Path) -> Path:
    """Beside the log ``path`` of a process: that of what it wrote past Python."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.out.jsonl")


def last_lines(path: Path, most: int) -> list[LogLine]:
    """The last lines of the process whose log is ``path``, at most so many; empty if there are none that can be read."""
    found = [*_last(path), *_last(raw_of(path))]
    return sorted(found, key=lambda line: line.t)[-most:]


def _last(path: Path) -> list[LogLine]:
    files = [path, *(file for _, file in reversed(set_aside(path)))]
    for file in files[:2]:  # a log that was set aside a moment ago is empty
        with suppress(OSError), open_regular(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _BLOCK))
            block = opened.read(_BLOCK)
            if size > _BLOCK:
                block = block[block.find(b"\n") + 1 :]
            if lines := decode_lines(block):
                return lines
    return []


def last_text(path: Path, lines: int) -> list[str]:
    """The last lines of text that the process whose log is ``path`` has said, those of tracebacks too."""
    said = last_lines(path, lines + 2)
    begun = max((number for number, line in enumerate(said) if says_its_beginning(line)), default=-1)
    said = [line for line in said[begun + 1 :] if not says_its_end(line)]
    return [text for line in said for text in line.text.splitlines()][-lines:]
