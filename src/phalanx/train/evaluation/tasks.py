"""Tasks: files of items with known answers, the token sequences that a model scores for them, and the figures of its scores.

A task file has one JSON object on each line. Its form is that of the task's kind:

- ``choice``: ``{"context": ..., "choices": [..., ...], "answer": 0}``. The choice with the largest log-probability after the context is
  the model's.
- ``completion``: ``{"context": ..., "completion": ...}``. The model is right if greedy decoding would write exactly the completion's tokens.
- ``text``: ``{"text": ...}``. The whole text is scored.
- ``generation``: ``{"context": ..., "answers": [...], "until": [...], "max_tokens": ...}``. The model is right if the text that it writes is one of
  the answers (``generated_answers``). ``until`` and ``max_tokens`` may be left out.

An item may have an ``"id"``. Context and continuation are encoded together, as lm-evaluation-harness does (arXiv 2405.14782): spaces at the
end of the context belong to the continuation, whose tokens are those after as many as the context alone has. Without a context, the
end-of-document token stands before the text. A sequence that is too long loses the beginning of its context.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.run.directory.files import open_regular, unique_keys
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.sections.monitoring import PromptSpec
from phalanx.run.spec import TaskSpec

Kind = Literal["choice", "completion", "text", "generation"]
_MOST_BYTES = 256 << 20
"""Size of a task file that each rank reads and encodes."""
_MOST_TOKENS = 4096
"""Tokens of a generated text, as those of a sample: each is a forward pass."""


class TaskError(ValueError):
    """A task file cannot be used; the message has file, line and remedy."""


@dataclass(frozen=True)
class Item:
    """A context, and the continuations that are scored after it, or with which a generated text is compared."""

    context: str
    continuations: tuple[str, ...]
    """The accepted answers, stripped, if the kind is ``generation``."""
    answer: int = 0
    """Index of the right continuation; 0 for kind ``generation``."""
    until: tuple[str, ...] = ()
    """Strings before which a generated text ends."""
    max_tokens: int = 0
    """Number of tokens to generate; 0 for the kinds that generate nothing."""


@dataclass(frozen=True)
class Task:
    """A task, read from its file."""

    name: str
    kind: Kind
    items: tuple[Item, ...]
    sha256: str
    """SHA-256 of the file, in hex."""


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    context: str
    choices: list[str]
    answer: int
    id: str | int = ""


class _Completion(msgspec.Struct, forbid_unknown_fields=True):
    context: str
    completion: str
    id: str | int = ""


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    id: str | int = ""


class _Generation(msgspec.Struct, forbid_unknown_fields=True):
    context: str
    answers: list[str]
    until: list[str] = msgspec.field(default_factory=lambda: ["\n"])
    max_tokens: int = 32
    id: str | int = ""


def _choice_item(line: bytes) -> Item:
    """Decode a line with choices. Raises ``ValueError`` for fewer than two, an empty one, or an answer that is no index."""
    parsed = msgspec.json.decode(line, type=_Choice)
    if len(parsed.choices) < 2 or not all(parsed.choices):
        raise ValueError("needs at least two choices, none of them empty")
    if not 0 <= parsed.answer < len(parsed.choices):
        raise ValueError(f"answer {parsed.answer} is not the index of one of {len(parsed.choices)} choices")
    return Item(parsed.context, tuple(parsed.choices), parsed.answer)


def _completion_item(line: bytes) -> Item:
    """Decode a line with a completion. Raises ``ValueError`` if that is empty."""
    parsed = msgspec.json.decode(line, type=_Completion)
    if not parsed.completion:
        raise ValueError("the completion is empty")
    return Item(parsed.context, (parsed.completion,))


def _text_item(line: bytes) -> Item:
    """Decode a line with a text. Raises ``ValueError`` if that is empty."""
    parsed = msgspec.json.decode(line, type=_Text)
    if not parsed.text:
        raise ValueError("the text is empty")
    return Item("", (parsed.text,))


def _generation_item(line: bytes) -> Item:
    """Decode a line with accepted answers, stripped. Raises ``ValueError`` for empty ones, empty stops, a bad limit, or an answer
    with a stop in it."""
    parsed = msgspec.json.decode(line, type=_Generation)
    answers = tuple(answer.strip() for answer in parsed.answers)
    if not answers or not all(answers):
        raise ValueError("needs at least one answer, none of them empty")
    if not all(parsed.until):
        raise ValueError("a string of until is empty, and every text would end before it")
    if not 1 <= parsed.max_tokens <= _MOST_TOKENS:
        raise ValueError(f"max_tokens is {parsed.max_tokens}, and must be 1 to {_MOST_TOKENS:,}")
    for answer in answers:
        if stop := next((stop for stop in parsed.until if stop in answer), None):
            raise ValueError(
                f"no text is the answer {answer!r}: texts end before {stop!r}, a string of until"
            )
    return Item(parsed.context, answers, until=tuple(parsed.until), max_tokens=parsed.max_tokens)


_ITEM_OF: Mapping[Kind, Callable[[bytes], Item]] = {
    "choice": _choice_item,
    "completion": _completion_item,
    "text": _text_item,
    "generation": _generation_item,
}
_FORM: Mapping[Kind, str] = {
    "choice": '{"context": "...", "choices": ["...", "..."], "answer": 0}',
    "completion": '{"context": "...", "completion": "..."}',
    "text": '{"text": "..."}',
    "generation": '{"context": "...", "answers": ["..."], "until": ["\\n"], "max_tokens": 32}',
}


def read_task(path: Path, name: str, kind: Kind, most_items: int = 0) -> Task:
    """Read the first ``most_items`` items of a task file, or all if it is 0. Blank lines are skipped; the SHA-256 is
    that of the whole file.

    Raises ``TaskError`` if the file cannot be read, is longer than ``_MOST_BYTES``, has no item, or has a malformed
    line or one with a repeated key.
    """
    try:
        with open_regular(path, follow=True) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise TaskError(f"cannot read the task file {path}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise TaskError(f"{path} is longer than {_MOST_BYTES >> 20} MiB; score a sample of its items")
    lines = ((number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip())
    items = []
    for number, line in islice(lines, most_items or None):
        try:
            items.append(_ITEM_OF[kind](line))
            json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{path}, line {number}: {error}; a line of kind {kind!r} is {_FORM[kind]}"
            ) from error
    if not items:
        raise TaskError(f"{path} has no item; a line of kind {kind!r} is {_FORM[kind]}")
    return Task(name, kind, tuple(items), hashlib.sha256(content).hexdigest())


def task_file(spec: TaskSpec, directory: RunDirectory | None) -> Path:
    """Return the file of a run's task: the path in the run file. If that is gone and an earlier start copied the same
    path, return the copy in ``directory``, which is ``None`` if there is no run directory yet.
    """
    path = Path(spec.path)
    if directory is None or path.exists() or not directory.task(spec.name).exists():
        return path
    with suppress(RunDirectoryError):
        recorded = read_resolved(directory).evaluation.tasks
        if any(task.name == spec.name and task.path == spec.path for task in recorded):
            return directory.task(spec.name)
    return path


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence of tokens of which the last are scored."""

    tokens: tuple[int, ...]
    """At most ``seq_len + 1``, the first of which is never scored."""
    scored: int
    """Number of scored tokens, at least 1."""
    item: int
    continuation: int
    cut: bool = False
    """True if the beginning of the context was left out."""


