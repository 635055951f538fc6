"""The processes of a local fleet: started, supervised, restarted when they die, and ended.

A local fleet is a coordinator and one agent per "node"; on a cluster, the leading node runs the coordinator
and its own agent. This process starts them, each in a session of its own, and restarts the coordinator if it
dies. A node whose agent has died is restarted after its repair time, or sooner if too few are left to train
on. Ctrl-C is passed on to the coordinator as a request to save and stop. A process that dies again and again
without progress of the run is given up (``process/restarts.py``). The fleet then ends with a message rather
than wait for ever. If this process is killed, the kernel kills all of them.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.fleet.control.security import TOKEN_VARIABLES, SecurityError, make_token, require_two_tokens
from phalanx.fleet.control.succession.reign import HURRY_SIGNAL
from phalanx.fleet.control.transport import TransportError
from phalanx.fleet.core.messages import StopRun
from phalanx.fleet.core.requests import GIVEN_BACK
from phalanx.fleet.core.state import FleetPhase
from phalanx.fleet.node.launcher import Launcher, LocalFleet
from phalanx.process.child import Child, describe_exit, end_all
from phalanx.process.exit_codes import EXIT_CANNOT_START, EXIT_STOPPED, EXIT_SUPERSEDED
from phalanx.process.restarts import MOST_DEATHS, RestartPolicy, Restarts
from phalanx.process.this_process import StopOrders, on_stop_signals
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import STOP_WORDS, Ending, last_words
from phalanx.train.start.open_run import OpenRun

# Run a fleet on this machine.


def run_fleet(
    run: OpenRun,
    fleet: LocalFleet,
    while_running: Callable[[Callable[[], bool]], None],
    notify: Callable[[str], None] = lambda _words: None,
) -> Ending:
    """Run a local fleet to the run's end, and return how it ended. Its processes have ended on return.

    Makes tokens, removes an old fleet.json, and starts coordinator and agents. ``while_running`` is called once
    with a function that returns True once the run has ended, and returns after that. If it raises, the run is saved
    and stopped before the error is raised. ``notify`` prints the reactions to a request to stop. Ends after the
    copies to a store.
    """
    path = run.directory.path
    token = make_token(path)
    path_in(path).unlink(missing_ok=True)  # From the previous attempt.
    # Computed once: a restart must not fail because the user's model file is missing by then. The same holds
    # for the tokens: without their files, a restarted process must still be admitted.
    environment = {**rank_environment(run.spec.model.factory), TOKEN_VARIABLES["join"]: token}
    operator = {TOKEN_VARIABLES["operate"]: make_token(path, "operate")}
    require_two_tokens(token, operator[TOKEN_VARIABLES["operate"]])
    orders = StopOrders(notify, STOP_WORDS)
    processes = FleetProcesses(Launcher(run, fleet, environment, operator, orders), orders)
    try:
        with on_stop_signals(processes.request_stop):
            processes.start()
            orders.supervise(while_running, processes.ended, processes.request_stop)
            processes.wait_for_copies()
    finally:
        processes.end()
    return _ending(run, processes)


def _ending(run: OpenRun, processes: FleetProcesses) -> Ending:
    """Return how the run ended: finished if it has a result, failed with the reason, or else stopped.

    The first that applies counts: the result file, a process that was given up, a result in fleet.json, a stuck run, a
    failure in fleet.json. A second request to stop only marks a stopped run as unsaved.
    """
    fleet_file = processes.fleet_file()
    if run.directory.finished_result() is not None:
        return Ending("finished")
    if processes.gave_up:
        return Ending("failed", None, 1, _gave_up(run, processes))
    if fleet_file is not None and fleet_file.phase is FleetPhase.FINISHED and fleet_file.result_json:
        return Ending("finished")
    reason, unsaved_steps = ("", 0) if fleet_file is None else (fleet_file.reason, fleet_file.unsaved_steps)
    if processes.stuck:
        message = f"{processes.stuck} ({reason})" if reason else processes.stuck
        return Ending("failed", None, 1, message, unsaved_steps=unsaved_steps)
    if fleet_file is not None and fleet_file.phase is FleetPhase.FAILED:
        return Ending("failed", None, 1, reason, unsaved_steps=unsaved_steps)
    # The coordinator ended with code 0, so it finished or was stopped, and there is no result.
    at_once = processes.orders.made > 1
    return Ending("stopped", None, EXIT_STOPPED, reason, unsaved=at_once, unsaved_steps=unsaved_steps)


def _gave_up(run: OpenRun, processes: FleetProcesses) -> str:
    """Return the message about a fleet that was ended because a required process could not be kept alive."""
    name, path = processes.gave_up, run.directory.path
    if not path.exists():
        return (
            f"the run directory {path} is gone, and with it all that was saved there; restore it (is its disk mounted?), "
            "or start the run from scratch"
        )
    process = "the coordinator" if name == "coordinator" else f"the agent of {name}"
    message = f"{process} could not run"
    words = last_words(processes.launcher.log(name), message, prefix=f"{message}: ")
    if processes.hopeless:
        return words
    return f"{words}\nIt was started {MOST_DEATHS} times without progress of the run, so the fleet has been ended."


_POLL_S = 0.1
_COPIES_NOTICE_S = 2.0
_RETRY_NOTICE_S = 30.0
_LOOK_S, _STUCK_S = 1.0, 60.0
"""A fleet that cannot continue is ended after this time, in which an operator can admit nodes (``phalanx
fleet add``).
"""


# Supervision: detects dead processes, restarts them, and passes on requests to stop.


class _DeadAgent(NamedTuple):
    """The death of an agent, and when it may be restarted, by the monotonic clock; infinity means never."""

    how: str
    soonest_s: float
    usually_s: float
    by_itself: bool = False
    """True if it ended with code 0: most likely it was ordered to."""


@dataclass
class FleetProcesses:
    """The processes of a local fleet, and the state of their supervision."""

    launcher: Launcher
    orders: StopOrders
    coordinator: Child | None = None
    coordinator_due_s: float = 0.0
    coordinator_restarts: Restarts = field(init=False)
    agents: dict[str, Child] = field(default_factory=dict)
    dead: dict[str, _DeadAgent] = field(default_factory=dict)
    agent_restarts: dict[str, Restarts] = field(default_factory=dict)
    stop_sent: tuple[int, int] = (0, 0)
    """Process id of the coordinator that got stop requests, and their number."""
    over: bool = False
    superseded: bool = False
    """True if another node leads the run now; here, only the agents are supervised."""
    gave_up: str = ""
    """The process that was given up, if the fleet ended for that."""
    hopeless: bool = False
    """True if it reported that a restart would not help, so that there was none."""
    stopped_s: dict[int, float] = field(default_factory=dict)
    """Process id -> since when it has been suspended by a signal."""
    stuck: str = ""
    """Why the run was stopped, if that was not by the user."""
    looked_s: float = 0.0
    retry_notice_s: float = 0.0
    """Time of the next notice that the stop request cannot be sent to the leading node."""
    way_on_s: float = math.inf
    """The time when the fleet was last training, or about to."""

    def __post_init__(self) -> None:
        self.coordinator_restarts = self._new_restarts()

    @property
    def run(self) -> OpenRun:
        """The opened run directory."""
        return self.launcher.run

    @property
    def fleet(self) -> LocalFleet:
        """The fleet to start."""
        return self.launcher.fleet

    def _new_restarts(self) -> Restarts:
        return Restarts(RestartPolicy(self.fleet.times.first_pause_s))

    def start(self) -> None:
        """Start the coordinator and all agents; the agents poll fleet.json for its address."""
        self._start_coordinator()
        for name in self.fleet.names:
            self._start_agent(name)

    def ended(self) -> bool:
        """Supervise once, and return True once the run is over. Call it repeatedly.

        Restarts dead processes that are due, kills suspended ones, passes requests to stop on, starts nodes that an
        operator requested, and stops a run that is stuck.
        """
        self.orders.tell_new()
        if not self.over:
            self._kill_suspended()
            self._look_after_coordinator()
        if not self.over:
            self._pass_on_stop()
            self._look_after_agents()
            self._stop_if_stuck()
        return self.over

    def wait_for_copies(self) -> None:
        """Wait until the agents have ended, and with them their copies to the store, or the user requests the end
        again.

        Notify the user of a long wait and of missing copies. Does nothing without a store; no wait unless the run
        is over.
        """
        if not self.run.spec.checkpoint.store:
            return
        fleet_file, requests = self.fleet_file(), self.orders.made
        notice_s = time.monotonic() + _COPIES_NOTICE_S
        ended = not self.gave_up and fleet_file is not None and fleet_file.over
        while (
            ended
            and self.orders.made == requests < 2
            and any(a.exit_code() is None for a in self.agents.values())
        ):
            if time.monotonic() > notice_s:
                notice_s = math.inf
                self.orders.notify(
                    f"copying the last checkpoint to {self.run.spec.checkpoint.store}; a second request ends the run at once, and the next "
                    "start copies it"
                )
            time.sleep(_POLL_S)
        with suppress(OSError):
            standing = store_standing(self.run.spec, self.run.directory)
            if standing is not None and standing.behind:
                self.orders.notify(str(standing))

    def request_stop(self) -> None:
        """Count one request to save and stop. The next call of ``ended`` passes it on."""
        self.orders.made += 1

    def _kill_suspended(self) -> None:
        """Send SIGKILL to a coordinator or agent that has been suspended for ``times.stopped_s``; it is restarted
        later.
        """
        sessions = [session for session in (self.coordinator, *self.agents.values()) if session is not None]
        now_s, stopped = time.monotonic(), [session for session in sessions if session.is_suspended()]
        self.stopped_s = {session.pid: self.stopped_s.get(session.pid, now_s) for session in stopped}
        for session in stopped:
            if now_s - self.stopped_s[session.pid] >= self.fleet.times.stopped_s:
                session.signal(signal.SIGKILL)

    # --- the coordinator -----------------------------------------------------------------------

    def _look_after_coordinator(self) -> None:
        """Start the coordinator if it is due. If it has ended, decide by its exit code.

        The run is over if it finished or failed. A coordinator that cannot start gives the fleet up. A superseded one
        does so in a local fleet; elsewhere this node remains as a member. Any other death schedules a restart.
        """
        if self.superseded:
            fleet_file = self.fleet_file()
            self.over = fleet_file is not None and fleet_file.over
            return
        if self.coordinator is None:
            if time.monotonic() >= self.coordinator_due_s:
                self._start_coordinator()
            return
        code = self.coordinator.exit_code()
        if code is None:
            return
        self.coordinator.end()
        self.coordinator = None
        fleet_file = self.fleet_file()
        # Without fleet.json, code 1 may mean a failed run or a failed coordinator: the next one reads which
        # from the journal.
        is_final = code == 0 or self.run.directory.finished_result() is not None
        if is_final or (code == 1 and fleet_file is not None and fleet_file.over):
            self.over = True
        elif code == EXIT_SUPERSEDED and self.fleet.lead is None:
            # No other machine can lead a local fleet: the run was started again, or its claims were changed.
            self.over, self.gave_up, self.hopeless = True, "coordinator", True
        elif code == EXIT_SUPERSEDED:
            self.superseded, self.stop_sent = True, (0, 0)
            self.orders.notify(
                "another node leads the run now, and this one continues as its member: see phalanx status"
            )
        elif code == EXIT_CANNOT_START:
            self.over, self.gave_up, self.hopeless = True, "coordinator", True
        else:
            self._coordinator_died(fleet_file)

    def _coordinator_died(self, fleet_file: FleetFile | None) -> None:
        """Schedule the coordinator's restart, or give the fleet up after ten deaths in a row without progress of
        the run.
        """
        pause_s = self.coordinator_restarts.after_death(_standing(fleet_file))
        if pause_s is None:
            self.over, self.gave_up = True, "coordinator"
        else:
            self.coordinator_due_s = time.monotonic() + pause_s

    def _start_coordinator(self) -> None:
        """Start the coordinator, which got no request to stop yet; an ``OSError`` counts as its death."""
        self.stop_sent = 0, 0
        try:
            self.coordinator = self.launcher.coordinator()
        except OSError:
            # A missing run directory, no processes or no memory: all may be back in a moment.
            self._coordinator_died(None)

    def fleet_file(self) -> FleetFile | None:
        """Return the content of fleet.json, or None if it cannot be read."""
        with suppress(FleetFileError):
            return read_fleet_file(self.run.directory.path)
        return None

    def _pass_on_stop(self) -> None:
        """Send the coordinator one more of the user's requests: SIGTERM to save and stop, then ``HURRY_SIGNAL`` to
        end at once.

        Not before it has written fleet.json: until then the signal would kill it, and the file shows whether it has
        a request already. If another node leads, send the request there.
        """
        if self.superseded:
            self._send_stop_to_successor()
        if self.coordinator is None or self.stop_sent[1] >= min(self.orders.made, 2):
            return
        coordinator, fleet_file = self.coordinator, self.fleet_file()
        if fleet_file is None or fleet_file.coordinator_pid != coordinator.pid:
            return
        requests_sent = (
            self.stop_sent[1] if self.stop_sent[0] == coordinator.pid else int(fleet_file.stopping)
        )
        if requests_sent < self.orders.made:
            coordinator.signal(HURRY_SIGNAL if requests_sent else signal.SIGTERM)
            requests_sent += 1
        self.stop_sent = coordinator.pid, requests_sent

    def _send_stop_to_successor(self) -> None:
        """Send one more of the user's requests to the node that leads now, as ``phalanx fleet stop`` does.

        A failure is retried at the next call, with a notice every 30 s. If the user has made a second request, a
        failure ends this node instead.
        """
        requests_sent, fleet_file = self.stop_sent[1], self.fleet_file()
        if requests_sent >= min(self.orders.made, 2) or fleet_file is None or fleet_file.over:
            return
        run, lead = self.run, self.fleet.lead
        certificates = lead.certificates if lead else None
        try:
            credentials = credentials_of(
                run.directory.path, run.spec, run.attempt, certificates, ("operate",)
            )
            # A first request may have arrived although its answer was lost, and is repeated.
            asyncio.run(
                operate(fleet_file.coordinator, credentials, StopRun(never_at_once=requests_sent == 0))
            )
        except (SecurityError, TransportError) as error:
            if self.orders.made > 1:
                self.orders.notify(
                    f"this node ends; the run did not get the request, and continues if it can: {error}"
                )
                self.over = True
            elif time.monotonic() >= self.retry_notice_s:
                self.retry_notice_s = time.monotonic() + _RETRY_NOTICE_S
                self.orders.notify(
                    f"cannot send the stop request to the leading node, retrying; another request ends this node alone: {error}"
                )
        else:
            self.stop_sent = 0, requests_sent + 1

    # --- the agents ----------------------------------------------------------------------------

    def _look_after_agents(self) -> None:
        """Note agents that have died, and restart those that are due; these are due earlier if the fleet waits for nodes or none is left.
        Once fleet.json shows the run as over, none is restarted.

        A dead agent of a node that was given back is dropped if it ended by itself. In a local fleet with a readable fleet.json, give up
        (``over``, ``gave_up``) once every dead agent was given up and the fleet waits or has no agent left.
        """
        for name, agent in list(self.agents.items()):
            if agent.exit_code() is not None:
                code = agent.end()
                # An agent that ends by itself most likely got the end of the run: fleet.json will show it in
                # a moment.
                self._agent_died(
                    name, describe_exit(code), at_least_s=0.0 if code else self.fleet.times.farewell_s
                )
        if not self.dead:
            return
        fleet_file = self.fleet_file()
        if fleet_file is not None and fleet_file.over:
            return  # The coordinator is about to end too.
        # Others can train meanwhile, unless there are too few: then no other process will restart it.
        self._forget_given_back(fleet_file)
        at_once = not self.agents or (fleet_file is not None and fleet_file.phase is FleetPhase.WAITING)
        for name, dead in list(self.dead.items()):
            if time.monotonic() >= (dead.soonest_s if at_once else dead.usually_s):
                self.orders.notify(f"{name}: its agent {dead.how}; it is started again")
                self._start_agent(name)
        given_up = [name for name, dead in self.dead.items() if dead.soonest_s == math.inf]
        # On a cluster nodes may still join. If there never was a coordinator, the coordinator is at fault.
        hopeless = at_once and self.fleet.lead is None and fleet_file is not None
        if hopeless and given_up and len(given_up) == len(self.dead):
            self.over, self.gave_up = True, given_up[0]

    def _forget_given_back(self, fleet_file: FleetFile | None) -> None:
        """Forget the dead agents of nodes that were given back and ended by themselves: they are not restarted."""
        for member in fleet_file.members if fleet_file is not None else ():
            dead = self.dead.get(member.name)
            if member.role == GIVEN_BACK and dead is not None and dead.by_itself:
                del self.dead[member.name]
                self.agent_restarts.pop(member.name, None)

    def _grow(self, fleet_file: FleetFile) -> None:
        """Start nodes up to the operator's expected number, under the lowest free names; each start is announced.

        A node that was given back has a free name. Does nothing once the run is over.
        """
        if fleet_file.over:
            return
        existing = {*self.agents, *self.dead}
        missing = fleet_file.expected_nodes - len(existing)
        names = (name for number in count() if (name := f"node-{number}") not in existing)
        for name in islice(names, max(0, missing)):
            self.orders.notify(
                f"{name}: its agent is started, for {fleet_file.expected_nodes} nodes are requested"
            )
            self._start_agent(name)

    def _agent_died(self, name: str, how: str, at_least_s: float = 0.0) -> None:
        """Record an agent's death, and when to restart it: after a pause of at least ``at_least_s``, usually
        ``repair_s``.

        Given up, and announced, after ten deaths in a row without progress of the run. ``how`` describes the
        death.
        """
        self.agents.pop(name, None)
        restarts = self.agent_restarts.setdefault(name, self._new_restarts())
        pause_s = restarts.after_death(_standing(self.fleet_file()))
        now_s = time.monotonic()
        if pause_s is None:
            self.dead[name] = _DeadAgent(how, math.inf, math.inf)
            self.orders.notify(
                f"{name}: its agent {how}, for the {restarts.in_vain}th time without progress: given up"
            )
        else:
            pause_s = max(pause_s, at_least_s)
            usually_s = now_s + max(pause_s, self.fleet.repair_s)
            self.dead[name] = _DeadAgent(how, now_s + pause_s, usually_s, at_least_s > 0)

    def _start_agent(self, name: str) -> None:
        """Start a node's agent; an ``OSError`` counts as its death."""
        try:
            self.agents[name] = self.launcher.agent(name)
        except OSError as error:
            self._agent_died(name, f"could not be started ({error})")
        else:
            self.dead.pop(name, None)

    def _stop_if_stuck(self) -> None:
        """Request a stop if for a minute all nodes were spare or barred, which only an operator can change
        (``no_way_on``).

        Also starts the nodes that an operator requested. Only for a local fleet, before any request to stop, at
        most once a second.
        """
        now_s = time.monotonic()
        if self.fleet.lead is not None or self.orders.made or now_s < self.looked_s + _LOOK_S:
            return
        self.looked_s, fleet_file = now_s, self.fleet_file()
        if fleet_file is not None:
            self._grow(fleet_file)
        reason = no_way_on(fleet_file, len(self.agents)) if fleet_file is not None and not self.dead else ""
        if not reason:
            self.way_on_s = now_s
        elif now_s - self.way_on_s > _STUCK_S:
            self.stuck = reason
            self.orders.notify(f"stopping: {reason}")
            self.request_stop()

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """End every remaining process, workers included, and reap it.

        Agents get SIGTERM, and ``times.farewell_s`` seconds if fleet.json shows that the run is over; then
        SIGKILL, as the coordinator does at once.
        """
        fleet_file = self.fleet_file()
        agents_know = self.over and not self.gave_up and fleet_file is not None and fleet_file.over
        for agent in self.agents.values():
            # Also to agents that the coordinator did not meet before it ended: they would wait for it.
            agent.signal(signal.SIGTERM)
        end_all(self.agents.values(), self.fleet.times.farewell_s if agents_know else 0.0)
        if self.coordinator is not None:
            self.coordinator.end()


def _standing(fleet_file: FleetFile | None) -> tuple[FleetPhase, int, int] | None:
    """Return the run's position, to detect progress; None if it is unknown."""
    return None if fleet_file is None else (fleet_file.phase, fleet_file.epoch, fleet_file.step)


def no_way_on(fleet_file: FleetFile, agents: int) -> str:
    """Return why a waiting or forming fleet needs an operator's help: all its nodes are spare or barred.

    Empty if none is barred, one may still come, or the fleet trains. ``agents`` is their number.
    """
    barred = [member for member in fleet_file.members if member.role in ("quarantined", "drained")]
    # A lost or warming node may be a spare in a moment; a node without an agent is restarted.
    settled = len(barred) + sum(member.role == "spare" for member in fleet_file.members) == agents
    if fleet_file.phase not in (FleetPhase.WAITING, FleetPhase.FORMING) or not barred or not settled:
        return ""
    details = "; ".join(f"{member.name} is {member.role} ({member.reason[:200]})" for member in barred)
    return f"too few nodes are left to train on: {details}"
