"""``phalanx score`` and ``phalanx eval``: log-probabilities of text, and figures of a run on tasks, by the arithmetic of training."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, TextIO

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.cli.errors import (
    RUN_FILE_NAMES,
    Bytes,
    DeviceName,
    DtypeName,
    TrustCode,
    explained,
    require_trusted_code,
)
from phalanx.cli.run_places import weights_place
from phalanx.command import Argument, AsJson, Option, command_options
from phalanx.command_help import Command
from phalanx.run.directory.files import RepeatedKeyError, unique_keys
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.data.tokenizers.tokenizer import Tokenizer
    from phalanx.train.evaluation.tasks import EncodedTask, ScoredSequence, SequenceScore, Task
    from phalanx.train.score import Scorer


_MOST_BYTES = 256 << 20
"""Most bytes of a file of texts, which is read into memory."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    place: Annotated[Path, Argument()]
    file: Annotated[BinaryIO, click.File("rb"), Argument()]
    step: int | None = None
    """A step other than the newest."""
    dtype: Annotated[str | None, DtypeName()] = None
    """Format to compute in; by default the run's own."""
    stream: bool = False
    """Read the weights during computation; for models larger than memory."""
    memory: Annotated[int | None, Bytes()] = None
    """With --stream: memory limit of the process, 2GiB, 500MiB (four fifths of the free memory)."""
    device: Annotated[str, DeviceName()] = "cpu"
    """Device: cpu, whose numbers exact serving is held to, cuda, or one GPU, cuda:1. auto: a GPU if there is one and the run was trained on one."""
    trust_code: TrustCode = False
    as_json: AsJson = False
    """Print a JSON object for each text, with all log-probabilities."""


@click.command("score", cls=Command)
@command_options(ScoreOptions)
def score_command(options: ScoreOptions) -> None:
    """Score the texts in FILE with the weights in PLACE: a run directory, a checkpoint, a pack (`phalanx pack`), or a folder of Hugging Face.

    FILE is one plain text, or has a JSON object on each line, {"text": ...} or {"tokens": [...]}; - reads standard input. A text may be as long
    as the sequences that the run was trained on. All tokens of a
    text but the first are scored, in nats, on a CPU with the bits of exact serving. These are the trainer's bits, if the run was trained with
    portable numerics.

    \b
      phalanx score runs/quickstart-1f3a9c04 texts.jsonl
      echo 'def __init__(self):' | phalanx score runs/quickstart-1f3a9c04 - --json
      echo '{"tokens": [12, 7, 99]}' | phalanx score runs/quickstart-1f3a9c04 - --step 200
      phalanx score model.pack texts.jsonl --stream --memory 4GiB
    """
    from phalanx.data.errors import DataError
    from phalanx.run.kinds.latent_attention import is_absorbed
    from phalanx_serve.numerics import computing_on, numerics_id
    from phalanx_serve.prompt import load_run_tokenizer
    from phalanx_serve.traffic.events import PartLostError

    if options.memory is not None and not options.stream:
        raise click.UsageError("--memory is for --stream")
    place, file = options.place, options.file
    name = "standard input" if file is sys.stdin.buffer else file.name
    inputs = given_texts(file.read(_MOST_BYTES + 1), name)
    kinds = (CheckpointError, DataError, RunDirectoryError, PartLostError, ValueError)
    with explained(*kinds), opened_weights(place, options.step) as opened:
        run_dir, step = opened
        pack = place if place.is_file() else None
        require_trusted_code(run_dir, trust_code=options.trust_code, place=pack)
        needs_tokenizer = any(isinstance(text, str) for text in inputs)
        try:
            tokenizer = load_run_tokenizer(run_dir)
        except DataError:
            if needs_tokenizer:
                raise
            tokenizer = None  # tokens alone are scored without one, but not by the byte
        texts = [_encoded(text, tokenizer) for text in inputs]
        scorer = scorer_for(
            pack or run_dir, step, options.dtype, options.device, stream=options.stream, memory=options.memory
        )
        with computing_on(scorer.device, "the scores of a text"):
            scores = scorer.score(texts, shown_progress(len(texts), "texts"))
        computed = numerics_id(
            "exact" if scorer.is_exact else "score",
            scorer.dtype,
            absorbed=is_absorbed(scorer.spec.model),
            device=scorer.device,
        )
    if scorer.note:
        click.echo(f"note: {scorer.note}", err=True)
    every = [
        Scored(tuple(text), tuple(log_probs.tolist()), _bytes(text, tokenizer))
        for text, log_probs in zip(texts, scores, strict=True)
    ]
    for number, scored in enumerate(every, 1):
        if options.as_json:
            click.echo(json.dumps(scored.json(scorer.step, scorer.note) | {"numerics_id": computed}))
        else:
            click.echo(f"text {number}: {scored}")
    if len(every) > 1 and not options.as_json:
        click.echo(f"all {len(every)} texts: {_together(every)}")


