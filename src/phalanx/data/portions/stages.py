"""The stages of a preparation, and how an executor runs their tasks: in this process, or in a worker."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from phalanx.data.errors import DataError, PreparationError
from phalanx.data.portions import find_duplicates
from phalanx.data.portions.planning.plan import PreparationPlan, software_of
from phalanx.data.portions.tasks import SEAL, Stage, Workplace
from phalanx.data.portions.write_portion import seal, train_tokenizer, write_portion
from phalanx.observe.logs.assemble import shortened
from phalanx.process.child import watch_parent
from phalanx.store.store import StoreError

_WORK: Mapping[str, Callable[[Workplace, int], None]] = MappingProxyType(
    {
        find_duplicates.READ: find_duplicates.read_and_sketch,
        find_duplicates.EXACT: find_duplicates.find_exact,
        find_duplicates.NEAR: find_duplicates.find_near,
        find_duplicates.CLUSTER: find_duplicates.write_dropped_documents,
        "tokenizer": train_tokenizer,
        "write": write_portion,
        SEAL: seal,
    }
)


def stages_of(plan: PreparationPlan) -> list[Stage]:
    """Return the stages of a plan in order. Each stage needs all stages before it."""
    return [
        *find_duplicates.duplicate_stages(plan),
        *([Stage("tokenizer", 1)] if plan.tokenizer == "bpe" else []),
        Stage("write", len(plan.portions)),
        Stage(SEAL, 1),
    ]


def stage_named(plan: PreparationPlan, name: str) -> Stage:
    """Return a stage of a plan by its name."""
    return next(stage for stage in stages_of(plan) if stage.name == name)


def do_task(place: Workplace, stage: str, task: int) -> None:
    """Run a task unless it is done. Raises ``DataError`` and ``StoreError``; the task is then not done."""
    _require_software(place.plan)
    if not place.is_done(stage, task):
        _WORK[stage](place, task)


def _require_software(plan: PreparationPlan) -> None:
    """Raise ``PreparationError`` if this machine's software is not the plan's: it could write other bytes."""
    installed = software_of(plan.recipe)
    if installed != plan.software:
        other = ", ".join(
            f"{name} {installed.get(name)}, planned with {version}"
            for name, version in plan.software.items()
            if installed.get(name) != version
        )
        raise PreparationError(
            f"this worker has other software ({other}), and could write other bytes; install what the plan was made with"
        )


# Executors call ``do_task(place, stage, task)`` on some machine for each of a list of task numbers.
#
# An executor may return outcomes in any order, run a task twice, or lose one. Only manifests in the store count, so an executor
# cannot change the output.


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


def raised(stage: str, task: int, error: BaseException) -> TaskOutcome:
    """Return the outcome of a task that raised an unexpected error."""
    return TaskOutcome(task, failed=f"task {task} of stage {stage}: {type(error).__name__}: {error}")


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


# A worker process, which ``Processes`` starts.


def main() -> None:
    """Run the tasks on standard input, one JSON request a line, and write ``{"failed": TEXT}`` for each as a line
    (empty: done), until the input or the parent ends.

    Standard output of the tasks goes to standard error. It is safe to kill this process at any time.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Output of a user's filter must not be read as an answer.
    os.dup2(2, 1)
    watch_parent()
    place: Workplace | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if place is None or place.url != request["url"]:
            place = Workplace(request["url"])
        try:
            failed = outcome_of(place, request["stage"], request["task"]).failed
        except Exception as error:
            traceback.print_exc()
            failed = raised(request["stage"], request["task"], error).failed
        replies.write(json.dumps({"failed": shortened(failed)}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
