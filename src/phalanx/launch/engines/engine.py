"""The engines that give nodes to a run: Slurm, Kubernetes, hosts by ssh, this machine, and those of other packages.

An engine is an object of the group ``phalanx.engines`` (``phalanx.plugins``); ``phalanx submit --on NAME`` finds it by its name. Commands that
follow a run (``status``, ``logs``, ``cancel``, ``why``, ``fleet grow``) read the run's record and call the engine that started it. They never
compare names, so that a further engine is one class and one entry point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.launch.engines.submission import OF_PODS, RECORD, Submitted, mark_stopped, read_record
from phalanx.plugins import PluginError, load_plugin, plugin_names
from phalanx.run.fields import Problem, unknown_value
from phalanx.run.read import plugin_problems, variable_problems
from phalanx.run.smaller_degrees import problems_on
from phalanx.run.spec import LaunchSpec, RunSpec

GROUP = "phalanx.engines"
FIELDS_OF_PODS = frozenset(
    {
        *("namespace", "scheduler", "topology_label", "domain_labels", "resources", "gpu_resource"),
        *("tolerations", "service_account", "run_as", "pod_patch"),
    }
)
_FIELDS_OF_SOME_ENGINES: Mapping[str, tuple[str, frozenset[str]]] = {
    "ssh": ("hosts that are reached by ssh", frozenset({"hosts"})),
    "kubernetes": ("Kubernetes", FIELDS_OF_PODS),
}
"""Engine -> the fields of ``[launch]`` that it reads and not every other one, and what they are about."""
_SILENT_S = 30.0
_LONGEST_LINE, _TAIL_BYTES = 500, 16 << 10


@dataclass(frozen=True)
class Lender:
    """A run that gives back nodes for another one."""

    run_dir: Path
    take_nodes: Callable[[int], list[str]]
    """Have the run give back so many nodes; returns their names once they have left it."""


@dataclass(frozen=True)
class SubmitRequest:
    """The options of ``phalanx submit`` that are not in the run file."""

    dry_run: bool = False
    """Return what would be submitted, and change nothing."""
    out: Path | None = None
    """File for what would be submitted."""
    lender: Lender | None = None
    """Gives back the nodes that are missing."""
    notify: Callable[[str], None] = print
    """Receives lines on the progress."""


@dataclass(frozen=True)
class SubmitReport:
    """The result of a submission: ``values`` for programs and ``text`` for people."""

    values: Mapping[str, object]
    text: str


@dataclass(frozen=True)
class JobStanding:
    """A submitted run as its engine shows it."""

    title: str
    doing: str
    """Where it runs, or why it waits."""
    is_waiting: bool = False
    is_held: bool = False
    """Nothing starts it before somebody releases it."""
    has_ended: bool = False


class QueuedJob(Protocol):
    """A job as ``phalanx runs --on NAME`` prints it: a dataclass, whose fields are its JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def listing(self) -> str:
        """Name, state and run directory, for people."""


class LaunchEngine(Protocol):
    """Engine that gives nodes to runs. All methods raise ``EngineError`` with what to change."""

    @property
    def name(self) -> str:
        """The value of ``launch.engine``."""

    @property
    def needs_nodes(self) -> bool:
        """False if a run without a fleet (``fleet.nodes = 0``) can be submitted."""

    @property
    def has_queue(self) -> bool:
        """True if ``jobs`` can list the runs that are queued or running; ``phalanx runs --on`` offers only these engines."""

    @property
    def options(self) -> frozenset[str]:
        """The options of commands (``out``, ``lender``) and fields of ``[launch]`` that this engine uses, of those that not every engine does."""

    def prepare(self, spec: RunSpec, working_dir: Path) -> tuple[RunSpec, list[str]]:
        """Return the run with an absolute ``run_dir`` and with the engine's own defaults, and a line on each of those."""

    def doubts(self, spec: RunSpec, working_dir: Path) -> Iterator[str]:
        """Yield what may be a mistake, and cannot be known on this machine."""

    def submit(self, spec: RunSpec, working_dir: Path, request: SubmitRequest) -> SubmitReport:
        """Start the run, or return what would be submitted."""

    def jobs(self, namespace: str) -> Sequence[QueuedJob]:
        """Return the user's runs that are queued or running."""

    def queued(self, run_dir: Path) -> Submitted | None:
        """Return the submission of a run by the engine's queue; ``None`` if that does not have it."""

    def submitted(self, run_dir: Path, made: Submitted) -> SubmittedRun:
        """Return the run that this record is of."""


