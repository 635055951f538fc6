"""Executors: processes of this machine, and clusters of Dask, Ray, Spark and Slurm.

Each process of this machine is a Python of its own that reads tasks line by line (``worker.py``). No client package is imported before it is used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each, task_at
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import Workplace
from phalanx.process.child import LineChild, describe_exit, end_all

_COMMAND = (sys.executable, "-P", "-m", "phalanx.data.portions.executors.worker")


class Processes:
    """Runs tasks in ``workers`` processes; one that dies is replaced."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._idle: list[LineChild] = []
        self._running: set[LineChild] = set()
        self._lock = threading.Lock()
        self._closed = False

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[TaskOutcome] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        for _ in range(min(self._workers, len(tasks))):
            threading.Thread(target=self._feed, args=(stage, url, todo, outcomes), daemon=True).start()
        for _ in tasks:
            yield outcomes.get()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._running]
            self._idle = []
        end_all(processes)

    def _feed(
        self, stage: str, url: str, todo: queue.SimpleQueue[int], outcomes: queue.SimpleQueue[TaskOutcome]
    ) -> None:
        """Gives one worker after another tasks until there are none."""
        process: LineChild | None = None
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self._worker()
            if process is None:
                outcomes.put(TaskOutcome(task, lost="the preparation has ended"))
                continue
            reply = process.exchange({"stage": stage, "url": url, "task": task})
            if reply is None:
                with self._lock:
                    self._running.discard(process)
                outcomes.put(TaskOutcome(task, lost=_how_it_ended(process.end())))
                process = None
            else:
                outcomes.put(TaskOutcome(task, failed=str(reply["failed"])))
        if process is not None:
            with self._lock:
                self._running.discard(process)
                self._idle.append(process)

    def _worker(self) -> LineChild | None:
        with self._lock:
            if self._closed:
                return None
            process = self._idle.pop() if self._idle else LineChild(_COMMAND, os.environ | one_thread_each())
            self._running.add(process)
            return process


def _how_it_ended(code: int) -> str:
    return describe_exit(code) + ("; out of memory?" if code == -signal.SIGKILL else "")


# A cluster of Dask distributed: plain futures, one a task, without data frames.
#
# The workers need this package, and to reach the sources and the place of the dataset by the same URLs. Dask sends functions and arguments as pickles, so
# whoever reaches its scheduler can run code in its workers: that is a matter of the cluster.


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


# A cluster of Ray: Ray Core tasks, one for each task, without Ray Data.
#
# The workers need this package, and to reach the sources and the place of the dataset by the same URLs. Ray sends functions as pickles, so whoever
# reaches the cluster can run code in its workers: that is a matter of the cluster.


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


# A cluster of Spark: one job a stage, ``sc.parallelize(tasks).map(f)``, without data frames or a shuffle.
#
# The executors' Pythons need this package, and to reach the sources and the place of the dataset by the same URLs. Spark's answer to a job comes when the
# last task is done; so how far a stage is, is told by the manifests in the store.


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


# Slurm: one array of jobs that go through all stages (``phalanx data work``), watched from here.
#
# Jobs and this process tell each other nothing: what is done stands in the store, who still works says ``squeue``, and why one has failed says its log, which
# lies where the command was given. The array's name says which place and which plan it works on, so that a command that is given again, after the first
# was killed, finds the jobs that still run; those of a command with another number of jobs it ends. Partition, account and time limit are what sbatch's own variables say (``SBATCH_PARTITION``,
# ``SBATCH_ACCOUNT``, ``SBATCH_TIMELIMIT``: https://slurm.schedmd.com/sbatch.html, "INPUT ENVIRONMENT VARIABLES").


_SLURM_LOOK_S = 1.0
_ASK_S = 5.0
_ANSWER_S = 60.0
_TRIES = 4
"""Times that squeue is asked before the array is given up: a quarter of a minute, or four minutes without an answer."""
_FAILED = "Error: "
"""How the command line begins the line that says why it ends."""


