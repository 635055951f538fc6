"""A server that goes on to each newer checkpoint of its run as it is committed, without dropping a request.

What reinforcement learning and whoever watches a run needs: the weights are read beside what goes on (for that time they are in memory twice),
and take over between two steps of the engine. A checkpoint that cannot be read is told once and passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from phalanx.checkpoint.committed.restore import candidates
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.serve.engine.engine import Engine, KeptPages
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.gateway.served.model_text import ModelText, read_model_text
from phalanx.serve.gateway.served.of_run import open_engine, weights_digest
from phalanx.serve.gateway.served.served_run import ServedRun
from phalanx.serve.gateway.worker import EngineWorker, Swap
from phalanx.train.score.restored import restored_model

_LOOK_S = 2.0
"""How long until the run's folder is looked at again."""


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
    ) -> None:
        """``step`` is the one whose weights compute; ``pages`` says what becomes of texts that go on (``Engine.swap``)."""
        self.step = step
        self._served, self._engine, self._worker, self._pages, self._tell = (
            served,
            engine,
            worker,
            pages,
            tell,
        )
        self._unreadable: set[int] = set()

    def start(self) -> None:
        """Looks again and again, in a thread that ends with the process."""

        def go_on() -> None:
            wait = threading.Event()
            while not wait.wait(_LOOK_S):
                try:
                    self.look()
                except (
                    Exception
                ) as error:  # What is served goes on, and somebody must hear that it grows old.
                    return self._tell(f"newer steps are followed no more, by a defect: {error!r}")
            return None

        threading.Thread(target=go_on, name="follower", daemon=True).start()

    def look(self) -> None:
        """Has the newest checkpoint that can be read take over, if it is newer than the one that computes."""
        try:
            steps = candidates(DiskTier(RunDirectory(self._served.path).checkpoints))
        except CheckpointError as error:
            return self._tell(f"the run's checkpoints cannot be listed: {error}")
        for step in steps:
            if step <= self.step:
                return None
            if step not in self._unreadable and self._take(step):
                return None
        return None

    def _take(self, step: int) -> bool:
        try:
            model, spec, _ = restored_model(
                self._served.path,
                step,
                dtype=getattr(torch, self._served.dtype),
                ahead=self._engine.spec.mtp_depth > 0,
            )
        except (CheckpointError, RunDirectoryError, OSError) as error:
            self._unreadable.add(step)
            self._tell(f"step {step} cannot be read, and step {self.step} goes on: {error}")
            return False
        if not isinstance(model, Transformer) or spec != self._engine.spec:
            self._unreadable.add(step)
            self._tell(f"step {step} is of another model than the one that is served: start another server")
            return False
        digest = weights_digest(model)
        try:
            prepared = self._engine.prepare(model)
        except EngineError as error:
            self._unreadable.add(step)
            self._tell(f"step {step} cannot take over, and step {self.step} goes on: {error}")
            return False
        take_over = partial(self._engine.swap, prepared, digest, pages=self._pages)
        self._worker.swap(Swap(step, digest, take_over))
        self.step = step
        self._tell(f"step {step} takes over (weights {digest})")
        return True


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
    words = read_model_text(served.path, served.text_name(name), opened.spec.vocab_size)
    worker = EngineWorker(opened.engine, opened.identity, step=opened.step)
    Follower(served, opened.engine, worker, opened.step, pages, tell).start()
    return words, worker
