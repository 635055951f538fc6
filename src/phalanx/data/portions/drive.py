"""Drives a preparation from its recipe to the sealed dataset, stage after stage, on any executor.

What is done is what has a manifest in the store; so the driver may be killed, and another may go on, or two at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import Executor, outcome_of
from phalanx.data.portions.planning.named_files import NamedFilesPlan, plan_named_files
from phalanx.data.portions.planning.plan import (
    INDEX_KEY,
    PREPARATION,
    PreparationPlan,
    commit_plan,
    make_plan,
)
from phalanx.data.portions.planning.recipe import PreparationRecipe
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import SEAL, Stage, Workplace, total
from phalanx.data.portions.work.seal import held_out_in_training, sweep
from phalanx.data.preparing.prepare import PreparedDataset
from phalanx.data.stored.index import DatasetIndex, parse_index
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.store.open_store import is_remote, is_url
from phalanx.store.store import MissingObjectError, require_create

_MOST_LOSSES = 3
_LOOK_S = 1.0

OnStage = Callable[[str, int, int], None]
"""Called with (stage, tasks done, tasks in all)."""


def place_plan(recipe: PreparationRecipe, folder: Path, out: str) -> Workplace:
    """Plan a recipe whose file lies in ``folder``, and write the plan to ``out``, or find the same there. Raises as ``make_plan`` and ``commit_plan``."""
    _require_place(out)
    return put_plan(out, *make_plan(recipe, folder, out=out))


def place_named_files(
    named: Sequence[str], recipe: PreparationRecipe, out: str
) -> tuple[Workplace, NamedFilesPlan]:
    """Likewise of files that are named, with what of them is left out. Raises as ``plan_named_files`` and ``commit_plan``."""
    _require_place(out)
    found = plan_named_files(named, recipe, out)
    return put_plan(out, found.plan, found.tokenizer), found


def _require_place(out: str) -> None:
    if not is_url(out) and Path(out).exists() and not Path(out).is_dir():
        raise PreparationError(f"{out} is a file; choose another --out")


def put_plan(out: str, plan: PreparationPlan, tokenizer: Tokenizer | None) -> Workplace:
    """Write a plan, with its tokenizer if that is not to be trained, to ``out``, or find the same there. Raises as ``commit_plan``."""
    place = Workplace(out if is_url(out) else str(Path(out).expanduser().absolute()))
    if is_remote(out) and not any(place.store.list(PREPARATION)):
        require_create(place.store, f"{PREPARATION}/probe-{time.time_ns():x}")
    commit_plan(place.store, plan, tokenizer)
    place.plan = plan
    return place


def carry_out(place: Workplace, executor: Executor, on_stage: OnStage = lambda *_: None) -> PreparedDataset:
    """Do all that is not yet done of the plan at ``place``, and return the dataset.

    Raises ``PreparationError`` with what a task failed with, or if a task was lost three times; what is done then stays done.
    """
    index = sealed_index(place)
    reused = index is not None
    if index is None:
        for stage in stages_of(place.plan):
            _do_stage(place, stage, executor, on_stage)
        index = sealed_index(place)
        if index is None:
            raise PreparationError(f"{place.url}/{INDEX_KEY} is gone since it was written")
    _sweep(place)
    manifests = place.manifests(Stage("write", len(place.plan.portions)))
    shared = None if reused else held_out_in_training(place, manifests)
    return PreparedDataset(place.url, index, reused, shared, total(manifests))


def work_share(
    place: Workplace, number: int, of: int, on_stage: OnStage = lambda *_: None, patience_s: float = 600.0
) -> None:
    """As one of ``of`` jobs of an array, number 1 to ``of``, do every ``of``-th task of each stage, and wait for the others' before the next.

    Where no task has become done for ``patience_s``, those missing are done here: the job that they belong to is gone. Raises ``PreparationError``.
    """
    if sealed_index(place) is not None:
        return
    for stage in stages_of(place.plan):
        done = place.done(stage)
        for task in range(number - 1, stage.tasks, of):
            if task not in done:
                if failed := outcome_of(place, stage.name, task).failed:
                    _require_sealed(place, failed)
                on_stage(stage.name, len(done := done | {task}), stage.tasks)
        _await_stage(place, stage, number, on_stage, patience_s)
    _sweep(place)


def _sweep(place: Workplace) -> None:
    sweep(
        place,
        [stage.name for stage in stages_of(place.plan) if stage.name not in ("tokenizer", "write", SEAL)],
    )


def _await_stage(place: Workplace, stage: Stage, number: int, on_stage: OnStage, patience_s: float) -> None:
    last, since = -1, time.monotonic()
    while len(done := place.done(stage)) < stage.tasks:
        on_stage(stage.name, len(done), stage.tasks)
        if len(done) != last:
            last, since = len(done), time.monotonic()
        if time.monotonic() - since > patience_s:
            missing = sorted(set(range(stage.tasks)) - done)
            if failed := outcome_of(place, stage.name, missing[number % len(missing)]).failed:
                _require_sealed(place, failed)
        else:
            time.sleep(min(_LOOK_S, patience_s / 4))


def _require_sealed(place: Workplace, failed: str) -> None:
    """Raises ``PreparationError`` with what failed, unless others have sealed the dataset meanwhile, and removed what this task was reading."""
    if sealed_index(place) is None:
        raise PreparationError(failed)


def _do_stage(place: Workplace, stage: Stage, executor: Executor, on_stage: OnStage) -> None:
    losses: Counter[int] = Counter()
    done = place.done(stage)
    while missing := sorted(set(range(stage.tasks)) - done):
        on_stage(stage.name, len(done), stage.tasks)
        count = len(done)
        for outcome in executor.map(stage.name, place.url, missing):
            if outcome.failed:
                _require_sealed(place, outcome.failed)
                return
            if outcome.lost:
                losses[outcome.task] += 1
                if losses[outcome.task] >= _MOST_LOSSES:
                    _require_sealed(
                        place,
                        f"worker lost {_MOST_LOSSES} times on {_named(stage, outcome.task)} ({outcome.lost}): fewer --workers, "
                        "or a smaller output.portion_bytes with another --out",
                    )
                    return
            else:
                count += 1
                on_stage(stage.name, min(count, stage.tasks), stage.tasks)
        before, done = done, place.done(stage)
        if done == before and not losses:
            losses.update(missing)
            if max(losses.values()) >= _MOST_LOSSES:
                _require_sealed(
                    place,
                    f"{_named(stage, missing[0])} was reported as done and is not; look at the executor's workers",
                )
                return


def _named(stage: Stage, task: int) -> str:
    return f"portion {task}" if stage.name in ("write", "read") else f"task {task} of stage {stage.name}"


def sealed_index(place: Workplace) -> DatasetIndex | None:
    """The index of the dataset, if it is sealed."""
    try:
        text = place.store.get(INDEX_KEY)
    except MissingObjectError:
        return None
    index = parse_index(text.decode(errors="replace"), Path(f"{place.url}/{INDEX_KEY}"))
    if index.recipe.source_sha256 != place.plan.sha256:
        raise PreparationError(f"{place.url} holds another dataset; choose another --out, or remove it")
    return index
