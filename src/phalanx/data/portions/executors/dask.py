"""Has tasks done by a cluster of Dask distributed: plain futures, one a task, without data frames.

The workers need this package, and to reach the sources and the place of the dataset by the same URLs. Dask sends functions and arguments as pickles, so
whoever reaches its scheduler can run code in its workers: that is a matter of the cluster.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import TaskOutcome, task_at

_CONNECT_S = 30


class DaskCluster:
    """Runs tasks on the workers of the scheduler at ``address``, such as ``tcp://10.0.0.1:8786``. Raises ``PreparationError``."""

    def __init__(self, address: str, *, connect_timeout_s: float = _CONNECT_S) -> None:
        """``connect_timeout_s``: Limit for the scheduler's first response."""
        try:
            distributed = importlib.import_module("distributed")
        except ImportError as error:
            raise PreparationError(
                "--dask needs the package distributed: pip install 'phalanx-train[dask]', or pip install distributed"
            ) from error
        try:
            self._client: Any = distributed.Client(address, timeout=connect_timeout_s, set_as_default=False)
        except (OSError, ValueError) as error:
            raise PreparationError(
                f"no Dask scheduler answers at {address}: {error}; correct --dask"
            ) from error
        self._as_completed = distributed.as_completed

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        # A name of its own for each call: Dask would give the outcome of an earlier one of the same name.
        call = secrets.token_hex(4)
        futures = {
            self._client.submit(task_at, url, stage, task, key=f"{stage}-{task}-{call}", pure=False): task
            for task in tasks
        }
        for future in self._as_completed(list(futures), loop=self._client.loop):
            error = future.exception()
            task = futures[future]
            if error is None:
                yield TaskOutcome(task, failed=future.result())
            elif type(error).__name__ in ("KilledWorker", "FutureCancelledError"):
                yield TaskOutcome(task, lost=f"{type(error).__name__}; out of memory?")
            else:
                yield TaskOutcome(
                    task, failed=f"task {task} of stage {stage}: {type(error).__name__}: {error}"
                )
            future.release()

    def close(self) -> None:
        self._client.close()
