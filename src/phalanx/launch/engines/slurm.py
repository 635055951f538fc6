"""Slurm's tools: sbatch, squeue, sinfo, scontrol, scancel; no accounting is needed.

``preflight`` returns, before anything is queued, why a job would wait for ever: clusters accept impossible jobs unless they enforce the limits
of partitions, and ``squeue`` then shows one reason of several.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

from phalanx.launch.engines.order import (
    EngineError,
    LaunchOrder,
    excluded_nodes,
    run_tool,
    seconds_of,
    slurm_time,
    time_problems,
)
from phalanx.launch.engines.slurm_options import limit_problems, limits_of, without_overrulers
from phalanx.launch.engines.slurm_script import COMMENT, JOINING_COMMENT
from phalanx.launch.placing import expanded
from phalanx.run.spec import LaunchSpec

_FORMAT = "%i|%T|%r|%D|%N|%S|%L|%j|%P|%k"
_DOWN = (
    "down",
    "drained",
    "draining",
    "fail",
    "failing",
    "maint",
    "unknown",
    "error",
    "future",
    "power",
    "reserved",
)
_REMEDIES = {
    "Resources": "it waits for nodes to become free",
    "Priority": "jobs before it in the queue are served first",
    "PartitionNodeLimit": "it requests more nodes than the partition allows: --nodes, --spares or another --partition",
    "PartitionTimeLimit": "it requests more time than the partition allows: --time",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "AssocGrpNodeLimit": "the account's limit of nodes is used up: wait, or another --account",
    "AssocGrpGRES": "the account's limit of GPUs is used up: wait, or another --account",
    "QOSGrpNodeLimit": "the limit of nodes of the QOS is used up: wait, or another --qos",
    "QOSGrpGRES": "the limit of GPUs of the QOS is used up: wait, or another --qos",
    "QOSMaxNodePerUserLimit": "the QOS allows you fewer nodes at a time",
    "QOSMaxWallDurationPerJobLimit": "the QOS allows less time: --time",
    "BeginTime": "its time has not come: it was queued again a moment ago, or --begin sets a later time",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
    "job requeued in held state": "it is held: scontrol release JOB",
}
_HELD = ("JobHeldUser", "JobHeldAdmin", "job requeued in held state", "JobHoldMaxRequeue")
_NO_LIMIT_DAYS = 300
"""A partition without a limit counts as UNLIMITED or as a year, depending on the second."""


_NO_INDEX = ("the DB index is being set", "Unexpected message received")
"""Errors of scontrol for a job whose last change slurmdbd has not recorded yet; without slurmdbd it never does (22.05)."""
_ONCE = "a Slurm that keeps no accounts makes a job smaller once (AccountingStorageType), and one that does must have taken note of the last time"
_TRIES, _PAUSE_S = 3, 2.0


@dataclass(frozen=True)
class SlurmJob:
    """A job of a run, as its engine shows it."""

    id: str
    state: str
    """As in "PENDING" or "RUNNING"."""
    reason: str
    """Why it waits; empty while it runs."""
    nodes: int
    hosts: str
    """The nodes that it has, as a host list; empty while it waits."""
    starts: str
    """When it began, or is expected to."""
    time_left: str
    name: str
    partition: str
    run_dir: str
    joins: bool = False
    """Its nodes join the fleet of the run's own job."""

    @property
    def is_waiting(self) -> bool:
        """True if it is queued."""
        return self.state == "PENDING"

    @property
    def is_held(self) -> bool:
        """True if it is queued, and nothing starts it before somebody releases it."""
        return self.is_waiting and self.reason in _HELD

    @property
    def sentence(self) -> str:
        """The state of the job: nodes and time left. If it waits, the reason, a remedy and the expected start,
        where known.
        """
        if not self.is_waiting:
            left = f"{self.time_left} left" if _days(self.time_left) < _NO_LIMIT_DAYS else "no time limit"
            return f"{self.state.lower()} on {self.nodes} nodes ({self.hosts}), {left}"
        first = self.reason.split(",")[0].split("(")[0]
        remedy = _REMEDIES.get(first, "")
        expected = (
            "" if self.is_held or not is_known_start(self.starts) else f"; expected to start {self.starts}"
        )
        return f"waits for {self.nodes} nodes: {self.reason}{f' ({remedy})' if remedy else ''}{expected}"

    @property
    def listing(self) -> str:
        """The job and its run directory, as ``phalanx runs --on slurm`` prints them."""
        return f"job {self.id}  {self.name}: {self.sentence}\n  {self.run_dir}"


def is_known_start(text: str) -> bool:
    """Return True if ``text`` is an ISO time less than 300 days from now.

    Before Slurm has looked at a job it prints N/A as its start, or a year or more from now.
    """
    try:
        return datetime.fromisoformat(text) < datetime.now() + timedelta(days=_NO_LIMIT_DAYS)
    except ValueError:
        return False


