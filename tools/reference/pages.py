"""The generated pages by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.reference import commands, events, metrics, python_api, run_file

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "events.md": events.page,
    "metrics.md": metrics.page,
    "python-api.md": python_api.page,
    "run-file.md": run_file.page,
}
