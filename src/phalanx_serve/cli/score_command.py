"""``phalanx score``: log-probabilities of given text, by the arithmetic that a run was trained with."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import click

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
from phalanx.command import Argument, AsJson, command_options
from phalanx.command_help import Command

if TYPE_CHECKING:
    from phalanx.data.tokenizers.tokenizer import Tokenizer
    from phalanx.train.score import Scorer


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
def command(options: ScoreOptions) -> None:
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
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.run.kinds.latent_attention import is_absorbed
    from phalanx_serve.numerics import computing_on, numerics_id
    from phalanx_serve.prompt import load_run_tokenizer
    from phalanx_serve.traffic.events import PartLostError

    if options.memory is not None and not options.stream:
        raise click.UsageError("--memory is for --stream")
    place, file = options.place, options.file
    inputs = given_texts(file.read(), "standard input" if file is sys.stdin.buffer else file.name)
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
    """Yield the run directory and the step to score; of a pack, the given step.

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
    """Return what scores with the weights in a run directory or a pack, by the options of those names.

    With "auto" a GPU is used only for the directory of a run with ``runtime.device`` "cuda". Raises ServeError, and the
    errors of opening the weights.
    """
    from phalanx.hardware.local.detect import set_for_rank
    from phalanx.hardware.local.device import gpus, on_gpu
    from phalanx.run.directory.paths import RunDirectory, read_resolved
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
    """Return a callback that prints on a terminal how many of ``count`` things are scored. Return None without a
    terminal.
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
        """Return the object that ``--json`` prints."""
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
    """Concatenate all texts. The result has no byte count if that of any text is unknown."""
    is_bytes_known = all(scored.text_bytes for scored in every)
    return Scored(
        tuple(token for scored in every for token in scored.tokens),
        tuple(value for scored in every for value in scored.log_probs),
        sum(scored.text_bytes for scored in every) if is_bytes_known else 0,
    )


def given_texts(content: bytes, name: str) -> list[str | list[int]]:
    """Parse a file: one plain text, or a text or tokens from the JSON object on each line.

    Raises ClickException. Also for an empty file or text, or text that is not UTF-8. Blank lines are skipped.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{name} is not UTF-8 at byte {error.start}; convert it") from error
    if not text.strip():
        raise click.ClickException(f"{name} is empty: give a text, or a JSON object on each line")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not name.endswith(".jsonl") and _given(lines[0][1]) is None:
        return [text]
    texts: list[str | list[int]] = []
    for number, line in lines:
        parsed = _given(line)
        if parsed is None:
            raise click.ClickException(
                f'{name}, line {number}: {_damage(line)}give {{"text": "..."}} or {{"tokens": [1, 2, ...]}}'
            )
        if not parsed:
            raise click.ClickException(f"{name}, line {number}: the text is empty; leave the line out")
        texts.append(parsed)
    return texts


def _damage(line: str) -> str:
    """The reason why a line is no JSON, for a message; empty if it is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); "
    return ""


def _given(line: str) -> str | list[int] | None:
    """Return the text or the tokens in a line's JSON object; ``None`` if it has not just one of them, or is no JSON."""
    try:
        table = json.loads(line)
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
    """Return the tokens of a text behind its start tokens; tokens are returned as they are."""
    if not isinstance(text, str):
        return text
    assert tokenizer is not None
    return [*tokenizer.document_start, *tokenizer.encode(text)]


def _bytes(text: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Bytes of text that the tokens behind the first stand for, without the tokenizer's own prefix; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    lengths, start = tokenizer.byte_lengths, tokenizer.document_start
    # A vocabulary may be padded beyond the tokenizer's.
    count = sum(int(lengths[token]) for token in text[1:] if token < len(lengths))
    # The first token of a text may have a space that is not the text's.
    return max(0, count - tokenizer.prefix_bytes) if start and tuple(text[: len(start)]) == start else count
