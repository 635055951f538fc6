"""Reproduction of a run, and the differences between the time when it was trained and now, here: code, packages, machine, data, and the
bits of its kernels.

The past is the record of the run's newest start. Each difference has a weight: *bits* (the numbers will differ),
*perhaps* (they may: another library or processor) or *no* (they cannot, by this project's promises; the speed may).
The probes decide: small computations of the run's own shapes, whose bits were recorded. They are computed again here,
with the installed PyTorch.

A run is repeated in the recorded environment, in a directory of its own, by its own resolved run file.
Packages are installed from pip's configured indexes. A version with a local part (``torch==2.13.0+cpu``) needs the
index that has it, given by ``PIP_EXTRA_INDEX_URL``. The code is checked out from this process's own repository, if it
has the commit.

Fleet fields are replaced for this machine: no nodes, no engine, no trackers, and no object store, which is the first
run's. None of that changes a bit. To repeat only the first steps, the new run is stopped once it has logged them. A
smaller ``train.steps`` would be another run, whose learning rate decays sooner.
"""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import tomli_w

import phalanx
from phalanx.data.errors import DataError
from phalanx.data.reading.sources import index_of_places, open_places
from phalanx.observe.record.notes import this_machine
from phalanx.observe.record.records import code_patch, code_version, git, package_versions, variables
from phalanx.process.child import Child
from phalanx.process.exit_codes import EXIT_STOPPED
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.identity import identity
from phalanx.run.read import found_again, to_table
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx.store.store import StoreError
from phalanx_watch.runs.probe import read_tail
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
    """Return the present environment of this machine, code and data; ``probes`` are its kernels' bits, empty if not
    computed.

    Opens the data.
    """
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
    """Return the present fingerprint of the run's data; if they cannot be read, a sentence that gives the reason in its place."""
    data = found_again(spec.data, directory.read_record())
    try:
        return index_of_places(open_places(data)).fingerprint
    except (DataError, StoreError, OSError) as error:
        return f"not to be had: {error}"


def changes(past: RunEnvironment, present: RunEnvironment) -> list[Changed]:
    """Return the differences of data, probes, code, packages, machine and variables, those that surely change bits
    first.

    Variables count only if they were set then and are now.
    """
    differences = [
        *_data(past, present),
        *_probes(past, present),
        *_code_change(past, present),
        *_packages(past.packages, present.packages),
        *_machine(past, present),
        # Only variables that were set at the record's time; those that only run processes have are skipped.
        *(
            Changed(name, value, present.variables[name], "no")
            for name, value in past.variables.items()
            if name in present.variables and value != present.variables[name]
        ),
    ]
    order = ("bits", "perhaps", "no")
    return sorted(differences, key=lambda change: order.index(change.weight))


