"""The prepared datasets that a run names, folders or URLs, and where to look for folders that are given relative to elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.run.section_reader import JsonObject
from phalanx.run.spec import DataSpec

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
    """The fields of ``record.json`` that say where the data of a run were found."""
    found = {
        name: address if "://" in address else str(Path(address).resolve())
        for name, address in addresses(data).items()
    }
    return {"data_folder": found[ONLY]} if ONLY in found else {"data_folders": found}


def found_again(data: DataSpec, record: JsonObject, *, same_end: bool = True) -> DataSpec:
    """The data with each folder that is not there where an earlier start, of that ``record.json``, had it.

    ``same_end``: Only if that path ends as the one in the run file does, so that another folder is not taken for it.
    """
    known: Mapping[str, str] = record.get("data_folders") or {ONLY: record.get("data_folder", "")}

    def place(name: str, path: str) -> str:
        recorded = known.get(name, "")
        if not recorded or "://" in path or Path(path).exists():
            return path
        parts = Path(path).parts
        return recorded if not same_end or Path(recorded).parts[-len(parts) :] == parts else path

    sources = tuple(replace(source, path=place(source.name, source.path)) for source in data.sources)
    return replace(data, sources=sources) if sources else replace(data, path=place(ONLY, data.path))
