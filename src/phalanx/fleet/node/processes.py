"""The processes of a local fleet: started, looked after, restarted when they die, and ended.

A local fleet is a coordinator and one agent per "node"; on a cluster, the node that leads runs the coordinator and its own agent. This
process starts them, each in a session of its own, starts the coordinator again if it dies, brings a node whose agent has died back after
its repair time (sooner if too few are left to train on), and passes Ctrl-C on to the coordinator as a request to save and stop. A process
that dies again and again without progress of the run is given up (``process/restarts.py``), and the fleet ends with a message rather than
wait for it for ever. If this process is killed, the kernel kills all of them.
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
from phalanx.fleet.control.succession.reign import EXIT_CANNOT_START, EXIT_SUPERSEDED, HURRY_SIGNAL
from phalanx.fleet.control.transport import TransportError
from phalanx.fleet.core.messages import StopRun
from phalanx.fleet.core.requests import GIVEN_BACK
from phalanx.fleet.core.state import FleetPhase
from phalanx.fleet.node.launcher import Launcher, LocalFleet
from phalanx.process.child import Child, describe_exit, end_all
from phalanx.process.restarts import MOST_DEATHS, RestartPolicy, Restarts
from phalanx.process.stop_signals import StopOrders, on_stop_signals
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import STOP_WORDS, Ending, last_words
from phalanx.train.lifecycle.worker import EXIT_STOPPED
from phalanx.train.start.open_run import OpenRun

# Run a fleet on this machine.


def run_fleet(
    run: OpenRun,
    fleet: LocalFleet,
    while_running: Callable[[Callable[[], bool]], None],
    tell: Callable[[str], None] = lambda _words: None,
) -> Ending:
    """Runs a fleet to the run's end.

    Args:
        run: The opened run directory; its ``spec.fleet`` must say the same number of nodes.
        fleet: What to start.
        while_running: Called once with a function that tells whether the run has ended; returns after it has (it shows
            the run's progress meanwhile). Whatever it raises asks the run to save and stop, and is raised when it has.
        tell: Tells the user that a request to stop was heard, and what comes of it.
    """
    path = run.directory.path
    token = make_token(path)
    path_in(path).unlink(missing_ok=True)  # of the attempt before
    # Computed once: a restart must not fail because the user's model file is gone meanwhile.
    # The tokens go along: that their files are removed meanwhile must not keep a restarted process out.
    environment = {**rank_environment(run.spec.model.factory), TOKEN_VARIABLES["join"]: token}
    operator = {TOKEN_VARIABLES["operate"]: make_token(path, "operate")}
    require_two_tokens(token, operator[TOKEN_VARIABLES["operate"]])
    orders = StopOrders(tell, STOP_WORDS)
    processes = Processes(Launcher(run, fleet, environment, operator, orders), orders)
    try:
        with on_stop_signals(processes.ask_to_stop):
            processes.start()
            try:
                while_running(processes.ended)
            except BaseException:
                if not processes.orders.made:
                    processes.ask_to_stop()
                processes.wait()
                raise
            processes.wait()
            processes.wait_for_copies()
    finally:
        processes.end()
    return _ending(run, processes)


def _ending(run: OpenRun, processes: Processes) -> Ending:
    seen = processes.seen()
    if run.directory.finished_result() is not None:
        return Ending("finished")
    if processes.gave_up:
        return Ending("failed", None, 1, _gave_up(run, processes))
    if seen is not None and seen.phase is FleetPhase.FINISHED and seen.result_json:
        return Ending("finished")
    reason, unsaved_steps = ("", 0) if seen is None else (seen.reason, seen.unsaved_steps)
    if processes.stuck:
        why = f"{processes.stuck} ({reason})" if reason else processes.stuck
        return Ending("failed", None, 1, why, unsaved_steps=unsaved_steps)
    if seen is not None and seen.phase is FleetPhase.FAILED:
        return Ending("failed", None, 1, reason, unsaved_steps=unsaved_steps)
    # The coordinator ended with code 0, so it finished or was stopped, and there is no result.
    at_once = processes.orders.made > 1
    return Ending("stopped", None, EXIT_STOPPED, reason, unsaved=at_once, unsaved_steps=unsaved_steps)


def _gave_up(run: OpenRun, processes: Processes) -> str:
    """The text for the user about a fleet that was ended because a process that it needs could not be kept alive."""
    name, path = processes.gave_up, run.directory.path
    if not path.exists():
        return (
            f"the run directory {path} is gone, and with it all that was saved there; bring it back (is its disk mounted?), "
            "or start the run anew"
        )
    what = "the coordinator" if name == "coordinator" else f"the agent of {name}"
    why = f"{what} could not run"
    words = last_words(processes.launcher.log(name), why, prefix=f"{why}: ")
    if processes.hopeless:
        return words
    return f"{words}\nIt was started {MOST_DEATHS} times without the run getting any further, so the fleet has been ended."


_POLL_S = 0.1
_TELL_COPIES_S = 2.0
_ASK_AGAIN_S = 30.0
_LOOK_S, _STUCK_S = 1.0, 60.0
"""A fleet that has no way on is ended after this time, in which an operator can let nodes in (``phalanx fleet add``)."""


# Supervision: which process has died, which is started again and when, and which is asked to stop.


class _DeadAgent(NamedTuple):
    """The death of an agent, and when it may be started again, by the monotonic clock; never: infinity."""

    how: str
    soonest_s: float
    usually_s: float
    by_itself: bool = False
    """It ended with code 0: most likely it was told to."""


@dataclass
class Processes:
    """The processes of a local fleet, and the state of their supervision."""

    launcher: Launcher
    orders: StopOrders
    coordinator: Child | None = None
    coordinator_due_s: float = 0.0
    coordinator_restarts: Restarts = field(init=False)
    agents: dict[str, Child] = field(default_factory=dict)
    dead: dict[str, _DeadAgent] = field(default_factory=dict)
    agent_restarts: dict[str, Restarts] = field(default_factory=dict)
    stop_told: tuple[int, int] = (0, 0)
    """Process id of the coordinator that was told to stop, and how many times."""
    over: bool = False
    superseded: bool = False
    """Another node leads the run now; here, only the agents are looked after."""
    gave_up: str = ""
    """The process that was given up, if the fleet ended for that."""
    hopeless: bool = False
    """It said that another start would find the same, so that there was none."""
    stopped_s: dict[int, float] = field(default_factory=dict)
    """Since when a process has been seen stopped by a signal."""
    stuck: str = ""
    """Why the run was asked to stop, if that was not by the user."""
    looked_s: float = 0.0
    ask_again_s: float = 0.0
    """When the user is told again that the node that leads cannot be asked to stop."""
    way_on_s: float = math.inf
    """The time when the fleet could last be seen to train, or to be about to."""

    def __post_init__(self) -> None:
        self.coordinator_restarts = self._new_restarts()

    @property
    def run(self) -> OpenRun:
        """The opened run directory."""
        return self.launcher.run

    @property
    def fleet(self) -> LocalFleet:
        """What was to be started."""
        return self.launcher.fleet

    def _new_restarts(self) -> Restarts:
        return Restarts(RestartPolicy(self.fleet.times.first_pause_s))

    def start(self) -> None:
        """Starts the coordinator and all agents; the agents poll fleet.json for its address."""
        self._start_coordinator()
        for name in self.fleet.names:
            self._start_agent(name)

    def ended(self) -> bool:
        """Restarts what has died and is to come back; returns True once the run is over. Call it again and again."""
        self.orders.tell_new()
        if not self.over:
            self._kill_what_was_stopped()
            self._look_after_coordinator()
        if not self.over:
            self._hand_on_stop()
            self._look_after_agents()
            self._look_for_a_way_on()
        return self.over

    def wait(self) -> None:
        """Waits until the run is over."""
        while not self.ended():
            time.sleep(_POLL_S)

    def wait_for_copies(self) -> None:
        """Waits until the agents have brought to the store what the run has saved, or the user asks once more to end; says what is not there."""
        if not self.run.spec.checkpoint.store:
            return
        seen, asked = self.seen(), self.orders.made
        told_s = time.monotonic() + _TELL_COPIES_S
        ended = not self.gave_up and seen is not None and seen.over
        while (
            ended
            and self.orders.made == asked < 2
            and any(a.exit_code() is None for a in self.agents.values())
        ):
            if time.monotonic() > told_s:
                told_s = math.inf
                self.orders.notify(
                    f"copying the last checkpoint to {self.run.spec.checkpoint.store}; asked once more, the run ends at once, and the next "
                    "start copies it"
                )
            time.sleep(_POLL_S)
        with suppress(OSError):
            standing = store_standing(self.run.spec, self.run.directory)
            if standing is not None and standing.behind:
                self.orders.notify(str(standing))

    def ask_to_stop(self) -> None:
        """Counts one request to save and stop; it is passed on by the next call of ``ended``."""
        self.orders.made += 1

    def _kill_what_was_stopped(self) -> None:
        """Kills a coordinator or agent that somebody has stopped and not continued for long: it does no work, and a new one will."""
        sessions = [one for one in (self.coordinator, *self.agents.values()) if one is not None]
        now_s, stopped = time.monotonic(), [one for one in sessions if one.is_suspended()]
        self.stopped_s = {one.pid: self.stopped_s.get(one.pid, now_s) for one in stopped}
        for session in stopped:
            if now_s - self.stopped_s[session.pid] >= self.fleet.times.stopped_s:
                session.signal(signal.SIGKILL)

    # --- the coordinator -----------------------------------------------------------------------

    def _look_after_coordinator(self) -> None:
        if self.superseded:
            seen = self.seen()
            self.over = seen is not None and seen.over
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
        seen = self.seen()
        # Without fleet.json, code 1 may be of a run that failed or of a coordinator that did: the next one knows from the journal.
        done = code == 0 or self.run.directory.finished_result() is not None
        if done or (code == 1 and seen is not None and seen.over):
            self.over = True
        elif code == EXIT_SUPERSEDED and self.fleet.lead is None:
            # No other machine can lead a local fleet: somebody started the run again, or changed its claims.
            self.over, self.gave_up, self.hopeless = True, "coordinator", True
        elif code == EXIT_SUPERSEDED:
            self.superseded, self.stop_told = True, (0, 0)
            self.orders.notify(
                "another node leads the run now, and this one trains on as its member: phalanx status says which"
            )
        elif code == EXIT_CANNOT_START:
            self.over, self.gave_up, self.hopeless = True, "coordinator", True
        else:
            self._coordinator_died(seen)

    def _coordinator_died(self, seen: FleetFile | None) -> None:
        pause_s = self.coordinator_restarts.after_death(_standing(seen))
        if pause_s is None:
            self.over, self.gave_up = True, "coordinator"
        else:
            self.coordinator_due_s = time.monotonic() + pause_s

    def _start_coordinator(self) -> None:
        self.stop_told = 0, 0
        try:
            self.coordinator = self.launcher.coordinator()
        except OSError:
            # A run directory that is gone, no processes or memory left: all may be back in a moment.
            self._coordinator_died(None)

    def seen(self) -> FleetFile | None:
        """fleet.json, if it can be read."""
        with suppress(FleetFileError):
            return read_fleet_file(self.run.directory.path)
        return None

    def _hand_on_stop(self) -> None:
        """Passes the user's requests on to the coordinator: the first is to save and stop, a second to end at once.

        Not before it has written fleet.json: until then the signal would kill it, and the file says whether it has learned of
        the request from its journal.
        """
        if self.superseded:
            self._ask_successor_to_stop()
        if self.coordinator is None or self.stop_told[1] >= min(self.orders.made, 2):
            return
        coordinator, seen = self.coordinator, self.seen()
        if seen is None or seen.coordinator_pid != coordinator.pid:
            return
        told = self.stop_told[1] if self.stop_told[0] == coordinator.pid else int(seen.stopping)
        if told < self.orders.made:
            coordinator.signal(HURRY_SIGNAL if told else signal.SIGTERM)
            told += 1
        self.stop_told = coordinator.pid, told

    def _ask_successor_to_stop(self) -> None:
        """Passes the user's requests on to the node that leads now, as ``phalanx fleet stop`` does."""
        asked, seen = self.stop_told[1], self.seen()
        if asked >= min(self.orders.made, 2) or seen is None or seen.over:
            return
        run, lead = self.run, self.fleet.lead
        certificates = lead.certificates if lead else None
        try:
            shown = credentials_of(run.directory.path, run.spec, run.attempt, certificates, ("operate",))
            # A first request may have come there although its answer did not come here, and is made again.
            asyncio.run(operate(seen.coordinator, shown, StopRun(never_at_once=asked == 0)))
        except (SecurityError, TransportError) as error:
            if self.orders.made > 1:
                self.orders.notify(
                    f"this node ends; the run could not be told, and goes on where it can: {error}"
                )
                self.over = True
            elif time.monotonic() >= self.ask_again_s:
                self.ask_again_s = time.monotonic() + _ASK_AGAIN_S
                self.orders.notify(
                    f"cannot ask the node that leads to stop, and tries again; asked once more, this node ends by itself: {error}"
                )
        else:
            self.stop_told = 0, asked + 1

    # --- the agents ----------------------------------------------------------------------------

    def _look_after_agents(self) -> None:
        for name, agent in list(self.agents.items()):
            if agent.exit_code() is not None:
                code = agent.end()
                # One that ends by itself was most likely told that the run is over: fleet.json will say so in a moment.
                self._agent_died(
                    name, describe_exit(code), at_least_s=0.0 if code else self.fleet.times.farewell_s
                )
        if not self.dead:
            return
        seen = self.seen()
        if seen is not None and seen.over:
            return  # the coordinator is about to end too
        # Others can train on meanwhile, unless there are too few: then nobody else will start it.
        self._let_go(seen)
        wanted = not self.agents or (seen is not None and seen.phase is FleetPhase.WAITING)
        for name, dead in list(self.dead.items()):
            if time.monotonic() >= (dead.soonest_s if wanted else dead.usually_s):
                self.orders.notify(f"{name}: its agent {dead.how}; it is started again")
                self._start_agent(name)
        given_up = [name for name, dead in self.dead.items() if dead.soonest_s == math.inf]
        # On a cluster nodes may still come; and while no coordinator was ever there, it is the coordinator that is at fault.
        hopeless = wanted and self.fleet.lead is None and seen is not None
        if hopeless and given_up and len(given_up) == len(self.dead):
            self.over, self.gave_up = True, given_up[0]

    def _let_go(self, seen: FleetFile | None) -> None:
        """Forgets the nodes that were given back: they are not started again, unless more nodes are wanted later."""
        for member in seen.members if seen is not None else ():
            dead = self.dead.get(member.name)
            if member.role == GIVEN_BACK and dead is not None and dead.by_itself:
                del self.dead[member.name]
                self.agent_restarts.pop(member.name, None)

    def _grow(self, seen: FleetFile) -> None:
        """Starts as many nodes as an operator wants the fleet to have: those that were given back first, then new ones."""
        if seen.over:
            return
        there = {*self.agents, *self.dead}
        missing = seen.expected_nodes - len(there)
        names = (name for number in count() if (name := f"node-{number}") not in there)
        for name in islice(names, max(0, missing)):
            self.orders.notify(f"{name}: its agent is started, for {seen.expected_nodes} nodes are wanted")
            self._start_agent(name)

    def _agent_died(self, name: str, how: str, at_least_s: float = 0.0) -> None:
        self.agents.pop(name, None)
        restarts = self.agent_restarts.setdefault(name, self._new_restarts())
        pause_s = restarts.after_death(_standing(self.seen()))
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
        try:
            self.agents[name] = self.launcher.agent(name)
        except OSError as error:
            self._agent_died(name, f"could not be started ({error})")
        else:
            self.dead.pop(name, None)

    def _look_for_a_way_on(self) -> None:
        """Asks the run to stop if it waits for nodes that only an operator can give it, and nobody has for a while."""
        now_s = time.monotonic()
        if self.fleet.lead is not None or self.orders.made or now_s < self.looked_s + _LOOK_S:
            return
        self.looked_s, seen = now_s, self.seen()
        if seen is not None:
            self._grow(seen)
        why = no_way_on(seen, len(self.agents)) if seen is not None and not self.dead else ""
        if not why:
            self.way_on_s = now_s
        elif now_s - self.way_on_s > _STUCK_S:
            self.stuck = why
            self.orders.notify(f"stopping: {why}")
            self.ask_to_stop()

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Waits a moment for the agents to exit, then kills every process that is left, workers included."""
        seen = self.seen()
        told = self.over and not self.gave_up and seen is not None and seen.over
        for agent in self.agents.values():
            # Also to those that the coordinator did not meet before it ended: they would wait for it.
            agent.signal(signal.SIGTERM)
        end_all(self.agents.values(), self.fleet.times.farewell_s if told else 0.0)
        if self.coordinator is not None:
            self.coordinator.end()


def _standing(seen: FleetFile | None) -> tuple[FleetPhase, int, int] | None:
    """The run's place, so that progress shows; None if nobody knows."""
    return None if seen is None else (seen.phase, seen.epoch, seen.step)


def no_way_on(seen: FleetFile, agents: int) -> str:
    """Why a fleet that waits will wait for ever unless an operator helps; empty if it need not, or trains."""
    barred = [member for member in seen.members if member.role in ("quarantined", "drained")]
    # A node that is lost or warming may be a spare in a moment; one without an agent is brought back.
    settled = len(barred) + sum(member.role == "spare" for member in seen.members) == agents
    if seen.phase not in (FleetPhase.WAITING, FleetPhase.FORMING) or not barred or not settled:
        return ""
    named = "; ".join(f"{member.name} is {member.role} ({member.why[:200]})" for member in barred)
    return f"too few nodes are left to train on: {named}"