class SubmittedRun(Protocol):
    """A run that an engine was given, with a directory that this machine sees. All methods raise ``EngineError``."""

    @property
    def run_dir(self) -> Path:
        """The run's directory."""

    @property
    def made(self) -> Submitted:
        """The record of its submission."""

    @property
    def title(self) -> str:
        """The name of what was started, as the user knows it."""

    @property
    def log_name(self) -> str:
        """The log of its job, or of the host that leads, in ``RUN_DIR/launch``."""

    @property
    def start_mark(self) -> str:
        """The file in ``RUN_DIR/launch`` that every start writes first."""

    @property
    def requeues(self) -> bool:
        """True if its job queues itself again until the run is marked as stopped."""

    @property
    def holds_nodes(self) -> bool:
        """True if its job keeps a node that has left the run until ``release`` takes it out."""

    @property
    def has_hosts(self) -> bool:
        """True if it runs on named hosts: each has a log, and others can join it (``phalanx fleet grow --hosts``)."""

    def standing(self) -> JobStanding | None:
        """Return its state; ``None`` once it has ended."""

    def remaining(self) -> tuple[bool, list[str]]:
        """Return whether anything of it is queued or running, and a line on each host that does not answer."""

    def refuse_second(self) -> None:
        """Raise ``EngineError`` if it is queued or running."""

    def request_stop(self, reign: int | None) -> bool:
        """Have it save and end. Return False if that is left to its coordinator.

        ``reign`` is the number of the coordinator that leads the run's fleet, ``None`` before there is one.
        """

    def end_now(self) -> None:
        """End it at once; what is not saved is lost."""

    def demand_resizable(self) -> None:
        """Raise ``EngineError`` if nodes cannot be taken out of its job."""

    def release(self, nodes: set[str]) -> dict[str, tuple[str, ...]]:
        """Take nodes out of its jobs; returns those of each job."""

    def prepare_joining(self, by: int, notify: Callable[[str], None]) -> Callable[[], str] | None:
        """Return the function that queues a job whose ``by`` nodes join it; ``None`` if nodes come otherwise."""

    def cancel_joining(self, *, waiting_only: bool = False) -> None:
        """End the jobs whose nodes join it; with ``waiting_only`` those that are still queued."""


def engine_named(name: str) -> LaunchEngine:
    """Return the engine of a name. Raises ``EngineError`` if it is unknown, with the nearest name, or cannot be
    loaded.
    """
    try:
        engine = load_plugin(GROUP, name)
    except PluginError as error:
        raise EngineError(str(error)) from error
    if engine is None:
        problem = unknown_value("launch.engine", name, plugin_names(GROUP))
        raise EngineError(
            f"the engine {problem.finding}: {problem.remedy}, or install the package that offers it"
        )
    return cast("LaunchEngine", engine)


def recorded_run(run_dir: Path) -> SubmittedRun | None:
    """Return the last submission of a run, by its record; ``None`` if there is none.

    Raises ``EngineError`` if its engine is not available.
    """
    made = read_record(run_dir)
    if made is None:
        return None
    try:
        engine = engine_named(made.engine)
    except EngineError as error:
        record = run_dir / FOLDER / RECORD
        raise EngineError(
            f"the run in {run_dir} was submitted to {made.engine}: {error}; or remove {record} if nothing of it runs"
        ) from error
    return engine.submitted(run_dir, made)


def submission_of(run_dir: Path) -> SubmittedRun | None:
    """Return the last submission of a run: that of its record. ``None`` if there is neither a record nor a queued
    job.

    A submitter that was killed may have recorded no job number, or nothing. Then the queue of the record's
    engine gives the number; without a record, the queues of all engines are searched. A run directory without
    the launch folder is in none. Raises ``EngineError``.
    """
    run = recorded_run(run_dir)
    if (run is not None and run.made.job) or not (run_dir / FOLDER).is_dir():
        return run
    for name in plugin_names(GROUP) if run is None else [run.made.engine]:
        try:
            engine = engine_named(name)
        except EngineError:  # a package that cannot be loaded has queued nothing from here
            continue
        queued = engine.queued(run_dir)
        if queued is not None:
            return engine.submitted(run_dir, queued if run is None else replace(run.made, job=queued.job))
    return run


