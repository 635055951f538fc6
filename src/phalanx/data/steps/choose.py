"""Steps by the name that a recipe gives in ``use``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from phalanx.data.steps.decontaminate import Decontaminate, digest_of_file
from phalanx.data.steps.function import GivenFunction, with_code
from phalanx.data.steps.rules import C4, Characters, GopherQuality, GopherRepetition, Length, Mask
from phalanx.run.problems import Problem
from phalanx.run.section_reader import read_section, unknown_value

AnyStep: TypeAlias = (
    Length | Characters | GopherQuality | GopherRepetition | C4 | Mask | Decontaminate | GivenFunction
)
STEPS: Mapping[str, type[AnyStep]] = MappingProxyType(
    {
        "length": Length,
        "characters": Characters,
        "gopher_quality": GopherQuality,
        "gopher_repetition": GopherRepetition,
        "c4": C4,
        "mask": Mask,
        "decontaminate": Decontaminate,
    }
)


def read_steps(tables: object, problems: list[Problem]) -> tuple[AnyStep, ...]:
    """The steps that the tables ``[[step]]`` describe; mistakes are added to ``problems``."""
    if not isinstance(tables, list | tuple):
        problems.append(Problem("step", "is no list of tables", "write [[step]]"))
        return ()
    return tuple(
        step for number, table in enumerate(tables) if (step := _read(table, f"step[{number}]", problems))
    )


def _read(table: object, where: str, problems: list[Problem]) -> AnyStep | None:
    use = table.get("use") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(use, str):
        problems.append(
            Problem(f"{where}.use", "is missing", f"one of {', '.join(STEPS)}, or FILE.py:FUNCTION")
        )
        return None
    if re.fullmatch(r".+\.py:\w+", use):
        return read_section(GivenFunction, table, problems, where)
    if use not in STEPS:
        problems.append(unknown_value(f"{where}.use", use, [*STEPS, "FILE.py:FUNCTION"]))
        return None
    step = read_section(STEPS[use], table, problems, where)
    if isinstance(step, Characters):
        try:
            re.compile(step.allowed)
        except re.error as error:
            problems.append(
                Problem(f"{where}.allowed", f"is no class of characters: {error}", "such as [a-z ]")
            )
    return step


def resolved(step: AnyStep, folder: Path) -> AnyStep:
    """The step with all that decides what it does; its files lie in ``folder``. Raises ``PreparationError``."""
    if isinstance(step, GivenFunction):
        return with_code(step, folder)
    if isinstance(step, Decontaminate):
        paths = tuple(str((folder / name).resolve()) for name in step.against)
        return replace(step, against=paths, sha256=tuple(digest_of_file(Path(path)) for path in paths))
    return step
