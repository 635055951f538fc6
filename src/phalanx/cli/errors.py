"""Errors of the command line: messages for the user without a traceback, and a run directory that is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from phalanx.run.factory import FactoryError
from phalanx.run.fields import RunFileError
from phalanx.run.rules import NotPortableError


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Shows errors of these kinds (and mistakes in run files and in the models that they name) as their message alone; exit
    code 1."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (RunFileError, FactoryError, NotPortableError, *kinds)):
            raise
        raise click.ClickException(str(error)) from error


def refuse_unused(options: Sequence[str], why: str) -> None:
    """Raises ``click.UsageError`` for ``options``, which would be ignored, with ``why``."""
    if options:
        raise click.UsageError(f"{', '.join(options)}: {why}")


class TroubleError(click.ClickException):
    """An error of a command whose exit code 1 is an answer."""

    exit_code = 2


@contextmanager
def trouble(*kinds: type[Exception]) -> Iterator[None]:
    """As ``explained``, with exit code 2, for commands whose exit code 1 says that a comparison has found a difference."""
    try:
        with explained(*kinds):
            yield
    except click.ClickException as error:
        raise TroubleError(error.message) from error


# A missing run directory: the error names those that exist.

_FILES = ("events.jsonl", "record.json", "run.toml")
"""A folder with one of these is a run directory."""
_MOST = 3
_MOST_LOOKED_AT = 10_000
_LEAST_FREE = 64 * 1024
"""Bytes below which neither the coordinator's journal nor a checkpoint can be written."""


def demand_folder(run_dir: Path, error: type[click.ClickException] = click.ClickException) -> None:
    """Raises ``error`` if ``run_dir`` is no folder; its message names the newest runs beside it, else those in ``runs/``."""
    if run_dir.is_dir():
        return
    what = f"{run_dir} is no folder" if run_dir.exists() else f"there is no folder {run_dir}"
    near = newest_runs(run_dir.parent) or newest_runs(Path("runs"))
    if near:
        names = ", ".join(map(str, near))
        raise error(
            f"{what}; the newest run{'s' * (len(near) > 1)} there: {names} (phalanx runs list has all)"
        )
    raise error(
        f"{what}, and no run beside it or in runs/; phalanx train RUN_FILE starts one and says where it lies"
    )


def full_disk(run_dir: Path) -> str:
    """A sentence on the disk of a run directory, if nothing more can be written there; empty if there is room."""
    try:
        disk = shutil.disk_usage(run_dir)
    except OSError:
        return ""
    # Some file systems of networks do not say how large they are.
    if not disk.total or disk.free >= _LEAST_FREE:
        return ""
    return f"the disk of {run_dir} is full: the coordinator decides nothing and no step is saved until there is space"


def newest_runs(folder: Path) -> list[Path]:
    """The run directories in ``folder`` that were begun or changed last, the newest first; empty if it cannot be read."""
    found: list[tuple[float, Path]] = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MOST_LOOKED_AT), entries, strict=False):
                path = folder / entry.name
                if entry.is_dir() and any((path / name).exists() for name in _FILES):
                    found.append((entry.stat().st_mtime, path))
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)[:_MOST]]