def _days(time_left: str) -> float:
    """Return the days in Slurm's D-HH:MM:SS, 0 below one; infinite for UNLIMITED."""
    days, dash, _ = time_left.partition("-")
    if time_left == "UNLIMITED":
        return math.inf
    return int(days) if dash and days.isdecimal() else 0


def jobs() -> list[SlurmJob]:
    """This user's queued and running jobs that Phalanx submitted. Raises ``EngineError``."""
    return parse_jobs(run_tool(["squeue", "-h", "--me", "-o", _FORMAT]))


def parse_jobs(text: str) -> list[SlurmJob]:
    """Return Phalanx's jobs in a ``squeue`` table with "|" between fields, recognized by their comments; skip other
    lines.
    """
    parsed = []
    for line in text.splitlines():
        fields = line.split("|", 9)
        if len(fields) == 10 and fields[9].startswith((COMMENT, JOINING_COMMENT)):
            number, state, reason, nodes, hosts, starts, left, name, partition, comment = fields
            count = int(nodes) if nodes.isdecimal() else 0
            run_dir, joins = comment.partition(":")[2], comment.startswith(JOINING_COMMENT)
            reason = "" if reason == "None" else reason
            parsed.append(
                SlurmJob(number, state, reason, count, hosts, starts, left, name, partition, run_dir, joins)
            )
    return parsed


def job_of(run_dir: Path, last: str = "") -> SlurmJob | None:
    """Return the queued or running job of a run; ``None`` if there is none.

    It is looked for among the user's own jobs, without those that join. Then the job number ``last``, which may
    be another user's, is taken if it is of this run; ``None`` if Slurm does not list it. Raises ``EngineError``
    if the user's jobs cannot be listed.
    """
    own = next((job for job in jobs_of(run_dir) if not job.joins), None)
    if own is not None or not last.isdecimal():
        return own
    try:
        listed = parse_jobs(run_tool(["squeue", "-h", "-j", last, "-o", _FORMAT]))
    except EngineError:  # Slurm has forgotten the job
        return None
    return next((job for job in listed if job.run_dir == str(run_dir.resolve())), None)


def jobs_of(run_dir: Path) -> list[SlurmJob]:
    """This user's queued and running jobs of a run: its own, and those whose nodes join its fleet. Raises
    ``EngineError``.
    """
    path = str(run_dir.resolve())
    return [job for job in jobs() if job.run_dir == path]


def give_back(
    run_dir: Path, names: set[str], *, retry_pause_s: float = _PAUSE_S
) -> dict[str, tuple[str, ...]]:
    """Take the nodes ``names``, whose agents have ended, out of the running jobs of a run. Return the released
    nodes by job.

    A job all of whose nodes have gone ends by itself. ``retry_pause_s`` is the pause between two tries to make a
    job smaller while Slurm is busy. Raises ``EngineError``.
    """
    released: dict[str, tuple[str, ...]] = {}
    for job in jobs_of(run_dir):
        hosts = expanded(job.hosts) if job.state == "RUNNING" and job.hosts else []
        rest = [host for host in hosts if host not in names]
        if len(rest) < len(hosts):
            released[job.id] = tuple(host for host in hosts if host in names)
            if rest:
                _make_smaller(job, rest, released[job.id], retry_pause_s)
    return released


def demand_resizable(run_dir: Path) -> None:
    """Raise ``EngineError`` if the job of a run cannot be made smaller now, before nodes leave the fleet for
    nothing.

    Tried by setting its comment to the same text. Does nothing unless the run has exactly one job, its own, and
    that is running.
    """
    running = jobs_of(run_dir)
    if len(running) != 1 or running[0].joins or running[0].state != "RUNNING":
        return
    (job,) = running
    try:  # an update without effect, refused if any update would be
        run_tool(["scontrol", "update", f"JobId={job.id}", f"Comment={COMMENT}{job.run_dir}"])
    except EngineError as error:
        if any(sign in str(error) for sign in _NO_INDEX):
            raise EngineError(f"job {job.id} cannot be made smaller now: {_ONCE}: {error}") from error
        raise


def _make_smaller(job: SlurmJob, rest: Sequence[str], leaving: Sequence[str], retry_pause_s: float) -> None:
    """Reduce a job to the nodes ``rest``, trying again while Slurm is busy. Raises ``EngineError``, naming
    ``leaving`` if it stays busy.
    """
    words = ["scontrol", "update", f"JobId={job.id}", f"NodeList={','.join(rest)}"]
    for tried in range(_TRIES):
        try:
            with (
                TemporaryDirectory() as folder
            ):  # scontrol leaves scripts there that set the variables of a shell
                run_tool(words, folder=folder)
            return
        except EngineError as error:
            if not any(sign in str(error) for sign in _NO_INDEX):
                raise
            if tried == _TRIES - 1:
                raise EngineError(
                    f"{' '.join(leaving)} have left the run, but Slurm keeps them in job {job.id}: {_ONCE}. To free them, phalanx cancel "
                    f"{quote(job.run_dir)} and submit it again with fewer --nodes: {error}"
                ) from error
        time.sleep(retry_pause_s)


