"""Builds the environment that a run was trained in: its packages in their versions, and its code with its changes.

The packages come from where pip gets them here, so that a version with a local part (``torch==2.13.0+cpu``) needs the index that has it; give it by
``PIP_EXTRA_INDEX_URL``. The code comes from the repository that this process runs from, if that knows the commit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.observe.record.records import git
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.watch.runs.recorded import Recorded
from phalanx.watch.runs.then_and_now import requirements


def make_environment(found: Recorded, folder: Path, tell: Callable[[str], None]) -> Path:
    """Makes a virtual environment in ``folder`` and returns its Python. Raises ``RunDirectoryError`` that says which step failed."""
    if not found.packages:
        raise RunDirectoryError(
            f"{found.row.path} has no list of installed packages: it is of an older version"
        )
    if folder.exists() and any(folder.iterdir()):
        raise RunDirectoryError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(requirements(Path(found.packages).read_text()))
    python = _python(str(_table(found.environment.get("packages")).get("python", "")), tell)
    _run([python, "-m", "venv", str(folder / "venv")], tell)
    made = folder / "venv" / "bin" / "python"
    _run([str(made), "-m", "pip", "install", "--quiet", "-r", str(wanted)], tell)
    source = _code(found, folder, tell)
    if source is not None:
        _run([str(made), "-m", "pip", "install", "--quiet", "setuptools>=77"], tell)
        _run(
            [str(made), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(source)],
            tell,
        )
    return made


def _code(found: Recorded, folder: Path, tell: Callable[[str], None]) -> Path | None:
    code = _table(found.environment.get("code"))
    commit = code.get("git_commit")
    package = Path(__file__).resolve().parents[2]
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
    if found.patch:
        _run(["git", "-C", str(target), "apply", str(Path(found.patch).resolve())], tell)
    if code.get("untracked"):
        tell(f"not there, since they were never in the repository: {code['untracked']}")
    return target


def _python(version: str, tell: Callable[[str], None]) -> str:
    """An interpreter of the recorded version, else this one."""
    here = ".".join(map(str, sys.version_info[:3]))
    minor = ".".join(version.split(".")[:2])
    if not version or version == here:
        return sys.executable
    other = shutil.which(f"python{minor}")
    if other is None or minor == ".".join(here.split(".")[:2]):
        other = sys.executable
    tell(f"the run had Python {version}; the environment is made with {other}")
    return other


def _run(words: list[str], tell: Callable[[str], None]) -> None:
    tell(f"$ {' '.join(words)}")
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        end = "\n".join(line for line in done.stdout.splitlines()[-8:])
        raise RunDirectoryError(f"{words[0]} failed with exit code {done.returncode}:\n{end}")


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}