class SlurmArray:
    """Runs tasks in ``jobs`` jobs of an array; one that is gone with work left is submitted again. Raises ``PreparationError``."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._name = ""
        self._array: dict[int, str] = {}
        """The array that each job was submitted with last, by the job's number from 1."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        place = Workplace(url)
        mark = hashlib.sha256(f"{place.plan.sha256} {url}".encode()).hexdigest()[:12]
        if not self._name:
            self._name = f"phalanx-data-{mark}-{self._jobs}"
            self._end_other_arrays(f"phalanx-data-{mark}-")
        (planned,) = (one for one in stages_of(place.plan) if one.name == stage)
        waiting, asked_s = set(tasks), -_ASK_S
        while waiting:
            for task in sorted(waiting & place.done(planned)):
                waiting.remove(task)
                yield TaskOutcome(task)
            if waiting and time.monotonic() - asked_s >= _ASK_S:
                alive, asked_s = self._alive(), time.monotonic()
                if gone := [job for job in range(1, self._jobs + 1) if job not in alive]:
                    missing = waiting & set(tasks) - place.done(planned)
                    yield from self._outcomes(gone, missing)
                    # One without work of its own here is submitted again once a stage has some: else it might end, and come back, for ever.
                    if needed := [job for job in gone if job not in self._array or self._mine(job, missing)]:
                        self._submit(needed, url)
            if waiting:
                time.sleep(_SLURM_LOOK_S)

    def close(self) -> None:
        """Take what is left of the array out of the queue."""
        if self._name:
            _slurm("scancel", "--me", "--quiet", "--name", self._name, may_fail=True)

    def _end_other_arrays(self, begin: str) -> None:
        """Take arrays of another number of jobs, as a command that was killed has left them, out of the queue: both would do the same work."""
        names = set(_slurm("squeue", "--me", "-h", "-o", "%j", tries=_TRIES).split())
        if others := sorted(name for name in names if name.startswith(begin) and name != self._name):
            _slurm("scancel", "--me", "--quiet", "--name", ",".join(others), may_fail=True)

    def _outcomes(self, gone: Sequence[int], missing: set[int]) -> Iterator[TaskOutcome]:
        """What became of tasks that belong to jobs that have ended before they did them."""
        for job in gone:
            mine = self._mine(job, missing)
            log = Path(f"{self._name}-{self._array[job]}_{job}.log") if job in self._array else None
            if log is None:
                continue
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            said = [line.removeprefix(_FAILED) for line in lines if line.startswith(_FAILED)]
            for task in mine or sorted(missing)[:1] if said else mine:
                if said:
                    yield TaskOutcome(task, failed=f"{said[-1]} (job {self._array[job]}_{job})")
                else:
                    yield TaskOutcome(
                        task, lost=f"job {self._array[job]}_{job} ended early; its log is {log}"
                    )

    def _mine(self, job: int, missing: set[int]) -> list[int]:
        """Those of ``missing`` that are dealt to a job."""
        return sorted(task for task in missing if task % self._jobs == job - 1)

    def _alive(self) -> set[int]:
        """Numbers of the jobs that are queued or run. A controller that begins anew does not answer for a moment."""
        rows = _slurm("squeue", "--me", "-h", "-r", "--name", self._name, "-o", "%F %K", tries=_TRIES).split()
        found = {int(number): array for array, number in zip(rows[::2], rows[1::2], strict=True)}
        self._array.update(found)
        return set(found)

    def _submit(self, jobs: Sequence[int], url: str) -> None:
        variables = " ".join(f"{name}={value}" for name, value in one_thread_each().items())
        work = f"{shlex.quote(sys.executable)} -m phalanx data work {shlex.quote(url)} --task $SLURM_ARRAY_TASK_ID/{self._jobs}"
        said = _slurm(
            "sbatch",
            "--parsable",
            f"--job-name={self._name}",
            f"--array={','.join(map(str, jobs))}",
            f"--output={self._name}-%A_%a.log",
            f"--wrap={variables} exec {work}",
        )
        self._array.update(dict.fromkeys(jobs, said.strip().split(";")[0]))


def _slurm(*words: str, may_fail: bool = False, tries: int = 1) -> str:
    """What one of Slurm's commands prints. Raises ``PreparationError`` with its own words, when it has failed so many times."""
    trouble = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(_ASK_S)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        except FileNotFoundError:
            if may_fail:
                return ""
            raise PreparationError(
                f"--slurm needs {words[0]}, which is not here: give the command on a machine that jobs are submitted from, or leave --slurm out"
            ) from None
        except subprocess.TimeoutExpired:
            trouble = f"{words[0]} has not answered for {_ANSWER_S:.0f} s: is Slurm's controller up? Give the same command again"
            continue
        if not done.returncode:
            return done.stdout
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        trouble = f"--slurm: {words[0]}: {said}; SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT say where and for how long jobs run"
    if may_fail:
        return ""
    raise PreparationError(trouble)
