"""Has tasks done by a cluster of Spark: one job a stage, ``sc.parallelize(tasks).map(f)``, without data frames or a shuffle.

The executors' Pythons need this package, and to reach the sources and the place of the dataset by the same URLs. Spark's answer to a job comes when the
last task is done; so how far a stage is, is told by the manifests in the store.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each, task_at
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import Workplace

_LOOK_S = 1.0


class SparkCluster:
    """Runs tasks on the executors of a ``master``: ``spark://HOST:7077``, ``yarn``, ``local[8]``. Raises ``PreparationError``."""

    def __init__(self, master: str) -> None:
        try:
            pyspark = importlib.import_module("pyspark")
        except ImportError as error:
            raise PreparationError(
                "--spark needs the package pyspark, in the cluster's version: pip install 'phalanx-train[spark]', or pip install pyspark"
            ) from error
        conf = pyspark.SparkConf().setMaster(master).setAppName("phalanx data prepare")
        conf.set("spark.ui.showConsoleProgress", "false")
        if master.startswith("local"):
            conf.set("spark.ui.enabled", "false").set("spark.driver.host", "127.0.0.1")
            # Else whichever `python3` comes first is taken.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        try:
            self._context: Any = pyspark.SparkContext(conf=conf, environment=one_thread_each())
        except Exception as error:  # Java's own errors come as they are
            raise PreparationError(f"--spark {master}: {_first_line(error)}") from error
        self._context.setLogLevel("OFF")

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        answers: list[TaskOutcome] = []
        job = threading.Thread(target=self._run, args=(stage, url, tasks, answers), daemon=True)
        job.start()
        waiting = set(tasks)
        place = Workplace(url)
        (planned,) = (one for one in stages_of(place.plan) if one.name == stage)
        while job.is_alive():
            job.join(_LOOK_S)
            for task in sorted(waiting & place.done(planned)):
                waiting.remove(task)
                yield TaskOutcome(task)
        yield from (answer for answer in answers if answer.task in waiting)

    def _run(self, stage: str, url: str, tasks: Sequence[int], answers: list[TaskOutcome]) -> None:
        try:
            numbers = self._context.parallelize(tasks, len(tasks))
            found = numbers.map(functools.partial(_outcome, url, stage)).collect()
            answers += [TaskOutcome(task, failed=failed) for task, failed in found]
        except Exception as error:  # Java's own errors come as they are
            answers += [
                TaskOutcome(task, lost=f"Spark ended the job: {_first_line(error)}") for task in tasks
            ]

    def close(self) -> None:
        self._context.stop()


def _outcome(url: str, stage: str, task: int) -> tuple[int, str]:
    return task, task_at(url, stage, task)


def _first_line(error: Exception) -> str:
    """What went wrong: of an error of Java, whose text is a stack of calls, its message."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage()).strip() or type(error).__name__
    line = text.splitlines()[0][:300]
    return f"{line} Is Java installed, 17 or later, and JAVA_HOME right?" if "Java gateway" in line else line
