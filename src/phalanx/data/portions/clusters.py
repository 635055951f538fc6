"""Executors: local processes, and clusters of Dask, Ray, Spark and Slurm.

Each local process runs Python and reads tasks as lines (``stages.py``). Client packages are imported only when used.
"""

from __future__ import annotations

import functools
import hashlib
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.data.errors import PreparationError, optional_package
from phalanx.data.portions.stages import TaskOutcome, one_thread_each, raised, stage_named, task_at
from phalanx.data.portions.tasks import Workplace
from phalanx.observe.event_log import lines_from_the_end
from phalanx.process.child import LineChild, describe_exit, end_all

_COMMAND = (sys.executable, "-P", "-m", "phalanx.data.portions.stages")


class Processes:
    """Runs tasks in ``workers`` local processes; a process that dies is replaced."""

    def __init__(self, workers: int) -> None:
        """Use up to ``workers`` processes; none is started yet."""
        self._workers = workers
        self._idle: list[LineChild] = []
        self._running: set[LineChild] = set()
        self._lock = threading.Lock()
        self._closed = False

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Yield one outcome for each task as they end, from worker processes on this machine, which threads feed.

        The work begins with the first ``next``; workers stay for the next stage. A task whose worker died, or cannot be
        started, is lost and not repeated here; the worker is replaced. After ``close`` the rest are lost.
        """
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[TaskOutcome] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        for _ in range(min(self._workers, len(tasks))):
            threading.Thread(target=self._feed, args=(stage, url, todo, outcomes), daemon=True).start()
        for _ in tasks:
            yield outcomes.get()

    def close(self) -> None:
        """End all worker processes, also those in a task. Tasks that have not begun are reported as lost."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._running]
            self._idle = []
        end_all(processes)

    def _feed(
        self, stage: str, url: str, todo: queue.SimpleQueue[int], outcomes: queue.SimpleQueue[TaskOutcome]
    ) -> None:
        """Send tasks to a worker until none are left; replace the worker if it dies.

        Puts one outcome for each task: lost, if the worker died or cannot be started, or the executor is closed.
        """
        process: LineChild | None = None
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                break
            try:
                process = process or self._worker()
            except OSError as error:  # no memory, processes or descriptors are left
                outcomes.put(TaskOutcome(task, lost=f"no worker process could be started: {error.strerror}"))
                continue
            if process is None:
                outcomes.put(TaskOutcome(task, lost="the preparation has ended"))
                continue
            reply = process.exchange({"stage": stage, "url": url, "task": task})
            if reply is None:
                with self._lock:
                    self._running.discard(process)
                code = process.end()
                reason = describe_exit(code) + ("; out of memory?" if code == -signal.SIGKILL else "")
                outcomes.put(TaskOutcome(task, lost=reason))
                process = None
            else:
                outcomes.put(TaskOutcome(task, failed=str(reply["failed"])))
        if process is not None:
            with self._lock:
                self._running.discard(process)
                self._idle.append(process)

    def _worker(self) -> LineChild | None:
        """Return an idle or a new worker process, marked as running; None if the executor is closed. Raises ``OSError``."""
        with self._lock:
            if self._closed:
                return None
            process = self._idle.pop() if self._idle else LineChild(_COMMAND, os.environ | one_thread_each())
            self._running.add(process)
            return process


# Dask distributed: one future per task, without data frames.
#
# Workers need this package and access to the sources and the dataset by the same URLs. Dask sends functions and arguments as
# pickles, so anyone who can reach the scheduler can run code in its workers. The cluster must restrict access.


_CONNECT_S = 30


