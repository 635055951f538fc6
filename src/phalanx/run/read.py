"""Read a run file into a ``RunSpec``, report all mistakes at once, and resolve values that depend on the environment.

The table is read by the dataclasses' types (``run/fields.py``), with a preset's fields as defaults. Rules for several fields are applied to the fields
that could be read. One ``RunFileError`` has all mistakes.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phalanx.plugins import plugin_names
from phalanx.run.directory.files import read_named
from phalanx.run.fields import (
    JsonObject,
    Problem,
    RunFileError,
    TomlTable,
    field_docs,
    read_section,
    sections,
    unknown_value,
)
from phalanx.run.rules import check
from phalanx.run.spec import DataSpec, LaunchSpec, ModelSpec, PrecisionSpec, RunSpec, RuntimeSpec

RUN_FILE = "run.toml"
"""The name of the resolved run file in a run directory."""


def run_file_at(place: Path) -> Path:
    """Return the run file of a run directory, or ``place`` itself if it is none."""
    return place / RUN_FILE if (place / RUN_FILE).is_file() else place


def read_run(path: Path, presets: Mapping[str, ModelSpec], overrides: Sequence[str] = ()) -> RunSpec:
    """Return the run that a TOML file and ``section.field=value`` overrides describe.

    If there is no such file, ``configs/NAME.toml`` is one that comes with Phalanx. Raises ``RunFileError``: with the
    one problem of a file that cannot be read or is not TOML, otherwise with every problem found in fields and overrides.
    """
    path = shipped_or_given(path)
    try:
        table = tomllib.loads(read_named(path))
    except FileNotFoundError:
        problem = (
            f"{path} is a link to a file that does not exist"
            if path.is_symlink()
            else f"there is no file {path}"
        )
        raise RunFileError(
            path, [Problem("", problem, f"give the path of a run file{_near(path)}")]
        ) from None
    except IsADirectoryError:
        own = path / RUN_FILE
        remedy = f"its run file is {own}" if own.is_file() else "give the path of a run file"
        raise RunFileError(path, [Problem("", f"{path} is a directory", remedy)]) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise RunFileError(
            path, [Problem("", problem, "give the path of a run file that you may read")]
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # besides its own errors, a number of thousands of digits; deep nesting
        raise RunFileError(path, [Problem("", f"not valid TOML: {error}", "see https://toml.io")]) from None
    return read_table(table, presets, overrides, path)


def _near(path: Path) -> str:
    """Return the question whether another ``.toml`` file of the same folder is meant, whose name is nearly that of
    ``path``. Empty if there is none, or the folder cannot be listed.
    """
    with suppress(OSError):
        names = [name for name in os.listdir(path.parent) if name.endswith(".toml") and name != path.name]
        if near := difflib.get_close_matches(path.name, names, n=1):
            return f"; did you mean {path.with_name(near[0])}?"
    return ""


def override(spec: RunSpec, overrides: Sequence[str], path: Path) -> RunSpec:
    """Return a run with other values of the fields in ``overrides``, which name no preset; ``path`` is its file, for messages.

    Raises ``RunFileError`` with every problem.
    """
    # The preset's values are in the other fields since the run was read; only its name is kept.
    table, preset = to_table(spec), spec.model.preset
    table["model"] = {name: value for name, value in table.get("model", {}).items() if name != "preset"}
    other = read_table(table, {}, overrides, path)
    return replace(other, model=replace(other.model, preset=preset))


def read_table(
    table: TomlTable, presets: Mapping[str, ModelSpec], overrides: Sequence[str], path: Path
) -> RunSpec:
    """Return the run that a parsed table and overrides describe; ``path`` is for messages. The table's nested tables
    are changed in place.

    If ``data.path`` alone is overridden, ``data.corpus`` is dropped. Overridden fields are no longer ``unfilled``.
    Raises ``RunFileError`` with every problem.
    """
    table = dict(table)
    problems = [problem for override in overrides for problem in _apply_override(table, override)]
    _settle_overridden(table, {override.partition("=")[0].strip() for override in overrides})
    spec, more = spec_from_table(table, presets)
    if problems or spec is None:
        raise RunFileError(path, [*problems, *more])
    return spec


def spec_from_table(
    table: TomlTable, presets: Mapping[str, ModelSpec]
) -> tuple[RunSpec | None, list[Problem]]:
    """Return the run that a parsed table describes, or ``None`` if there is a problem, and all problems: of single
    fields, and of combinations of the others.
    """
    problems: list[Problem] = []
    table = {**table, "model": _expand_preset(table.get("model", {}), presets, problems)}
    spec = read_section(RunSpec, table, problems) or RunSpec()
    # Rules for several fields are applied even if single fields are wrong (with their defaults). Only problems that
    # do not involve a field already reported are added.
    named = {problem.path for problem in problems}
    problems += [problem for problem in check(spec) if not named & {problem.path, *problem.also}]
    return (None if problems else spec), problems


def _expand_preset(model: object, presets: Mapping[str, ModelSpec], problems: list[Problem]) -> object:
    """Return the table ``model`` merged on top of its preset: a named one, or that of a run directory. If there is
    none, or its run file cannot be read, add a problem and drop the name. A ``model`` without a preset is returned
    unchanged.
    """
    if not isinstance(model, Mapping) or not model.get("preset"):
        return model
    name = model["preset"]
    if isinstance(name, str) and name in presets:
        return _merge(to_table(presets[name]), model)
    if isinstance(name, str) and (file := Path(name) / RUN_FILE).is_file():
        try:
            preset = tomllib.loads(read_named(file)).get("model", {})
        except (ValueError, OSError) as error:
            problems.append(
                Problem("model.preset", f"{file} cannot be read: {error}", "give another run directory")
            )
            return {key: value for key, value in model.items() if key != "preset"}
        return _merge(preset, model)
    problem = unknown_value("model.preset", name, presets)
    problems.append(
        Problem(problem.path, problem.finding, f"{problem.remedy}; or the path of a run directory")
    )
    return {key: value for key, value in model.items() if key != "preset"}


def _merge(base: TomlTable, over: TomlTable) -> dict[str, object]:
    """Return ``base`` with the fields of ``over``, table by table; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _apply_override(table: JsonObject, override: str) -> list[Problem]:
    """Set the field of ``section.field=value`` in ``table``, making missing tables; entries of a list go by name. A
    value that is not TOML is a string.

    Return a list of at most one problem. Then the field is not set, but tables before it may have been made.
    """
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        return [Problem(override, "not of the form section.field=value", "for example optimizer.lr=3e-4")]
    *sections, last = path.strip().split(".")
    place: Any = table
    for section in sections:
        if isinstance(place, list):  # a list of tables, each with a name
            names = [str(entry.get("name", "")) for entry in place if isinstance(entry, dict)]
            if section not in names:
                return [unknown_value(path, section, names)]
            place = place[names.index(section)]
            continue
        place = place.setdefault(section, {})
        if not isinstance(place, dict | list):
            return [Problem(path, f"{section} is not a table", "give section.field=value")]
    if isinstance(place, list):
        remedy = f"give {'.'.join(sections)}.NAME.field=value, or the whole list"
        return [Problem(path, f"{sections[-1]} is a list of tables", remedy)]
    before = place.get(last)
    try:
        document = tomllib.loads(f"value = {text.strip()}")
        # Further lines would give further keys: then the text is no TOML value either.
        place[last] = document["value"] if len(document) == 1 else text.strip()
    except (ValueError, RecursionError):
        place[last] = text.strip()  # Text that is not TOML is a string without quotes.
    value = place[last]
    if not sections and isinstance(value, dict) and isinstance(before, dict) and before.keys() - value.keys():
        dropped = ", ".join(f"{last}.{name}" for name in sorted(before.keys() - value.keys())[:5])
        place[last] = before
        problem = f"the whole table would be replaced, and lose {dropped}"
        return [Problem(path, problem, f"give {last}.FIELD=value for each field")]
    return []


