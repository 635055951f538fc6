"""Executors call ``do_task(place, stage, task)`` on some machine for each of a list of task numbers.

An executor may return outcomes in any order, run a task twice, or lose one. Only manifests in the store count, so an executor cannot change the
output.
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
    """The outcome of a task: done, failed with a message for the user, or lost with its worker."""

    task: int
    failed: str = ""
    lost: str = ""


class Executor(Protocol):
    """Runs tasks of one stage at a time."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Run ``tasks`` for the dataset at ``url``. Yields outcomes in any order, at least one for each task that was not lost silently."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class InOrder:
    """Runs tasks in this process, one after another."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        place = Workplace(url)
        for task in tasks:
            yield outcome_of(place, stage, task)

    def close(self) -> None:
        pass


def outcome_of(place: Workplace, stage: str, task: int) -> TaskOutcome:
    """Run a task. ``DataError`` and ``StoreError`` become a failed outcome; other exceptions propagate."""
    try:
        do_task(place, stage, task)
    except (DataError, StoreError) as error:
        return TaskOutcome(task, failed=str(error))
    return TaskOutcome(task)


def task_at(url: str, stage: str, task: int) -> str:
    """Run a task in a cluster's worker, which may run further tasks. Returns the failure's message, or ""."""
    return outcome_of(_place(url), stage, task).failed


@functools.lru_cache(maxsize=1)
def _place(url: str) -> Workplace:
    """Return the workplace. It is cached, so that each worker reads plan and tokenizer once."""
    return Workplace(url)


def one_thread_each() -> dict[str, str]:
    """Return environment variables that limit each worker to one thread, because there are as many workers as cores."""
    return {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
