"""A run's directory as a served model: its newest weights in an engine, and its words."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.serve.gateway.model_text import ModelText, read_model_text
from phalanx.serve.gateway.turns import TurnsEngine
from phalanx.serve.gateway.worker import EngineWorker, Identity
from phalanx.serve.generate import load_model


def open_run(
    run_dir: Path, step: int | None, *, name: str | None, dtype: str, context: int | None
) -> tuple[ModelText, EngineWorker]:
    """The model of a run, ready to be asked. Raises as ``load_model`` and ``load_run_tokenizer`` do."""
    model, spec = load_model(run_dir, step, dtype=getattr(torch, dtype))
    words = read_model_text(run_dir, name or run_dir.resolve().name, spec.vocab_size)
    longest = context or read_resolved(RunDirectory(run_dir)).train.seq_len
    numerics = f"turns-{dtype}-torch{torch.__version__}-threads{torch.get_num_threads()}"
    return words, EngineWorker(
        TurnsEngine(model, longest), Identity(weights_digest(model), numerics, longest)
    )


def weights_digest(model: nn.Module) -> str:
    """A short hash of the weights as they are computed with."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]