def _settle_overridden(table: JsonObject, overridden: Set[str]) -> None:
    """Drop ``data.corpus`` if only ``data.path`` is overridden, and remove overridden fields from the list ``unfilled`` unless that is.

    The file's corpus belongs to the file's own folder: a misspelled or unprepared one would be filled with the wrong text.
    """
    data, unfilled = table.get("data"), table.get("unfilled")
    if "data.path" in overridden and "data.corpus" not in overridden and isinstance(data, dict):
        data.pop("corpus", None)
    chosen = overridden | ({"data.corpus"} if "data.path" in overridden else set())
    if isinstance(unfilled, list) and "unfilled" not in chosen:
        table["unfilled"] = [path for path in unfilled if path not in chosen]


def to_table(section: Any) -> JsonObject:
    """Return a section and those within it as plain tables, ready for TOML: ``None`` left out, tuples as lists."""
    table: JsonObject = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if value is None:
            continue
        if is_dataclass(value):
            value = to_table(value)
        if isinstance(value, tuple):
            value = [to_table(entry) if is_dataclass(entry) else entry for entry in value]
        table[item.name] = value
    return table


# Shipped run files: read by name from anywhere, and copied as the beginning of a user's own. They are in ``phalanx/configs``,
# so in every installation; ``configs`` in a checkout is a link to that folder.


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
    """Yield the lines of a run file with each field's documentation as a comment before it, and its name replaced by ``name``."""
    docs = {section: field_docs(kind) for section, kind, _ in sections(RunSpec)}
    section = ""
    for line in text.splitlines():
        if match := _SECTION.fullmatch(line.strip()):
            section = match[1]
        elif (match := _FIELD.match(line)) and match[1] in docs.get(section, {}):
            yield from textwrap.wrap(
                docs[section][match[1]], 100, initial_indent="# ", subsequent_indent="# "
            )
        yield f"name = {json.dumps(name)}" if not section and line.startswith("name = ") else line


