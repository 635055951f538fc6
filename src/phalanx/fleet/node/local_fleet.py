"""Launches and supervises the processes of a fleet on this machine, each in a session of its own.

A local fleet is a coordinator and one agent per "node"; on a cluster, the node that leads runs the coordinator and its own agent.
This process starts them, starts the coordinator again if it dies, brings a node whose agent has died back after its repair time
(sooner if too few are left to train on), and passes Ctrl-C on to the coordinator as a request to save and stop. A process that dies
again and again without the run getting any further is given up (``process/restarts.py``), and the fleet ends with a message rather than
wait for it for ever. If this process is killed, the kernel kills all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.fleet.control.fleet_file import path_in
from phalanx.fleet.control.security import TOKEN_VARIABLES, make_token, require_two_tokens
from phalanx.fleet.core.state import FleetPhase
from phalanx.fleet.node.supervision.fleet_plan import LocalFleet
from phalanx.fleet.node.supervision.launcher import Launcher
from phalanx.fleet.node.supervision.processes import Processes
from phalanx.process.restarts import MOST_DEATHS
from phalanx.process.stop_signals import StopOrders, on_stop_signals
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import STOP_WORDS, Ending, last_words
from phalanx.train.lifecycle.worker import EXIT_STOPPED
from phalanx.train.start.open_run import OpenRun


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
