"""An opened model: its engine, with identity, spec and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.checkpoint.interop.huggingface.publisher_files import served_context
from phalanx.hardware.local.device import gpus
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.serve.computing_device import device_named
from phalanx.serve.http.served.served_run import ServedRun
from phalanx.serve.http.worker import Engine, Identity, Streaming

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OpenedEngine:
    """An engine of a run or a pack, and what it computes."""

    engine: Engine
    identity: Identity
    spec: ModelSpec
    step: int | None = None
    """The step whose weights compute; ``None`` for those of a pack."""
    note: str = ""
    """A note for the person who started the server."""
    streaming: Callable[[], Streaming] | None = None
    """Counts of streaming so far, if weights are streamed."""
    trouble: Callable[[], str] | None = None
    """Why nothing can be computed any more, empty if it can, where that depends on other processes; from any thread."""
    device: torch.device = _CPU
    """Where it is computed."""


def device_of(served: ServedRun, number: int = 0) -> torch.device:
    """Where a run is computed, as it is asked for, in the process of this ``number`` of those that serve it here. Raises EngineError."""
    return device_named(served.device, gpus(), only_cpu=served.only_cpu, number=number)


def context_of(served: ServedRun, run: RunSpec, folder: Path) -> int:
    """The most tokens of a request: as many as asked for, else those of the published model that the run in ``folder`` is or goes on from, else of a
    training sequence. Streaming sets memory aside for a whole text, so there it is the sequence. Raises HuggingFaceError for a damaged ``config.json``."""
    sequence = run.train.seq_len
    if served.context or served.stream:
        return served.context or sequence
    return served_context(RunDirectory(folder).published, run.model, sequence) or sequence
