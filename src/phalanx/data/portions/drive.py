"""Run a preparation stage by stage on any executor, up to the sealed dataset. The plan is from a recipe or from files named on the command line.

A task is done when its manifest is in the store. So a driver may be killed and restarted, and two drivers may run at once.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.portions.planning.plan import (
    INDEX_KEY,
    PREPARATION,
    PreparationPlan,
    commit_plan,
    get_if_stored,
    make_plan,
)
from phalanx.data.portions.planning.raw_files import RawFile, list_raw_files
from phalanx.data.portions.planning.recipe import OutputRecipe, PreparationRecipe, RawSource, read_options
from phalanx.data.portions.read_portion import read_portion
from phalanx.data.portions.stages import Executor, outcome_of, stages_of
from phalanx.data.portions.tasks import SEAL, Stage, Workplace, total
from phalanx.data.portions.write_portion import has_text_hashes, sweep
from phalanx.data.preparing.files import Files, files_of, local_path
from phalanx.data.preparing.prepare import PreparedDataset
from phalanx.data.preparing.split_writer import held_out_end
from phalanx.data.stored.index import DatasetIndex, parse_index
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.store.open_store import is_remote, is_url
from phalanx.store.store import require_create

_MOST_LOSSES = 3
_LOOK_S = 1.0

OnStage = Callable[[str, int, int], None]
"""Called with (stage, completed tasks, total tasks)."""


def place_plan(recipe: PreparationRecipe, folder: Path, out: str) -> Workplace:
    """Plan a recipe whose file is in ``folder``, and store the plan at ``out`` unless it is there. Raises as ``make_plan`` and ``commit_plan``."""
    _require_place(out)
    return put_plan(out, *make_plan(recipe, folder, out=out))


def place_named_files(
    names: Sequence[str], recipe: PreparationRecipe, out: str
) -> tuple[Workplace, NamedFilesPlan]:
    """Plan named files, and store the plan at ``out`` unless it is there. Return the workplace, and the plan with the
    files that were left out.

    Raises as ``plan_named_files`` and ``commit_plan``.
    """
    _require_place(out)
    planned = plan_named_files(names, recipe, out)
    return put_plan(out, planned.plan, planned.tokenizer), planned


def _require_place(out: str) -> None:
    """Raise ``PreparationError`` if ``out`` is a file."""
    if not is_url(out) and Path(out).exists() and not Path(out).is_dir():
        raise PreparationError(f"{out} is a file; choose another --out")


def put_plan(out: str, plan: PreparationPlan, tokenizer: Tokenizer | None) -> Workplace:
    """Store a plan at ``out`` unless it is there, with its tokenizer if that is not trained, and return its workplace.

    At a new remote ``out``, writes and deletes a probe first to check that the store can create objects exclusively.
    Raises ``StoreError`` if it cannot, and as ``commit_plan``.
    """
    place = Workplace(out if is_url(out) else str(Path(out).expanduser().absolute()))
    if is_remote(out) and not any(place.store.list(PREPARATION)):
        require_create(place.store, f"{PREPARATION}/probe-{time.time_ns():x}")
    commit_plan(place.store, plan, tokenizer)
    place.plan = plan
    return place


def carry_out(place: Workplace, executor: Executor, on_stage: OnStage = lambda *_: None) -> PreparedDataset:
    """Run the tasks of the plan at ``place`` that are not done, and return the dataset.

    Raises ``PreparationError`` if a task fails, or is lost ``_MOST_LOSSES`` times, with or without a report. Completed
    tasks stay done. Calls ``on_stage`` with (stage, completed, tasks) as tasks end. At the end, seals the dataset and removes the tasks'
    inputs. A dataset that is sealed already is returned as reused.
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
    shared = None if reused or not has_text_hashes(manifests) else index.held_out_in_training
    return PreparedDataset(place.url, index, reused, shared, total(manifests))


