"""The log files of a run, by process, oldest first; also the raw ones that earlier versions wrote.

logs/attempt-000-rank-00003.jsonl           what the process says, now
logs/attempt-000-rank-00003.r0007.jsonl     the same, set aside when it was full
logs/attempt-000-rank-00003.out.jsonl       what it wrote past Python
logs/attempt-000-rank-00003.log             a process of an earlier version: text, whose time is that of the file
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx.run.directory.regular_file import leads_out

_NAME = re.compile(r"attempt-(\d{3,})-(.+?)(\.out)?(?:\.r(\d{4,}))?\.jsonl")
_RAW = re.compile(r"attempt-(\d{3,})-(.+)\.log")
_RANK = re.compile(r"rank-(\d+)")
_CURRENT = 1 << 62


@dataclass(frozen=True)
class Stream:
    """The files that one writer has written one after another."""

    attempt: int
    process: str
    files: tuple[Path, ...]
    raw: bool = False

    @property
    def rank(self) -> int | None:
        """The rank that the name of the process tells."""
        match = _RANK.fullmatch(self.process)
        return int(match[1]) if match else None

    @property
    def node(self) -> str | None:
        """The node that the name of an agent or worker tells."""
        if self.rank is not None or self.process.startswith("coordinator"):
            return None
        worker = re.fullmatch(r"(.*\d)-\d+", self.process)
        return worker[1] if worker else self.process


def streams(directory: RunDirectory, attempt: int | None = None) -> list[Stream]:
    """All writers of a run's logs, or of one attempt at it; none if there is no such folder."""
    found: dict[tuple[int, str, str], list[tuple[int, Path]]] = defaultdict(list)
    names: list[str] = []
    with suppress(OSError):
        names = [] if leads_out(directory.logs, directory.path) else os.listdir(directory.logs)
    for name in names:
        path = directory.logs / name
        if match := _NAME.fullmatch(name):
            number = int(match[4]) if match[4] else _CURRENT
            found[int(match[1]), match[2], match[3] or ""].append((number, path))
        elif match := _RAW.fullmatch(name):
            found[int(match[1]), match[2], "raw"].append((0, path))
    return [
        Stream(key[0], key[1], tuple(path for _, path in sorted(files)), key[2] == "raw")
        for key, files in sorted(found.items())
        if attempt is None or key[0] == attempt
    ]