def idle_nodes(order: LaunchOrder) -> int:
    """Return the number of idle nodes with enough GPUs that are not excluded, in the best of the named partitions.

    Raises ``EngineError``.
    """
    excluded = set(excluded_nodes(order.launch))
    return max(
        sum(
            node.free and node.gpus >= order.gpus_per_node and node.name not in excluded
            for node in _nodes_of(name)
        )
        for name in named_partitions(order.launch)
    )


def named_partitions(launch: LaunchSpec) -> list[str]:
    """The partitions of which a job may have one, whichever can start it first; an empty name stands for the cluster's default."""
    return [name.strip() for name in launch.partition.split(",")]


def _nodes_of(partition: str) -> list[NodeFacts]:
    """The nodes of a partition; all nodes if it has no name. Raises ``EngineError``."""
    only = ["-p", partition] if partition else []
    return parse_nodes(run_tool(["sinfo", "-h", "-N", "-o", "%N|%T|%G", *only]))


def submit(script: Path, private: Mapping[str, str]) -> str:
    """Queue a batch script, with ``private`` variables in its job's environment; return the job's number. Raises ``EngineError``."""
    words = ["sbatch", "--parsable", str(script)]
    return run_tool(words, environment={**without_overrulers(os.environ), **private}).strip().split(";")[0]


def test_submit(script: Path) -> str:
    """Return when Slurm expects a script to start, without queueing it; empty if unknown.

    Raises ``EngineError`` with sbatch's message if it never would.
    """
    words = ["sbatch", "--test-only", str(script)]
    output = run_tool(words, environment=without_overrulers(os.environ), errors_too=True)
    start = re.search(r"to start at (\S+)", output)
    return start[1] if start and is_known_start(start[1]) else ""


def cancel(job: str) -> None:
    """End a job, queued or running, without waiting. Raises ``EngineError``."""
    run_tool(["scancel", job])


def cancel_joining(run_dir: Path, *, waiting_only: bool = False) -> None:
    """Cancel the jobs whose nodes join the fleet of a run that ends; with ``waiting_only`` those that wait for
    nodes. Raises ``EngineError``.
    """
    for job in jobs_of(run_dir):
        if job.joins and (not waiting_only or job.state == "PENDING"):
            cancel(job.id)


# --- before anything is queued --------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmPartition:
    """The facts of a partition that decide whether a job can ever run there."""

    name: str
    up: bool
    most_nodes: int | None
    longest_s: float | None
    default: bool


@dataclass(frozen=True)
class NodeFacts:
    """One node of a partition."""

    name: str
    usable: bool
    free: bool
    gpus: int


def preflight(order: LaunchOrder) -> list[str]:
    """Return everything that keeps a job from ever starting, each with a remedy; empty if nothing does.

    Queries partitions, nodes and limits of accounts; limits are left out if they cannot be read. Raises
    ``EngineError`` if Slurm does not answer.
    """
    partitions = parse_partitions(run_tool(["scontrol", "show", "partition", "-o"]))
    names = {"", *(partition.name for partition in partitions)}
    nodes = {name: _nodes_of(name) for name in named_partitions(order.launch) if name in names}
    try:
        limits = limits_of(order)
    except EngineError:  # no sacctmgr here, or no answer from slurmdbd: the queued job's reason names it
        limits = []
    return [*problems(order, partitions, nodes), *limit_problems(order, limits)]


def problems(
    order: LaunchOrder, partitions: list[SlurmPartition], nodes: Mapping[str, list[NodeFacts]]
) -> list[str]:
    """Return why a job would start in none of its named partitions, or one of them does not exist; empty if it
    would.

    Pure: ``partitions`` and ``nodes`` (by partition) are the facts.
    """
    names, by_partition = {"", *(partition.name for partition in partitions)}, []
    for name in named_partitions(order.launch):
        order_there = replace(order, launch=replace(order.launch, partition=name))
        by_partition.append((name, list(_problems_in(order_there, partitions, nodes.get(name, [])))))
    if all(name in names for name, _ in by_partition) and not all(wrong for _, wrong in by_partition):
        return []
    return list(dict.fromkeys(line for name, wrong in by_partition for line in wrong))


