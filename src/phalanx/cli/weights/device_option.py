"""Devices on the command line, by PyTorch's names: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` where there is a rule."""

from __future__ import annotations

import re

import click


class DeviceName(click.ParamType[str]):
    """The name of a device, which need not be there."""

    name = "device"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; refuses what is none."""
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d{0,3}))?", str(value)):
            self.fail(
                f"{value!r} is no device: write auto, cpu, cuda, or cuda:1 for one of several GPUs",
                param,
                ctx,
            )
        return str(value)
