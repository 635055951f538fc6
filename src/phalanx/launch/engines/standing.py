"""Whether a submitted run is queued or running, and how it is ended: asked of the engine that started it."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from phalanx.launch.engines import bare, slurm
from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.launch.engines.submission import Submitted, read_record

_SILENT_S = 30.0
_LONGEST_LINE, _TAIL_BYTES = 500, 16 << 10


def submission_of(run_dir: Path) -> Submitted | None:
    """The last submission of a run, by its record; by Slurm's queue if whoever submitted it did not live to note the job's number.

    Raises ``EngineError``.
    """
    made = read_record(run_dir)
    if made is not None and (made.engine != "slurm" or made.job):
        return made
    if not (run_dir / FOLDER).is_dir() or shutil.which("squeue") is None:
        return made
    job = slurm.job_of(run_dir)
    if job is None:
        return made
    if made is not None:
        return replace(made, job=job.id)
    return Submitted("slurm", job.id, job.name.removeprefix("phalanx-"), job.nodes, 0, 0.0, "")


@dataclass(frozen=True)
class JobStanding:
    """A submitted run as its engine shows it."""

    title: str
    doing: str
    """In words: where it runs, or why it waits."""
    is_waiting: bool = False
    is_held: bool = False
    """Nothing starts it before somebody releases it."""
    has_ended: bool = False


def standing(run_dir: Path, made: Submitted) -> JobStanding | None:
    """Return what a submitted run does; ``None`` once it has ended. Raises ``EngineError``."""
    if made.engine != "slurm":
        doing = bare.sentence(run_dir)
        return None if doing is None else JobStanding(title(made), doing)
    job = slurm.job_of(run_dir, made.job)
    return None if job is None else JobStanding(title(made), job.sentence, job.is_waiting, job.is_held)


def standing_or_end(run_dir: Path) -> JobStanding | None:
    """Return what the last submission of a run does, or that it has ended and where its log is.

    ``None`` if the run was not submitted, or its engine does not answer.
    """
    try:
        made = submission_of(run_dir)
        if made is None:
            return None
        job = standing(run_dir, made)
        if job is not None:
            return job
        log = log_of(run_dir, made)
        last = "".join(_printed(log)[-1:])[:_LONGEST_LINE] or "there is none"
        text = f"it has ended; the last line of its log ({log}): {last}"
        return JobStanding(title(made), text, has_ended=True)
    except EngineError:
        return None


def _printed(log: Path) -> list[str]:
    """The last lines that a job has printed; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def sentence(run_dir: Path, made: Submitted) -> str | None:
    """What a submitted run does, in words; ``None`` once it has ended. Raises ``EngineError``."""
    job = standing(run_dir, made)
    return None if job is None else job.doing


def wait_until_ended(
    run_dir: Path, made: Submitted, poll_s: float, *, silent_timeout_s: float = _SILENT_S
) -> None:
    """Waits until nothing of a submitted run is queued or running any more.

    ``silent_timeout_s`` limits the wait for hosts that do not answer, once no other host has a session of the run.

    Raises ``EngineError`` where that cannot be known: hosts do not answer, and no session is left on the others.
    """
    silent_since_s: float | None = None
    while True:
        if made.engine == "slurm":
            if slurm.job_of(run_dir, made.job) is None:
                return
        else:
            there, wrong = bare.alive(run_dir)
            if not there and not wrong:
                return
            now_s = time.monotonic()
            silent_since_s = None if there else silent_since_s or now_s
            if silent_since_s is not None and now_s - silent_since_s >= silent_timeout_s:
                raise EngineError(
                    f"nothing of the run in {run_dir} is left on the hosts that answer, and of the others nobody knows; give the same command again "
                    f"when they are back, or remove {run_dir / FOLDER / 'hosts.json'} if they are gone for good:\n  "
                    + "\n  ".join(wrong)
                )
        time.sleep(poll_s)


def title(made: Submitted) -> str:
    """The name of what was started, as the user knows it."""
    if made.engine == "slurm":
        return f"job {made.job} (slurm)" if made.job else "job of unknown number (slurm)"
    return f"run on {made.job} ({made.engine})"


def log_of(run_dir: Path, made: Submitted) -> Path:
    """What a submitted run, or the host that leads it, has printed."""
    name = f"job-{made.job}" if made.engine == "slurm" else made.leader
    return run_dir / FOLDER / f"{name}.log"


def refuse_second(run_dir: Path, made: Submitted | None) -> None:
    """Raises ``EngineError`` if a run is queued or running already, whichever engine has started it."""
    if made is None:
        return
    if made.engine == "slurm":
        if shutil.which("squeue") is None:  # the run was taken to a machine that belongs to no cluster
            return
        try:
            job = slurm.job_of(run_dir, made.job)
        except EngineError as error:
            raise EngineError(
                f"whether {title(made)} of the run in {run_dir} still runs is not known: {error}. If it does not, remove "
                f"{run_dir / FOLDER / 'submitted.json'}"
            ) from error
        if job is not None:
            raise slurm.second(run_dir, job)
        return
    if (doing := bare.sentence(run_dir)) is not None:
        name = quote(str(run_dir))
        raise EngineError(
            f"the run in {run_dir} is {doing} already: follow it with phalanx status {name}, or end it with phalanx cancel {name}"
        )


def end_now(run_dir: Path, made: Submitted) -> None:
    """Ends a run at once: what is not saved is lost. Raises ``EngineError`` naming the hosts that do not answer."""
    if made.engine == "slurm":
        job = slurm.job_of(run_dir, made.job)
        if job is not None:
            slurm.cancel(job.id)
        return
    _, wrong = bare.end(run_dir, bare.started_on(run_dir), signal.SIGKILL)
    if wrong:
        raise EngineError("not ended everywhere:\n  " + "\n  ".join(wrong))
