"""Variables of agents and workers in a run file (``launch.environment``): by value, or by name, so that the file holds no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.run.problems import Problem
from phalanx.run.spec import LaunchSpec

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
    """Name the variables that are badly written, and the secrets whose values would be in every copy of the run file."""
    for name, value in launch_variables(launch):
        if not name.isidentifier():
            yield Problem("launch.environment", f"{name!r} is no name of a variable", "NAME=VALUE, or NAME")
        elif value and SECRET_NAME.search(name):
            yield Problem(
                "launch.environment",
                f"the value of {name} would stand in run.toml, job scripts and manifests, which others read",
                f'write "{name}" alone and set the variable where phalanx is called, or name a file in launch.secrets',
                ("launch.secrets",),
            )
