"""Differences between the time when a run was trained and now, here: code, packages, machine, data, and the bits of
its kernels.

The past is the record of the run's newest start. Each difference has a weight: *bits* (the numbers will differ),
*perhaps* (they may: another library or processor) or *no* (they cannot, by this project's promises; the speed may).
The probes decide: small computations of the run's own shapes, whose bits were recorded. They are computed again here,
with the installed PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from phalanx.data.errors import DataError
from phalanx.data.reading.sources import index_of_places, open_places
from phalanx.observe.record.machines import this_machine
from phalanx.observe.record.records import code_patch, code_version, package_versions, variables
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.resolve import found_again
from phalanx.run.spec import RunSpec
from phalanx.store.store import StoreError
from phalanx_watch.runs.recorded import RunRecording

Weight = Literal["bits", "perhaps", "no"]
_MOST_PACKAGES = 12
_CORE = frozenset(package_versions()) | {"torch", "numpy", "triton"}


class Changed(msgspec.Struct, frozen=True):
    """A difference between then and now."""

    name: str = msgspec.field(name="what")
    then: str
    now: str
    weight: Weight
    """Effect on the bits of the weights."""
    remedy: str = ""


@dataclass(frozen=True)
class RunEnvironment:
    """Inputs of a run's numbers besides its run file."""

    code: Mapping[str, object]
    packages: Mapping[str, str]
    """All installed distributions if known, else the most important ones."""
    processor: str
    accelerators: tuple[str, ...]
    driver: str
    variables: Mapping[str, str]
    data_fingerprint: str
    """Fingerprint of the data, or the reason why it is unavailable."""
    probes: Mapping[str, str]


def then(recording: RunRecording, packages: str) -> RunEnvironment:
    """Return the recorded environment of a run; ``packages`` is the list of installed packages, empty if unknown."""
    environment = recording.environment
    machine = recording.machines[0] if recording.machines else None
    host = environment.get("host")
    processor = str(host.get("cpu_model", "")) if isinstance(host, dict) else ""
    return RunEnvironment(
        code=_table(environment.get("code")),
        packages={**_texts(environment.get("packages")), **parse_packages(packages)},
        processor=machine.cpu_model if machine else processor,
        accelerators=machine.accelerators if machine else (),
        driver=machine.driver if machine else "",
        variables=_texts(environment.get("variables")),
        data_fingerprint=recording.row.data_fingerprint,
        probes=_texts(environment.get("numerics")),
    )


def now(spec: RunSpec, directory: RunDirectory, probes: Mapping[str, str]) -> RunEnvironment:
    """Return the present environment; ``probes`` are those of this machine, empty if not computed."""
    machine, packages = this_machine("", 0)
    patch = code_patch()
    return RunEnvironment(
        code={**code_version(), **(patch.facts() if patch else {})},
        packages={**package_versions(), **parse_packages(packages)},
        processor=machine.cpu_model,
        accelerators=machine.accelerators,
        driver=machine.driver,
        variables=variables(),
        data_fingerprint=_data_now(spec, directory),
        probes=probes,
    )


def _data_now(spec: RunSpec, directory: RunDirectory) -> str:
    """Return the present fingerprint of the run's data, or a sentence on why they cannot be read."""
    data = found_again(spec.data, directory.read_record())
    try:
        return index_of_places(open_places(data)).fingerprint
    except (DataError, StoreError, OSError) as error:
        return f"not to be had: {error}"


def changes(past: RunEnvironment, present: RunEnvironment) -> list[Changed]:
    """Return the differences, those that surely change bits first."""
    differences = [
        *_data(past, present),
        *_probes(past, present),
        *_code(past, present),
        *_packages(past.packages, present.packages),
        *_machine(past, present),
        *_variables(past.variables, present.variables),
    ]
    order = ("bits", "perhaps", "no")
    return sorted(differences, key=lambda change: order.index(change.weight))


