"""A scorer of a pack: the trainer's arithmetic over weights that are in memory, or streamed within what the process may take.

Scoring goes through the model once for each micro-batch, so streamed weights are read once for as many texts as share one.
"""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.checkpoint.format.shards import dtype_name
from phalanx.checkpoint.pack.index import PackIndex
from phalanx.checkpoint.pack.reader import is_pack
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.serve.weights.budget import LIBRARIES, Computing, divide_budget
from phalanx.serve.weights.open_model import (
    empty_model,
    free_to_use,
    packed,
    read_weights,
    recorded_run,
    stream_weights,
    taken,
)
from phalanx.train.assembly.model_facts import compute_dtype
from phalanx.train.score.score import DTYPES, Compute, Scorer, begin_scoring


def scorer_of(
    place: Path,
    step: int | None,
    compute: Compute | None,
    *,
    stream: bool,
    memory_bytes: int | None,
) -> Scorer:
    """The scorer of a pack, or of a run that is packed for streaming, computing in ``compute``, else in the run's own format.

    With ``stream`` the whole process takes at most ``memory_bytes``, by default four fifths of what is free. Raises as ``open_model`` does.
    """
    dtype = DTYPES[compute] if compute else None
    if dtype is None and not is_pack(place):
        dtype = compute_dtype(read_resolved(RunDirectory(place)))
    file = packed(place, step, dtype or torch.float32)
    spec = recorded_run(file.index)
    dtype = dtype or compute_dtype(spec)
    model, resolved = empty_model(file.index, dtype, spec.train.seq_len)
    if isinstance(model, Transformer):
        begin_scoring()  # before memory is divided
    if stream:
        stream_weights(model, file, _weights_bytes(file.index, spec, resolved, dtype, memory_bytes), dtype)
    else:
        read_weights(model, file, free_to_use() * 4 // 5 if memory_bytes is None else memory_bytes, dtype)
    scorer = Scorer(spec, model, file.index.step)
    if file.index.format in ("fp8", "int8"):
        rounded = f"the weights are rounded to {file.index.format}, in {file.path}"
        scorer.note = f"{scorer.note}; {rounded}" if scorer.note else rounded
    return scorer


def _weights_bytes(
    index: PackIndex, spec: RunSpec, model: ModelSpec, dtype: torch.dtype, memory_bytes: int | None
) -> int:
    """What of the process's memory is left for weights when a micro-batch is scored."""
    train, name = spec.train, dtype_name(dtype)
    rows = (train.micro_batch_size or train.batch_size // train.slots) * train.seq_len
    computing = Computing(rows, min(rows, train.loss_chunk or rows), train.seq_len).nbytes(model, name)
    return divide_budget(
        index,
        name,
        taken() + free_to_use() * 4 // 5 if memory_bytes is None else memory_bytes,
        process=taken() + LIBRARIES,
        computing=computing,
        of_text=0,
        most_texts=0,
        fewer="",  # a micro-batch has the run's own shape
    ).weights
