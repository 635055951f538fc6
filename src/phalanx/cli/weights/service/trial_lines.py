"""Shows on standard error that a machine's kernels are being tried: a line says why the start takes so long, and on a terminal another one how far it is."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.serve.numerics.trials import Trial


class TrialLines:
    """Shows each trial that it is called with."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begun = False
        self._width = 0

    def __call__(self, trial: Trial) -> None:
        if not self._begun:
            click.echo(str(trial), err=True)
        self._begun = True
        if not self._terminal:
            return
        # A line that is broken by the terminal is not written over by the next.
        line = f"{trial.number} of {trial.of}: {trial.part}"[: shutil.get_terminal_size().columns - 1]
        click.echo("\r" + line.ljust(self._width), err=True, nl=False)
        self._width = len(line)

    def end(self) -> None:
        """Ends the line that is being written, for whatever is said next."""
        if self._width:
            click.echo(err=True)
        self._width = 0
