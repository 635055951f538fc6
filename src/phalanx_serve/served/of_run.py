"""A run directory or a pack as a served model: weights in an engine, or streamed, or followed to newer checkpoints;
and its text side.

Streaming divides the memory first (``phalanx_serve.weights.budget``), and computes only as many texts at a time as
fit. The others wait.

Following swaps in each newer checkpoint of the run as it is committed, without dropping a request: for reinforcement
learning, and to watch a run. The weights are read beside the running steps, so they are in memory twice for that
time. They replace the old ones between two engine steps. A damaged checkpoint is reported once and skipped until its files change. If memory
or the storage fails, the read is reported and retried with doubling waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from phalanx.checkpoint.committed.digest import combine
from phalanx.checkpoint.committed.restore import candidates, dtype_name
from phalanx.checkpoint.format.errors import CheckpointError, StorageError, StorageFullError
from phalanx.checkpoint.pack.layout import PackIndex
from phalanx.checkpoint.pack.reader import PackFile, is_pack, open_pack
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.directory.files import files_below
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved, step_folder
from phalanx.run.kinds.block import prediction_depths
from phalanx.run.spec import ModelSpec
from phalanx.train.score import restored_model
from phalanx_serve.engine.engine import Engine as PagedEngine
from phalanx_serve.engine.engine import KeptPages
from phalanx_serve.http.worker import EngineWorker, Streaming, Swap
from phalanx_serve.numerics import begin_exact, computing_on, shown_device
from phalanx_serve.prompt import ModelText, read_model_text
from phalanx_serve.served.opened import OpenedEngine, context_of, device_of, engine_over, open_divided
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.stages.shares import tensor_digests
from phalanx_serve.traffic.events import DeviceMemoryError, PartLostError, ServeError
from phalanx_serve.traffic.scheduler import PAGE
from phalanx_serve.weights.budget import LIBRARIES, Computing, MemoryBudget, divide_budget, text_bytes
from phalanx_serve.weights.open_model import (
    empty_model,
    free_to_use,
    packed,
    read_weights,
    resident_memory,
    run_folder,
    stream_weights,
)
from phalanx_serve.weights.ring import StreamStatistics

# Packs.


def open_packed(served: ServedRun) -> OpenedEngine:
    """Open the engine of a pack, or of a run that is packed for streaming.

    Streams the weights within a memory budget, or reads all of them to the device, if they fit into four fifths of
    free memory. Exact numerics switch this process to portable kernels. Weights in 8 bits never have the trainer's
    bits. Raises ServeError, and the errors of ``open_model``.
    """
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
    engine, identity = engine_over(model, spec, served, run, context, digest, pages=pages, texts=texts)
    if identity.bits == "trainer" and file.index.format in ("fp8", "int8"):
        identity = replace(identity, bits="request")  # the trainer's weights are not rounded
    return OpenedEngine(engine, identity, spec, note=note, streaming=streaming, device=device)


def weights_name(index: PackIndex, dtype: torch.dtype) -> str:
    """Return 16 digits that identify a pack's weights as they are computed with. For an fp32 pack in fp32 they are
    the first digits of ``phalanx hash``.
    """
    if index.format == "fp32" and dtype == torch.float32:
        return index.weights_sha256[:16]
    return hashlib.sha256(f"{index.weights_id} {dtype_name(dtype)}".encode()).hexdigest()[:16]


def _streaming(statistics: StreamStatistics) -> Streaming:
    """Return the counts of streaming: bytes read, seconds waited, experts needed, and those found in memory."""
    # Read by another thread than the one that counts: a number may be a step old.
    waited = sum(list(statistics.stall_s.values())) + statistics.expert_stall_s
    needed = statistics.expert_hits + statistics.expert_misses
    return Streaming(statistics.bytes_read, waited, needed, statistics.expert_hits)


def _budget(
    file: PackFile, model: Transformer | Chain, spec: ModelSpec, served: ServedRun, context: int
) -> MemoryBudget:
    """Divide the memory between weights, texts and computing.

    With a ``memory_bytes`` of 0, it is what this process has plus four fifths of what is free. A custom model takes
    full contexts as rows.
    """
    keeps = isinstance(model, Transformer)
    # A user's own model computes full texts, one after another, without a KV cache.
    rows = served.rows if keeps else context
    process = resident_memory() + LIBRARIES
    return divide_budget(
        file.index,
        served.dtype,
        served.memory_bytes or resident_memory() + free_to_use() * 4 // 5,
        process=process,
        computing=Computing(rows, rows, context, served.numerics == "fast").nbytes(spec, served.dtype),
        of_text=text_bytes(spec, served.dtype, context) if keeps else 0,
        most_texts=served.texts,
    )


# Runs.


_log = logging.getLogger(__name__)


def open_run(
    served: ServedRun, name: str | None, tell: Callable[[str], None]
) -> tuple[ModelText, EngineWorker]:
    """Open the model of a run or a pack for requests, and start its engine's thread.

    ``name`` None takes the place's own. ``tell`` receives notes and the device. Raises ServeError, and the errors of
    ``restored_model`` and ``load_run_tokenizer``.
    """
    opened = open_engine(served, tell)
    with served_folder(served) as folder:
        words = read_model_text(folder, served.text_name(name), opened.spec.vocab_size, served.chat_template)
    if opened.note:
        tell(opened.note)
    tell(f"computing on {shown_device(opened.device)}")
    return words, EngineWorker(opened.engine, opened.identity, opened.streaming, trouble=opened.trouble)


def open_engine(served: ServedRun, tell: Callable[[str], None] = _log.info) -> OpenedEngine:
    """Open the engine of a run or a pack: divided over processes, streamed or packed, or in this process.

    Only the last drafts tokens, by default as many as the model predicts ahead. ``tell`` receives progress messages.
    Raises ServeError, and the errors of ``restored_model`` and ``open_model``.
    """
    device = device_of(served)
    if served.stages > 1 or served.tensor > 1:
        return open_divided(served, tell)
    require_drafts(served)
    if served.stream or is_pack(served.path):
        return open_packed(served)
    dtype = getattr(torch, served.dtype)
    run = read_resolved(RunDirectory(served.path))
    depths = prediction_depths(run.model)
    drafts = depths if served.drafts is None else served.drafts
    if drafts > depths:
        raise ServeError(
            f"--drafts {drafts}: the run's model predicts {depths} tokens ahead (model.mtp_depth), so no more can be drafted"
        )
    with computing_on(device, f"the weights in {served.dtype}"):
        model, spec, step = restored_model(
            served.path, served.step, device=device, dtype=dtype, ahead=drafts > 0
        )
    context, digest = context_of(served, run, served.path), weights_digest(model)
    engine, identity = engine_over(model, spec, served, run, context, digest, drafts=drafts)
    return OpenedEngine(engine, identity, spec, step=step, device=device)


def require_drafts(served: ServedRun) -> None:
    """Raise ServeError if drafts are requested for a pack, or for a run that is packed for streaming."""
    if served.drafts and (served.stream or is_pack(served.path)):
        raise ServeError(
            f"--drafts {served.drafts}: a pack is served without its predictions ahead, so nothing can be drafted: serve the run's directory, "
            "without --stream"
        )


@contextmanager
def served_folder(served: ServedRun) -> Iterator[Path]:
    """Yield the folder of the run's small files: the run directory, or a temporary folder with those of a pack."""
    if not is_pack(served.path):
        yield served.path
        return
    file = open_pack(served.path)
    file.close()
    with run_folder(file.index) as folder:
        yield folder