def work_share(
    place: Workplace, number: int, of: int, on_stage: OnStage = lambda *_: None, patience_s: float = 600.0
) -> None:
    """Do every ``of``-th task of each stage as array job ``number`` (1 to ``of``), and wait for the others' tasks before the next stage.

    Returns when the dataset is sealed, which is the last stage, and removes the tasks' inputs. If no task completes for ``patience_s``,
    the job of a missing task is gone, and the task is done here. Raises ``PreparationError`` if a task fails here.
    """
    if sealed_index(place) is not None:
        return
    for stage in stages_of(place.plan):
        completed = place.done(stage)
        for task in range(number - 1, stage.tasks, of):
            if task not in completed:
                if failed := outcome_of(place, stage.name, task).failed:
                    _require_sealed(place, failed)
                on_stage(stage.name, len(completed := completed | {task}), stage.tasks)
        _await_stage(place, stage, number, on_stage, patience_s)
    _sweep(place)


def _sweep(place: Workplace) -> None:
    sweep(
        place,
        [stage.name for stage in stages_of(place.plan) if stage.name not in ("tokenizer", "write", SEAL)],
    )


def _await_stage(place: Workplace, stage: Stage, number: int, on_stage: OnStage, patience_s: float) -> None:
    """Wait until all tasks of a stage are done. Whenever none completes for ``patience_s``, do a missing one here,
    chosen by ``number``; if it fails, raise ``PreparationError``.
    """
    last, since = -1, time.monotonic()
    while len(completed := place.done(stage)) < stage.tasks:
        on_stage(stage.name, len(completed), stage.tasks)
        if len(completed) != last:
            last, since = len(completed), time.monotonic()
        if time.monotonic() - since > patience_s:
            missing = sorted(set(range(stage.tasks)) - completed)
            if failed := outcome_of(place, stage.name, missing[number % len(missing)]).failed:
                _require_sealed(place, failed)
        else:
            time.sleep(min(_LOOK_S, patience_s / 4))


def _require_sealed(place: Workplace, failed: str) -> None:
    """Raise ``PreparationError`` with the failure, unless another process has sealed the dataset and removed this
    task's inputs.
    """
    if sealed_index(place) is None:
        raise PreparationError(failed)


def _do_stage(place: Workplace, stage: Stage, executor: Executor, on_stage: OnStage) -> None:
    """Run the missing tasks of a stage until all are done. Raises ``PreparationError`` if one fails, or is lost
    ``_MOST_LOSSES`` times, or if the executor ``_MOST_LOSSES`` times returns without a new manifest or a loss.

    Returns early if another process has sealed the dataset meanwhile.
    """
    losses: Counter[int] = Counter()
    idle_rounds = 0
    completed = place.done(stage)
    while missing := sorted(set(range(stage.tasks)) - completed):
        on_stage(stage.name, len(completed), stage.tasks)
        count, losses_before = len(completed), losses.total()
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
        before, completed = completed, place.done(stage)
        if completed == before and losses.total() == losses_before:
            idle_rounds += 1
            if idle_rounds >= _MOST_LOSSES:
                _require_sealed(
                    place,
                    f"{_named(stage, missing[0])} was reported as done and has no manifest in {place.url}; look at the executor's workers",
                )
                return


def _named(stage: Stage, task: int) -> str:
    return f"portion {task}" if stage.name in ("write", "read") else f"task {task} of stage {stage.name}"


def sealed_index(place: Workplace) -> DatasetIndex | None:
    """Return the index of the dataset if it is sealed, otherwise None.

    Raises ``PreparationError`` if it is the index of another plan, and ``DatasetError`` if it is damaged.
    """
    text = get_if_stored(place.store, INDEX_KEY)
    if text is None:
        return None
    index = parse_index(text.decode(errors="replace"), Path(f"{place.url}/{INDEX_KEY}"))
    if index.recipe.source_sha256 != place.plan.sha256:
        raise PreparationError(f"{place.url} holds another dataset; choose another --out, or remove it")
    return index


