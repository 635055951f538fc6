"""Runs under Slurm: queued as one job of one agent a node, followed by its queue, lent nodes by other runs.

``slurm`` runs Slurm's tools, ``slurm_script`` writes the batch scripts; this is the order in which a submission uses them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote

from phalanx.launch.engines import slurm, submission
from phalanx.launch.engines.engine import JobStanding, Lender, SubmitReport, SubmitRequest, recorded_run
from phalanx.launch.engines.order import (
    FOLDER,
    EngineError,
    LaunchOrder,
    private_variables,
    refuse_for,
    run_tool,
)
from phalanx.launch.engines.slurm_options import from_environment, options_in
from phalanx.launch.engines.slurm_script import RETURNED, batch_script, joining_script
from phalanx.launch.planner import price_or_reason
from phalanx.launch.topology_files import load_topology
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class SlurmEngine:
    """``launch.engine = "slurm"``."""

    name: str = "slurm"
    needs_nodes: bool = True
    has_queue: bool = True
    options: frozenset[str] = frozenset({"lender"})

    def prepare(self, spec: RunSpec, working_dir: Path) -> tuple[RunSpec, list[str]]:
        """Return the run with what sbatch's environment variables set, and a line on each.

        Raises ``EngineError`` for variables that contradict the launcher.
        """
        launch, lines = from_environment(spec.launch, os.environ)
        return submission.with_run_dir(replace(spec, launch=launch), working_dir), lines

    def doubts(self, spec: RunSpec, working_dir: Path) -> Iterator[str]:
        """Yield warnings: datasets that this machine does not see, and workers of a node that would share one
        core.

        Raises ``EngineError`` if an option has a quote without an end.
        """
        yield from submission.missing_data(spec, working_dir)
        options = {name for line in spec.launch.options for name in options_in(line)}
        if not spec.launch.exclusive and not options & {"cpus-per-task", "cpus-per-gpu", "mincpus"}:
            yield (
                f"launch.exclusive = false: Slurm gives the agent of a node and its {spec.fleet.workers_per_node} workers one core; "
                'launch.options = ["--cpus-per-task=N"] requests more'
            )

    def submit(self, spec: RunSpec, working_dir: Path, request: SubmitRequest) -> SubmitReport:
        """Queue the run, with unit and order of the best placement on the nodes that are free now, unless the file
        gives a unit.

        With ``dry_run`` only return the script. ``request.lender`` gives back missing nodes. Raises
        ``EngineError`` if the run is finished, queued already, or could never start, if the lender is no run
        under Slurm, or Slurm does not answer.
        """
        order = submission.order_of(spec, working_dir)
        if request.dry_run:
            script = batch_script(order if request.lender is None else _borrowing(order, request.lender))
            return SubmitReport({"script": script, "run_dir": spec.run_dir}, script)
        _refuse_second(order)
        problems = [*submission.finished_problems(order, spec), *slurm.preflight(order)]
        refuse_for(problems, "this job would never start")
        # On the nodes of the partition that are free now.
        best, why_not = price_or_reason(
            lambda planner: planner.best_placement(
                spec, lambda: load_topology("slurm", spec.launch.partition, free_only=True)
            )
        )
        if best is not None and not spec.launch.unit:
            spec = replace(spec, launch=replace(spec.launch, unit=best.unit, order=best.order))
        made, expected = queue_job(spec, working_dir, request.lender)
        price = None if best is None else {"slowest_s": best.slowest_s, "certified": best.certified}
        ranks = order.nodes * spec.fleet.workers_per_node
        spares = f" and {order.spares} spares" if order.spares else ""
        lines = [
            f"job {made.job}: {order.nodes} nodes{spares}, {ranks} ranks; run directory {order.run_dir}",
            *([f"  expected to start {expected}"] if expected else ()),
            f"  placement: {f'not priced: {why_not}' if best is None else f'on what is free now, {best.sentence}'}",
            submission.how_to_follow(order.run_dir),
        ]
        values = {**asdict(made), "run_dir": str(order.run_dir), "placement": price}
        return SubmitReport(values, "\n".join(lines))

    def jobs(self, namespace: str) -> list[slurm.SlurmJob]:  # noqa: ARG002
        """Return the user's runs in the queue; Slurm has no namespaces."""
        return slurm.jobs()

    def queued(self, run_dir: Path) -> submission.Submitted | None:
        """Return the job of a run in the queue; ``None`` if there is none, or Slurm's tools are not installed.

        Raises ``EngineError`` if the jobs cannot be listed.
        """
        job = slurm.job_of(run_dir) if shutil.which("squeue") is not None else None
        if job is None:
            return None
        return submission.Submitted(
            self.name, job.id, job.name.removeprefix("phalanx-"), job.nodes, 0, 0.0, ""
        )

    def submitted(self, run_dir: Path, made: submission.Submitted) -> SlurmRun:
        """Return the run with its job."""
        return SlurmRun(run_dir, made)


