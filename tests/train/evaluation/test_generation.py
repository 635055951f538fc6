"""Tasks by generation: the answer in a text, the end of a text, and one score on every layout."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.reading.sources import open_place
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.run.read import ONLY
from phalanx.run.spec import RunSpec, TaskSpec
from phalanx.train.evaluation.scoring import continue_prompts
from phalanx.train.evaluation.tasks import (
    GeneratedAnswer,
    Item,
    ScoredSequence,
    SequenceScore,
    Task,
    TaskError,
    answer_in,
    encode_task,
    generated_answers,
    generation_figures,
)
from phalanx.train.start.checks import start_problems
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run
from train.evaluation.test_samples import score_by_initial_weights
from train.evaluation.test_scoring import LAYOUTS
from train.pieces import divided, model_in, run_in_pieces

BYTES = BytesTokenizer()


def item(context: str = "a", *answers: str, until: tuple[str, ...] = ("\n",), max_tokens: int = 8) -> Item:
    return Item(context, answers or ("b",), until=until, max_tokens=max_tokens)


def task_of(*items: Item) -> Task:
    return Task("task", "generation", items, "")


class Writer:
    """A model that writes one text after each context, and counts the sequences that it reads."""

    def __init__(self, texts: dict[str, str], log_probability: float = -1.0) -> None:
        self.texts, self.log_probability, self.sequences = texts, log_probability, 0

    def score(self, sequences: Sequence[ScoredSequence], noise: torch.Tensor | None) -> list[SequenceScore]:
        assert noise is None
        self.sequences += len(sequences)
        return [
            SequenceScore((self.log_probability,), (self.next_token(sequence),), is_greedy=False)
            for sequence in sequences
        ]

    def next_token(self, sequence: ScoredSequence) -> int:
        text = BYTES.decode(sequence.tokens[:-1])
        context = next(context for context in self.texts if text.startswith(context))
        rest = self.texts[context][len(text) - len(context) :]
        return BYTES.encode(rest)[0] if rest else BYTES.end_of_document


def written(writer: Writer, *items: Item) -> list[GeneratedAnswer]:
    encoded = encode_task(task_of(*items), BYTES, 64)
    texts = continue_prompts(encoded.prompts, writer.score, BYTES, 64, BYTES.vocab_size)
    return generated_answers(encoded.task, texts, BYTES)


@given(st.text("ab \n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_the_answer_is_the_text_before_the_first_stop_string_without_surrounding_white_space(
    text: str, until: list[str]
) -> None:
    before = re.split("|".join(map(re.escape, until)), text, maxsplit=1)[0] if until else text
    assert answer_in(text, item(until=tuple(until))) == before.strip()


def test_an_answer_is_right_if_it_is_one_of_those_accepted_character_by_character() -> None:
    writer = Writer({"1": " Paris \nand", "2": "paris\n", "3": "Paris.\n", "4": "Rome"})
    answers = written(writer, *(item(context, "Paris", "Rome") for context in "1234"))
    assert [answer.text for answer in answers] == ["Paris", "paris", "Paris.", "Rome"]
    assert [answer.is_right for answer in answers] == [True, False, False, True]
    results = generation_figures(answers)
    assert results["exact_match"] == 0.5
    assert results["exact_match_error"] == pytest.approx(math.sqrt(0.25 / 3))


def test_a_text_costs_a_sequence_for_each_token_up_to_its_stop_string_or_max_tokens() -> None:
    writer = Writer({"1": "ab\ncd", "2": "abcdefghij", "3": "abEND and", "4": "ab"})
    items = item("1"), item("2", max_tokens=6), item("3", until=("END",)), item("4")
    assert [answer.text for answer in written(writer, *items)] == ["ab", "abcdef", "ab", "ab"]
    assert writer.sequences == len("ab\n") + 6 + len("abEND") + len("ab") + 1


def test_a_context_that_does_not_fit_with_its_text_is_refused_with_its_item() -> None:
    fits = item("abcd", max_tokens=5)
    (prompt,) = encode_task(task_of(fits), BYTES, 8).prompts
    assert len(prompt.tokens) + prompt.most - 1 == 8  # the last token is written, and not read
    with pytest.raises(TaskError, match=r"item 2: the context has 4 tokens and max_tokens is 6.*shorten"):
        encode_task(task_of(fits, item("abcd", max_tokens=6)), BYTES, 8)


def test_a_start_names_the_file_the_item_and_the_remedy(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"context": "1+1=", "answers": ["2"], "max_tokens": 30}')
    spec = replace_at(
        tiny_run(dataset, tmp_path), "evaluation.tasks", (TaskSpec("sums", str(file), "generation"),)
    )
    (problem,) = start_problems(spec, {ONLY: open_place(str(dataset))}, begins=True)
    assert problem.path == "evaluation.tasks[0]"
    assert "task sums, item 1: the context has 4 tokens and max_tokens is 30" in problem.finding


def test_a_context_is_encoded_with_its_spaces_and_an_empty_one_begins_a_document() -> None:
    spaced, empty = encode_task(task_of(item("a: "), item("")), BYTES, 16).prompts
    assert BYTES.decode(spaced.tokens) == "a: "
    assert empty.tokens == (BYTES.end_of_document,)


def test_figures_of_weights_that_are_not_finite_are_not_numbers() -> None:
    results = generation_figures(written(Writer({"a": "b"}, math.nan), item()))
    assert all(math.isnan(value) for value in results.values())
    assert results.keys() == {"exact_match", "exact_match_error"}


def answers_on_this_rank(spec: RunSpec, task: Task) -> list[GeneratedAnswer]:
    """The answers by the run's initial weights, on this rank of the process group."""
    seq_len, vocabulary = spec.train.seq_len, spec.model.vocab_size
    prompts = encode_task(task, BYTES, seq_len).prompts
    texts = continue_prompts(prompts, score_by_initial_weights(spec), BYTES, seq_len, vocabulary)
    return generated_answers(task, texts, BYTES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_answers_and_the_same_score(ranks: Ranks, name: str) -> None:
    pieces, model, count, degrees = LAYOUTS[name]
    spec = run_in_pieces(model_in(pieces, model))
    items = [item("1" * (1 + n), "-", until=(), max_tokens=2 + n % 3) for n in range(7)]
    (texts,) = ranks.run(1, answers_on_this_rank, spec, task_of(*items))
    right = [n % 2 == 0 for n in range(7)]
    task = task_of(
        *(
            dataclasses.replace(item, continuations=("-", answer.text)) if is_right else item
            for item, answer, is_right in zip(items, texts, right, strict=True)
        )
    )
    parallel = divided(spec.model, **degrees)
    for answers in ranks.run(count, answers_on_this_rank, dataclasses.replace(spec, parallel=parallel), task):
        assert [answer.text for answer in answers] == [answer.text for answer in texts]
        assert generation_figures(answers)["exact_match"] == sum(right) / len(right)
