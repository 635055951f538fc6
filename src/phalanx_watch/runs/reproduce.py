"""Reproduction of a run: in the recorded environment, in a directory of its own, by its own resolved run file.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

import phalanx
from phalanx.observe.record.records import git
from phalanx.process.child import Child
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.identity import identity
from phalanx.run.read import to_table
from phalanx.run.resolve import found_again
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx_watch.runs.probe import read_tail
from phalanx_watch.runs.recorded import RunRecording
from phalanx_watch.runs.then_and_now import requirements

# The environment.


def make_environment(recording: RunRecording, folder: Path, tell: Callable[[str], None]) -> Path:
    """Make a virtual environment in ``folder`` with the recorded packages and code, and return its Python. Commands are passed to
    ``tell``.

    Raises ``RunDirectoryError`` naming the step that failed, or if the folder is not empty.
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
    _run([str(python_path), "-m", "pip", "install", "--quiet", "-r", str(requirements_file)], tell)
    source = _code(recording, folder, tell)
    if source is not None:
        _run([str(python_path), "-m", "pip", "install", "--quiet", "setuptools>=77"], tell)
        _run(
            [
                str(python_path),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                str(source),
            ],
            tell,
        )
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
    """Return an interpreter of the recorded version, else this one; ``tell`` receives a sentence if the version differs."""
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
_STOPPED = 75


def free_directory(run_dir: Path) -> Path:
    """Return an unused directory name beside a run, for its reproduction."""
    number = 1
    while (place := run_dir.with_name(f"{run_dir.name}-again{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return place


def again(spec: RunSpec, directory: RunDirectory, into: Path, ranks: int) -> RunSpec:
    """Return the run's spec for training it again on this machine, without store, sinks, fleet and launcher. Its identity is the same."""
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
    """Write the run file beside the future directory ``into`` and return its path. Raises ``RunDirectoryError`` if ``into`` is not
    empty."""
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
    on_step: Callable[[int], None] = lambda _step: None,
    command: Sequence[str] = (sys.executable, "-m", "phalanx", "train"),
) -> int:
    """Train until the end, or until ``steps`` are logged and the run has stopped; return the exit code.

    Output goes to stderr. If this process is interrupted, the training saves and stops; the same command resumes it.
    """
    training, stopped = Child.start([*command, str(run_file)]), False
    try:
        while training.wait(_POLL_S) is None:
            step = read_tail(into.events).step
            on_step(step.step if step else 0)
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
    return 0 if code == _STOPPED and steps is not None else code
