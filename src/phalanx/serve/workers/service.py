"""A run's directory or a pack served by several worker processes of this machine: its words here, its weights in each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec.structs import replace

from phalanx.checkpoint.pack.reader import is_pack
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.http.served.model_text import ModelText, read_model_text
from phalanx.serve.http.served.of_processes import (
    newest_step,
    older_than_damaged,
    require_divisible,
    threads_of_each,
)
from phalanx.serve.http.served.of_run import require_drafts, served_folder
from phalanx.serve.http.served.opened import device_of
from phalanx.serve.http.served.served_run import ServedRun
from phalanx.serve.weights.open_model import free_to_use, packed
from phalanx.serve.workers.over_nixl.agent_process import require_installed
from phalanx.serve.workers.page_client import PageWay
from phalanx.serve.workers.router import RouterSettings
from phalanx.serve.workers.router_client import Notice, RouterClient, ServiceConfig, WorkerDivision
from phalanx.serve.workers.worker_main import WorkerTask
from phalanx.traffic.events import Role


def open_service(
    served: ServedRun,
    name: str | None,
    roles: Sequence[Role],
    *,
    divisions: Mapping[Role, WorkerDivision] | None = None,
    threads: int,
    audit_share: float,
    tell: Callable[[Notice], None],
    pages: PageWay = "auto",
) -> tuple[ModelText, RouterClient]:
    """The words of a run's model and the workers that compute it, ready to be asked.

    ``divisions`` says into how many processes a worker of a role divides the model, by default as ``served``. Memory is each worker's, and ``threads`` are each
    process's; 0 threads divide this machine's processors among all processes. Without a step all workers, also those
    that are started again later, serve the step that is the newest now, or the newest that can be read: ``tell`` hears of those passed over. ``pages``
    is how workers take pages from one another. Raises EngineError where a worker cannot serve, RunDirectoryError for a run without a checkpoint, and as ``load_run_tokenizer`` does.
    """
    if pages == "nixl":
        require_installed()
    called = served.text_name(name)
    served = _of_one_kind(served, divisions or {})
    device_of(served)  # before packing, which takes long
    any_step = served.step is None
    served = _settled(served)
    if served.stream and not served.memory_bytes:
        served = replace(served, memory_bytes=free_to_use() * 4 // 5 // len(roles))
    with served_folder(served) as folder:
        spec = read_resolved(RunDirectory(folder))
        words = read_model_text(folder, called, spec.model.vocab_size, served.chat_template)
    while True:
        task = WorkerTask("", 0, "", 0, "both", served, pages=pages)
        service = ServiceConfig(roles, task, {}, RouterSettings(served.rows, audit_share), divisions or {})
        processes = 0
        for role in roles:  # refused here rather than by each worker
            asked = service.task_of(role).served
            device_of(asked)
            require_divisible(asked)
            processes += asked.stages * asked.tensor
        environment = {"OMP_NUM_THREADS": str(threads or threads_of_each(processes))}
        service = dataclasses.replace(service, environment=environment)
        try:
            return words, RouterClient(service, tell)
        except EngineError as error:
            older = _older_than_damaged(served) if any_step else None
            if older is None:
                raise
            text = f"step {served.step} cannot be read and is passed over: {error}"
            tell(Notice("step-passed-over", text, {"step": served.step}))
            served = replace(served, step=older)


def devices_of(
    served: ServedRun, workers: int, divisions: Mapping[Role, WorkerDivision] | None = None
) -> list[torch.device]:
    """The devices of so many workers of ``open_service``, each once: they are dealt round. Raises EngineError."""
    served = _of_one_kind(served, divisions or {})
    return list(dict.fromkeys(device_of(served, number) for number in range(workers)))


def _older_than_damaged(served: ServedRun) -> int | None:
    """``older_than_damaged`` of the step of ``served``; of a pack there is none."""
    if served.step is None or is_pack(served.path):
        return None
    return older_than_damaged(served.path, served.step)


def _of_one_kind(served: ServedRun, divisions: Mapping[Role, WorkerDivision]) -> ServedRun:
    """The same with a device that workers of all roles can have: "auto" is the CPU where those of one role divide the model. Else
    the others would compute on GPUs, and the router would refuse one or the other for its numerics."""
    divided = any(division != WorkerDivision() for division in divisions.values())
    return replace(served, device="cpu") if divided and served.device == "auto" else served


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
