"""What of a run is served, and how it is computed: one value for the command, the engine in its process, and every worker's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct


class ServedRun(Struct, frozen=True):
    """A run's weights as they are to be served; workers get it as JSON."""

    run_dir: str
    step: int | None
    """``None`` is the newest that can be read."""
    dtype: str
    context: int | None
    """The most tokens of a request; ``None`` is the length that was trained on."""
    memory_bytes: int
    """For pages of keys and values."""
    rows: int
    """The most tokens of a pass."""
    numerics: Literal["exact", "fast"]

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.run_dir)

    def text_name(self, name: str | None) -> str:
        """What clients call the model: ``name``, else the directory's."""
        return name or self.path.resolve().name