def _data(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    if past.data_fingerprint != present.data_fingerprint:
        remedy = "put the dataset back where it was, or name a copy of it: --set data.path=PATH"
        yield Changed("data", past.data_fingerprint, present.data_fingerprint, "bits", remedy)


def _probes(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield a change if kernels compute other bits now; nothing if the bits of then or now are unknown."""
    if not past.probes or not present.probes:
        return
    names = [name for name, value in past.probes.items() if present.probes.get(name, value) != value]
    if names:
        text = ", ".join(names)
        yield Changed(
            "kernels",
            "bits of its probes",
            f"other bits in {text}",
            "bits",
            "use a machine and libraries like those of then",
        )


def _code(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield the changes of version, commit and changed files, with the commands that restore them."""
    weights: Mapping[str, tuple[str, Weight]] = {
        "version": ("version of phalanx", "perhaps"),
        "git_commit": ("commit", "perhaps"),
        "wheel_record_sha256": ("wheel", "perhaps"),
        "patch_sha256": ("changes against the commit", "perhaps"),
        "untracked": ("untracked files", "no"),
    }
    commit = past.code.get("git_commit")
    for key, (title, weight) in weights.items():
        before, after = past.code.get(key), present.code.get(key)
        if before != after:
            remedy = {
                "git_commit": f"git checkout {commit}" if commit else "",
                "patch_sha256": f"git apply RUN_DIR/code/{str(before)[:12]}.patch"
                if before
                else "put the changes away: git stash",
            }.get(key, "")
            yield Changed(title, _text(before), _text(after), weight, remedy)
    if past.code.get("git_dirty") and "patch_sha256" not in past.code and "untracked" not in past.code:
        yield Changed(
            "changes against the commit", "there were some, which were not kept", "unknown", "perhaps"
        )


def _packages(past: Mapping[str, str], present: Mapping[str, str]) -> Iterator[Changed]:
    """Yield a change for each package that may change the bits, and one for all others."""
    names = [name for name in past if past[name] != present.get(name) and name != "phalanx-train"]
    core = [name for name in names if name in _CORE or name.startswith("nvidia-")]
    for name in core:
        yield Changed(
            name,
            past[name],
            present.get(name, "not installed"),
            "perhaps",
            "phalanx reproduce RUN_DIR --make-env DIR",
        )
    others = [name for name in names if name not in core]
    if others:
        shown = others[:_MOST_PACKAGES]
        more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
        yield Changed(
            "other packages",
            ", ".join(f"{name} {past[name]}" for name in shown) + more,
            ", ".join(f"{name} {present.get(name, 'not installed')}" for name in shown) + more,
            "no",
        )


def _machine(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield the changes of processor, accelerators and driver; they matter only if the probes do not have the same bits."""
    facts = (
        ("processor", past.processor, present.processor),
        ("accelerators", _kinds(past.accelerators), _kinds(present.accelerators)),
        ("driver", past.driver, present.driver),
    )
    # Equal probes have shown that another machine computes with the same bits, as far as probes go.
    settled = bool(past.probes) and past.probes == present.probes
    for title, before, after in facts:
        if before != after:
            yield Changed(title, before or "none", after or "none", "no" if settled else "perhaps")


def _variables(past: Mapping[str, str], present: Mapping[str, str]) -> Iterator[Changed]:
    """Yield the variables that were set then and differ now; variables of run processes only are skipped."""
    for name in past:
        if name in present and past[name] != present[name]:
            yield Changed(name, past[name], present[name], "no")


def parse_packages(listed: str) -> dict[str, str]:
    """Return packages by name from a list of requirements, as ``machines.installed_packages`` writes it."""
    pairs = (line.partition("==") for line in listed.splitlines())
    return {name: version for name, separator, version in pairs if separator}


def requirements(listed: str) -> str:
    """Return the list without this project and the tools that every environment has."""
    left_out = ("phalanx-train", "pip", "setuptools", "wheel")
    return "".join(
        f"{name}=={version}\n" for name, version in parse_packages(listed).items() if name not in left_out
    )


def _kinds(names: tuple[str, ...]) -> str:
    return ", ".join(sorted(set(names)))


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:_MOST_PACKAGES])) or "none"
    return "none" if value in (None, "") else str(value)
