"""User input: errors as messages without a traceback, a missing run directory, and options that several
commands share.

The options are trust in code, number formats, devices, sizes of memory, and addresses. Their types refuse
unusable values.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.command import Option, given_options
from phalanx.run.factory import FactoryError, require_trusted
from phalanx.run.fields import RunFileError
from phalanx.run.peers import AddressError, read_address, read_host
from phalanx.run.rules import NotPortableError


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Context that turns errors of these kinds into ``click.ClickException``: a message with exit code 1.

    Always included are mistakes in run files, errors of a user's model, and numerics that are not portable.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (RunFileError, FactoryError, NotPortableError, *kinds)):
            raise
        raise click.ClickException(str(error)) from error


def refuse_unused(options: Sequence[str], reason: str) -> None:
    """Raise ``click.UsageError`` for ``options``, which would be ignored, with ``reason``."""
    if options:
        raise click.UsageError(f"{', '.join(options)}: {reason}")


def refuse_given(fields: Collection[str], reason: str) -> None:
    """Raise ``click.UsageError`` for options of ``fields`` on the command line, which would be ignored, with ``reason``."""
    refuse_unused([name for field, name in given_options().items() if field in fields], reason)


def seed_range(seeds: str) -> range:
    """Parse FIRST:END as a range without END. Raises ``click.BadParameter`` for another text or an empty range."""
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", seeds)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.BadParameter(
            f"{seeds[:80]!r} is not FIRST:END with FIRST < END, such as 0:100", param_hint="--seeds"
        )
    return range(int(match[1]), int(match[2]))


class TroubleError(click.ClickException):
    """An error of a command whose exit code 1 is a result."""

    exit_code = 2


@contextmanager
def trouble(*kinds: type[Exception]) -> Iterator[None]:
    """As ``explained``, but with exit code 2: for commands whose exit code 1 means that a comparison found a
    difference.
    """
    try:
        with explained(*kinds):
            yield
    except click.ClickException as error:
        raise TroubleError(error.message) from error


# A missing run directory: the error names the existing ones.

_FILES = ("events.jsonl", "record.json", "run.toml")
"""A folder with one of these is a run directory."""
_MOST = 3
_MOST_LOOKED_AT = 10_000
_LEAST_FREE = 64 * 1024
"""Bytes below which neither the coordinator's journal nor a checkpoint can be written."""


def demand_folder(run_dir: Path, error: type[click.ClickException] = click.ClickException) -> None:
    """Raise ``error`` if ``run_dir`` is no folder.

    Its message names the newest runs beside it, else those in ``runs/``.
    """
    if run_dir.is_dir():
        return
    problem = f"{run_dir} is no folder" if run_dir.exists() else f"there is no folder {run_dir}"
    near = newest_runs(run_dir.parent) or newest_runs(Path("runs"))
    if near:
        names = ", ".join(map(str, near))
        raise error(
            f"{problem}; the newest run{'s' * (len(near) > 1)} there: {names} (phalanx runs list has all)"
        )
    raise error(
        f"{problem}, and no run beside it or in runs/; phalanx train RUN_FILE starts one and prints its directory"
    )


def full_disk(run_dir: Path) -> str:
    """Return a sentence if the disk of a run directory has less than 64 KiB free; empty otherwise, or if that
    cannot be determined.
    """
    try:
        disk = shutil.disk_usage(run_dir)
    except OSError:
        return ""
    # Some network file systems do not report their size.
    if not disk.total or disk.free >= _LEAST_FREE:
        return ""
    return f"the disk of {run_dir} is full: the coordinator decides nothing and no step is saved until there is space"


def newest_runs(folder: Path) -> list[Path]:
    """Return at most three run directories in ``folder``, the last changed first; empty if it cannot be read.

    Only the first ``_MOST_LOOKED_AT`` entries are looked at.
    """
    candidates: list[tuple[float, Path]] = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MOST_LOOKED_AT), entries, strict=False):
                path = folder / entry.name
                if entry.is_dir() and any((path / name).exists() for name in _FILES):
                    candidates.append((entry.stat().st_mtime, path))
    except OSError:
        return []
    return [path for _, path in sorted(candidates, reverse=True)[:_MOST]]