def sequences_of(task: Task, tokenizer: Tokenizer, seq_len: int) -> list[ScoredSequence]:
    """Return the sequences that are scored for a task, in the order of its items.

    Raises ``TaskError`` for a continuation without a token of its own, and for one of more than ``seq_len`` tokens. The
    latter does not hold for kind "text", which is cut into several sequences.
    """
    return [
        sequence
        for number, item in enumerate(task.items)
        for index, continuation in enumerate(item.continuations)
        for sequence in _sequences(task, tokenizer, seq_len, (number, index), item.context, continuation)
    ]


def _sequences(
    task: Task, tokenizer: Tokenizer, seq_len: int, place: tuple[int, int], context: str, continuation: str
) -> Iterator[ScoredSequence]:
    """Yield the sequences that score ``continuation``, marked with ``place``, its item and index. A text gives
    windows of ``seq_len`` tokens; all else one sequence, whose context is cut on the left to fit.

    Raises ``TaskError`` if the continuation has no token of its own, or (unless a text) more than ``seq_len``.
    """
    before, scored = encode_pair(tokenizer, context, continuation)
    if not scored:
        raise TaskError(
            f"task {task.name}, item {place[0] + 1}: {continuation!r} has no token of its own after its context; write both as one text"
        )
    if task.kind == "text":
        # Windows of seq_len tokens, each after the last token of the one before.
        for first in range(0, len(scored), seq_len):
            window = scored[first : first + seq_len]
            yield ScoredSequence((before[-1], *window), len(window), *place)
            before = window
        return
    if len(scored) > seq_len:
        raise TaskError(
            f"task {task.name}, item {place[0] + 1}: the continuation has {len(scored):,} tokens, and the model reads {seq_len:,} "
            '(train.seq_len); shorten it, or score it with kind = "text"'
        )
    tokens = (*before, *scored)
    yield ScoredSequence(tokens[-seq_len - 1 :], len(scored), *place, cut=len(tokens) > seq_len + 1)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens of the context and of the continuation. Trailing whitespace of the context counts to the
    continuation. The context begins with the tokenizer's start token; if it is empty, it is that token or the end of
    a document.
    """
    kept = context.rstrip()
    tokens = tokenizer.encode(context + continuation)
    first = len(tokenizer.encode(kept)) if kept else 0
    start = tokenizer.document_start or (tokenizer.end_of_document,)
    before = (*tokenizer.document_start, *tokens[:first]) if kept else start
    return before, tuple(tokens[first:])


@dataclass(frozen=True)
class SequenceScore:
    """The scores of a sequence's tokens."""

    log_probabilities: tuple[float, ...]
    """Log-probability of each scored token, in nats."""
    greedy_tokens: tuple[int, ...]
    """The most probable token at the place of each scored one."""
    is_greedy: bool
    """True if they are the scored tokens."""