@contextmanager
def opened_weights(place: Path, step: int | None) -> Iterator[tuple[Path, int | None]]:
    """Yield the run directory and the step to score: the newest for a run if ``step`` is None; of a pack, ``step``
    itself.

    A pack's small files are unpacked for the time of the block.
    """
    if not place.is_file():
        with weights_place(place, step) as where:
            yield where.root.parent, where.step
        return
    from phalanx.checkpoint.pack.reader import open_pack
    from phalanx_serve.weights.open_model import run_folder

    file = open_pack(place)
    file.close()
    with run_folder(file.index) as folder:
        yield folder, step


def scorer_for(
    place: Path, step: int | None, dtype_name: str | None, device: str, *, stream: bool, memory: int | None
) -> Scorer:
    """Return the scorer of the weights in a run directory or a pack, by the options of those names; None means their
    defaults.

    With "auto" a GPU is used only for the directory of a run with ``runtime.device`` "cuda"; packs and streamed
    weights are scored on the CPU. Raises ServeError, and the errors of opening the weights.
    """
    from phalanx.hardware.local.detect import set_for_rank
    from phalanx.hardware.local.device import gpus, on_gpu
    from phalanx.train.score import Scorer
    from phalanx_serve.numerics import computing_on, device_named
    from phalanx_serve.weights.open_model import scorer_of

    dtype = None if dtype_name is None else RUN_FILE_NAMES[dtype_name]
    of_pack = stream or place.is_file()
    if device == "auto" and (of_pack or read_resolved(RunDirectory(place)).runtime.device != "cuda"):
        device = "cpu"
    only_cpu = "a pack, and what is streamed, is scored by the CPU: leave out --device" if of_pack else ""
    computing = device_named(device, gpus(), only_cpu=only_cpu)
    if on_gpu(computing):
        set_for_rank()  # before CUDA starts: deterministic mode needs it
    if of_pack:
        return scorer_of(place, step, dtype, stream=stream, memory_bytes=memory)
    with computing_on(computing, "the weights"):
        return Scorer.of_run(place, step, dtype, computing)


def shown_progress(count: int, things: str) -> Callable[[int], None] | None:
    """Return a callback that prints on standard error how many of ``count`` things are scored.

    Return None without a terminal, or for fewer than two things.
    """
    if count < 2 or not sys.stderr.isatty():
        return None
    return lambda scored: click.echo(f"\r{scored} of {count} {things}", err=True, nl=scored == count)


@dataclass(frozen=True)
class Scored:
    """Tokens of a text, log-probabilities in nats of all tokens after the first, and the bytes that these tokens
    decode to.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    text_bytes: int
    """0 without a tokenizer, or if all tokens are special."""

    @property
    def total(self) -> float:
        """The sum of all log-probabilities, rounded once."""
        return math.fsum(self.log_probs)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text. None if the number of bytes is unknown."""
        return -self.total / math.log(2) / self.text_bytes if self.text_bytes else None

    def __str__(self) -> str:
        bits = self.bits_per_byte
        by_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        mean = self.total / len(self.log_probs)
        return f"{len(self.log_probs)} tokens scored, sum {self.total:.6f}, mean {mean:.6f} nats{by_byte}"

    def json(self, step: int, note: str) -> dict[str, object]:
        """Return the object that ``--json`` prints: tokens, natural log-probabilities, their sum and mean, bits per
        byte, step and note.
        """
        return {
            "tokens": self.tokens,
            "log_probs": self.log_probs,
            "sum": self.total,
            "mean": self.total / len(self.log_probs),
            "bits_per_byte": self.bits_per_byte,
            "step": step,
            "note": note,
        }