# The option ``--trust-code``: a user's model (``model.factory``) is code, which computing with it runs.

TrustCode = Annotated[
    bool,
    Option(
        text="Run the code that the run names (model.factory) also if its run file has no digest of it, if it is in the run directory, or if "
        "that belongs to another user."
    ),
]
"""The flag ``--trust-code``."""


def require_trusted_code(run_dir: Path, *, trust_code: bool, place: Path | None = None) -> None:
    """Raise FactoryError if the run in ``run_dir`` has a model of code that the user has not chosen to run
    (``require_trusted``).

    ``place`` is the pack that the run directory was taken from. Without a run file, or with ``trust_code``,
    nothing is refused. Raises ``RunDirectoryError`` if the run file cannot be read.
    """
    from phalanx.run.directory.paths import RunDirectory, read_resolved

    if not RunDirectory(run_dir).run_file.exists():
        return  # Its reader refuses it.
    model = read_resolved(RunDirectory(run_dir)).model
    if model.factory and not trust_code:
        require_trusted(model.factory, model.factory_sha256, place or run_dir)


# Number formats on the command line: PyTorch's names, float32 and bfloat16, which help shows, and the run
# file's, fp32 and bf16.

RUN_FILE_NAMES: Mapping[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
"""Name of a format in the run file (``precision.compute``), by PyTorch's name."""
_NAMES: Mapping[str, str] = {short: name for name, short in RUN_FILE_NAMES.items()}


class DtypeName(click.Choice[str]):
    """PyTorch's name of a format for computing with weights."""

    def __init__(self) -> None:
        super().__init__(tuple(RUN_FILE_NAMES))

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return PyTorch's name for either name; fail for others."""
        return super().convert(_NAMES.get(str(value), value), param, ctx)


# Devices on the command line, by PyTorch's names: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` where there is a rule.


class DeviceName(click.ParamType[str]):
    """The name of a device, which need not exist here."""

    name = "device"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name: auto, cpu, cuda or cuda:N. Fail for another one; whether it exists is not checked."""
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d{0,3}))?", str(value)):
            self.fail(
                f"{value!r} is no device: write auto, cpu, cuda, or cuda:1 for one of several GPUs",
                param,
                ctx,
            )
        return str(value)


_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Bytes(click.ParamType[int]):
    """A number of bytes, with a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes of a number with an optional unit, "2GiB"; fail for another form."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value))
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is no size: write 2GiB, 500MiB or a number of bytes", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


# Addresses on the command line: a host by name or IP address, alone or with a port.

_EVERY_INTERFACE = ("0.0.0.0", "::")


class HostName(click.ParamType[str]):
    """An address of this machine: one to listen at, or the one ``for_others`` to connect to."""

    name = "host"

    def __init__(self, *, for_others: bool = False) -> None:
        self._for_others = for_others

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the host without brackets; fail for a malformed one.

        An address to listen at must resolve here. One ``for_others`` must not mean every interface; its name may be
        unknown here.
        """
        try:
            host = read_host(str(value))
        except AddressError as error:
            has_port = ctx is not None and any(option.name == "port" for option in ctx.command.params)
            self.fail(f"{error}{', which --port sets' if has_port else ''}", param, ctx)
        if self._for_others:
            # A name that only the others know is valid here; an address that each resolves to itself is not.
            if host in _EVERY_INTERFACE:
                self.fail(
                    f"{host} means every interface, and others connect to one: give its address", param, ctx
                )
            return host
        from phalanx.hardware.local.network import resolved

        if not resolved(host):
            self.fail(f"no address is known for {host}: give an address of this machine", param, ctx)
        return host


class HostAndPort(click.ParamType[str]):
    """An address of another process; empty if none is given."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return "host:port", with brackets around an IPv6 address; empty stays empty. Fail for another form."""
        if not value:
            return ""
        from phalanx.hardware.local.network import join_address

        try:
            return join_address(*read_address(str(value)))
        except AddressError as error:
            self.fail(str(error), param, ctx)
