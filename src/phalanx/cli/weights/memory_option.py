"""Sizes on the command line: ``2GiB``, ``500MiB``, or a number of bytes."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Bytes(click.ParamType[int]):
    """A number of bytes, with a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; refuses what is none."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value))
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is no size: write 2GiB, 500MiB or a number of bytes", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])
