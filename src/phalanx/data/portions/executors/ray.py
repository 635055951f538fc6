"""Has tasks done by a cluster of Ray: Ray Core tasks, one for each task, without Ray Data.

The workers need this package, and to reach the sources and the place of the dataset by the same URLs. Ray sends functions as pickles, so whoever
reaches the cluster can run code in its workers: that is a matter of the cluster.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each, task_at

LOCAL = "local"
"""The address of a Ray of this machine, which is started and ended with the preparation."""
_LOST = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "RaySystemError", "LocalRayletDiedError")


class RayCluster:
    """Runs tasks on the workers of the cluster at ``address``: ``auto``, ``HOST:6379``, or ``local``. Raises ``PreparationError``."""

    def __init__(self, address: str) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise PreparationError(
                "--ray needs the package ray, in the cluster's version: pip install 'phalanx-train[ray]', or pip install ray"
            ) from error
        try:
            self._ray.init(
                address,
                log_to_driver=False,
                logging_level="error",
                runtime_env={"env_vars": one_thread_each()},
                **({"include_dashboard": False} if address == LOCAL else {}),
            )
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise PreparationError(f"no Ray answers at {address}: {first}; correct --ray") from error

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        remote = self._ray.remote(num_cpus=1, max_retries=0)(task_at)
        running = {remote.remote(url, stage, task): task for task in tasks}
        while running:
            (done,), _ = self._ray.wait(list(running), num_returns=1)
            yield self._outcome(stage, running.pop(done), done)

    def _outcome(self, stage: str, task: int, done: object) -> TaskOutcome:
        try:
            return TaskOutcome(task, failed=self._ray.get(done))
        except Exception as error:
            if type(error).__name__ in _LOST:
                return TaskOutcome(task, lost=f"{type(error).__name__}; out of memory?")
            cause = getattr(error, "cause", None) or error
            return TaskOutcome(task, failed=f"task {task} of stage {stage}: {type(cause).__name__}: {cause}")

    def close(self) -> None:
        self._ray.shutdown()
