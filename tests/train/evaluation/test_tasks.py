"""Task files, the token sequences that are scored for them, and the figures of their scores."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.run.sections.monitoring import TASK_FIGURES, evaluation_problems
from phalanx.run.spec import EvalSpec, RunSpec, TaskSpec
from phalanx.train.evaluation.tasks import (
    ContinuationScore,
    Item,
    Kind,
    SequenceScore,
    Task,
    TaskError,
    encode_pair,
    figures,
    read_task,
    scores_by_item,
    sequences_of,
    task_file,
)

BYTES = BytesTokenizer()
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)


def written(folder: Path, *lines: object) -> Path:
    path = folder / "task.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def task_of(kind: Kind, *items: Item) -> Task:
    return Task("task", kind, items, "")


def test_items_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    rows = [{"context": f"{n}+1=", "choices": [str(n), str(n + 1)], "answer": 1, "id": n} for n in range(5)]
    path = written(tmp_path, rows[0], "", *rows[1:])
    assert read_task(path, "sums", "choice").items[3] == Item("3+1=", ("3", "4"), 1)
    assert len(read_task(path, "sums", "choice", 2).items) == 2


@pytest.mark.parametrize(
    ("kind", "line", "problem"),
    [
        ("choice", {"context": "a", "choices": ["b"], "answer": 0}, "at least two choices"),
        ("choice", {"context": "a", "choices": ["b", ""], "answer": 0}, "none of them empty"),
        ("choice", {"context": "a", "choices": ["b", "c"], "answer": 2}, "answer 2"),
        ("choice", {"context": "a", "choices": ["b", "c"], "anser": 0}, "anser"),
        ("choice", "{", "truncated"),
        (
            "completion",
            '{"context": "a", "completion": "b", "completion": "c"}',
            "'completion' is there twice",
        ),
        ("choice", "[" * 5000, "line 2"),
        ("completion", {"context": "a", "completion": ""}, "empty"),
        ("completion", {"context": "a"}, "completion"),
        ("text", {"text": ""}, "empty"),
        ("text", {"text": 3}, "str"),
        ("generation", {"context": "a", "answers": []}, "at least one answer"),
        ("generation", {"context": "a", "answers": ["b", " "]}, "none of them empty"),
        ("generation", {"context": "a", "answers": ["b"], "until": [""]}, "until is empty"),
        ("generation", {"context": "a", "answers": ["b"], "max_tokens": 0}, "max_tokens is 0"),
        ("generation", {"context": "a", "answers": ["b\nc"]}, "texts end before"),
        ("generation", {"context": "a", "answers": ["b"], "max_token": 9}, "max_token"),
    ],
)
def test_a_line_that_is_no_item_is_named_with_the_form_of_its_kind(
    tmp_path: Path, kind: Kind, line: Any, problem: str
) -> None:
    good = {
        "choice": {"context": "a", "choices": ["b", "c"], "answer": 0},
        "completion": {"context": "a", "completion": "b"},
        "text": {"text": "a"},
        "generation": {"context": "a", "answers": ["b"]},
    }[kind]
    with pytest.raises(TaskError) as error:
        read_task(written(tmp_path, good, line), "task", kind)
    assert problem in str(error.value)
    assert "line 2" in str(error.value)
    assert "a line of kind" in str(error.value)


def test_a_file_that_is_empty_or_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no item"):
        read_task(written(tmp_path), "task", "text")
    with pytest.raises(TaskError, match="No such file"):
        read_task(tmp_path / "gone.jsonl", "task", "text")


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation() -> None:
    before, scored = encode_pair(BYTES, "two and ", "three")
    assert BYTES.decode(before) == "two and"
    assert BYTES.decode(scored) == " three"


def test_without_a_context_the_end_of_a_document_stands_before_the_text() -> None:
    assert encode_pair(BYTES, "", "a") == ((BYTES.end_of_document,), tuple(BYTES.encode("a")))


@given(TEXT, st.integers(1, 9))
def test_a_text_is_scored_once_token_by_token_each_after_the_one_before_it(text: str, seq_len: int) -> None:
    sequences = sequences_of(task_of("text", Item("", (text,))), BYTES, seq_len)
    scored = [token for sequence in sequences for token in sequence.tokens[-sequence.scored :]]
    stream = [BYTES.end_of_document, *scored]
    assert scored == BYTES.encode(text)
    pairs = [pair for sequence in sequences for pair in itertools.pairwise(sequence.tokens)]
    assert pairs == list(itertools.pairwise(stream))
    assert all(len(sequence.tokens) <= seq_len + 1 for sequence in sequences)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    item = Item("abcdefgh", ("xy",))
    (sequence,) = sequences_of(task_of("completion", item), BYTES, 5)
    assert BYTES.decode(sequence.tokens) == "efghxy"
    assert (sequence.scored, sequence.cut) == (2, True)
    (uncut,) = sequences_of(task_of("completion", item), BYTES, 9)
    assert (BYTES.decode(uncut.tokens), uncut.cut) == ("abcdefghxy", False)


def test_a_continuation_that_is_longer_than_what_the_model_reads_is_refused() -> None:
    with pytest.raises(TaskError, match="item 1: the continuation has 6 tokens"):
        sequences_of(task_of("completion", Item("a", ("bcdefg",))), BYTES, 5)


@st.composite
def scored_tasks(draw: st.DrawFn) -> tuple[Task, list[list[ContinuationScore]]]:
    items, scores = [], []
    for _ in range(draw(st.integers(1, 6))):
        choices = tuple(draw(st.lists(TEXT, min_size=2, max_size=5)))
        items.append(Item("context", choices, draw(st.integers(0, len(choices) - 1))))
        values = draw(st.lists(st.integers(-40, 0), min_size=len(choices), max_size=len(choices)))
        scores.append([ContinuationScore(float(value), draw(st.booleans())) for value in values])
    return task_of("choice", *items), scores


@given(scored_tasks())
def test_the_choice_is_the_first_of_the_most_probable(
    drawn: tuple[Task, list[list[ContinuationScore]]],
) -> None:
    task, scores = drawn
    right = [
        [score.log_probability for score in row].index(max(score.log_probability for score in row))
        == item.answer
        for item, row in zip(task.items, scores, strict=True)
    ]
    results = figures(task, scores)
    assert results["accuracy"] == sum(right) / len(right)
    nats = sum(row[item.answer].log_probability for item, row in zip(task.items, scores, strict=True))
    size = sum(len(item.continuations[item.answer].encode()) for item in task.items)
    assert results["bits_per_byte"] == pytest.approx(-nats / math.log(2) / size)


def test_per_character_a_long_choice_is_not_worse_for_its_length() -> None:
    task = task_of("choice", Item("", ("ab", "abcdefgh"), 1))
    results = figures(task, [[ContinuationScore(-2.0, False), ContinuationScore(-4.0, False)]])
    assert (results["accuracy"], results["accuracy_per_character"]) == (0.0, 1.0)


def test_a_completion_is_right_if_greedy_decoding_writes_it() -> None:
    task = task_of("completion", *(Item("a", ("b",)) for _ in range(4)))
    results = figures(task, [[ContinuationScore(-1.0, flag)] for flag in (True, False, True, True)])
    assert results["accuracy"] == 0.75
    assert results["accuracy_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_the_windows_of_a_text_are_added_up() -> None:
    task = task_of("text", Item("", ("abcdef",)))
    sequences = sequences_of(task, BYTES, 4)
    scores = [
        SequenceScore((-math.log(2),) * sequence.scored, (0,) * sequence.scored, is_greedy=False)
        for sequence in sequences
    ]
    assert len(sequences) == 2
    assert figures(task, scores_by_item(task, sequences, scores)) == {"bits_per_byte": pytest.approx(1.0)}


def test_a_file_that_an_earlier_start_found_is_replaced_by_its_copy_in_the_run_directory(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    spec = TaskSpec("sums", str(tmp_path / "sums.jsonl"))
    directory.tasks.mkdir(parents=True)
    directory.task("sums").write_text("{}")
    directory.run_file.write_text(tomli_w.dumps(to_table(RunSpec(evaluation=EvalSpec(tasks=(spec,))))))
    assert task_file(spec, directory) == directory.task("sums")
    mistyped = TaskSpec("sums", str(tmp_path / "sum.jsonl"))
    assert task_file(mistyped, directory) == tmp_path / "sum.jsonl"
    (tmp_path / "sums.jsonl").write_text("{}")
    assert task_file(spec, directory) == tmp_path / "sums.jsonl"


def test_a_pipe_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "task.jsonl")
    with pytest.raises(TaskError, match="cannot read"):
        read_task(tmp_path / "task.jsonl", "task", "text")


def test_figures_of_scores_that_are_not_finite_are_not_numbers() -> None:
    task = task_of("choice", Item("", ("a", "b")), Item("", ("a", "b"), 1))
    finite = [ContinuationScore(-1.0, False), ContinuationScore(-2.0, False)]
    results = figures(task, [finite, [ContinuationScore(math.nan, False)] * 2])
    assert results.keys() == figures(task, [finite, finite]).keys()
    assert all(math.isnan(value) for value in results.values())


@pytest.mark.parametrize("kind", [kind for kind in TASK_FIGURES if kind != "generation"])
def test_the_figures_by_which_evaluations_are_compared_are_those_of_each_kind(kind: Kind) -> None:
    task = task_of(kind, Item("a", ("b", "c")))
    results = figures(task, [[ContinuationScore(-1.0, False), ContinuationScore(-2.0, False)]])
    assert results.keys() - {"accuracy_error"} == {*TASK_FIGURES[kind]}


def test_each_task_has_a_name_of_its_own_and_a_file() -> None:
    tasks = (TaskSpec("a", "a.jsonl"), TaskSpec("a", "b.jsonl"), TaskSpec("a/b", "c.jsonl"), TaskSpec("c"))
    assert [problem.path for problem in evaluation_problems(EvalSpec(tasks=tasks), 16)] == [
        "evaluation.tasks[1].name",
        "evaluation.tasks[2].name",
        "evaluation.tasks[3].path",
    ]
