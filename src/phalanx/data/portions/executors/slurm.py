"""Has tasks done by Slurm: one array of jobs that go through all stages (``phalanx data work``), watched from here.

Jobs and this process tell each other nothing: what is done stands in the store, who still works says ``squeue``, and why one has failed says its log, which
lies where the command was given. The array's name says which place and which plan it works on, so that a command that is given again, after the first
was killed, finds the jobs that still run; those of a command with another number of jobs it ends. Partition, account and time limit are what sbatch's own variables say (``SBATCH_PARTITION``,
``SBATCH_ACCOUNT``, ``SBATCH_TIMELIMIT``: https://slurm.schedmd.com/sbatch.html, "INPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.data.errors import PreparationError
from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import Workplace

_LOOK_S = 1.0
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
                time.sleep(_LOOK_S)

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
