"""Runs on hosts that are reached by ssh, or in the background of this machine: no scheduler, one session a host.

``bare`` checks, starts and signals the sessions; ``hosts`` writes their scripts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import NoReturn

from phalanx.launch.engines import bare, submission
from phalanx.launch.engines.engine import JobStanding, SubmitReport, SubmitRequest, recorded_run
from phalanx.launch.engines.hosts import HERE, Host, network_of, read_hosts, start_script
from phalanx.launch.engines.order import EngineError, LaunchOrder, refuse_for, writing
from phalanx.launch.planner import PricedNodes, price_or_reason, too_slow
from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.spec import RunSpec

_CANNOT_START = "this run cannot start"
_THIS_MACHINE = Host("this-machine", HERE, 0, "127.0.0.1")


@dataclass(frozen=True)
class HostsEngine:
    """``launch.engine = "ssh"``, and ``"local"``, whose only host is this machine."""

    name: str
    needs_nodes: bool
    has_hosts: bool
    options: frozenset[str] = frozenset()
    has_queue: bool = False

    def prepare(self, spec: RunSpec, working_dir: Path) -> tuple[RunSpec, list[str]]:
        """Return the run with its directory."""
        return submission.with_run_dir(spec, working_dir), []

    def doubts(self, spec: RunSpec, working_dir: Path) -> Iterator[str]:
        """Yield missing data."""
        return submission.missing_data(spec, working_dir)

    def submit(self, spec: RunSpec, working_dir: Path, request: SubmitRequest) -> SubmitReport:
        """Verify the hosts, record the submission, and start the run on them, detached. With ``dry_run`` only
        return the scripts.

        Takes as many hosts as the run needs, from the first. Raises ``EngineError`` with every reason against it.
        """
        order = submission.order_of(spec, working_dir)
        listed = hosts_in(order, order.launch.hosts) if self.has_hosts else [_THIS_MACHINE]
        # As many as the run needs, spares included; all if there are fewer, which the checks report.
        hosts = listed[: order.all_nodes] if self.has_hosts else listed
        scripts = {host.name: start_script(order, host, hosts[0], "WORD") for host in hosts}
        if request.dry_run:
            refuse_for(bare.problems(order, hosts), _CANNOT_START)
            text = "\n".join(f"# on {name}\n{script}" for name, script in scripts.items())
            return SubmitReport({"scripts": scripts, "run_dir": spec.run_dir}, text)
        where = f"{len(hosts)} hosts" if self.has_hosts else "this machine"
        if finished := submission.finished_problems(order, spec):
            # Hosts are not contacted: that would write into the finished run's directory.
            refuse_for([*finished, *bare.problems(order, hosts)], _CANNOT_START)
        with submission.only_submission(order):
            spec, price = self.verified(order, spec, listed, hosts)
            submission.write_files(order, spec, scripts[hosts[0].name])
            with submission.recorded(order, self.name, where, hosts[0].name) as made:
                bare.start(order, hosts)
        lost = {} if price is None else {"lost_s": price.lost_s, "good": price.certified}
        lines = [
            f"started on {where}, and needs this terminal no more; run directory {order.run_dir}",
            *([] if price is None else [f"  placement: {price.sentence}"]),
            submission.how_to_follow(order.run_dir),
        ]
        return SubmitReport({**asdict(made), "run_dir": str(order.run_dir), **lost}, "\n".join(lines))

    def verified(
        self, order: LaunchOrder, spec: RunSpec, listed: list[Host], hosts: list[Host]
    ) -> tuple[RunSpec, PricedNodes | None]:
        """Return the run as it can start on the first ``hosts`` of those ``listed``, with the price of that
        placement if it is known.

        If ``launch.unit`` is open, unit and order come from the price. The price, or why there is none, is
        written into the run's folder; for this machine alone neither. The mark of an earlier stop is removed.
        Raises ``EngineError`` with everything that keeps the run from starting.
        """
        earlier = recorded_run(order.run_dir)
        if earlier is not None:
            earlier.refuse_second()
        submission.forget_stopped(order)
        wrong = bare.preflight(order, hosts)
        refuse_for(wrong, _CANNOT_START)
        if not self.has_hosts:
            return spec, None
        names = [host.name for host in hosts]
        price, why_not = price_or_reason(lambda planner: planner.price_of(spec, network_of(listed), names))
        if spec.launch.most_lost_ms:
            slow = too_slow(spec, price) if price else unpriced(spec, why_not)
            refuse_for([slow] if slow else [], _CANNOT_START)
        if price is not None and not spec.launch.unit:
            spec = replace(spec, launch=replace(spec.launch, unit=price.unit, order=price.order))
        sentence = price.sentence if price else f"not verified: {why_not}"
        with writing(order.price_file):
            write_atomically(order.price_file, f"{sentence}\n".encode())
        return spec, price

    def jobs(self, namespace: str) -> NoReturn:  # noqa: ARG002
        """Raise ``EngineError``: hosts have no queue."""
        raise EngineError(
            f"--on {self.name}: hosts have no queue; phalanx runs FOLDER lists the runs in a folder"
        )

    def queued(self, run_dir: Path) -> None:
        """Return ``None``: hosts have no queue."""

    def submitted(self, run_dir: Path, made: submission.Submitted) -> HostsRun:
        """Return the run with its sessions."""
        return HostsRun(run_dir, made, self.has_hosts)


@dataclass(frozen=True)
class HostsRun:
    """A run whose nodes are sessions on hosts."""

    run_dir: Path
    made: submission.Submitted
    has_hosts: bool
    requeues: bool = False
    holds_nodes: bool = False
    start_mark: str = "job.sh"

    @property
    def title(self) -> str:
        """The run with its hosts."""
        return f"run on {self.made.job} ({self.made.engine})"

    @property
    def log_name(self) -> str:
        """The log of the host that leads."""
        return f"{self.made.leader}.log"

    def standing(self) -> JobStanding | None:
        """Return the state of the sessions; ``None`` if none is there and all hosts answer."""
        doing = bare.sentence(self.run_dir)
        return None if doing is None else JobStanding(self.title, doing)

    def remaining(self) -> tuple[bool, list[str]]:
        """Return whether a session is there, and the hosts that do not answer."""
        there, wrong = bare.alive(self.run_dir)
        return bool(there), wrong

    def refuse_second(self) -> None:
        """Raise ``EngineError`` if a session of the run is there, or a host does not answer."""
        if (doing := bare.sentence(self.run_dir)) is not None:
            name = quote(str(self.run_dir))
            raise EngineError(
                f"the run in {self.run_dir} is {doing} already: follow it with phalanx status {name}, or end it with phalanx cancel {name}"
            )

    def request_stop(self, reign: int | None) -> bool:
        """Send SIGTERM to the sessions and return True if no coordinator leads yet (``reign`` None).

        Otherwise only return False: its coordinator ends the run.
        """
        if reign is None:
            bare.end(self.run_dir, bare.started_on(self.run_dir), signal.SIGTERM)
        return reign is None

    def end_now(self) -> None:
        """Kill the sessions. Raises ``EngineError`` naming the hosts that do not answer."""
        _, wrong = bare.end(self.run_dir, bare.started_on(self.run_dir), signal.SIGKILL)
        refuse_for(wrong, "not ended everywhere")

    def demand_resizable(self) -> None:
        """Return: hosts leave a run freely."""

    def release(self, nodes: set[str]) -> dict[str, tuple[str, ...]]:  # noqa: ARG002
        """Return no jobs: nobody else waits for the hosts."""
        return {}

    def prepare_joining(self, by: int, notify: Callable[[str], None]) -> None:
        """Return ``None``: hosts are named by ``--hosts``."""

    def cancel_joining(self, *, waiting_only: bool = False) -> None:
        """Return: hosts that join are sessions of the run itself."""


SSH = HostsEngine("ssh", needs_nodes=True, has_hosts=True, options=frozenset({"hosts"}))
LOCAL = HostsEngine("local", needs_nodes=False, has_hosts=False)


def hosts_in(order: LaunchOrder, path: str) -> list[Host]:
    """Return the hosts in the file ``path``, relative to the working directory.

    Raises ``EngineError`` if the path is empty, or the file is unreadable, malformed, or names no host.
    """
    if not path:
        raise EngineError("which hosts? --hosts FILE, or launch.hosts in the run file")
    try:
        hosts = read_hosts(read_small(order.working_dir / path, follow=True).decode("utf-8-sig"))
    except OSError as error:
        raise EngineError(f"launch.hosts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EngineError(f"launch.hosts: {path} is no text: write one host a line") from error
    if not hosts:
        raise EngineError(f"launch.hosts: {path} names no host")
    return hosts


def unpriced(spec: RunSpec, why_not: str) -> str:
    """Return why hosts without a price are not used where a limit was set."""
    return f"launch.most_lost_ms = {spec.launch.most_lost_ms:g} cannot be verified: {why_not}. Or take the limit out"
