"""Print requirements for the oldest or the newest releases that pyproject.toml declares, for `make test-oldest` and `make test-newest`.

Example: python requirements/resolved.py oldest torch==2.13.0 > oldest.txt

The oldest release of a dependency is its declared lower bound. pip chooses the tools of the tests, and the packages of extras, to fit.
Requirements given as further arguments replace those of the same name.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WITH = ("tensorboard", "otel", "prepare", "dask", "parity")
"""Extras whose packages the suite imports."""
PARTS = ("plan", "serve", "watch")
"""Extras of this project's own packages, which have lower bounds as the core has."""


def name_of(requirement: str) -> str:
    """Return the normalized name of the package that a requirement names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]).lower()


def declared(project: dict[str, Any], kind: str) -> dict[str, str]:
    """Return the requirements of pyproject.toml, and of the extras that the suite uses, by package; those of our own packages at their lower bounds."""
    parts = [line for extra in PARTS for line in project["optional-dependencies"][extra]]
    own = [oldest(line) if kind == "oldest" else line for line in [*project["dependencies"], *parts]]
    extras = [line for extra in WITH for line in project["optional-dependencies"][extra]]
    return {name_of(line): line for line in [*own, *extras]}


def tools() -> set[str]:
    """Return the packages of dev.txt."""
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    return {name_of(line) for line in lines if line and not line.startswith(("#", "-"))}


def oldest(requirement: str) -> str:
    """Return the requirement at its lower bound."""
    bound = re.search(r"(>=|==)\s*([^,; ]+)", requirement)
    if bound is None:
        raise SystemExit(
            f"pyproject.toml declares no lower bound for {requirement!r}: write {requirement}>=VERSION"
        )
    return f"{re.split(r'[<>=!~; ]', requirement, maxsplit=1)[0]}=={bound[2]}"


def requirements(kind: str, replaced: dict[str, str]) -> list[str]:
    """Return the lines of a requirements file."""
    lines = declared(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], kind)
    return list(({name: name for name in tools()} | lines | replaced).values())


if __name__ == "__main__":
    match sys.argv[1:]:
        case [("oldest" | "newest") as kind, *others]:
            print("\n".join(requirements(kind, {name_of(line): line for line in others})))
        case _:
            raise SystemExit(__doc__)
