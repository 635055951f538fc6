"""Values of variables that no file of a run may hold: those that the run file names alone, and those of ``launch.secrets``.

They are read where the run is submitted. Slurm gets them in sbatch's environment and hosts on the standard input of their shell, so they are
in no script, no command line and no file of the run directory.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.launch.engines.tools import EngineError
from phalanx.run.directory.files import open_regular
from phalanx.run.resolve import launch_variables
from phalanx.run.spec import LaunchSpec

_MOST_BYTES = 1 << 20


def private_variables(
    launch: LaunchSpec, working_dir: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the values of variables that the run file does not hold. Raises ``EngineError`` naming the field."""
    values = _of_file(working_dir / Path(launch.secrets).expanduser()) if launch.secrets else {}
    for name, value in launch_variables(launch):
        if value is None and name not in values:
            if name not in environ:
                raise EngineError(
                    f"launch.environment: {name} has no value here: export {name}=..., or write it into the file that launch.secrets names"
                )
            values[name] = environ[name]
    return values


def exports_of(launch: LaunchSpec) -> Iterator[str]:
    """Yield the shell lines that export the variables whose values the run file holds. Raises ``EngineError`` for a bad name."""
    for name, value in launch_variables(launch):
        if not name.isidentifier():
            raise EngineError(f"launch.environment: {name!r} is no name of a variable")
        if value is not None:
            yield f"export {name}={shlex.quote(value)}"


def private_exports(launch: LaunchSpec, working_dir: Path) -> str:
    """Return the shell lines that export ``private_variables``, to be sent to a shell and never written."""
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in private_variables(launch, working_dir).items()
    )


def _of_file(path: Path) -> dict[str, str]:
    try:
        with open_regular(path, follow=True) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"launch.secrets: cannot read {path}: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise EngineError(f"launch.secrets: others can read {path}: chmod 600 {shlex.quote(str(path))}")
    values: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        name, sign, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not sign or not name.isidentifier():
                raise EngineError(f"launch.secrets: line {number} of {path} is not NAME=VALUE")
            values[name] = value
    return values
