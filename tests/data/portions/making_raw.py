"""Raw files, recipes and stores to prepare in tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.data.portions.drive import carry_out, place_plan
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.portions.stages import Executor, InOrder, TaskOutcome, outcome_of
from phalanx.data.portions.tasks import Workplace
from phalanx.data.preparing.prepare import PreparedDataset
from phalanx.store.open_store import open_store

_WORDS = [f"word{number}" for number in range(300)]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 60 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(1, 60))) for _ in range(count)]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """JSON lines with these texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def raw_folder(folder: Path, files: int = 3, lines: int = 60) -> Path:
    """JSON lines and plain texts, in several folders."""
    raw = folder / "raw"
    for number in range(files):
        write_lines(raw / f"part-{number}.jsonl", texts(lines, seed=number))
    for number, text in enumerate(texts(7, seed=99)):
        (raw / "notes").mkdir(exist_ok=True)
        (raw / "notes" / f"{number}.txt").write_text(text)
    return raw


def recipe_file(folder: Path, more: str = "", *, source: str = 'url = "raw"', output: str = "") -> Path:
    """A recipe of the bytes tokenizer, in portions of some 4 KiB."""
    path = folder / "recipe.toml"
    held_out = "" if "held_out" in output else "held_out = 0.1\n"
    tokenizer = "" if "tokenizer" in output else 'tokenizer = "bytes"\n'
    path.write_text(
        f"[[source]]\n{source}\n{more}\n[output]\n{tokenizer}{held_out}portion_bytes = 4096\n{output}\n"
    )
    return path


def prepared(recipe: Path, out: Path | str, executor: Executor | None = None) -> PreparedDataset:
    """Prepare in this process, unless there is another executor."""
    place = place_plan(read_recipe(recipe), recipe.parent, str(out))
    return carry_out(place, executor or InOrder())


def objects(out: Path | str) -> dict[str, bytes]:
    """Everything at a place that readers of a store see."""
    store = open_store(str(out))
    return {info.key: store.get(info.key) for info in store.list()}


class Hostile:
    """Run tasks in this process, in any order, some twice, and lose some, before or after they were done."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        order = [*tasks, *self._draw.choices(tasks, k=len(tasks) // 2)]
        self._draw.shuffle(order)
        places = [Workplace(url), Workplace(url)]
        for task in order:
            fate = self._draw.random()
            if fate < 0.1:
                yield TaskOutcome(task, lost="a machine went away")
            elif fate < 0.2:
                continue  # lost without an answer
            else:
                outcome = outcome_of(self._draw.choice(places), stage, task)
                yield TaskOutcome(task, lost="its answer was lost") if fate < 0.25 else outcome

    def close(self) -> None:
        pass
