"""The folders of prepared datasets that a run names, and where to look for them when they are given relative to elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.run.section_reader import JsonObject
from phalanx.run.spec import DataSpec

ONLY = ""
"""The name of the one dataset of a run without ``[[data.sources]]``."""


def folders(data: DataSpec) -> dict[str, Path]:
    """The folder of each source by its name, in the order of names; of a run without sources, that of ``data.path`` as ``ONLY``."""
    named = sorted((source.name, Path(source.path)) for source in data.sources)
    return dict(named) or {ONLY: Path(data.path)}


def tokenizer_folder(data: DataSpec) -> Path:
    """The folder of a dataset whose tokenizer is the run's; all sources have the same."""
    return next(iter(folders(data).values()))


def record_of(data: DataSpec) -> dict[str, object]:
    """The fields of ``record.json`` that say where the data of a run were found."""
    found = {name: str(folder.resolve()) for name, folder in folders(data).items()}
    return {"data_folder": found[ONLY]} if ONLY in found else {"data_folders": found}


def found_again(data: DataSpec, record: JsonObject, *, same_end: bool = True) -> DataSpec:
    """The data with each folder that is not there where an earlier start, of that ``record.json``, had it.

    ``same_end``: Only if that path ends as the one in the run file does, so that another folder is not taken for it.
    """
    known: Mapping[str, str] = record.get("data_folders") or {ONLY: record.get("data_folder", "")}

    def place(name: str, path: str) -> str:
        recorded = known.get(name, "")
        if not recorded or Path(path).exists():
            return path
        parts = Path(path).parts
        return recorded if not same_end or Path(recorded).parts[-len(parts) :] == parts else path

    sources = tuple(replace(source, path=place(source.name, source.path)) for source in data.sources)
    return replace(data, sources=sources) if sources else replace(data, path=place(ONLY, data.path))
