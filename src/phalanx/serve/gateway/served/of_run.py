"""A run's directory as a served model: its newest weights in an engine, and its words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.checkpoint.format.shards import dtype_name
from phalanx.checkpoint.tiers.digest import combine, tensor_digest
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.engine import Engine as PagedEngine
from phalanx.serve.gateway.served.model_text import ModelText, read_model_text
from phalanx.serve.gateway.served.served_run import ServedRun
from phalanx.serve.gateway.served.turns import TurnsEngine
from phalanx.serve.gateway.worker import Engine, EngineWorker, Identity
from phalanx.serve.generate import load_model
from phalanx.serve.numerics.identity import numerics_id


@dataclass(frozen=True)
class OpenedEngine:
    """A run's engine, and what it computes."""

    engine: Engine
    identity: Identity
    spec: ModelSpec


def open_run(served: ServedRun, name: str | None) -> tuple[ModelText, EngineWorker]:
    """The model of a run, ready to be asked. Raises EngineError, and as ``load_model`` and ``load_run_tokenizer`` do."""
    opened = open_engine(served)
    words = read_model_text(served.path, served.text_name(name), opened.spec.vocab_size)
    return words, EngineWorker(opened.engine, opened.identity)


def open_engine(served: ServedRun) -> OpenedEngine:
    """The engine of a run. Raises EngineError, and as ``load_model`` does."""
    dtype = getattr(torch, served.dtype)
    model, spec = load_model(served.path, served.step, dtype=dtype)
    sequence = read_resolved(RunDirectory(served.path)).train.seq_len
    context, digest = served.context or sequence, weights_digest(model)
    engine: Engine
    if isinstance(model, Transformer):
        paged = PagedEngine(
            model,
            spec,
            memory_bytes=served.memory_bytes,
            rows=served.rows,
            numerics=served.numerics,
            sequence=sequence,
            context=context,
            weights_id=digest,
        )
        engine, computed = paged, paged.numerics_id
    else:
        engine = TurnsEngine(model, context)
        computed = numerics_id("turns", dtype, sequence)
    return OpenedEngine(engine, Identity(digest, computed, context), spec)


def weights_digest(model: nn.Module) -> str:
    """The first 16 digits of the hash of the weights as they are computed with: in fp32, of the one that ``phalanx hash`` prints."""
    tensors = {
        name: tensor_digest(dtype_name(tensor.dtype), tuple(tensor.shape), [_bytes(tensor)])
        for name, tensor in model.state_dict().items()
    }
    return combine(tensors)[:16]


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data
    return data