def weights_digest(model: nn.Module) -> str:
    """Return the first 16 digits of the hash of the weights as they are computed with. In fp32 it is the hash of
    ``phalanx hash``.
    """
    return combine(tensor_digests(model))[:16]


# Following.


_LOOK_S = 2.0
"""Seconds between two polls of the run's folder."""
_MOST_LOOKS = 64
"""Most polls between two attempts at a step: two minutes."""


_Files: TypeAlias = tuple[tuple[str, int, int], ...]
"""Path, size and time of the last change of each file of a step."""


@dataclass(frozen=True)
class _Failed:
    """A step that could not be read, and the time of its next attempt."""

    again: int
    """Number of the poll at which the step is tried again; 0 if only once its files have changed."""
    wait: int = 1
    """Polls from one attempt to the next."""
    message: str = ""
    files: _Files = ()


class CheckpointFollower:
    """Poller that swaps in the newer checkpoints of a run."""

    def __init__(
        self,
        served: ServedRun,
        engine: PagedEngine,
        worker: EngineWorker,
        step: int,
        pages: KeptPages,
        tell: Callable[[str], None],
        *,
        look_pause_s: float = _LOOK_S,
    ) -> None:
        """Begin at the ``step`` of the current weights; nothing is polled before ``start``.

        ``pages`` is the treatment of running texts (``PagedEngine.swap``). ``look_pause_s`` is the pause between two
        polls of the run's folder. ``tell`` receives swaps and failures.
        """
        self.step, self._look_pause_s = step, look_pause_s
        self._served, self._engine, self._worker, self._pages, self._tell = (
            served,
            engine,
            worker,
            pages,
            tell,
        )
        self._failed: dict[int, _Failed] = {}
        self._looks = 0

    def start(self) -> None:
        """Poll in a daemon thread. An error is reported unless it equals the one before, and does not end the polling."""

        def go_on() -> None:
            """Look again and again; report each new kind of error once."""
            wait, reported = threading.Event(), ""
            while not wait.wait(self._look_pause_s):
                try:
                    self.look()
                    reported = ""
                except Exception as error:  # After any error, the next look may succeed.
                    trouble = f"newer steps cannot be looked for at present: {_message_of(error)}"
                    if trouble != reported:
                        with contextlib.suppress(Exception):  # A failed report must not stop the thread.
                            self._tell(trouble)
                    reported = trouble

        threading.Thread(target=go_on, name="follower", daemon=True).start()

    def look(self) -> None:
        """Swap in the newest readable checkpoint, if it is newer than the current one.

        One that fails is reported, and the next older one tried. Skips failed ones that are not due again. Raises
        RunDirectoryError for a run that has been removed, and CheckpointError if its checkpoints cannot be listed.
        """
        self._looks += 1
        folder = RunDirectory(self._served.path).checkpoints
        if not folder.is_dir():  # A tier would make it.
            raise RunDirectoryError(f"{folder} is not there any more")
        for step in candidates(DiskTier(folder)):
            if step <= self.step or (self._is_due(step) and self._take(step)):
                return

    def _is_due(self, step: int) -> bool:
        """Return True for a step that has not failed, is to be tried again now, or has other files than when it failed."""
        failed = self._failed.get(step)
        return failed is None or 0 < failed.again <= self._looks or failed.files != self._files_of(step)

    def _files_of(self, step: int) -> _Files:
        """Return (path, bytes, change time in ns) of each present file of ``step``; empty if they are being moved or removed."""
        folder = step_folder(RunDirectory(self._served.path).checkpoints, step)
        try:
            files = [(str(path), path.stat()) for path in sorted(files_below(folder))]
        except OSError:
            return ()
        return tuple((path, stat.st_size, stat.st_ctime_ns) for path, stat in files)

    def _take(self, step: int) -> bool:
        """Swap in the weights of ``step``, report it and return True; if that fails, report the reason and return
        False.

        Another model, or a damaged checkpoint, is not tried again while its files stay the same. All other failures
        are, such as lack of memory, storage errors or defects.
        """
        files = self._files_of(step)  # before they are read: they may be copied meanwhile
        try:
            swap = self._swap_to(step)
        except Exception as error:  # No error may end the following of a run for days.
            problem = f"cannot take over, and step {self.step} continues: {error}"
            if not isinstance(error, ServeError):
                problem = f"cannot be read, and step {self.step} continues: {_message_of(error)}"
            # Memory and storage may recover, a damaged checkpoint and another model do not.
            lasts = isinstance(error, ServeError | CheckpointError) and not isinstance(
                error, DeviceMemoryError | StorageError | StorageFullError
            )
            self._fail(step, files, f"step {step} {problem}", again=not lasts)
            return False
        self._worker.swap(swap)
        self.step = step
        self._failed = {other: failed for other, failed in self._failed.items() if other > step}
        self._tell(f"step {step} takes over (weights {swap.weights_sha})")
        return True

    def _swap_to(self, step: int) -> Swap:
        """Return the weights of ``step``, ready to swap in. Raises ServeError for another model, DeviceMemoryError
        if a GPU lacks memory for both sets of weights, and the errors of reading.
        """
        with computing_on(
            self._engine.device, "a second copy of the weights, which --follow needs for a while"
        ):
            model, spec, _ = restored_model(
                self._served.path,
                step,
                device=self._engine.device,
                dtype=getattr(torch, self._served.dtype),
                ahead=self._engine.spec.mtp_depth > 0,
            )
            if not isinstance(model, Transformer) or spec != self._engine.spec:
                raise ServeError("it is of another model than the one that is served: start another server")
            digest = weights_digest(model)
            prepared = self._engine.prepare(model)
        return Swap(step, digest, partial(self._engine.swap, prepared, digest, pages=self._pages))

    def _fail(self, step: int, files: _Files, message: str, *, again: bool) -> None:
        """Record a failure, and report a ``message`` unlike the last.

        The step is tried ``again`` after twice as many looks as before, at most ``_MOST_LOOKS``; else not while it has
        these ``files``.
        """
        before = self._failed.get(step, _Failed(0))
        wait = min(_MOST_LOOKS, 2 * before.wait) if again else 1
        self._failed[step] = _Failed(self._looks + wait if again else 0, wait, message, files)
        if message != before.message:
            self._tell(f"{message}; it is tried again" if again else message)