class DaskCluster:
    """Runs tasks on the workers of a Dask scheduler at ``address``, for example ``tcp://10.0.0.1:8786``. Raises ``PreparationError``."""

    def __init__(self, address: str, *, connect_timeout_s: float = _CONNECT_S) -> None:
        """Connect to the scheduler at ``address``. ``connect_timeout_s`` limits the wait for its first response.

        Raises ``PreparationError`` if the package is missing or no scheduler answers.
        """
        missing = "--dask needs the package distributed: pip install 'phalanx-train[dask]', or pip install distributed"
        distributed = optional_package("distributed", PreparationError(missing))
        try:
            self._client: Any = distributed.Client(address, timeout=connect_timeout_s, set_as_default=False)
        except (OSError, ValueError) as error:
            raise PreparationError(
                f"no Dask scheduler answers at {address}: {error}; correct --dask"
            ) from error
        self._as_completed = distributed.as_completed

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Submit all tasks to the cluster and yield their outcomes as they end.

        A killed worker is a loss, other errors a failure.
        """
        # Each call needs a unique key: Dask would return an earlier result for the same key.
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
                yield raised(stage, task, error)
            future.release()

    def close(self) -> None:
        self._client.close()


# Ray: one Ray Core task per task, without Ray Data.
#
# Workers need this package and access to the sources and the dataset by the same URLs. Ray sends functions as pickles, so
# anyone who can reach the cluster can run code in its workers. The cluster must restrict access.


LOCAL = "local"
"""Address for a local Ray that starts and ends with the preparation."""
_LOST = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "RaySystemError", "LocalRayletDiedError")


class RayCluster:
    """Runs tasks on the workers of a Ray cluster at ``address``: ``auto``, ``HOST:6379``, or ``local``. Raises ``PreparationError``."""

    def __init__(self, address: str) -> None:
        """Connect to Ray at ``address``, or start it on this machine; raises ``PreparationError`` if the package or Ray
        is missing.
        """
        missing = "--ray needs the package ray, in the cluster's version: pip install 'phalanx-train[ray]', or pip install ray"
        self._ray: Any = optional_package("ray", PreparationError(missing))
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
        """Submit all tasks to the cluster, one CPU each, and yield their outcomes as they end; Ray does not repeat them."""
        remote = self._ray.remote(num_cpus=1, max_retries=0)(task_at)
        running = {remote.remote(url, stage, task): task for task in tasks}
        while running:
            (finished,), _ = self._ray.wait(list(running), num_returns=1)
            yield self._outcome(stage, running.pop(finished), finished)

    def _outcome(self, stage: str, task: int, reference: object) -> TaskOutcome:
        """Return the outcome of a finished task: lost if its worker died, otherwise what the task returned or the error that it raised."""
        try:
            return TaskOutcome(task, failed=self._ray.get(reference))
        except Exception as error:
            if type(error).__name__ in _LOST:
                return TaskOutcome(task, lost=f"{type(error).__name__}; out of memory?")
            cause = getattr(error, "cause", None) or error
            return raised(stage, task, cause)

    def close(self) -> None:
        self._ray.shutdown()


# Spark: one job per stage, ``sc.parallelize(tasks).map(f)``, without data frames or a shuffle.
#
# The executors' Pythons need this package and access to the sources and the dataset by the same URLs. Spark returns a job's
# results only after the last task, so progress is read from the manifests in the store.


_LOOK_S = 1.0


class SparkCluster:
    """Runs tasks on the executors of a Spark ``master``: ``spark://HOST:7077``, ``yarn``, ``local[8]``. Raises ``PreparationError``."""

    def __init__(self, master: str) -> None:
        """Start a Spark context at ``master``, without its messages; a local one uses this Python. Raises
        ``PreparationError`` if the package is missing or it cannot start.
        """
        missing = "--spark needs the package pyspark, in the cluster's version: pip install 'phalanx-train[spark]', or pip install pyspark"
        pyspark = optional_package("pyspark", PreparationError(missing))
        conf = pyspark.SparkConf().setMaster(master).setAppName("phalanx data prepare")
        conf.set("spark.ui.showConsoleProgress", "false")
        if master.startswith("local"):
            conf.set("spark.ui.enabled", "false").set("spark.driver.host", "127.0.0.1")
            # Otherwise the first `python3` in PATH is used.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        try:
            self._context: Any = pyspark.SparkContext(conf=conf, environment=one_thread_each())
        except Exception as error:  # includes Java errors
            raise PreparationError(f"--spark {master}: {_first_line(error)}") from error
        self._context.setLogLevel("OFF")

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Run the tasks as one Spark job, and yield outcomes as manifests appear in the store.

        If the job fails, the rest are lost.
        """
        outcomes: list[TaskOutcome] = []
        job = threading.Thread(target=self._run, args=(stage, url, tasks, outcomes), daemon=True)
        job.start()
        waiting = set(tasks)
        place = Workplace(url)
        stage_tasks = stage_named(place.plan, stage)
        while job.is_alive():
            job.join(_LOOK_S)
            for task in sorted(waiting & place.done(stage_tasks)):
                waiting.remove(task)
                yield TaskOutcome(task)
        yield from (outcome for outcome in outcomes if outcome.task in waiting)

    def _run(self, stage: str, url: str, tasks: Sequence[int], outcomes: list[TaskOutcome]) -> None:
        """Run the job to its end and add an outcome for each task to ``outcomes``: its failure if it has one, or a
        loss of every task if Spark ends the job.
        """
        try:
            numbers = self._context.parallelize(tasks, len(tasks))
            results = numbers.map(functools.partial(_outcome, url, stage)).collect()
            outcomes += [TaskOutcome(task, failed=failed) for task, failed in results]
        except Exception as error:  # includes Java errors
            outcomes += [
                TaskOutcome(task, lost=f"Spark ended the job: {_first_line(error)}") for task in tasks
            ]

    def close(self) -> None:
        self._context.stop()


def _outcome(url: str, stage: str, task: int) -> tuple[int, str]:
    return task, task_at(url, stage, task)


def _first_line(error: Exception) -> str:
    """Return the first line of an error. For a Java error, whose text is a stack trace, this is its message."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage()).strip() or type(error).__name__
    line = text.splitlines()[0][:300]
    return f"{line} Is Java installed, 17 or later, and JAVA_HOME right?" if "Java gateway" in line else line


