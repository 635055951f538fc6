"""Prepares the start of a run on a cluster: its folder, its frozen run file, and the record of what was submitted."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote

import tomli_w

from phalanx.launch.engines.order import FOLDER, EngineError, LaunchOrder, range_of_connections, writing
from phalanx.process.lock_file import LockHeldError, holder_of, lock_file
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.run.spec import RunSpec

RECORD = "submitted.json"
"""The record of the last submission, in ``RUN_DIR/launch``."""
STOPPED = "stopped"
"""A file of this name keeps a job from queueing itself again, and a run that is being submitted from starting."""
OF_PODS = "submission"
"""A file of this name is written by the pods of a run on Kubernetes, and names their start."""
_SUBMITTING = "submitting"
_LOCK_S, _PAUSE_S = 0.2, 0.05
"""A process that looks at the lock holds it for a moment."""
_SUBMITS_S = 180.0
"""Longest wait for the submitter of a run: longer than its own wait for hosts that do not answer."""


@dataclass(frozen=True)
class Submitted:
    """The record of a submission."""

    engine: str
    job: str
    """Slurm's number of it, empty until sbatch has answered; or what a run without a scheduler is started on."""
    name: str
    nodes: int
    spares: int
    unix_s: float
    working_dir: str
    """Where relative paths of the run file begin."""
    leader: str = ""
    """The node that leads, if hosts were named; its log has the name."""
    taken_from: str = ""
    """The run that has lent nodes for this one; empty for none."""
    taken: int = 0
    """Number of those nodes."""


def with_run_dir(spec: RunSpec, working_dir: Path) -> RunSpec:
    """The run with an absolute run directory: its own, or ``runs/NAME-DIGEST`` by the digest of the run file, so that it is found again."""
    if spec.run_dir:
        return replace(spec, run_dir=str((working_dir / Path(spec.run_dir).expanduser()).resolve()))
    return replace(spec, run_dir=str((working_dir / "runs" / default_name(spec)).resolve()))


def default_name(spec: RunSpec) -> str:
    """The name of the run directory of a run that names none: NAME-DIGEST, by the digest of the run file."""
    # Fields of the engine and the fleet may change from one start to the next.
    same = to_table(replace(spec, fleet=RunSpec().fleet, launch=RunSpec().launch))
    return f"{spec.name}-{hashlib.sha256(tomli_w.dumps(same).encode()).hexdigest()[:8]}"


def missing_data(spec: RunSpec, working_dir: Path) -> Iterator[str]:
    """Yield a line for each dataset that this machine does not see; the nodes may see it. None if the run prepares its data."""
    data = spec.data
    if data.corpus:
        return
    for path in [source.path for source in data.sources] or [data.path]:
        if path and "://" not in path and not (working_dir / Path(path).expanduser()).exists():
            yield f"data.path: {path} is not there on this machine; if the nodes do not see it either, the run ends at its start"


def order_of(spec: RunSpec, working_dir: Path) -> LaunchOrder:
    """Return the order for an engine of a run whose directory is known, with this machine's Python and port range.

    On "cpu" no GPUs; else ``launch.gpus_per_node``, or one for each worker.
    """
    launch, fleet = spec.launch, spec.fleet
    gpus = 0 if spec.runtime.device == "cpu" else launch.gpus_per_node or fleet.workers_per_node
    return LaunchOrder(
        name=spec.name,
        run_dir=Path(spec.run_dir),
        working_dir=working_dir,
        nodes=fleet.nodes,
        spares=fleet.spares,
        gpus_per_node=gpus,
        port=fleet.port,
        python=sys.executable,
        launch=launch,
        connections=range_of_connections(),
    )


@contextmanager
def only_submission(order: LaunchOrder) -> Iterator[None]:
    """Context that locks the submissions of a run: two that both see nothing queued would both queue it.

    Tries for 0.2 s to get the lock. Raises ``EngineError`` naming the holder, or if the lock cannot be had. Its
    file stays: removing one that another process waits for would let in a third.
    """
    path = order.folder / _SUBMITTING
    try:
        with writing(path):
            order.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_file(
                path, 0o666, patience_s=_LOCK_S
            )  # as far as the umask lets a group submit the run
    except LockHeldError as error:
        raise EngineError(
            f"the run in {order.run_dir} is being submitted by {error.holder}: wait for it, then phalanx status {quote(str(order.run_dir))}"
        ) from None
    try:
        yield
    finally:
        os.close(lock)


def submitter_of(run_dir: Path) -> str:
    """Return the process that submits a run at this moment, as named in its lock; empty if none does, or without
    locks.
    """
    return holder_of(run_dir / FOLDER / _SUBMITTING)