def _message_of(error: Exception) -> str:
    """Return the text of an expected error; of any other its ``repr``."""
    return (
        str(error)
        if isinstance(error, CheckpointError | RunDirectoryError | PartLostError | OSError)
        else repr(error)
    )


def open_followed(
    served: ServedRun, name: str | None, pages: KeptPages, tell: Callable[[str], None]
) -> tuple[ModelText, EngineWorker]:
    """Open the newest step as ``open_run`` does, and start to follow: each newer step takes over as it is committed.

    ``pages`` is the treatment of running texts then; ``tell`` receives the device, swaps and failures. Raises the
    errors of ``open_run``, and ServeError for a pack or a model without a KV cache.
    """
    opened = open_engine(served)
    if not isinstance(opened.engine, PagedEngine):
        raise ServeError(
            "a model of your own (model.factory) computes a text by one pass for each token: serve each step by itself"
        )
    if opened.step is None:
        raise ServeError(f"{served.path} is a pack, which has no newer steps: serve the run's directory")
    words = read_model_text(served.path, served.text_name(name), opened.spec.vocab_size, served.chat_template)
    tell(f"computing on {shown_device(opened.device)}")
    worker = EngineWorker(opened.engine, opened.identity, step=opened.step)
    CheckpointFollower(served, opened.engine, worker, opened.step, pages, tell).start()
    return words, worker