@dataclass(frozen=True)
class ContinuationScore:
    """The score of a continuation."""

    log_probability: float
    """In nats."""
    is_greedy: bool


def scores_by_item(
    task: Task, sequences: Sequence[ScoredSequence], scores: Sequence[SequenceScore]
) -> list[list[ContinuationScore]]:
    """Return the summed log-probability of each continuation of each item, and whether all its tokens were the most
    probable. Sums are exactly rounded, so that no order of sequences matters.
    """
    terms: list[list[list[float]]] = [[[] for _ in item.continuations] for item in task.items]
    greedy = [[True] * len(item.continuations) for item in task.items]
    for sequence, score in zip(sequences, scores, strict=True):
        terms[sequence.item][sequence.continuation] += score.log_probabilities
        greedy[sequence.item][sequence.continuation] &= score.is_greedy
    return [
        [ContinuationScore(math.fsum(values), flag) for values, flag in zip(sums, flags, strict=True)]
        for sums, flags in zip(terms, greedy, strict=True)
    ]


def figures(task: Task, scores: Sequence[Sequence[ContinuationScore]]) -> dict[str, float]:
    """Return the figures of a task whose continuations are scored.

    ``choice``: ``accuracy``; ``accuracy_per_character``, which divides each log-probability by the characters of its
    choice; and ``bits_per_byte`` of the right choices. ``completion``: ``accuracy`` and ``bits_per_byte``. ``text``:
    ``bits_per_byte``. ``accuracy`` comes with its standard error, ``accuracy_error``. All are NaN if a log-probability
    is not finite.
    """
    results = _figures(task, scores)
    is_finite = all(math.isfinite(score.log_probability) for of_item in scores for score in of_item)
    return results if is_finite else dict.fromkeys(results, math.nan)


def _figures(task: Task, scores: Sequence[Sequence[ContinuationScore]]) -> dict[str, float]:
    """Return bits per byte of the right continuations. For a completion, add the share whose tokens were all greedy;
    for choices, the share of items whose right choice has the best score, in total and per character.
    """
    pairs = list(zip(task.items, scores, strict=True))
    right = [(item.continuations[item.answer], of_item[item.answer]) for item, of_item in pairs]
    nats = -math.fsum(score.log_probability for _, score in right)
    text_bytes = sum(len(text.encode()) for text, _ in right)
    results = {"bits_per_byte": nats / math.log(2) / text_bytes}
    if task.kind == "text":
        return results
    if task.kind == "completion":
        return share_of_right("accuracy", (score.is_greedy for _, score in right)) | results
    plain = [item.answer == _best([score.log_probability for score in of_item]) for item, of_item in pairs]
    per_character = [
        item.answer
        == _best([s.log_probability / len(text) for text, s in zip(item.continuations, of_item, strict=True)])
        for item, of_item in pairs
    ]
    share = sum(per_character) / len(per_character)
    return share_of_right("accuracy", plain) | {"accuracy_per_character": share} | results


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equal ones


def share_of_right(figure: str, right: Iterable[bool]) -> dict[str, float]:
    """Return the share of items that are right as ``figure``, with its standard error, ``FIGURE_error``."""
    flags = list(right)
    share = sum(flags) / len(flags)
    return {figure: share, f"{figure}_error": math.sqrt(share * (1 - share) / max(1, len(flags) - 1))}


