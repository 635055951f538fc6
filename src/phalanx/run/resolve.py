"""Resolve values that depend on the environment: "auto", folders of data, variables of processes.

Trainer, planner and ``phalanx show`` share one rule for "auto". The caller knows whether there is a GPU: the trainer checks its machine, the planner
its cluster, and ``show`` assumes one. ``phalanx.run.kinds.whole_model.resolve`` resolves dimensions of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from phalanx.plugins import plugin_names
from phalanx.run.fields import JsonObject, Problem, unknown_value
from phalanx.run.spec import DataSpec, LaunchSpec, PrecisionSpec, RuntimeSpec

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


# Prepared datasets of a run: folders or URLs, and where to look for folders given relative to elsewhere.


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
    """Return the fields of ``record.json`` with the locations of the run's data."""
    locations = {
        name: address if "://" in address else str(Path(address).resolve())
        for name, address in addresses(data).items()
    }
    return {"data_folder": locations[ONLY]} if ONLY in locations else {"data_folders": locations}


def found_again(data: DataSpec, record: JsonObject, *, same_end: bool = True) -> DataSpec:
    """Return the data with each folder that is missing replaced by the path that ``record.json`` of an earlier start has. Addresses
    in stores stay.

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


# Variables of agents and workers in a run file (``launch.environment``): by value, or by name, so that the file holds no secret.


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
                f"the value of {name} would stand in run.toml, job scripts and manifests, which others read",
                f'write "{name}" alone and set the variable where phalanx is called, or name a file in launch.secrets',
                ("launch.secrets",),
            )


def plugin_problems(path: str, names: Sequence[str], group: str) -> list[Problem]:
    """Return a mistake for each of the ``names`` in the field ``path`` that a group does not have, or that is there twice. No plug-in is imported."""
    offered = plugin_names(group) if names else []
    return [
        *(unknown_value(path, name, offered) for name in names if name not in offered),
        *(
            Problem(path, f"has {name!r} twice", "name each once")
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ),
    ]