def _data(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield a change if the data have another fingerprint, which changes bits."""
    if past.data_fingerprint != present.data_fingerprint:
        remedy = "put the dataset back where it was, or name a copy of it: --set data.path=PATH"
        yield Changed("data", past.data_fingerprint, present.data_fingerprint, "bits", remedy)


def _probes(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield one change, which changes bits, that names the kernels with other bits now; nothing if those of then or now are unknown."""
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


def _code_change(past: RunEnvironment, present: RunEnvironment) -> Iterator[Changed]:
    """Yield the changes of version, commit, wheel, changed files and untracked files, with a command for commit and changed files. Past
    changes that were not kept are yielded too, since they cannot be compared."""
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
    is_kept = "patch_sha256" in past.code or "untracked" in past.code
    if past.code.get("patch_failed") or (past.code.get("git_dirty") and not is_kept):
        yield Changed(
            "changes against the commit", "there were some, which were not kept", "unknown", "perhaps"
        )


def _packages(past: Mapping[str, str], present: Mapping[str, str]) -> Iterator[Changed]:
    """Yield a change for each recorded package that may change the bits, and one for all others; this project's own is left out."""
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


def parse_packages(listed: str) -> dict[str, str]:
    """Return packages by name from a list of requirements, as ``machines.installed_packages`` writes it."""
    pairs = (line.partition("==") for line in listed.splitlines())
    return {name: version for name, separator, version in pairs if separator}


def requirements(listed: str) -> str:
    """Return the list in pip's form, without this project and the tools that every environment has."""
    left_out = ("phalanx-train", "pip", "setuptools", "wheel")
    return "".join(
        f"{name}=={version}\n" for name, version in parse_packages(listed).items() if name not in left_out
    )


def _kinds(names: tuple[str, ...]) -> str:
    """Return the different names, sorted, with commas."""
    return ", ".join(sorted(set(names)))


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return a value as text: up to ``_MOST_PACKAGES`` entries of a list, "none" for nothing."""
    if isinstance(value, list):
        return ", ".join(map(str, value[:_MOST_PACKAGES])) or "none"
    return "none" if value in (None, "") else str(value)


# The environment.


def make_environment(recording: RunRecording, folder: Path, tell: Callable[[str], None]) -> Path:
    """Make a virtual environment in ``folder`` with the recorded packages and code, and return its Python.

    Downloads packages with pip. Commands, and what must be done by hand, are passed to ``tell``. Raises
    ``RunDirectoryError`` with the step that failed, or if the folder is not empty or the run has no list of packages.
    """
    if not recording.packages:
        raise RunDirectoryError(
            f"{recording.row.path} has no list of installed packages: it is of an older version"
        )
    if folder.exists() and any(folder.iterdir()):
        raise RunDirectoryError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    requirements_file = folder / "requirements.txt"
    requirements_file.write_text(requirements(Path(recording.packages).read_text()))
    python = _python(str(_table(recording.environment.get("packages")).get("python", "")), tell)
    _run([python, "-m", "venv", str(folder / "venv")], tell)
    python_path = folder / "venv" / "bin" / "python"
    install = [str(python_path), "-m", "pip", "install", "--quiet"]
    _run([*install, "-r", str(requirements_file)], tell)
    source = _code(recording, folder, tell)
    if source is not None:
        _run([*install, "setuptools>=77"], tell)
        _run([*install, "--no-deps", "--no-build-isolation", str(source)], tell)
    return python_path


def _code(recording: RunRecording, folder: Path, tell: Callable[[str], None]) -> Path | None:
    """Clone the recorded commit into ``folder``, apply the recorded changes, and return its path. Raises ``RunDirectoryError``.

    Return None if the commit is not in this repository, or the run's code was a wheel; ``tell`` receives the remedy.
    """
    code = _table(recording.environment.get("code"))
    commit = code.get("git_commit")
    package = Path(phalanx.__file__).resolve().parent
    if not commit:
        tell(f"install phalanx-train {code.get('version')} there by hand: the run's code was a wheel")
        return None
    if git(package, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        tell(f"install phalanx there by hand: no repository with the commit {commit} is here")
        return None
    root = (git(package, "rev-parse", "--show-toplevel") or "").strip()
    target = folder / "code"
    _run(["git", "clone", "--quiet", "--shared", "--no-checkout", root, str(target)], tell)
    _run(["git", "-C", str(target), "checkout", "--quiet", "--detach", str(commit)], tell)
    if recording.patch:
        _run(["git", "-C", str(target), "apply", str(Path(recording.patch).resolve())], tell)
    if code.get("untracked"):
        tell(f"not there, since they were never in the repository: {code['untracked']}")
    return target


def _python(version: str, tell: Callable[[str], None]) -> str:
    """Return an interpreter of the recorded minor version, else this one; also if no version is recorded.

    ``tell`` receives a sentence if the version differs.
    """
    present = ".".join(map(str, sys.version_info[:3]))
    minor = ".".join(version.split(".")[:2])
    if not version or version == present:
        return sys.executable
    other = shutil.which(f"python{minor}")
    if other is None or minor == ".".join(present.split(".")[:2]):
        other = sys.executable
    tell(f"the run had Python {version}; the environment is made with {other}")
    return other


def _run(words: list[str], tell: Callable[[str], None]) -> None:
    """Run a command, after passing it to ``tell``. Raises ``RunDirectoryError`` with the end of its output if it fails."""
    tell(f"$ {' '.join(words)}")
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        end = "\n".join(line for line in result.stdout.splitlines()[-8:])
        raise RunDirectoryError(f"{words[0]} failed with exit code {result.returncode}:\n{end}")


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}


# The run.


_POLL_S = 0.5


def free_directory(run_dir: Path) -> Path:
    """Return an unused directory name beside a run, for its reproduction."""
    number = 1
    while (place := run_dir.with_name(f"{run_dir.name}-again{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return place


def again(spec: RunSpec, directory: RunDirectory, into: Path, ranks: int) -> RunSpec:
    """Return the run's spec for training it again on this machine on ``ranks`` ranks, into the directory ``into``.

    Its data are searched again; store, sinks, fleet and launcher are left out. Asserts that its identity is the same.
    """
    data = found_again(spec.data, directory.read_record())
    spec_again = replace(
        spec,
        run_dir=str(into),
        data=data,
        parallel=replace(spec.parallel, ranks=ranks),
        checkpoint=replace(spec.checkpoint, store=""),
        observe=replace(spec.observe, sinks=()),
        fleet=FleetSpec(),
        launch=LaunchSpec(),
    )
    assert identity(spec_again) == identity(spec)
    return spec_again


def write_run_file(spec: RunSpec, into: Path) -> Path:
    """Write the run file, with the model's fields in place of its preset, beside the future directory ``into``;
    return its path.

    Raises ``RunDirectoryError`` if ``into`` is not empty.
    """
    if into.exists() and any(into.iterdir()):
        raise RunDirectoryError(f"{into} is not empty; give another --into")
    into.parent.mkdir(parents=True, exist_ok=True)
    table = to_table(spec)
    table["model"] = {**table["model"], "preset": ""}  # its fields are all there
    file = into.with_name(f"{into.name}.toml")
    file.write_bytes(tomli_w.dumps(table).encode())
    return file


def train_again(
    run_file: Path,
    into: RunDirectory,
    steps: int | None,
    command: Sequence[str] = (sys.executable, "-m", "phalanx", "train"),
) -> int:
    """Train in a child process until the end, or until ``steps`` are logged and the run has stopped; return the exit
    code.

    A stop after ``steps`` is 0. Output goes to stderr. If this process is interrupted, the training saves and stops;
    the same command resumes it.
    """
    training, stopped = Child.start([*command, str(run_file)]), False
    try:
        while training.wait(_POLL_S) is None:
            step = read_tail(into.events).step
            if steps is not None and step is not None and step.step >= steps and not stopped:
                stopped = True
                training.signal(signal.SIGTERM)
    except BaseException:
        if not stopped:  # a second request would end it without saving
            training.signal(signal.SIGTERM)
        training.wait(math.inf)
        raise
    finally:
        code = training.end()
    return 0 if code == EXIT_STOPPED and steps is not None else code