# A plan for files named on the command line: the short form of a preparation, with the documents, order and splits of
# ``phalanx.data.preparing.prepare``.
#
# A recipe's files are ordered by URL, and document names decide the split. Named files are ordered by name, and files that only
# describe data are left out. If there are so few documents that a split would be empty, the end of the largest document is held
# out. To find out, documents are read until both splits have one.


@dataclass(frozen=True)
class NamedFilesPlan:
    """The plan of named files."""

    plan: PreparationPlan
    tokenizer: Tokenizer | None
    """The tokenizer to use; ``None`` to train one."""
    corpus: Files
    """The local files."""


def recipe_of_files(
    names: Sequence[str],
    output: OutputRecipe,
    *,
    text_field: str | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    as_text: bool = False,
) -> PreparationRecipe:
    """Return the recipe of named files, folders and globs (paths or URLs).

    Its paths are absolute, so it does not depend on the working directory. ``text_field`` is None for the default.
    With ``as_text``, JSON lines are read as plain text; tables are read as usual.
    """
    field = RawSource.text_field if text_field is None else text_field
    tokenizer = (
        output.tokenizer if output.tokenizer in ("bpe", "bytes") else os.path.abspath(output.tokenizer)
    )
    template = os.path.abspath(output.chat_template) if output.chat_template else ""
    return PreparationRecipe(
        tuple(
            RawSource(name if is_url(name) else os.path.abspath(name), field, on_bad, as_text)
            for name in names
        ),
        replace(output, tokenizer=tokenizer, chat_template=template),
    )


def plan_named_files(names: Sequence[str], recipe: PreparationRecipe, out: str = "") -> NamedFilesPlan:
    """Return the plan of a recipe that ``recipe_of_files`` made of the same names, for a dataset at ``out``.

    Raises ``CorpusError``, ``TokenizerError`` and ``StoreError``. Lists the files, and reads documents if some are held
    out. Returns the plan with its tokenizer and the local files. Files are sorted by name; raises ``CorpusError`` for
    one that is named twice. Empty local files are left out.
    """
    local = {number: local_path(name) for number, name in enumerate(names) if not is_remote(name)}
    files: list[RawFile] = []
    corpus = Files((), ReadOptions())
    if local:
        # All sources have the same options, so it does not matter which of them named a file.
        first = next(iter(local))
        source = recipe.source[first]
        corpus = files_of(
            list(local.values()),
            read_options(recipe, first),
            on_bad=source.on_bad,
            json_as_text=source.as_text,
            out=out,
        )
        files = [
            RawFile(str(file.path.resolve()), file.name, file.bytes, str(file.modified_ns), first)
            for file in corpus.files
            if file.bytes
        ]
    for number in range(len(names)):
        if number not in local:
            remote_files = list_raw_files([recipe.source[number]], Path(), out)
            files += [replace(file, source=number) for file in remote_files]
    repeated = next((url for url, count in Counter(file.url for file in files).items() if count > 1), None)
    if repeated is not None:
        raise CorpusError(f"{repeated} is named twice; name each file once, since it is read once")
    files.sort(key=lambda file: (file.name, file.url))
    plan, tokenizer = make_plan(recipe, Path(), files)
    if recipe.output.held_out:
        urls = [file.url for file in plan.files]
        divisible = recipe.output.layout == "text"
        end = held_out_end(_documents(plan), plan.split_rule, urls, divisible=divisible)
        plan = replace(plan, held_out_end=end)
    return NamedFilesPlan(plan, tokenizer, corpus)


def _documents(plan: PreparationPlan) -> Iterator[tuple[int, int, Document]]:
    """Yield (portion, number among the portion's documents with text, document) of each document with text. Reads all files."""
    for portion in range(len(plan.portions)):
        texts = (document for _, document in read_portion(plan, portion) if document and document.text)
        for number, document in enumerate(texts):
            yield portion, number, document
