"""Preparations that need a process of their own: one on a disk that becomes full, one that is killed. Importing them is quick."""

from __future__ import annotations

import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare


def prepare_with_small_files(
    documents: list[Document], out: Path, settings: dict[str, Any], outcome: Connection
) -> None:
    """Prepare where no file may have more than 20,000 bytes, and send the outcome."""
    # A file-size limit is the one full disk that every machine has: writing beyond it fails as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepare(documents, out, **settings)
        outcome.send("prepared")
    except Exception as error:
        outcome.send(f"{type(error).__name__}: {error}")


def prepare_until_killed(documents: list[Document], out: Path, settings: dict[str, Any]) -> None:
    """Prepare, and end by a kill when half of the documents have been encoded."""

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("encode", total // 2):
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(documents, out, on_progress=kill, **settings)