# Slurm: one job array that runs all stages (``phalanx data work``), monitored from here.
#
# Jobs and this process do not communicate. Completed tasks are in the store, ``squeue`` lists running jobs, and a failed job's
# log in the working directory has the reason. The array's name depends on the dataset's location and plan. So if the command is
# killed and repeated, it finds the jobs that still run; it ends those of a command with another number of jobs. sbatch's
# variables set partition, account and time limit (``SBATCH_PARTITION``, ``SBATCH_ACCOUNT``, ``SBATCH_TIMELIMIT``:
# https://slurm.schedmd.com/sbatch.html, "INPUT ENVIRONMENT VARIABLES").


_SLURM_LOOK_S = 1.0
_POLL_S = 5.0
_RESPONSE_S = 60.0
_TRIES = 4
"""Attempts of squeue before the preparation fails: 15 seconds, or four minutes without a response."""
_FAILED = b"Error: "
"""Prefix of the line with the command's error message."""
_BLOCK_BYTES, _TAIL_BYTES = 1 << 16, 1 << 20
"""How much of a job's log is read at once, and how much of its end in all: a user's filter may print without end."""


class SlurmArray:
    """Runs tasks in an array of ``jobs`` jobs; a job that ends early is submitted again. Raises ``PreparationError``."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._name = ""
        self._array: dict[int, str] = {}
        """The last array in which each job was submitted, by the job's number from 1."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        """Run the tasks in array jobs, and yield outcomes as manifests appear in the store.

        The first call cancels other arrays of the same dataset. Submits jobs that were not submitted yet, and again
        those that have ended while some of their tasks are missing.
        """
        place = Workplace(url)
        mark = hashlib.sha256(f"{place.plan.sha256} {url}".encode()).hexdigest()[:12]
        if not self._name:
            self._name = f"phalanx-data-{mark}-{self._jobs}"
            self._end_other_arrays(f"phalanx-data-{mark}-")
        stage_tasks = stage_named(place.plan, stage)
        waiting, polled_s = set(tasks), -_POLL_S
        while waiting:
            for task in sorted(waiting & place.done(stage_tasks)):
                waiting.remove(task)
                yield TaskOutcome(task)
            if waiting and time.monotonic() - polled_s >= _POLL_S:
                alive, polled_s = self._alive(), time.monotonic()
                if ended_jobs := [job for job in range(1, self._jobs + 1) if job not in alive]:
                    missing = waiting & set(tasks) - place.done(stage_tasks)
                    yield from self._outcomes(ended_jobs, missing)
                    # A job without tasks in this stage is submitted again only in a stage with tasks. Otherwise it could end
                    # and return forever.
                    if needed := [
                        job for job in ended_jobs if job not in self._array or self._own_tasks(job, missing)
                    ]:
                        self._submit(needed, url)
            if waiting:
                time.sleep(_SLURM_LOOK_S)

    def close(self) -> None:
        """Cancel the rest of the array."""
        if self._name:
            _slurm("scancel", "--me", "--quiet", "--name", self._name, may_fail=True)

    def _end_other_arrays(self, begin: str) -> None:
        """Cancel arrays with another number of jobs that a killed command has left: both would do the same work."""
        names = set(_slurm("squeue", "--me", "-h", "-o", "%j", tries=_TRIES).split())
        if others := sorted(name for name in names if name.startswith(begin) and name != self._name):
            _slurm("scancel", "--me", "--quiet", "--name", ",".join(others), may_fail=True)

    def _outcomes(self, ended_jobs: Sequence[int], missing: set[int]) -> Iterator[TaskOutcome]:
        """Yield an outcome for each of the ``missing`` tasks whose job has ended: a failure if the job's log has one,
        otherwise a loss. A failed job without missing tasks fails the first missing one.
        """
        for job in ended_jobs:
            own_tasks = self._own_tasks(job, missing)
            log = Path(f"{self._name}-{self._array[job]}_{job}.log") if job in self._array else None
            if log is None:
                continue
            message = failure_message(log)
            for task in own_tasks or sorted(missing)[:1] if message else own_tasks:
                if message:
                    yield TaskOutcome(task, failed=f"{message} (job {self._array[job]}_{job})")
                else:
                    yield TaskOutcome(
                        task, lost=f"job {self._array[job]}_{job} ended early; its log is {log}"
                    )

    def _own_tasks(self, job: int, missing: set[int]) -> list[int]:
        """Return those of ``missing`` that are assigned to a job."""
        return sorted(task for task in missing if task % self._jobs == job - 1)

    def _alive(self) -> set[int]:
        """Return the numbers of the queued or running jobs, and note their arrays.

        Tries several times while the controller restarts.
        """
        rows = _slurm("squeue", "--me", "-h", "-r", "--name", self._name, "-o", "%F %K", tries=_TRIES).split()
        arrays = {int(number): array for array, number in zip(rows[::2], rows[1::2], strict=True)}
        self._array.update(arrays)
        return set(arrays)

    def _submit(self, jobs: Sequence[int], url: str) -> None:
        """Submit the jobs as one array, and note its id for each. Each runs ``phalanx data work`` on its share of the
        dataset at ``url``.

        Raises ``PreparationError`` if sbatch fails.
        """
        variables = " ".join(f"{name}={value}" for name, value in one_thread_each().items())
        work = f"{shlex.quote(sys.executable)} -m phalanx data work {shlex.quote(url)} --task $SLURM_ARRAY_TASK_ID/{self._jobs}"
        output = _slurm(
            "sbatch",
            "--parsable",
            f"--job-name={self._name}",
            f"--array={','.join(map(str, jobs))}",
            f"--output={self._name}-%A_%a.log",
            f"--wrap={variables} exec {work}",
        )
        self._array.update(dict.fromkeys(jobs, output.strip().split(";")[0]))


def failure_message(log: Path) -> str:
    """Return the error message at the end of a job's log; empty if there is none."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        for line in lines_from_the_end(file, _BLOCK_BYTES, _TAIL_BYTES):
            if line.startswith(_FAILED):
                return line.removeprefix(_FAILED).decode(errors="replace")
    return ""


def _slurm(*command: str, may_fail: bool = False, tries: int = 1) -> str:
    """Return the output of a Slurm command.

    Raises ``PreparationError`` if it fails ``tries`` times, or at once if the command is missing or cannot run. With
    ``may_fail``, returns an empty text instead. A timeout counts as a failure.
    """
    trouble = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(_POLL_S)
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_RESPONSE_S, check=False
            )
        except OSError as error:
            if may_fail:
                return ""
            reason = (
                "is not here" if isinstance(error, FileNotFoundError) else f"cannot run: {error.strerror}"
            )
            raise PreparationError(
                f"--slurm needs {command[0]}, which {reason}: give the command on a machine that jobs are submitted from, or leave --slurm out"
            ) from None
        except subprocess.TimeoutExpired:
            trouble = f"{command[0]} has not answered for {_RESPONSE_S:.0f} s: is Slurm's controller up? Give the same command again"
            continue
        if not process.returncode:
            return process.stdout
        output = " ".join((process.stderr or process.stdout).split()) or f"exit code {process.returncode}"
        trouble = f"--slurm: {command[0]}: {output}; SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT set where and for how long jobs run"
    if may_fail:
        return ""
    raise PreparationError(trouble)