@dataclass(frozen=True)
class SlurmRun:
    """A run whose nodes are a job's."""

    run_dir: Path
    made: submission.Submitted
    requeues: bool = True
    holds_nodes: bool = True
    has_hosts: bool = False
    start_mark: str = "nonce"

    @property
    def title(self) -> str:
        """The job with its number."""
        return f"job {self.made.job or 'of unknown number'} (slurm)"

    @property
    def log_name(self) -> str:
        """The file that the batch script writes."""
        return f"job-{self.made.job}.log"

    def standing(self) -> JobStanding | None:
        """Return the state of the job; ``None`` if the queue does not have it."""
        job = self._job()
        return None if job is None else JobStanding(self.title, job.sentence, job.is_waiting, job.is_held)

    def remaining(self) -> tuple[bool, list[str]]:
        """Return whether the queue has the job."""
        return self._job() is not None, []

    def refuse_second(self) -> None:
        """Raise ``EngineError`` if the queue has the job, or Slurm does not answer. A machine without Slurm's tools
        has no job.
        """
        if shutil.which("squeue") is None:  # the run was taken to a machine that belongs to no cluster
            return
        try:
            job = self._job()
        except EngineError as error:
            raise EngineError(
                f"whether {self.title} of the run in {self.run_dir} still runs is not known: {error}. If it does not, remove "
                f"{self.run_dir / FOLDER / submission.RECORD}"
            ) from error
        if job is not None:
            raise slurm.second(self.run_dir, job)

    def request_stop(self, reign: int | None) -> bool:
        """Send SIGTERM to the batch shell, which saves and ends the run.

        Return False, without a signal, if there is no job or a successor leads (``reign`` above 1): the shell
        is lost with the first node. Raises ``EngineError``.
        """
        job = self._job()
        if job is None or reign not in (None, 1):
            return False
        run_tool(["scancel", "--batch", "--signal=TERM", job.id])
        return True

    def end_now(self) -> None:
        """Cancel the job."""
        job = self._job()
        if job is not None:
            slurm.cancel(job.id)

    def demand_resizable(self) -> None:
        """Raise ``EngineError`` if Slurm refuses to change the job."""
        slurm.demand_resizable(self.run_dir)

    def release(self, nodes: set[str]) -> dict[str, tuple[str, ...]]:
        """Shrink the jobs of the run."""
        return slurm.give_back(self.run_dir, nodes)

    def prepare_joining(self, by: int, notify: Callable[[str], None]) -> Callable[[], str]:
        """Write the script of a job of ``by`` nodes that join the run, after checking that it could start. Return
        a function that queues it and returns the job's number.

        ``notify`` receives a line for each variable of sbatch that is used. Raises ``EngineError``, and
        ``OSError`` if the script cannot be written.
        """
        try:
            spec = read_resolved(RunDirectory(self.run_dir))
        except RunDirectoryError as error:
            raise EngineError(str(error)) from error
        launch, lines = from_environment(spec.launch, os.environ)
        for line in lines:
            notify(line)
        spec = replace(spec, run_dir=str(self.run_dir.resolve()), launch=launch)
        order = submission.order_of(spec, Path(self.made.working_dir))
        refuse_for(slurm.preflight(replace(order, nodes=by, spares=0)), "this job would never start")
        path = order.folder / "joining.sh"
        write_atomically(path, joining_script(order, by).encode(), mode=0o755)
        slurm.test_submit(path)
        private = private_variables(order.launch, order.working_dir)
        return lambda: slurm.submit(path, private)

    def cancel_joining(self, *, waiting_only: bool = False) -> None:
        """Cancel the jobs whose nodes join the run."""
        slurm.cancel_joining(self.run_dir, waiting_only=waiting_only)

    def _job(self) -> slurm.SlurmJob | None:
        return slurm.job_of(self.run_dir, self.made.job)


