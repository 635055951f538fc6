"""Turns errors with a message for the user into a line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from phalanx.run.factory import FactoryError
from phalanx.run.fields import RunFileError
from phalanx.run.rules import NotPortableError


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Shows errors of these kinds (and mistakes in run files and in the models that they name) as their message alone; exit
    code 1."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (RunFileError, FactoryError, NotPortableError, *kinds)):
            raise
        raise click.ClickException(str(error)) from error


def refuse_unused(options: Sequence[str], why: str) -> None:
    """Raises ``click.UsageError`` for ``options``, which would be ignored, with ``why``."""
    if options:
        raise click.UsageError(f"{', '.join(options)}: {why}")


class TroubleError(click.ClickException):
    """An error of a command whose exit code 1 is an answer."""

    exit_code = 2


@contextmanager
def trouble(*kinds: type[Exception]) -> Iterator[None]:
    """As ``explained``, with exit code 2, for commands whose exit code 1 says that a comparison has found a difference."""
    try:
        with explained(*kinds):
            yield
    except click.ClickException as error:
        raise TroubleError(error.message) from error
