"""``phalanx eval`` on a finished run with tasks: its figures are those of the run's own evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from phalanx.observe.event_log import read_events
from phalanx.observe.events import TaskEvaluated
from phalanx_process import last_json, run
from phalanx_serve.cli.scoring import eval_command

QUESTIONS = [{"context": f"{n} and", "choices": [" ab", " cde", " f"], "answer": n % 3} for n in range(6)]


TASKS = """
[[evaluation.tasks]]
name = "questions"
path = "questions.jsonl"

[[evaluation.tasks]]
name = "texts"
path = "texts.jsonl"
kind = "text"

[[evaluation.tasks]]
name = "answers"
path = "answers.jsonl"
kind = "generation"
"""


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    """A finished run with three tasks, trained on two ranks."""
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
    (folder / "texts.jsonl").write_text(json.dumps({"text": "words of a text " * 5}))
    (folder / "answers.jsonl").write_text(
        json.dumps({"context": "a word", "answers": ["b"], "max_tokens": 4})
    )
    (folder / "tasks.toml").write_text((folder / "tiny.toml").read_text() + TASKS)
    changes = [
        "train.steps=6",
        "evaluation.every_steps=2",
        "checkpoint.every_steps=2",
        "name=tasks",
        "model.init_std=0.3",  # so that texts are not all white space
        "model.vocab_size=264",  # tokens that only the model has
    ]
    result = last_json(
        run(
            ["train", "tasks.toml", "--ranks", "2", "--json", *(f"--set={change}" for change in changes)],
            folder,
        )
    )
    for name in ("questions", "texts", "answers"):
        (folder / f"{name}.jsonl").unlink()  # the run directory has copies
    return folder / str(result["run_dir"])


def evaluated(run_dir: Path, *options: object) -> Result:
    return CliRunner().invoke(eval_command, [str(run_dir), *map(str, options)])


def figures_at(run_dir: Path, step: int) -> dict[str, Any]:
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return {
        body.task: body.figures for body in bodies if isinstance(body, TaskEvaluated) and body.step == step
    }


@pytest.mark.parametrize("step", [4, 6])
def test_the_figures_are_those_of_the_run_to_the_last_bit(run_dir: Path, step: int) -> None:
    done = evaluated(run_dir, "--json", "--step", step)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert {name: task["figures"] for name, task in printed["tasks"].items()} == figures_at(run_dir, step)
    assert (printed["step"], printed["note"]) == (step, "")


def test_one_task_is_chosen_by_its_name(run_dir: Path) -> None:
    done = evaluated(run_dir, "--task", "texts")
    assert done.exit_code == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("texts")
    wrong = evaluated(run_dir, "--task", "text")
    assert wrong.exit_code == 2
    assert "did you mean 'texts'?" in wrong.output


def test_a_file_is_scored_beside_the_tasks_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    file, scores = tmp_path / "more.jsonl", tmp_path / "scores.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
    done = evaluated(run_dir, "--file", file, "--items", 4, "--scores", scores, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["tasks"]["more"]
    rows = [json.loads(line) for line in scores.read_text().splitlines()]
    right = [row["answer"] == max(range(3), key=row["log_probabilities"].__getitem__) for row in rows]
    assert (result["items"], len(rows)) == (4, 4)
    assert result["figures"]["accuracy"] == sum(right) / 4


def test_the_generated_texts_are_written_and_are_right_as_answers(run_dir: Path, tmp_path: Path) -> None:
    file, scores = tmp_path / "more.jsonl", tmp_path / "scores.jsonl"
    items = [
        {"context": f"{n} words of", "answers": ["-"], "until": [], "max_tokens": 2 + n} for n in range(4)
    ]
    file.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    options = ["--file", file, "--kind", "generation", "--scores", scores, "--json"]
    assert json.loads(evaluated(run_dir, *options).stdout)["tasks"]["more"]["figures"]["exact_match"] == 0
    texts = [json.loads(line)["text"] for line in scores.read_text().splitlines()]
    answered = [
        item | {"answers": ["-", text]} if text and number % 2 else item
        for number, (item, text) in enumerate(zip(items, texts, strict=True))
    ]
    file.write_text("".join(f"{json.dumps(item)}\n" for item in answered))
    results = json.loads(evaluated(run_dir, *options).stdout)["tasks"]["more"]["figures"]
    rows = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [row["exact_match"] for row in rows] == [
        item != plain for item, plain in zip(answered, items, strict=True)
    ]
    assert results["exact_match"] == sum(row["exact_match"] for row in rows) / 4 > 0


def test_a_file_with_a_mistake_is_refused_with_its_line(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"context": "a"}\n')
    done = evaluated(run_dir, "--file", tmp_path / "more.jsonl")
    assert done.exit_code == 1
    assert "line 1" in done.output


def test_a_run_without_tasks_names_the_way_to_give_one(folder: Path, result: dict[str, object]) -> None:
    done = evaluated(folder / str(result["run_dir"]))
    assert done.exit_code == 2
    assert "evaluation.tasks" in done.output
    assert "--file" in done.output
