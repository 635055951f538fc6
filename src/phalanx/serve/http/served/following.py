"""A server that goes on to each newer checkpoint of its run as it is committed, without dropping a request.

What reinforcement learning and whoever watches a run needs: the weights are read beside what goes on (for that time they are in memory twice),
and take over between two steps of the engine. A checkpoint that is damaged is told once and passed over. One that cannot be read at present, for want
of memory or by a fault of the storage, is told and tried again, after waits that double.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from phalanx.checkpoint.committed.restore import candidates
from phalanx.checkpoint.format.errors import CheckpointError, StorageError, StorageFullError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.serve.computing_device import computing_on, shown_device
from phalanx.serve.engine.engine import Engine, KeptPages
from phalanx.serve.engine.errors import DeviceMemoryError, EngineError, PartLostError
from phalanx.serve.http.served.model_text import ModelText, read_model_text
from phalanx.serve.http.served.of_run import open_engine, weights_digest
from phalanx.serve.http.served.served_run import ServedRun
from phalanx.serve.http.worker import EngineWorker, Swap
from phalanx.train.score.score import restored_model

_LOOK_S = 2.0
"""How long until the run's folder is looked at again."""
_MOST_LOOKS = 64
"""The most looks between two tries of a step: two minutes."""


@dataclass(frozen=True)
class _Failed:
    """A step that could not be read, and when it is tried again."""

    again: int
    """The look at which it is tried again; 0: at none."""
    wait: int = 1
    """Looks from one try to the next."""
    message: str = ""


class Follower:
    """Looks for newer checkpoints of a run and has their weights take over."""

    def __init__(
        self,
        served: ServedRun,
        engine: Engine,
        worker: EngineWorker,
        step: int,
        pages: KeptPages,
        tell: Callable[[str], None],
        *,
        look_pause_s: float = _LOOK_S,
    ) -> None:
        """``step`` is the one whose weights compute; ``pages`` says what becomes of texts that go on (``Engine.swap``).

        ``look_pause_s``: Pause between two looks at the run's folder.
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
        """Looks again and again, in a thread that ends with the process."""

        def go_on() -> None:
            wait, reported = threading.Event(), ""
            while not wait.wait(self._look_pause_s):
                try:
                    self.look()
                    reported = ""
                except Exception as error:  # Whatever happens here, the next look may find another world.
                    trouble = f"newer steps cannot be looked for at present: {_message_of(error)}"
                    if trouble != reported:
                        with contextlib.suppress(Exception):  # Nobody listens; that is no reason to stop.
                            self._tell(trouble)
                    reported = trouble

        threading.Thread(target=go_on, name="follower", daemon=True).start()

    def look(self) -> None:
        """Has the newest checkpoint that can be read take over, if it is newer than the one that computes.

        Raises RunDirectoryError for a run that has been removed, and CheckpointError where its checkpoints cannot be listed.
        """
        self._looks += 1
        folder = RunDirectory(self._served.path).checkpoints
        if not folder.is_dir():  # A tier would make it.
            raise RunDirectoryError(f"{folder} is not there any more")
        for step in candidates(DiskTier(folder)):
            if step <= self.step or (self._is_due(step) and self._take(step)):
                return

    def _is_due(self, step: int) -> bool:
        failed = self._failed.get(step)
        return failed is None or 0 < failed.again <= self._looks

    def _take(self, step: int) -> bool:
        try:
            swap = self._swap_to(step)
        except DeviceMemoryError as error:
            self._try_again(step, f"step {step} cannot take over, and step {self.step} goes on: {error}")
            return False
        except EngineError as error:
            self._give_up(step, f"step {step} cannot take over, and step {self.step} goes on: {error}")
            return False
        except Exception as error:  # Whatever it is must not end the following of a run for days.
            message = f"step {step} cannot be read, and step {self.step} goes on: {_message_of(error)}"
            if _is_lasting(error):
                self._give_up(step, message)
            else:
                self._try_again(step, message)
            return False
        self._worker.swap(swap)
        self.step = step
        self._failed = {other: failed for other, failed in self._failed.items() if other > step}
        self._tell(f"step {step} takes over (weights {swap.weights_sha})")
        return True

    def _swap_to(self, step: int) -> Swap:
        """The weights of ``step``, ready to take over. Raises EngineError for those of another model, DeviceMemoryError where a GPU has no memory for
        them beside those that compute, and whatever reading may raise."""
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
                raise EngineError("it is of another model than the one that is served: start another server")
            digest = weights_digest(model)
            prepared = self._engine.prepare(model)
        return Swap(step, digest, partial(self._engine.swap, prepared, digest, pages=self._pages))

    def _give_up(self, step: int, message: str) -> None:
        self._failed[step] = _Failed(0)
        self._tell(message)

    def _try_again(self, step: int, message: str) -> None:
        before = self._failed.get(step, _Failed(0))
        wait = min(_MOST_LOOKS, 2 * before.wait)
        self._failed[step] = _Failed(self._looks + wait, wait, message)
        if message != before.message:
            self._tell(f"{message}; it is tried again")


def _is_lasting(error: Exception) -> bool:
    """True for what is wrong with a checkpoint itself, and false for what may pass: memory, the storage's answer, or what is wrong with the run's
    own file, of which no step is at fault."""
    return isinstance(error, CheckpointError) and not isinstance(error, StorageError | StorageFullError)


def _message_of(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, CheckpointError | RunDirectoryError | PartLostError | OSError)
        else repr(error)
    )


def open_followed(
    served: ServedRun, name: str | None, pages: KeptPages, tell: Callable[[str], None]
) -> tuple[ModelText, EngineWorker]:
    """``open_run`` of the newest step, and of each newer one as it comes. Raises as that does, and EngineError for a model whose blocks
    keep no keys and values."""
    opened = open_engine(served)
    if not isinstance(opened.engine, Engine):
        raise EngineError(
            "a model of your own (model.factory) computes a text by one pass for each token: serve each step by itself"
        )
    if opened.step is None:
        raise EngineError(f"{served.path} is a pack, which has no newer steps: serve the run's directory")
    words = read_model_text(served.path, served.text_name(name), opened.spec.vocab_size, served.chat_template)
    tell(f"computing on {shown_device(opened.device)}")
    worker = EngineWorker(opened.engine, opened.identity, step=opened.step)
    Follower(served, opened.engine, worker, opened.step, pages, tell).start()
    return words, worker
