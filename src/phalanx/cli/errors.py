"""Turns errors with a message for the user into a line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from phalanx.run.factory import FactoryError
from phalanx.run.problems import RunFileError


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Shows errors of these kinds (and mistakes in run files and in the models that they name) as their message alone; exit
    code 1."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (RunFileError, FactoryError, *kinds)):
            raise
        raise click.ClickException(str(error)) from error
