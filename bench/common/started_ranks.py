"""Ranks of a measurement: processes of this machine that meet at a file, and the first one's answer."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_ranks(main: Callable[..., None], ranks: int, arguments: object) -> dict[str, float]:
    """Call ``main(rank, ranks, meeting point, arguments, results)`` on each rank; return the first item in ``results``.

    Raises ``SystemExit`` if a rank fails before that.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        point = (Path(folder) / "store").as_uri()
        processes = [
            context.Process(target=main, args=(rank, ranks, point, arguments, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _answer(results, processes)
        finally:
            for process in processes:
                process.join()


def _answer(results: Any, processes: list[Any]) -> dict[str, float]:
    while True:
        try:
            answer: dict[str, float] = results.get(timeout=1.0)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                raise SystemExit("a rank has ended without an answer: see its output above") from None
            continue
        return answer
