"""Steps by the name that a recipe gives in ``use``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from phalanx.data.steps.datatrove_filter import PREFIX, DatatroveFilter, with_version
from phalanx.data.steps.decontaminate import Decontaminate, digest_of_file
from phalanx.data.steps.function import GivenFunction, with_code
from phalanx.data.steps.rules import C4, Characters, GopherQuality, GopherRepetition, Length, Mask
from phalanx.run.fields import Problem, read_section, unknown_value

AnyStep: TypeAlias = (
    Length
    | Characters
    | GopherQuality
    | GopherRepetition
    | C4
    | Mask
    | Decontaminate
    | DatatroveFilter
    | GivenFunction
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


_OTHERS = ("FILE.py:FUNCTION", f"{PREFIX}FILTER")


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
        problems.append(Problem(f"{where}.use", "is missing", f"one of {', '.join([*STEPS, *_OTHERS])}"))
        return None
    if re.fullmatch(r".+\.py:\w+", use):
        return _with_parameters(GivenFunction, table, problems, where)
    if use.startswith(PREFIX):
        return _with_parameters(DatatroveFilter, table, problems, where)
    if use not in STEPS:
        problems.append(unknown_value(f"{where}.use", use, [*STEPS, *_OTHERS]))
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


def _with_parameters(
    kind: type[GivenFunction] | type[DatatroveFilter],
    table: Mapping[str, object],
    problems: list[Problem],
    where: str,
) -> AnyStep | None:
    """The step that ``table`` describes, whose ``parameters`` are its own business."""
    given = table.get("parameters", {})
    step = read_section(
        kind, {name: value for name, value in table.items() if name != "parameters"}, problems, where
    )
    try:
        if not isinstance(given, Mapping):
            raise TypeError("is no table")
        parameters = json.loads(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError) as error:
        remedy = 'write parameters = {name = "value"}, with texts, numbers, true and false, lists and tables'
        problems.append(Problem(f"{where}.parameters", str(error), remedy))
        return None
    return None if step is None else replace(step, parameters=parameters)


def resolved(step: AnyStep, folder: Path) -> AnyStep:
    """The step with all that decides what it does; its files lie in ``folder``. Raises ``PreparationError``."""
    if isinstance(step, DatatroveFilter):
        return with_version(step)
    if isinstance(step, GivenFunction):
        return with_code(step, folder)
    if isinstance(step, Decontaminate):
        paths = tuple(str((folder / name).resolve()) for name in step.against)
        return replace(step, against=paths, sha256=tuple(digest_of_file(Path(path)) for path in paths))
    return step