def wait_for_submitter(run_dir: Path, notify: Callable[[str], None]) -> str:
    """Wait until no process submits the run, so that what was started can be seen. Return the last process that
    did, empty if none.

    Meanwhile the run is marked as stopped again and again: a submission that has just begun removes the mark of
    an earlier start. ``notify`` gets a line for each such process. Raises ``EngineError`` after 180 s.
    """
    deadline_s, notified = time.monotonic() + _SUBMITS_S, ""
    while submitter := submitter_of(run_dir):
        if submitter != notified:
            notified = submitter
            notify(f"the run is being submitted by {submitter}, which is notified and waited for")
        with suppress(EngineError):
            mark_stopped(run_dir)
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"the run in {run_dir} is being submitted by {submitter}, which does not get on: it starts nothing once it comes to look for "
                f"{run_dir / FOLDER / STOPPED}; end it, and give the same command again"
            )
        time.sleep(_PAUSE_S)
    return notified


def finished_problems(order: LaunchOrder, spec: RunSpec) -> list[str]:
    """Return a problem if the run directory has a complete result for ``spec``, else nothing."""
    if RunDirectory(order.run_dir).complete_result(spec) is None:
        return []
    return [f"the run in {order.run_dir} is finished; give another run_dir to train it once more"]


def write_files(order: LaunchOrder, spec: RunSpec, script: str) -> Path:
    """Write the frozen run file and the engine's script (executable); return the script's path.

    Creates the folder. Raises ``EngineError`` if it cannot be written.
    """
    path = order.folder / "job.sh"
    with writing(order.folder):
        order.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(order.run_file, tomli_w.dumps(to_table(spec)).encode())
        write_atomically(path, script.encode(), mode=0o755)
    return path


def record(order: LaunchOrder, engine: str, job: str, leader: str = "") -> Submitted:
    """Write the record of a submission, replacing that of an earlier one, and return it. Raises ``EngineError``."""
    lender = "" if order.taken_from is None else str(order.taken_from)
    made = Submitted(
        *(engine, job, order.name, order.nodes, order.spares, time.time(), str(order.working_dir), leader),
        *(lender, order.taken),
    )
    with writing(order.folder):
        write_atomically(order.folder / RECORD, (json.dumps(asdict(made), indent=1) + "\n").encode())
    return made


@contextmanager
def recorded(order: LaunchOrder, engine: str, job: str, leader: str = "") -> Iterator[Submitted]:
    """Context that records a submission before the body starts it, so that the run is known even if its starter is
    killed.

    If the body raises ``EngineError``, the earlier record is restored, or the new one removed; another
    exception leaves the new one. Raises ``EngineError``.
    """
    path = order.folder / RECORD
    try:
        before = path.read_bytes()
    except OSError:
        before = None
    made = record(order, engine, job, leader)
    try:
        yield made
    except EngineError:
        with suppress(OSError):  # on a full disk it stays, of a run that has ended
            path.unlink() if before is None else write_atomically(path, before)
        raise


def how_to_follow(run_dir: Path) -> str:
    """The commands that follow a submitted run, as a shell reads them."""
    name = quote(str(run_dir))
    return f"follow it with  phalanx status {name}  |  phalanx logs {name} --follow  |  phalanx cancel {name}"


def read_record(run_dir: Path) -> Submitted | None:
    """Return the last submission of the run in ``run_dir``; ``None`` if there is none that can be read."""
    try:
        return Submitted(**json.loads((run_dir / FOLDER / RECORD).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def forget_stopped(order: LaunchOrder) -> None:
    """Remove the mark that an earlier start of the run was stopped, as a submission begins; a later stop is one of this start.

    Raises ``EngineError``.
    """
    with writing(order.folder):
        (order.folder / STOPPED).unlink(missing_ok=True)


def refuse_stopped(order: LaunchOrder) -> None:
    """Raise ``EngineError`` if the run was stopped since its submission began.

    The submission must be recorded before: then either this sees the stop, or the stop sees what runs.
    """
    if (order.folder / STOPPED).exists():
        raise EngineError(f"the run in {order.run_dir} was cancelled while it was being submitted")


def mark_stopped(run_dir: Path) -> None:
    """Mark the run as stopped: its job does not queue itself again, and a submission under way does not start it.

    Does nothing for a run that was never submitted or is marked already. Raises ``EngineError``.
    """
    folder = run_dir / FOLDER
    # An existing mark may belong to another user, and then cannot be opened for writing.
    if not folder.is_dir() or (folder / STOPPED).is_file():
        return
    try:
        os.close(os.open(folder / STOPPED, os.O_CREAT | os.O_WRONLY, 0o644))
    except OSError as error:  # another user's file, or a full disk
        raise EngineError(
            f"cannot write {folder / STOPPED}, which keeps the run from queueing itself again: {error.strerror}"
        ) from error
