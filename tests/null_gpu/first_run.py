"""Run ``make gpu`` on the null GPU from a bare environment, as ``docs/gpu.md`` describes it for a machine without a network.

    python tests/null_gpu/first_run.py FOLDER [--wheels FOLDER] [PART ...]

``python`` is that of the environment of ``make null-gpu``. FOLDER gets a copy of the checkout's files, an environment that has PyTorch and what
it needs, and wheels of the other packages, from the package index unless ``--wheels`` has them. Each part of ``bench.gpu`` must end, and may
only find errors that ``EXPECTED`` lists. The times and bits in the report mean nothing. Limits are longer, since the host also compiles
for several ranks, and its cores may be shared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = re.compile(r"^(torch|numpy|setuptools)\b|^#")
NULL_GPU = Path(sys.prefix) / "null-gpu"
SMI = """#!/bin/sh
[ "$1" = -L ] && echo "GPU 0: NVIDIA H200 (UUID: none)" || echo "NVIDIA H200, 0.0, 144384 MiB, 700.00 W"
"""
"""A driver's program that lists one GPU."""
ANSWERS = """import sys
if "--run" in sys.orig_argv:
    from null_gpu import answers
    answers.pretend()
"""
SLOWER = 6.0
MINUTES = 60.0
EXPECTED = {"slots of a hand": "it splits rows by numbers that a kernel should have computed"}
"""Words in the names of findings that are errors, and the reasons."""


def distributions(name: str) -> Iterator[str]:
    """Yield a package and all that it needs, by the metadata of this environment; some several times."""
    yield name
    for requirement in importlib.metadata.requires(name) or ():
        package, _, condition = requirement.partition(";")
        if "extra" not in condition:
            needed = re.split(r"[^\w.-]", package.strip())[0]
            try:
                importlib.metadata.distribution(needed)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another system
            yield from distributions(needed)


def make_environment(folder: Path) -> Path:
    """Make an environment of PyTorch, NumPy and what they need, as links to this one's; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in {*distributions("torch"), "numpy"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.is_symlink():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python3"


def make_tree(folder: Path) -> None:
    """Copy the files of the checkout that Git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def install_packages(folder: Path, wheels: Path) -> None:
    """Install the wheels into ``folder`` without the network; get them from the package index before, if there are none."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not wheels.exists():
        pinned = (ROOT / "requirements" / "base.txt").read_text().splitlines()
        needed = [line for line in pinned if not NOT_NEEDED.match(line)]
        packages = [*needed, "pytest", "pytest-timeout", "hypothesis"]
        subprocess.run([*pip, "download", "-d", wheels, "--only-binary=:all:", *packages], check=True)
    command = [*pip, "install", "--no-index", "--no-deps", "--target", folder, *wheels.glob("*.whl")]
    subprocess.run(command, check=True)


def make_program(path: Path, text: str) -> None:
    """Write a file that can be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def measure(folder: Path, python: Path, parts: Sequence[str]) -> None:
    """Run ``bench.gpu`` with nothing in its environment but what the page names and the null GPU."""
    paths = [folder / "answers", folder / "packages", "src", ".", "tests"]
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": ":".join(map(str, paths)),
        "LD_PRELOAD": str(NULL_GPU / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(NULL_GPU),
        "TRITON_LIBCUDA_PATH": str(NULL_GPU),
    }
    command: list[str | Path] = [
        python,
        "-m",
        "bench.gpu",
        "--minutes",
        str(MINUTES),
        "--slower",
        str(SLOWER),
    ]
    only = [word for part in parts for word in ("--only", part)]
    subprocess.run(
        [*command, "--out", folder / "report", *only], cwd=folder / "tree", env=environment, check=True
    )


def failures(report: Path) -> list[str]:
    """Return the parts of a report that did not end, and the errors that are not expected."""
    bad = []
    for name, part in json.loads(report.read_text())["parts"].items():
        if part["ended"] != "ok":
            bad.append(f"{name}: {part['ended']}\n{part['output']}")
        for finding, value in part["found"].items():
            if isinstance(value, dict) and "error" in value and not any(word in finding for word in EXPECTED):
                bad.append(f"{name}, {finding}: {value['error']}")
    return bad


def main() -> None:
    """Make the environment, run all parts but PyTest's or those that are named, and fail if one fails."""
    from bench.gpu.__main__ import parts_for

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="must not exist, or be of an earlier call")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; by default FOLDER/wheels")
    parser.add_argument("part", nargs="*", help="by default all but the tests, which compare numbers")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.resolve()
    if not (folder / "tree").exists():
        make_tree(folder / "tree")
        make_environment(folder / "environment")
        install_packages(folder / "packages", (arguments.wheels or folder / "wheels").resolve())
        make_program(folder / "bin" / "nvidia-smi", SMI)
        make_program(folder / "answers" / "sitecustomize.py", ANSWERS)
    parts = arguments.part or [part.name for part in parts_for(1, 1) if part.name != "tests"]
    measure(folder, folder / "environment" / "bin" / "python3", parts)
    if bad := failures(folder / "report.json"):
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    main()