def _problems_in(
    order: LaunchOrder, partitions: list[SlurmPartition], nodes: list[NodeFacts]
) -> Iterator[str]:
    """Yield the reasons for which a job would never start in its partition, which is the default one if it names
    none.

    Checked are existence, state, size, time limit against partition and ``grace_s``, usable nodes, and their
    GPUs. Raises ``EngineError`` for a malformed time limit or ``launch.exclude``.
    """
    launch = order.launch
    names = ", ".join(candidate.name for candidate in partitions if candidate.up)
    matching = [
        candidate
        for candidate in partitions
        if (candidate.name == launch.partition if launch.partition else candidate.default)
    ]
    if not matching:
        problem = (
            f"there is no partition {launch.partition!r}"
            if launch.partition
            else "the cluster has no default partition"
        )
        yield f"launch.partition: {problem}: --partition with one of {names or 'none'}"
        return
    partition = matching[0]
    if not partition.up:
        yield f"launch.partition: {partition.name} takes no jobs now (its state is not UP): another of {names}, or wait"
    if partition.most_nodes is not None and order.all_nodes > partition.most_nodes:
        yield (
            f"fleet.nodes + fleet.spares = {order.all_nodes}: a job of {partition.name} may have {partition.most_nodes} nodes: "
            "--nodes, --spares"
        )
    limit_s = seconds_of(launch.time_limit) if launch.time_limit else None
    if limit_s is not None and partition.longest_s is not None and limit_s > partition.longest_s:
        yield (
            f"launch.time_limit: {launch.time_limit} is more than {partition.name} allows ({slurm_time(partition.longest_s)}): --time; the "
            "run queues itself again when its time is up"
        )
    yield from time_problems(launch)
    excluded = set(excluded_nodes(launch))
    usable = [node for node in nodes if node.usable and node.name not in excluded]
    fitting = [node for node in usable if node.gpus >= order.gpus_per_node]
    if len(usable) < order.all_nodes:
        yield (
            f"fleet.nodes + fleet.spares = {order.all_nodes}: {partition.name} has {len(nodes)} nodes, {len(usable)} of them usable (the "
            "others are down, drained or excluded): --nodes, --spares"
        )
    elif len(fitting) < order.all_nodes:
        most = max((node.gpus for node in usable), default=0)
        yield (
            f"launch.gpus_per_node: {order.all_nodes} nodes with {order.gpus_per_node} GPUs are requested, and {len(fitting)} have so many "
            f'(at most {most}): fleet.workers_per_node, launch.gpus_per_node, or runtime.device = "cpu"'
        )


def parse_partitions(text: str) -> list[SlurmPartition]:
    """Return the partitions in the output of ``scontrol show partition -o``; limits that are not set are ``None``.

    Raises ``EngineError`` for a malformed time.
    """
    parsed = []
    for line in text.splitlines():
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if "PartitionName" in fields:
            most, longest = fields.get("MaxNodes", "UNLIMITED"), fields.get("MaxTime", "UNLIMITED")
            parsed.append(
                SlurmPartition(
                    fields["PartitionName"],
                    fields.get("State") == "UP",
                    int(most) if most.isdecimal() else None,
                    None if longest in ("UNLIMITED", "NONE") else seconds_of(longest),
                    fields.get("Default") == "YES",
                )
            )
    return parsed


def parse_nodes(text: str) -> list[NodeFacts]:
    """Return the nodes in the output of ``sinfo -h -N -o '%N|%T|%G'``, each once, with state and number of GPUs.

    Not usable are nodes that are down, drained, failing, in maintenance, reserved, powered off or do not
    respond. Only idle ones are free.
    """
    parsed: dict[str, NodeFacts] = {}
    for line in text.splitlines():
        name, state, resources = (*line.split("|"), "", "")[:3]
        # Marks such as * (does not respond) and ~ (powered down) follow the state.
        word = re.sub(r"[^a-z].*", "", state.lower())
        usable = not word.startswith(_DOWN) and not state.endswith("*")
        gpus = sum(int(number) for number in re.findall(r"gpu(?::[A-Za-z][\w.-]*)?:(\d+)", resources))
        parsed[name] = NodeFacts(name, usable, usable and word == "idle", gpus)
    return list(parsed.values())


def refuse_second(run_dir: Path, last: str = "") -> None:
    """Raise ``EngineError`` if the run is queued or running already, by ``job_of``."""
    running = job_of(run_dir, last)
    if running is not None:
        raise second(run_dir, running)


def second(run_dir: Path, running: SlurmJob) -> EngineError:
    """Return the error for the submission of a run that has the job ``running``."""
    name = quote(str(run_dir))
    return EngineError(
        f"the run in {run_dir} is job {running.id} already ({running.sentence}): follow it with phalanx status {name}, or end it with "
        f"phalanx cancel {name}"
    )
