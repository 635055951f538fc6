"""The end of a run's processes: what a failing one leaves behind, and the message of its launcher.

A rank that the local launcher started, and a coordinator, leave an error that is meant for the user as a typed record beside
their log, so that the launcher need not search the log for it. One that ends in any other way leaves no record: then the end of
its log, with the traceback, is all there is to show. Agents, a fleet's workers, and ranks started by ``torchrun`` or ``srun``
leave no record.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.observe.logs.log_file import last_text
from phalanx.observe.logs.masking import SecretMask
from phalanx.run.directory.files import read_small, write_atomically

STOP_WORDS = (
    "stopping: the step in progress is finished and saved; at a second request the run ends at once and unsaved steps are lost",
    "ending at once, without saving",
)


@dataclass(frozen=True)
class Ending:
    """How the processes of a run ended, for the user."""

    status: Literal["finished", "stopped", "failed"]
    failed_rank: int | None = None
    exit_code: int = 0
    message: str = ""
    """Why it failed; of a fleet that was stopped, how it ended."""
    kind: str = ""
    """The class of the error that a rank left as a record; empty if none did."""
    unsaved: bool = False
    """True if it was ended at once, on a second request: steps after the newest checkpoint are lost."""
    unsaved_steps: int = 0
    """Completed steps of a fleet that are on no disk, as far as it knew."""


@dataclass(frozen=True)
class Failure:
    """Why a process of a run ended."""

    kind: str
    """The class of the error."""
    message: str
    """The text for the user, remedy included."""
    attempt: int
    rank: int | None = None
    """``None`` for a process that holds no rank, such as a coordinator."""
    remedy: str = ""
    """The remedy, of errors that hold it apart."""


class RunFailedError(RuntimeError):
    """The run cannot continue, and the user can do something about it: ``remedy``, which is also a part of the message."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def failure_file(log: Path) -> Path:
    """The place of the failure record of the process that writes ``log``."""
    return log.with_suffix(".failure.json")


def report_failure(error: Exception, log: Path, attempt: int, rank: int | None = None) -> None:
    """Print the error of this process on stderr, and write its record beside ``log``, for the launcher.

    If the record cannot be written, there is only the log. In the record, secrets are masked, and lone surrogates,
    which stand for the bytes of a path that is not UTF-8, are escaped.
    """
    print(f"error: {error}", file=sys.stderr, flush=True)
    remedy = error.remedy if isinstance(error, RunFailedError) else ""
    mask = SecretMask.of_environment(os.environ)
    message, remedy = (mask(text.encode(errors="backslashreplace").decode()) for text in (str(error), remedy))
    failure = Failure(type(error).__name__, message, attempt, rank, remedy)
    with suppress(OSError):
        write_atomically(failure_file(log), msgspec.json.encode(failure))


def remove_failure(log: Path) -> None:
    """Delete the record of an earlier process with the same log, if there is one, before the next is started. Raises ``OSError``."""
    failure_file(log).unlink(missing_ok=True)


def read_failure(log: Path) -> Failure | None:
    """Return the record of the process that wrote ``log``; ``None`` if there is none or it cannot be decoded."""
    try:
        return msgspec.json.decode(read_small(failure_file(log)), type=Failure)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def last_words(log: Path, ended: str, *, prefix: str = "", lines: int = 15) -> str:
    """Return the text for the user about the end of the process that wrote ``log``.

    It is the process's own error after ``prefix``, if it left one. Otherwise it is ``ended``, a sentence on how it
    ended, and the last ``lines`` lines of the log.
    """
    failure = read_failure(log)
    if failure is not None:
        return f"{prefix}{failure.message}"
    text = last_text(log, lines)
    return (
        "\n".join([f"{ended}; the end of {log}:", *text]) if text else f"{ended}; {log} is missing or empty"
    )
