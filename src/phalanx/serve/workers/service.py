"""A run's directory or a pack served by several worker processes of this machine: its words here, its weights in each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from phalanx.checkpoint.pack.reader import is_pack
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.rules.portable import numerics_environment
from phalanx.serve.gateway.served.model_text import ModelText, read_model_text
from phalanx.serve.gateway.served.of_processes import newest_step
from phalanx.serve.gateway.served.of_run import require_drafts, served_folder
from phalanx.serve.gateway.served.served_run import ServedRun
from phalanx.serve.weights.open_model import free_to_use, packed
from phalanx.serve.workers.router import RouterSettings
from phalanx.serve.workers.router_port import Notice, RouterPort, Service
from phalanx.serve.workers.worker_main import WorkerTask
from phalanx.traffic.events import Role


def open_service(
    served: ServedRun,
    name: str | None,
    roles: Sequence[Role],
    *,
    threads: int,
    audit_share: float,
    tell: Callable[[Notice], None],
) -> tuple[ModelText, RouterPort]:
    """The words of a run's model and the workers that compute it, ready to be asked.

    Memory and ``threads`` are each worker's; 0 threads divide this machine's processors among them. Without a step all workers, also those
    that are started again later, serve the step that is the newest now. Raises EngineError where a worker cannot serve, RunDirectoryError for a run
    without a checkpoint, and as ``load_run_tokenizer`` does.
    """
    called = served.text_name(name)
    served = _settled(served)
    if served.stream and not served.memory_bytes:
        served = replace(served, memory_bytes=free_to_use() * 4 // 5 // len(roles))
    with served_folder(served) as folder:
        spec = read_resolved(RunDirectory(folder))
        words = read_model_text(folder, called, spec.model.vocab_size)
    task = WorkerTask("", 0, "", 0, "both", served)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // len(roles))
    environment = {"OMP_NUM_THREADS": str(threads), **numerics_environment(spec.runtime)}
    return words, RouterPort(
        Service(roles, task, environment, RouterSettings(served.rows, audit_share)), tell
    )


def _settled(served: ServedRun) -> ServedRun:
    """The same for all workers, whenever they start: a step of the run, or a pack, which of a run that is streamed is made here, once."""
    require_drafts(served)  # before packing, which takes long
    path = served.path.resolve()
    if served.stream and not is_pack(path):
        file = packed(path, served.step, getattr(torch, served.dtype))
        file.close()
        path = file.path.resolve()
    if is_pack(path):
        return replace(served, run_dir=str(path))
    return replace(served, run_dir=str(path), step=newest_step(path) if served.step is None else served.step)
