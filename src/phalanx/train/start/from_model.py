"""Describes continued pretraining: a run that starts from the weights of an imported model, on text of one's own.

What would have to be said in four places of a run file (the model's shape, its weights, its tokenizer, the text) follows from
two paths. Without a run file, the rest has values with which a trained model is not undone in its first steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.tokenizers.published.files import TOKENIZER_FILE
from phalanx.run.directory.files_below import files_below
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

LEARNING_RATE, SEQ_LEN = 1e-5, 1024
"""For a run that has no run file. The rate is a tenth or less of what models are pretrained with."""


def fields_from_model(model: Path, data: Path, *, bare: bool) -> list[str]:
    """The ``section.field=value`` overrides of a run that trains an imported model on text.

    Args:
        model: The run directory of an imported model, or of a run.
        data: A prepared dataset; or text, which is then prepared with the model's tokenizer.
        bare: There is no run file, so what it would say is given too.

    Raises:
        RunDirectoryError: ``model`` is no such directory, or has no tokenizer for the text.
    """
    return [f"{field}={json.dumps(value)}" for field, value in _fields(RunDirectory(model), data, bare)]


def _fields(model: RunDirectory, data: Path, bare: bool) -> Iterator[tuple[str, object]]:
    if not model.run_file.is_file():
        hub = (model.path / "config.json").is_file()
        remedy = f"phalanx import {model.path}" if hub else "phalanx import FOLDER --out DIR makes one"
        raise RunDirectoryError(f"{model.path} is no imported model and no run directory: {remedy}")
    name = model.path.resolve().name
    yield "model.preset", str(model.path)
    yield "checkpoint.init_from", str(model.path)
    if (data / "index.json").is_file():
        yield "data.path", str(data)
    else:
        yield from _text_of(data, model, name)
    if bare:
        yield "name", f"{name}-further"
        yield "optimizer.lr", LEARNING_RATE
        yield "train.seq_len", SEQ_LEN


def _text_of(data: Path, model: RunDirectory, name: str) -> Iterator[tuple[str, object]]:
    """The fields that have ``data``, which is text, prepared with the model's tokenizer."""
    if not data.exists():
        raise RunDirectoryError(f"there is nothing at {data}: give a prepared dataset, or text to prepare")
    tokenizer = model.tokenizer / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise RunDirectoryError(
            f"{model.path} has no tokenizer to prepare {data} with; put a tokenizer.json into {model.tokenizer}, or give a dataset "
            "that was prepared with the model's"
        )
    # Another text, or another model, is another folder; files that were added or written again are another text.
    files = sorted(path for path in files_below(data) if path.is_file()) if data.is_dir() else [data]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    mark = hashlib.sha256(f"{data.resolve()}\n{model.path.resolve()}\n{stamps}".encode()).hexdigest()[:8]
    yield "data.path", f".cache/data/{data.resolve().stem}-for-{name}-{mark}"
    yield "data.corpus", [str(data)]
    yield "data.tokenizer", str(tokenizer)
