"""Number formats on the command line: PyTorch's names, float32 and bfloat16, which help shows; and the run file's, fp32 and bf16, which mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import click

RUN_FILE_NAMES: Mapping[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
"""How a run file calls a format, by PyTorch's name (``precision.compute``)."""
_NAMES: Mapping[str, str] = {short: name for name, short in RUN_FILE_NAMES.items()}


class DtypeName(click.Choice[str]):
    """PyTorch's name of a format that weights are computed with."""

    def __init__(self) -> None:
        super().__init__(tuple(RUN_FILE_NAMES))

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """PyTorch's name, whichever was given; refuses what is none."""
        return super().convert(_NAMES.get(str(value), value), param, ctx)
