"""A pack as a served model: its weights in memory, or streamed within a hard limit on what the process may take.

Streaming leaves nothing for afterwards: memory is divided first (``phalanx.serve.weights.budget``), and only as many texts are computed at a time as
there is memory for. The others wait.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch

from phalanx.checkpoint.format.shards import dtype_name
from phalanx.checkpoint.pack.index import PackIndex
from phalanx.checkpoint.pack.reader import PackFile
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec
from phalanx.serve.computing_device import computing_on
from phalanx.serve.engine.engine import Engine as PagedEngine
from phalanx.serve.http.served.opened import OpenedEngine, context_of, device_of
from phalanx.serve.http.served.served_run import ServedRun
from phalanx.serve.http.served.turns import TurnsEngine
from phalanx.serve.http.worker import Engine, Identity, Streaming
from phalanx.serve.numerics import begin_exact, bits_of, numerics_id
from phalanx.serve.weights.budget import (
    LIBRARIES,
    Budget,
    Computing,
    divide_budget,
    text_bytes,
)
from phalanx.serve.weights.open_model import (
    empty_model,
    free_to_use,
    packed,
    read_weights,
    run_folder,
    stream_weights,
    taken,
)
from phalanx.serve.weights.ring import StreamStatistics
from phalanx.traffic.block_table import PAGE


def open_packed(served: ServedRun) -> OpenedEngine:
    """The engine of a pack, or of a run that is packed for streaming. Raises EngineError, and as ``open_model`` does."""
    dtype, device = getattr(torch, served.dtype), device_of(served)
    file = packed(served.path, served.step, dtype)
    with run_folder(file.index) as folder:
        run = read_resolved(RunDirectory(folder))
        context = context_of(served, run, folder)
    model, spec = empty_model(file.index, dtype)
    note, texts, pages, streaming = "", 0, 0, None
    if isinstance(model, Transformer) and served.numerics == "exact":
        begin_exact()  # before memory is divided
    if served.stream:
        budget = _budget(file, model, spec, served, context)
        texts, pages = budget.texts, budget.texts * -(-context // PAGE)
        weights = stream_weights(model, file, budget.weights, dtype)
        kept, streaming = weights.residency, partial(_streaming, weights.statistics)
        bodies = sum(section.kind == "block" for section in file.index.sections)
        note = f"streaming {file.path}: {budget}; {len(kept.resident_layers)} of {bodies} layers stay, {kept.expert_slots} experts are kept"
    else:
        read_weights(model, file, free_to_use() * 4 // 5, dtype)
        with computing_on(device, f"the weights in {served.dtype}"):
            model.to(device)
    digest = weights_name(file.index, dtype)
    engine: Engine
    if isinstance(model, Transformer):
        paged = PagedEngine(
            model,
            spec,
            memory_bytes=served.memory_bytes,
            pages=pages,
            texts=texts,
            rows=served.rows,
            numerics=served.numerics,
            kept=served.kept,
            context=context,
            weights_id=digest,
        )
        engine, computed = paged, paged.numerics_id
    else:
        engine = TurnsEngine(model, context, kept=served.kept)
        computed = numerics_id("turns", dtype, device=device)
    bits = bits_of(served.numerics, run, served.dtype, kept=served.kept)
    if bits == "trainer" and file.index.format in ("fp8", "int8"):
        bits = "request"  # the trainer's weights are not rounded
    identity = Identity(digest, computed, context, bits)
    return OpenedEngine(engine, identity, spec, note=note, streaming=streaming, device=device)


def weights_name(index: PackIndex, dtype: torch.dtype) -> str:
    """16 digits that name a pack's weights as they are computed with: of an fp32 pack in fp32 the first of what ``phalanx hash`` prints."""
    if index.format == "fp32" and dtype == torch.float32:
        return index.weights_sha256[:16]
    return hashlib.sha256(f"{index.weights_id} {dtype_name(dtype)}".encode()).hexdigest()[:16]


def _streaming(statistics: StreamStatistics) -> Streaming:
    # Read by another thread than the one that counts: a number may be a step old.
    waited = sum(list(statistics.stall_s.values())) + statistics.expert_stall_s
    needed = statistics.expert_hits + statistics.expert_misses
    return Streaming(statistics.bytes_read, waited, needed, statistics.expert_hits)


def _budget(
    file: PackFile, model: Transformer | Chain, spec: ModelSpec, served: ServedRun, context: int
) -> Budget:
    keeps = isinstance(model, Transformer)
    # A user's own model computes whole texts, one after another, and keeps nothing of them.
    rows = served.rows if keeps else context
    process = taken() + LIBRARIES
    return divide_budget(
        file.index,
        served.dtype,
        served.memory_bytes or taken() + free_to_use() * 4 // 5,
        process=process,
        computing=Computing(rows, rows, context, served.numerics == "fast").nbytes(spec, served.dtype),
        of_text=text_bytes(spec, served.dtype, context) if keeps else 0,
        most_texts=served.texts,
    )
