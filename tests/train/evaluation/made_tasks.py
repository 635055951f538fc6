"""A run with a task of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from phalanx.run.spec import RunSpec, TaskSpec


def with_tasks(spec: RunSpec, folder: Path) -> RunSpec:
    """The run with a task of each kind."""
    folder.mkdir(exist_ok=True)
    rows: dict[str, list[object]] = {
        "choice": [{"context": f"{n} ", "choices": ["ab", "cde", "f"], "answer": n % 3} for n in range(7)],
        "completion": [{"context": "a b", "completion": "c"}, {"context": "", "completion": "d e"}],
        "text": [{"text": "some words " * 9}],
        "generation": [{"context": f"a word {n}", "answers": ["b"], "max_tokens": 3} for n in range(3)],
    }
    for kind, items in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    tasks = tuple(TaskSpec(f"of-{kind}", str(folder / f"{kind}.jsonl"), kind) for kind in rows)  # type: ignore[arg-type]
    return dataclasses.replace(spec, evaluation=dataclasses.replace(spec.evaluation, tasks=tasks))