ENGINE = SlurmEngine()


def queue_job(
    spec: RunSpec, working_dir: Path, lender: Lender | None = None
) -> tuple[submission.Submitted, str]:
    """Write script, run file and record of a run, and queue its job. A ``lender`` first gives back the nodes that
    are missing.

    Return the record, and when Slurm expects the job to start (empty if unknown). Locks the run's submissions
    meanwhile. Raises ``EngineError``, and then restores the earlier record; the message names the command that
    returns nodes to the lender.
    """
    order = submission.order_of(spec, working_dir)
    private = private_variables(order.launch, working_dir)
    script = batch_script(order)  # raises for an impossible request, before anything is written or borrowed
    with submission.only_submission(order):
        _refuse_second(order)
        submission.forget_stopped(order)
        path = submission.write_files(order, spec, script)
        expected = slurm.test_submit(path)
        if lender is not None:
            order = borrowed(order, lender)
        try:
            if lender is not None:
                submission.write_files(order, spec, batch_script(order))
            # If the submitter dies before it writes the job's number, no record of an earlier start may stay.
            with submission.recorded(order, ENGINE.name, ""):
                submission.refuse_stopped(order)
                return _record_or_cancel(order, slurm.submit(path, private)), expected
        except EngineError as error:
            raise EngineError(f"{error}{_give_back_hint(order)}") from error


def _refuse_second(order: LaunchOrder) -> None:
    """Raise ``EngineError`` if the run is queued or running, by any engine."""
    run = recorded_run(order.run_dir)
    if run is not None and not isinstance(run, SlurmRun):
        run.refuse_second()
    slurm.refuse_second(order.run_dir, run.made.job if isinstance(run, SlurmRun) else "")


def _borrowing(order: LaunchOrder, lender: Lender) -> LaunchOrder:
    """Return the order, with as many nodes to be taken from ``lender`` as idle ones are missing now; nothing is
    taken yet.

    Raises ``EngineError`` if the lender was not submitted to Slurm.
    """
    made = submission.read_record(lender.run_dir)
    if made is None or made.engine != ENGINE.name:
        raise EngineError(
            f"--take-from {lender.run_dir}: no nodes of Slurm's to give back: name the run directory of one that phalanx submit --on slurm has started"
        )
    missing = order.all_nodes - slurm.idle_nodes(order)
    return replace(order, taken_from=lender.run_dir.resolve(), taken=missing) if missing > 0 else order


def borrowed(order: LaunchOrder, lender: Lender) -> LaunchOrder:
    """Have ``lender`` give back as many nodes as are missing, wait until they have left it, and return the order with
    their number; unchanged if none is.

    Raises ``EngineError``.
    """
    order = _borrowing(order, lender)
    if not order.taken:
        return order
    names = lender.take_nodes(order.taken)
    with suppress(FileNotFoundError):  # from an earlier loan to this run
        (order.folder / RETURNED).rmdir()
    return replace(order, taken=len(names))


def _give_back_hint(order: LaunchOrder) -> str:
    """Return the end of a message: the command by which the lender takes back the nodes that it gave for a refused
    job.

    Empty if there are none. Also marks the loan as returned, so that ``phalanx cancel`` does not return it again.
    """
    if order.taken_from is None:
        return ""
    # Otherwise phalanx cancel would return them by the record of an earlier loan. The folder may exist, or the disk be full.
    with suppress(OSError):
        (order.folder / RETURNED).mkdir()
    return (
        f"; {order.taken_from} has given back {order.taken} nodes for it: phalanx fleet grow {quote(str(order.taken_from))} --by {order.taken} takes them "
        "again"
    )


def _record_or_cancel(order: LaunchOrder, job: str) -> submission.Submitted:
    """Record a queued job and return the record. If that cannot be written, cancel the job and raise ``EngineError``.

    If it cannot be canceled either, it stays queued, and the error has the command that ends it.
    """
    try:
        return submission.record(order, ENGINE.name, job)
    except EngineError as error:
        try:
            slurm.cancel(job)
        except EngineError as also:
            raise EngineError(
                f"job {job} can neither be noted ({error}) nor taken back ({also}): end it with scancel {job}"
            ) from error
        raise EngineError(f"job {job} is taken back: {error}") from error