def _together(every: Sequence[Scored]) -> Scored:
    """Concatenate all texts. ``text_bytes`` of the result is 0, which means unknown, if that of any text is 0."""
    is_bytes_known = all(scored.text_bytes for scored in every)
    return Scored(
        tuple(token for scored in every for token in scored.tokens),
        tuple(value for scored in every for value in scored.log_probs),
        sum(scored.text_bytes for scored in every) if is_bytes_known else 0,
    )


def given_texts(content: bytes, name: str) -> list[str | list[int]]:
    """Parse a file: one plain text, or a text or tokens from the JSON object on each line.

    It is JSON lines if its name ends in .jsonl or its first line is a JSON object. Blank lines are skipped. Raises
    ClickException for a line of another form, an empty file or text, more than ``_MOST_BYTES``, or text that is not
    UTF-8.
    """
    if len(content) > _MOST_BYTES:
        raise click.ClickException(
            f"{name} has more than {_MOST_BYTES:,} bytes; divide it into several files"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{name} is not UTF-8 at byte {error.start}; convert it") from error
    if not text.strip():
        raise click.ClickException(f"{name} is empty: give a text, or a JSON object on each line")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not name.endswith(".jsonl") and _given(name, *lines[0]) is None:
        if (keys := _keys(lines[0][1])) is None:
            return [text]
        raise click.ClickException(
            f'{name}, line {lines[0][0]}: an object with {", ".join(map(repr, keys)) or "no field"}: give {{"text": "..."}} or '
            '{"tokens": [1, 2, ...]}; if the file is one text, give it as the "text" of such a line'
        )
    texts: list[str | list[int]] = []
    for number, line in lines:
        parsed = _given(name, number, line)
        if parsed is None:
            raise click.ClickException(
                f'{name}, line {number}: {_damage(line)}give {{"text": "..."}} or {{"tokens": [1, 2, ...]}}'
            )
        if not parsed:
            raise click.ClickException(f"{name}, line {number}: the text is empty; leave the line out")
        texts.append(parsed)
    return texts


def _keys(line: str) -> list[str] | None:
    """Return the fields of the JSON object that a line is; None if it is none."""
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return list(table) if isinstance(table, dict) else None


def _damage(line: str) -> str:
    """Return the reason why a line is no JSON, as the beginning of a message; empty if it is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); "
    return ""


def _given(name: str, number: int, line: str) -> str | list[int] | None:
    """Return the text or the tokens in a line's JSON object.

    Returns None for what is no JSON, an object with neither or both fields, a value of another type, or a text with
    half of a pair of surrogates. Raises ClickException for an object with a key twice.
    """
    try:
        table = json.loads(line, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise click.ClickException(f"{name}, line {number}: {error}") from error
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict) or ("text" in table) == ("tokens" in table):
        return None
    text, tokens = table.get("text"), table.get("tokens")
    if isinstance(text, str):
        return (
            text
            if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
            else None
        )
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return tokens
    return None


def _encoded(text: str | list[int], tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens of a text behind its start tokens; tokens are returned as they are. A text needs a tokenizer."""
    if not isinstance(text, str):
        return text
    assert tokenizer is not None
    return [*tokenizer.document_start, *tokenizer.encode(text)]


def _bytes(text: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return the bytes of text that the tokens behind the first stand for; 0 without a tokenizer.

    Ids beyond the tokenizer's count nothing. If the text begins with the start tokens, ``prefix_bytes`` is
    subtracted.
    """
    if tokenizer is None:
        return 0
    lengths, start = tokenizer.byte_lengths, tokenizer.document_start
    # A vocabulary may be padded beyond the tokenizer's.
    count = sum(int(lengths[token]) for token in text[1:] if token < len(lengths))
    # The first token of a text may have a space that is not the text's.
    return max(0, count - tokenizer.prefix_bytes) if start and tuple(text[: len(start)]) == start else count


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    place: Annotated[Path, Argument()]
    tasks: Annotated[tuple[str, ...], Option("--task", metavar="NAME")] = ()
    """A task of the run, by its name in evaluation.tasks; may be repeated. By default all of them."""
    file: Annotated[Path | None, Option(metavar="FILE")] = None
    """A task file beside those of the run: one JSON object a line, in the form of --kind."""
    kind: Literal["choice", "completion", "text", "generation"] = "choice"
    """Form of the lines of --file: {"context", "choices", "answer"}, {"context", "completion"}, {"text"}, or {"context", "answers", "until",
    "max_tokens"}."""
    items: Annotated[int, click.IntRange(min=0)] = 0
    """With --file: number of its first items that are scored; 0 means all."""
    step: int | None = None
    """A step other than the newest."""
    scores: Annotated[TextIO | None, click.File("w"), Option(metavar="FILE")] = None
    """Write a JSON object for each item: the log-probability of each continuation, and whether greedy decoding writes it; of kind generation the
    text, and whether it is an answer."""
    dtype: Annotated[str | None, DtypeName()] = None
    """Format to compute in; by default the run's own."""
    device: Annotated[str, DeviceName()] = "cpu"
    """Device: cpu, cuda, or one GPU, cuda:1. auto: a GPU if there is one and the run was trained on one."""
    stream: bool = False
    """Read the weights during computation; for models larger than memory."""
    memory: Annotated[int | None, Bytes()] = None
    """With --stream: memory limit of the process, 2GiB, 500MiB (four fifths of the free memory)."""
    trust_code: TrustCode = False
    as_json: AsJson = False


@click.command("eval", cls=Command)
@command_options(EvalOptions)
def eval_command(options: EvalOptions) -> None:
    """Score tasks with the weights in PLACE: a run directory, a checkpoint, a pack (`phalanx pack`), or a folder of Hugging Face.

    Without options, the run's own tasks ([[evaluation.tasks]]) are scored with its newest weights. On a CPU the figures are those of the
    run's evaluations, to the last bit if the run was trained with portable numerics.

    \b
      phalanx eval runs/quickstart-1f3a9c04
      phalanx eval runs/quickstart-1f3a9c04 --task arc-easy --step 200 --json
      phalanx eval runs/quickstart-1f3a9c04 --file questions.jsonl --kind choice --scores scores.jsonl
    """
    from phalanx.data.errors import DataError
    from phalanx.train.evaluation.tasks import encode_task
    from phalanx_serve.numerics import computing_on
    from phalanx_serve.prompt import load_run_tokenizer
    from phalanx_serve.traffic.events import PartLostError

    if options.memory is not None and not options.stream:
        raise click.UsageError("--memory is for --stream")
    if options.items and options.file is None:
        raise click.UsageError(
            "--items is for --file; those of the run's tasks are evaluation.tasks.NAME.items"
        )
    kinds = (CheckpointError, DataError, RunDirectoryError, PartLostError, ValueError)
    results: dict[str, dict[str, object]] = {}
    with explained(*kinds), opened_weights(options.place, options.step) as (run_dir, step):
        pack = options.place if options.place.is_file() else None
        require_trusted_code(run_dir, trust_code=options.trust_code, place=pack)
        tasks = list(_tasks(run_dir, options))
        tokenizer = load_run_tokenizer(run_dir)
        scorer = scorer_for(
            pack or run_dir, step, options.dtype, options.device, stream=options.stream, memory=options.memory
        )
        for task in tasks:
            encoded = encode_task(task, tokenizer, scorer.length)
            with computing_on(scorer.device, "the scores of a task"):
                figures, rows = _evaluate(encoded, scorer, tokenizer)
            results[task.name] = {
                "kind": task.kind,
                "items": len(task.items),
                "cut": sum(sequence.cut for sequence in encoded.sequences),
                "sha256": task.sha256,
                "figures": figures,
            }
            if options.scores is not None:
                for number, row in enumerate(rows):
                    place = {"task": task.name, "item": number}
                    options.scores.write(f"{json.dumps(place | row)}\n")
    if options.as_json:
        click.echo(json.dumps({"step": scorer.step, "tasks": results, "note": scorer.note}))
        return
    _print(results, scorer.note)


def _tasks(run_dir: Path, options: EvalOptions) -> Iterator[Task]:
    """Yield the chosen tasks: that of ``--file``, and the named ones of the run, or all of the run if neither is
    given.

    The run directory's copy of a task is preferred. Raises ``click.UsageError`` for no, unknown or equal names, and
    ``TaskError``.
    """
    from phalanx.run.fields import unknown_value
    from phalanx.train.evaluation.tasks import read_task, task_file

    directory = RunDirectory(run_dir)
    own = {task.name: task for task in read_resolved(directory).evaluation.tasks}
    for name in options.tasks:
        if name not in own:
            raise click.UsageError(str(unknown_value("--task", name, own)))
    if options.file is not None:
        yield read_task(options.file, options.file.stem, options.kind, options.items)
    chosen = options.tasks or (own if options.file is None else ())
    if not chosen and options.file is None:
        raise click.UsageError(
            "the run has no tasks: add [[evaluation.tasks]] to its run file, or give one by --file"
        )
    if options.file is not None and options.file.stem in chosen:
        raise click.UsageError(
            f"--file and --task are both called {options.file.stem!r}: rename the file, or score one at a time"
        )
    for name in chosen:
        task = own[name]
        copy = directory.task(name)
        yield read_task(copy if copy.exists() else task_file(task, None), name, task.kind, task.items)


def _evaluate(
    encoded: EncodedTask, scorer: Scorer, tokenizer: Tokenizer
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Return the figures of a task, and for each item what ``--scores`` writes: the generated text, or each answer's
    log-probability.

    Shows progress on a terminal.
    """
    from phalanx.train.evaluation.scoring import continue_prompts
    from phalanx.train.evaluation.tasks import figures, generated_answers, generation_figures, scores_by_item

    task, sequences = encoded.task, encoded.sequences
    if task.kind == "generation":

        def score(following: Sequence[ScoredSequence], noise: Tensor | None) -> list[SequenceScore]:
            return scorer.score_sequences(following, noise=noise)

        most = sum(prompt.most for prompt in encoded.prompts)
        shown = shown_progress(most, "tokens")
        texts = continue_prompts(
            *(encoded.prompts, score, tokenizer, scorer.length, scorer.spec.model.vocab_size),
            lambda written, _: None if shown is None else shown(written),
        )
        if shown is not None:
            shown(most)  # texts may have ended before
        answers = generated_answers(task, texts, tokenizer)
        return generation_figures(answers), [
            {"text": answer.text, "exact_match": answer.is_right} for answer in answers
        ]
    scores = scorer.score_sequences(sequences, shown_progress(len(sequences), "sequences"))
    by_item = scores_by_item(task, sequences, scores)
    rows = [
        {
            "answer": item.answer,
            "log_probabilities": [score.log_probability for score in scores_of_item],
            "greedy": [score.is_greedy for score in scores_of_item],
        }
        for item, scores_of_item in zip(task.items, by_item, strict=True)
    ]
    return figures(task, by_item), rows


def _print(results: dict[str, dict[str, object]], note: str) -> None:
    """Print a line for each task: items, figures and the contexts that were cut; and the note, if any, on standard error."""
    from phalanx.observe.display.state import describe_figures

    width = max(map(len, results))
    for name, result in results.items():
        values = result["figures"]
        assert isinstance(values, dict)
        cut = f"  ({result['cut']} contexts cut)" if result["cut"] else ""
        click.echo(f"{name:{width}}  {result['items']:>6} items  {describe_figures(values)}{cut}")
    if note:
        click.echo(f"note: {note}", err=True)
