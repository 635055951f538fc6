"""What an executor is: whoever can have ``do_task(place, stage, task)`` called somewhere for each of a list of numbers.

An executor promises little: it gives outcomes in any order, may have a task done twice, and may lose one. What counts are the manifests in the store,
so no executor can change a byte of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.data.errors import DataError
from phalanx.data.portions.stages import do_task
from phalanx.data.portions.tasks import Workplace
from phalanx.store.store import StoreError


@dataclass(frozen=True)
class TaskOutcome:
    """What became of a task: done, failed with a message for the user, or lost with the worker that had it."""

    task: int
    failed: str = ""
    lost: str = ""


class Executor(Protocol):
    """Runs tasks of one stage at a time."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Have each of ``tasks`` done at the place ``url``: outcomes in any order, at least one of each task that was not lost silently."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class InOrder:
    """Does tasks in this process, one after another."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        place = Workplace(url)
        for task in tasks:
            yield outcome_of(place, stage, task)

    def close(self) -> None:
        pass


def outcome_of(place: Workplace, stage: str, task: int) -> TaskOutcome:
    """Do a task; errors that have a message for the user become its outcome."""
    try:
        do_task(place, stage, task)
    except (DataError, StoreError) as error:
        return TaskOutcome(task, failed=str(error))
    return TaskOutcome(task)


def task_at(url: str, stage: str, task: int) -> str:
    """Do a task in a cluster's worker, which may be asked again; returns what failed, "" if nothing."""
    return outcome_of(_place(url), stage, task).failed


@functools.lru_cache(maxsize=1)
def _place(url: str) -> Workplace:
    """The place, whose plan and tokenizer are read once in each worker."""
    return Workplace(url)


def one_thread_each() -> dict[str, str]:
    """The environment of workers, as many as cores: each with threads of its own for every core would only be in each other's way."""
    return {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