# Resolve values that depend on the environment: "auto", folders of data, variables of processes.
#
# Trainer, planner and ``phalanx show`` share one rule for "auto". The caller knows whether there is a GPU: the trainer checks
# its machine, the planner its cluster, and ``show`` assumes one. ``phalanx.run.kinds.whole_model.resolve`` resolves dimensions
# of the model.


Device = Literal["cpu", "cuda"]


def device_of(runtime: RuntimeSpec, *, has_gpu: bool) -> Device:
    """Return the kind of device that a run computes on: the selected one, or else a GPU if there is one."""
    if runtime.device == "auto":
        return "cuda" if has_gpu and runtime.numerics != "portable" else "cpu"
    return runtime.device


def compute_format(precision: PrecisionSpec, device: Device) -> Literal["fp32", "bf16"]:
    """Return the format of weights and activations in forward and backward: the selected one, or else bf16 on a GPU."""
    if precision.compute == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return precision.compute


# Prepared datasets of a run: folders or URLs, and the folders from which relative paths are resolved.


ONLY = ""
"""The name of the one dataset of a run without ``[[data.sources]]``."""


def addresses(data: DataSpec) -> dict[str, str]:
    """The path or URL of each source by its name, in the order of names; of a run without sources, ``data.path`` as ``ONLY``."""
    named = sorted((source.name, source.path) for source in data.sources)
    return dict(named) or {ONLY: data.path}


def field_of(name: str) -> str:
    """The field of the run file that gives the address of a source."""
    return "data.path" if name == ONLY else f"data.sources.{name}.path"


def record_of(data: DataSpec) -> dict[str, object]:
    """Return the fields of ``record.json`` with the locations of the run's data: ``data_folder``, or ``data_folders``
    by name of several sources. Folders are absolute.
    """
    locations = {
        name: address if "://" in address else str(Path(address).resolve())
        for name, address in addresses(data).items()
    }
    return {"data_folder": locations[ONLY]} if ONLY in locations else {"data_folders": locations}


def found_again(data: DataSpec, record: JsonObject, *, same_end: bool = True) -> DataSpec:
    """Return the data with each folder that is missing replaced by the path that ``record.json`` of an earlier start
    has, if it has one. Addresses in stores stay. The recorded folder need not exist.

    ``same_end``: Only if that path ends as the one in the run file does, so that another folder is not taken for it.
    """
    recorded_folders: Mapping[str, str] = record.get("data_folders") or {ONLY: record.get("data_folder", "")}

    def place(name: str, path: str) -> str:
        recorded = recorded_folders.get(name, "")
        if not recorded or "://" in path or Path(path).exists():
            return path
        parts = Path(path).parts
        return recorded if not same_end or Path(recorded).parts[-len(parts) :] == parts else path

    sources = tuple(replace(source, path=place(source.name, source.path)) for source in data.sources)
    return replace(data, sources=sources) if sources else replace(data, path=place(ONLY, data.path))


# Variables of agents and workers in a run file (``launch.environment``): by value, or only by name, so that the file contains
# no secret.


SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|AUTH(?!ORS?(?![A-Z]))|CONNECTION_?STRING|SIGNATURE",
    re.IGNORECASE,
)
"""Part of the name of a variable that holds a secret; an author (``GIT_AUTHOR_NAME``) is none."""


class LaunchVariable(NamedTuple):
    """A variable as ``launch.environment`` has it."""

    name: str
    value: str | None
    """``None``: the run file has the name alone."""


def launch_variables(launch: LaunchSpec) -> list[LaunchVariable]:
    """Return the variables of ``launch.environment``, well written or not."""
    parts = [text.partition("=") for text in launch.environment]
    return [LaunchVariable(name, value if sign else None) for name, sign, value in parts]


def variable_problems(launch: LaunchSpec) -> Iterator[Problem]:
    """Yield the variables that are malformed, and the secrets whose values would be in every copy of the run file."""
    for name, value in launch_variables(launch):
        if not name.isidentifier():
            yield Problem("launch.environment", f"{name!r} is no name of a variable", "NAME=VALUE, or NAME")
        elif value and SECRET_NAME.search(name):
            yield Problem(
                "launch.environment",
                f"the value of {name} would be in run.toml, job scripts and manifests, which others read",
                f'write "{name}" alone and set the variable where phalanx is called, or name a file in launch.secrets',
                ("launch.secrets",),
            )


def plugin_problems(path: str, names: Sequence[str], group: str) -> list[Problem]:
    """Return a mistake for each of the ``names`` in the field ``path`` that the plug-in ``group`` does not have, or
    that is there twice. No plug-in is imported.
    """
    offered = plugin_names(group) if names else []
    return [
        *(unknown_value(path, name, offered) for name in names if name not in offered),
        *(
            Problem(path, f"has {name!r} twice", "name each once")
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ),
    ]