def standing_or_end(run_dir: Path) -> JobStanding | None:
    """Return the state of the last submission of a run, or one that it has ended, with the last line of its log.

    ``None`` if the run was not submitted, or its engine does not answer.
    """
    try:
        run = submission_of(run_dir)
        if run is None:
            return None
        job = run.standing()
        if job is not None:
            return job
        log = log_of(run)
        last = "".join(_printed(log)[-1:])[:_LONGEST_LINE] or "there is none"
        text = f"it has ended; the last line of its log ({log}): {last}"
        return JobStanding(run.title, text, has_ended=True)
    except EngineError:
        return None


def _printed(log: Path) -> list[str]:
    """Return the lines in the last ``_TAIL_BYTES`` of a job's log, without blank ones; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def log_of(run: SubmittedRun) -> Path:
    """Return the log of a submitted run, or of the host that leads it."""
    return run.run_dir / FOLDER / run.log_name


def wait_until_ended(run: SubmittedRun, poll_s: float, *, silent_timeout_s: float = _SILENT_S) -> None:
    """Wait, looking every ``poll_s`` seconds, until nothing of a submitted run is queued or running.

    Raises ``EngineError`` if for ``silent_timeout_s`` only hosts are left that do not answer.
    """
    silent_since_s: float | None = None
    while True:
        running, silent = run.remaining()
        if not running and not silent:
            return
        now_s = time.monotonic()
        silent_since_s = None if running else silent_since_s or now_s
        if silent_since_s is not None and now_s - silent_since_s >= silent_timeout_s:
            raise EngineError(
                f"nothing of the run in {run.run_dir} is left on the hosts that answer, and the others do not answer; give the same command again "
                f"when they are back, or remove {run.run_dir / FOLDER / 'hosts.json'} if they are gone for good:\n  "
                + "\n  ".join(silent)
            )
        time.sleep(poll_s)


def prevent_restart(run_dir: Path, *, at_once: bool = False) -> str:
    """Mark a run that is to end, so that nothing starts it again; return an empty text.

    If the mark cannot be written (a full disk): for a job that would queue itself again, raise ``EngineError``,
    or with ``at_once`` return an empty text all the same, since the job is ended at once. For any other run,
    return a sentence on what follows. Also raises the errors of ``submission_of``.
    """
    try:
        mark_stopped(run_dir)
    except EngineError as error:
        run = submission_of(run_dir)
        if run is not None and run.requeues:
            if at_once:
                return ""
            raise EngineError(f"{error}; phalanx cancel --now ends it without saving") from error
        if (run_dir / FOLDER / OF_PODS).exists():
            return f"{error}. The request to end is sent all the same, and its pods start it again: phalanx cancel NAME --on kubernetes ends their job"
        return f"{error}. The request to end is sent all the same: no scheduler has it, and nothing else queues it again"
    return ""


def problems_of(spec: RunSpec, engine: LaunchEngine) -> list[Problem]:
    """Return the mistakes in a run that can be found without contacting its engine.

    They are illegal layouts, unfilled fields, fields of other engines, unknown sinks and observers, bad
    variables, and ``fleet.min_nodes`` above all nodes. If the engine needs nodes and there are none, only that
    is returned.
    """
    fleet = spec.fleet
    if not fleet.nodes and engine.needs_nodes:
        return [Problem("fleet.nodes", "0 nodes are to hold ranks", "--nodes N")]
    # Without a fleet this machine's ranks train the run, as phalanx train does.
    problems = problems_on(spec, fleet.nodes * fleet.workers_per_node) if fleet.nodes else []
    problems += [
        Problem(
            field,
            "holds a default that nobody chose",
            "write a value into the file and take the field off `unfilled`",
        )
        for field in spec.unfilled
    ]
    problems += [
        Problem(f"launch.{field}", f"is about {words}", f"take it out, or --on {name}")
        for name, (words, fields) in _FIELDS_OF_SOME_ENGINES.items()
        for field in sorted(fields - engine.options)
        if getattr(spec.launch, field) != getattr(LaunchSpec(), field)
    ]
    problems += plugin_problems("observe.sinks", spec.observe.sinks, "phalanx.sinks")
    problems += plugin_problems("observe.observers", spec.observe.observers, "phalanx.observers")
    problems += variable_problems(spec.launch)
    if fleet.nodes and fleet.min_nodes > fleet.nodes + fleet.spares:
        problems.append(
            Problem(
                "fleet.min_nodes",
                f"{fleet.min_nodes} nodes are never there: fleet.nodes and fleet.spares make {fleet.nodes + fleet.spares}",
                "fewer, or more nodes",
            )
        )
    return problems