# Prompts that the run's model continues: those of its samples, and the contexts of generation tasks.


@dataclass(frozen=True)
class Prompt:
    """Tokens that are continued."""

    tokens: tuple[int, ...]
    """At least one."""
    most: int
    """Number of tokens to generate, unless the text ends before."""
    temperature: float = 0.0
    """0 for the most probable tokens."""
    seed: tuple[int, ...] = ()
    """Seed of the noise."""
    until: tuple[str, ...] = ()
    """Strings at which the text ends: no token is generated after one of them."""


@dataclass(frozen=True)
class Continuation:
    """The text that a model writes after a prompt."""

    tokens: list[int]
    is_finite: bool
    """False if a token was chosen where a log-probability is not finite."""


def prompt_of(spec: PromptSpec, tokenizer: Tokenizer, seed: int) -> Prompt:
    """Return the prompt of a run's sample; ``seed`` is the run's."""
    tokens = prompt_tokens(spec.prompt, tokenizer)
    return Prompt(tokens, spec.tokens, spec.temperature, (seed, *spec.name.encode()))


def prompt_tokens(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a text that is continued, at least one: a document's beginning if it is empty."""
    start = tokenizer.document_start or (() if text else (tokenizer.end_of_document,))
    return (*start, *tokenizer.encode(text))


# Tasks of kind ``generation``: greedy text after each context, compared with the accepted answers (exact match).
#
# The text is generated like a run's samples (``phalanx.train.evaluation.scoring``), so layouts with one hash of the weights
# have the same score. The text before the first string of ``until``, or all of it, is compared. White space at both ends of
# texts and answers is removed (``str.strip``), and nothing else is changed. Items share micro-batches: each costs at most
# ``max_tokens`` sequences of a forward pass, plus its share of the padding of the last micro-batch.
#
# ``encode_task`` encodes tasks of every kind.


@dataclass(frozen=True)
class EncodedTask:
    """A task with what the model reads: sequences that are scored, or prompts that are continued."""

    task: Task
    sequences: list[ScoredSequence]
    """None for kind ``generation``."""
    prompts: list[Prompt]
    """For kind ``generation`` one of each item."""


def encode_task(task: Task, tokenizer: Tokenizer, seq_len: int) -> EncodedTask:
    """Encode a task for a model that reads ``seq_len`` tokens. Raises ``TaskError`` for an item that does not fit, or
    whose continuation has no token of its own.
    """
    if task.kind != "generation":
        return EncodedTask(task, sequences_of(task, tokenizer, seq_len), [])
    prompts = []
    for number, item in enumerate(task.items, 1):
        prompt = Prompt(prompt_tokens(item.context, tokenizer), item.max_tokens, until=item.until)
        if len(prompt.tokens) + prompt.most > seq_len + 1:  # the last token that is written is not read
            raise TaskError(
                f"task {task.name}, item {number}: the context has {len(prompt.tokens):,} tokens and max_tokens is {prompt.most:,}, and the "
                f"model reads {seq_len:,} (train.seq_len); shorten the context, or lower max_tokens"
            )
        prompts.append(prompt)
    return EncodedTask(task, [], prompts)


@dataclass(frozen=True)
class GeneratedAnswer:
    """The answer that the model writes for an item."""

    text: str
    """Before the first string of ``until``, stripped."""
    is_right: bool
    is_finite: bool
    """False if a token was chosen where a log-probability is not finite."""


def generated_answers(
    task: Task, continuations: Sequence[Continuation], tokenizer: Tokenizer
) -> list[GeneratedAnswer]:
    """Return the answer to each item of a ``generation`` task, cut from the continuation of its prompt, with whether
    it equals an accepted answer.
    """
    answers = []
    for item, continuation in zip(task.items, continuations, strict=True):
        text = answer_in(tokenizer.decode(continuation.tokens, at_start=False), item)
        answers.append(GeneratedAnswer(text, text in item.continuations, continuation.is_finite))
    return answers


def answer_in(text: str, item: Item) -> str:
    """Return the part of a generated text that is compared with the answers of ``item``."""
    end = min((place for stop in item.until if (place := text.find(stop)) >= 0), default=len(text))
    return text[:end].strip()


def generation_figures(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Return ``exact_match`` and its standard error, ``exact_match_error``; NaN if an answer is not finite."""
    results = share_of_right("exact_match", (answer.is_right for answer in answers))
    return results if all(answer.is_finite for answer in answers) else dict.fromkeys(results, math.nan)
