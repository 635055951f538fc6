"""A finished run to look at with the commands."""

from __future__ import annotations

from finished_run import folder, result

__all__ = ["folder", "result"]
