"""Code blocks of README.md and the manual, and the commands in them.

A fenced block is of its page, a language and a line. A block behind the line ``<!-- not run: REASON -->`` is not executed.
docs/evidence/ is a record of measurements, not part of the manual.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NOT_RUN = re.compile(r"not run: (\S.*)")
_HEREDOC = re.compile(r"(<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n).*?^\2$", re.DOTALL | re.MULTILINE)
_OPERATORS = frozenset(";&|()<>")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_COMMAND = re.compile(r"(^|/)phalanx$")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``reason`` is why it is not run, empty if it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return README.md and the pages of the manual, relative to the repository."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return [name for name in names if not name.startswith("docs/evidence/")]


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of ``text``, the page ``page``."""
    found = []
    for match in _BLOCK.finditer(text):
        mark = _NOT_RUN.fullmatch(match["mark"] or "")
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"], match["text"], mark[1] if mark else ""))
    return found


def phalanx_commands(script: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``phalanx`` command in a shell script, also of those in quoted commands such as ``sbatch --wrap '...'``."""
    script = _HEREDOC.sub(r"\1", script).replace("\\\n", " ")
    for inner in _SUBSTITUTION.findall(script):
        yield from phalanx_commands(inner)
    open_line = ""
    for line in _SUBSTITUTION.sub("SUBSTITUTED", script).splitlines():
        lexer = shlex.shlex(open_line + line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that ends in a later line
            open_line += line + "\n"
            continue
        open_line = ""
        for is_operator, command in itertools.groupby(words, lambda word: set(word) <= _OPERATORS):
            if not is_operator:
                yield from _arguments(list(command))


def _arguments(words: list[str]) -> Iterator[list[str]]:
    for position, word in enumerate(words):
        if " phalanx " in f" {word}" and " " in word:
            yield from phalanx_commands(word)
        elif _COMMAND.search(word):
            before = words[:position]
            is_command = all("=" in other for other in before) or before[0] in ("srun", "torchrun", "time")
            if is_command or before[-1:] == ["-m"]:
                yield words[position + 1 :]
                return
