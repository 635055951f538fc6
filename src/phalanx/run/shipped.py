"""The run files that come with Phalanx: read by name from anywhere, and copied as the beginning of one's own.

They lie in ``phalanx/configs`` and so in every installation; ``configs`` in a checkout is a link to that folder.
"""

from __future__ import annotations

import json
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

from phalanx.run.fields import field_docs
from phalanx.run.section_reader import field_types
from phalanx.run.spec import RunSpec

_FOLDER = Path(__file__).parents[1] / "configs"
_SECTION = re.compile(r"\[([\w.]+)\]")
_FIELD = re.compile(r"(\w+) = ")


def shipped_names() -> list[str]:
    """The names of the run files that come with Phalanx, such as "quickstart"."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def shipped_or_given(path: Path) -> Path:
    """``path``; or the run file that comes with Phalanx, if it is called ``configs/NAME.toml`` and there is none in that place."""
    shipped = _FOLDER / path.name
    return shipped if path.parent == Path("configs") and not path.exists() and shipped.is_file() else path


def first_run_file(source: str, name: str) -> str:
    """The shipped run file ``source`` for a run called ``name``, with the meaning of each field above it."""
    return "\n".join(_explained((_FOLDER / f"{source}.toml").read_text(encoding="utf-8"), name)) + "\n"


def _explained(text: str, name: str) -> Iterator[str]:
    docs = _docs_of_sections()
    section = ""
    for line in text.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            section = found[1]
        elif (found := _FIELD.match(line)) and found[1] in docs.get(section, {}):
            yield from textwrap.wrap(
                docs[section][found[1]], 100, initial_indent="# ", subsequent_indent="# "
            )
        yield f"name = {json.dumps(name)}" if not section and line.startswith("name = ") else line


def _docs_of_sections() -> dict[str, dict[str, str]]:
    """The documentation of every field, by section and name."""
    docs: dict[str, dict[str, str]] = {}

    def add(kind: type, name: str) -> None:
        docs[name] = field_docs(kind)
        for field, declared in field_types(kind).items():
            for option in typing.get_args(declared.plain) or (declared.plain,):
                if is_dataclass(option) and isinstance(option, type):
                    add(option, f"{name}.{field}".lstrip("."))

    add(RunSpec, "")
    return docs
