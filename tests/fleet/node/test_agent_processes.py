"""Real coordinator and agent processes, with stand-in workers whose end is known: whatever is killed or stopped, the run ends
with the state of an undisturbed one, and the processes that did not fail are the ones that were there before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from fleet.fleet_processes import FLEET, PATIENCE_S, Fleet, make_run, running_fleet
from fleet.stand_in_worker import state_after
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import FleetFile, Member
from phalanx.fleet.control.transport import TransportError
from phalanx.fleet.core.messages import Admit, RotateTokens, StopRun
from phalanx.run.directory.paths import RunDirectory, committed_steps, read_resolved, step_folder
from phalanx.run.read import to_table
from phalanx_process import alive

STEPS, HELD = 60, 20
MOST_LOST = 2
"""Steps: with a snapshot every step, at most the one before the newest is held by all."""


def member(seen: FleetFile, node: str) -> Member:
    return next(member for member in seen.members if member.name == node)


def holders(seen: FleetFile) -> list[str]:
    return sorted(member.name for member in seen.members if member.role == "member" and member.ranks)


def ends_well(fleet: Fleet) -> FleetFile:
    """Lets the workers go on; the state at the end must be that of an undisturbed run."""
    fleet.hold_at(None)
    assert fleet.result() == {"step": STEPS, "state": state_after(STEPS).hex()}
    seen = fleet.seen()
    assert seen is not None
    return seen


def restored_steps(fleet: Fleet) -> list[int]:
    """The step from which each epoch after the first resumed, as the workers print it."""
    lines = [line for line in fleet.logs().splitlines() if line.startswith("epoch ")]
    return [int(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("epoch 0 ")]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def wait_until_ended(pids: list[int]) -> None:
    """Wait until processes that were killed have ended, which the kernel does in its own time."""
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_an_undisturbed_run_ends_and_leaves_no_process(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD) as fleet:
        fleet.gathered(HELD)
        workers = [pid for node in fleet.agents for pid in fleet.workers(node)]
        assert len(workers) == 3
        assert ends_well(fleet).recoveries == 0
        for process in (*fleet.agents.values(), fleet.coordinator):
            assert process is not None
            assert process.wait(timeout=PATIENCE_S) == 0
        wait_until_ended(workers)  # an agent kills its workers, and waits half a second for them


def test_a_killed_worker_is_replaced_and_its_state_comes_from_its_nodes_memory(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD) as fleet:
        fleet.held(HELD)
        (survivor,), (victim,) = fleet.workers("node-0"), fleet.workers("node-1")
        os.kill(victim, signal.SIGKILL)
        fleet.held(HELD, epoch=1)
        assert fleet.workers("node-0") == [survivor]
        assert ends_well(fleet).recoveries == 1
        assert min(restored_steps(fleet)) >= HELD - MOST_LOST


def test_a_killed_node_is_replaced_by_the_spare_with_state_from_its_buddy(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD) as fleet:
        victim, survivor = holders(fleet.gathered(HELD))
        before = fleet.workers(survivor)
        fleet.kill_node(victim)
        seen = fleet.held(HELD, epoch=1)
        assert victim not in holders(seen)
        assert seen.ranks == 2
        assert fleet.workers(survivor) == before
        ends_well(fleet)
        assert min(restored_steps(fleet)) >= HELD - MOST_LOST


def test_without_a_spare_the_fleet_shrinks_at_once_and_takes_the_node_back_when_it_returns(
    tmp_path: Path,
) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD) as fleet:
        fleet.held(HELD)
        fleet.kill_node("node-1")
        assert fleet.held(HELD, epoch=1).ranks == 1
        fleet.start_agent("node-1")
        fleet.until(lambda seen: member(seen, "node-1").role in ("spare", "member"))
        ends_well(fleet)


def test_a_stopped_node_is_lost_after_its_lease_and_comes_back_as_another_incarnation(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD, lease_s=5.0) as fleet:
        victim, _ = holders(fleet.held(HELD))
        (orphan,) = fleet.workers(victim)
        for pid in (fleet.agents[victim].pid, orphan):
            os.kill(pid, signal.SIGSTOP)
        seen = fleet.held(HELD, epoch=1)
        assert victim not in holders(seen)
        assert member(seen, victim).role == "lost"
        # Once it runs, the agent kills the orphan at any moment.
        for pid in (orphan, fleet.agents[victim].pid):
            os.kill(pid, signal.SIGCONT)
        fleet.until(lambda seen: member(seen, victim).role != "lost")
        wait_until_ended([orphan])
        ends_well(fleet)


def test_a_stopped_worker_is_killed_by_its_agent_and_replaced(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD, worker_lease_s=3.0) as fleet:
        fleet.held(HELD)
        (victim,) = fleet.workers("node-1")
        os.kill(victim, signal.SIGSTOP)
        fleet.held(HELD, epoch=1)
        wait_until_ended([victim])
        # The coordinator's note depends on what it reads first: the worker's silence, a peer's collective, or the node's next heartbeat.
        wait_for(lambda: "was killed by SIGKILL by its agent" in fleet.logs())
        assert ends_well(fleet).recoveries == 1


def test_training_goes_on_without_the_coordinator_and_a_new_one_knows_what_the_old_one_knew(
    tmp_path: Path,
) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD) as fleet:
        before = fleet.gathered(HELD)
        workers = {node: fleet.workers(node) for node in fleet.agents}
        fleet.kill_coordinator()
        fleet.hold_at(2 * HELD)
        wait_for(lambda: (tmp_path / "progress").read_text() == str(2 * HELD))
        fleet.start_coordinator()
        after = fleet.until(lambda seen: seen.restarts == 1 and seen.step == 2 * HELD)
        assert holders(after) == holders(before)
        assert (after.epoch, after.recoveries) == (before.epoch, 0)
        assert {node: fleet.workers(node) for node in fleet.agents} == workers
        assert ends_well(fleet).epoch == before.epoch


def test_a_node_that_dies_while_there_is_no_coordinator_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD, lease_s=5.0) as fleet:
        victim, _ = holders(fleet.held(HELD))
        fleet.kill_coordinator()
        fleet.kill_node(victim)
        fleet.start_coordinator()
        seen = fleet.held(HELD, epoch=1)
        assert victim not in holders(seen)
        ends_well(fleet)


def test_a_killed_agent_takes_its_workers_with_it(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD) as fleet:
        victim, _ = holders(fleet.held(HELD))
        workers = fleet.workers(victim)
        fleet.agents[victim].kill()  # the agent alone, not its group
        fleet.agents.pop(victim).wait()
        wait_until_ended(workers)
        ends_well(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_several_faults_at_random_moments_change_nothing(seed: int, tmp_path: Path) -> None:
    import random

    chance = random.Random(seed)
    with running_fleet(tmp_path, nodes=3, spares=2, steps=300, lease_s=5.0, worker_lease_s=3.0) as fleet:
        fleet.until(lambda seen: seen.phase == "running")
        for _ in range(4):
            time.sleep(chance.uniform(0.0, 1.0))
            seen = fleet.seen()
            if seen is None or seen.over:
                break
            kind = chance.choice(["worker", "coordinator", "node", "stop"])
            node = chance.choice(sorted(fleet.agents))
            if kind == "coordinator":
                fleet.kill_coordinator()
                fleet.start_coordinator()
            elif kind == "node":
                fleet.kill_node(node)
                fleet.start_agent(node)
            else:
                for pid in fleet.workers(node):
                    with suppress(ProcessLookupError):  # it has ended since
                        os.kill(pid, signal.SIGKILL if kind == "worker" else signal.SIGSTOP)
        assert fleet.result()["state"] == state_after(300).hex()


def test_the_processes_explain_their_arguments() -> None:
    for module in ("phalanx.fleet.node.agent", "phalanx.fleet.control.coordinator"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
        )
        assert "--run-dir" in done.stdout


NVML_THAT_FINDS_NO_GPU_ANSWERING = """
class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    raise NVMLError("GPU is lost")

def nvmlShutdown():
    pass
"""


@pytest.mark.slow
def test_a_node_that_fails_its_checks_is_not_offered_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    broken = {"node-1": NVML_THAT_FINDS_NO_GPU_ANSWERING}
    with running_fleet(
        tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD, broken_gpus=broken, health_checks=True
    ) as fleet:
        seen = fleet.held(HELD)
        assert holders(seen) == ["node-0", "node-2"]
        unfit = member(seen, "node-1")
        assert (unfit.role, unfit.reason) == (
            "quarantined",
            "health: gpu: a GPU does not answer: GPU is lost",
        )
        assert ends_well(fleet).recoveries == 0


def test_without_health_checks_a_broken_gpu_is_not_noticed(tmp_path: Path) -> None:
    broken = {"node-1": NVML_THAT_FINDS_NO_GPU_ANSWERING}
    with running_fleet(
        tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD, broken_gpus=broken, health_checks=False
    ) as fleet:
        assert holders(fleet.held(HELD)) == ["node-0", "node-1"]


def test_a_node_whose_worker_died_is_checked_before_it_is_offered_again(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=HELD, health_checks=True) as fleet:
        victim = holders(fleet.gathered(HELD))[1]  # with a spare that is ready, it is not needed again
        (tmp_path / f"unfit-{victim}").touch()
        os.kill(fleet.workers(victim)[0], signal.SIGKILL)
        seen = fleet.until(lambda seen: member(seen, victim).role == "quarantined")
        assert member(seen, victim).reason == "health: worker 0: memory: 3 words read back wrongly"
        seen = fleet.held(HELD, epoch=1)
        assert victim not in holders(seen)
        credentials = credentials_of(tmp_path, read_resolved(RunDirectory(tmp_path)), 0, None)
        asyncio.run(operate(seen.coordinator, credentials, Admit(victim)))
        fleet.until(lambda seen: member(seen, victim).role == "spare")
        assert ends_well(fleet).recoveries == 1


def test_a_fleet_whose_nodes_are_all_barred_saves_what_only_their_memory_holds_before_it_ends(
    tmp_path: Path,
) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD) as fleet:
        seen = fleet.held(HELD)
        for node in fleet.agents:
            (tmp_path / f"unfit-{node}").touch()
            os.kill(fleet.workers(node)[0], signal.SIGKILL)
        fleet.until(lambda seen: [member.role for member in seen.members] == ["quarantined"] * 2)
        fleet.until(lambda seen: seen.phase == "waiting")
        credentials = credentials_of(tmp_path, read_resolved(RunDirectory(tmp_path)), 0, None)
        asyncio.run(operate(seen.coordinator, credentials, StopRun()))
        assert [agent.wait(timeout=PATIENCE_S) for agent in fleet.agents.values()] == [0, 0]
        seen = fleet.until(lambda seen: seen.over)
        (step,) = committed_steps(tmp_path / "checkpoints")
        assert step >= HELD - MOST_LOST
        folder = step_folder(tmp_path / "checkpoints", step)
        images = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
        assert images == [state_after(step)] * 2
        assert f"step {step} was saved from the memory of the nodes" in seen.reason
        assert seen.unsaved_steps == HELD - step


def test_agents_of_a_runs_last_start_take_part_in_the_next_one_with_their_memory_and_its_run_file(
    tmp_path: Path,
) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD) as fleet:
        fleet.held(HELD)
        before = [pid for node in fleet.agents for pid in fleet.workers(node)]
        fleet.kill_coordinator()
        spec = make_run(tmp_path, replace(FLEET, nodes=2, audit_every_steps=7), STEPS, attempts=2)
        fleet.start_coordinator("--attempt", "1")
        fleet.held(HELD, epoch=1)
        wait_until_ended(before)
        assert min(restored_steps(fleet)) >= HELD - MOST_LOST, "the agents' memory is there"
        # A run that is another one, in the same place: these agents are of no use to it.
        fleet.kill_coordinator()
        other = replace(spec, runtime=replace(spec.runtime, seed=spec.runtime.seed + 1))
        (tmp_path / "run.toml").write_text(tomli_w.dumps(to_table(other)))
        fleet.start_coordinator("--attempt", "2")
        assert [agent.wait(timeout=PATIENCE_S) for agent in fleet.agents.values()] == [1, 1]
        assert fleet.logs().count("belongs to another run now") >= 2


def test_tokens_are_changed_while_a_fleet_trains_and_the_earlier_ones_refused_after_the_grace(
    tmp_path: Path,
) -> None:
    spec_of = RunDirectory(tmp_path)
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=HELD) as fleet:
        seen = fleet.held(HELD)
        workers = [fleet.workers(node) for node in fleet.agents]
        first = credentials_of(tmp_path, read_resolved(spec_of), 0, None)
        assert asyncio.run(operate(seen.coordinator, first, RotateTokens(3600.0))) == "accepted"
        second = credentials_of(tmp_path, read_resolved(spec_of), 0, None)
        assert not {first.token, first.operator_token} & {second.token, second.operator_token}
        assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("fleet.*token")} == {0o600}
        fleet.until(lambda _: fleet.logs().count("has taken over the run's new token") == 2)
        fleet.hold_at(2 * HELD)
        seen = fleet.held(2 * HELD)
        assert (seen.epoch, [fleet.workers(node) for node in fleet.agents]) == (0, workers)
        assert asyncio.run(operate(seen.coordinator, first, RotateTokens(0.0))) == "accepted"
        for outdated in (first, second):
            with pytest.raises(TransportError, match="wrong token"):
                asyncio.run(operate(seen.coordinator, outdated, Admit("node-0")))
        # A process that is started now, and all ranks that meet, have the newest.
        fleet.kill_coordinator()
        os.kill(workers[0][0], signal.SIGKILL)
        fleet.start_coordinator()
        fleet.held(2 * HELD, epoch=1)
        ends_well(fleet)


def test_agents_that_no_coordinator_leads_any_more_stop_their_workers_and_end_with_the_reason(
    tmp_path: Path,
) -> None:
    with running_fleet(
        tmp_path, nodes=1, steps=STEPS, hold_at=HELD, coordinator_first=True, coordinator_lease_s=5.0
    ) as fleet:
        fleet.held(HELD)
        (agent,), workers = fleet.agents.values(), fleet.workers("node-0")
        fleet.kill_coordinator()
        assert agent.wait(timeout=PATIENCE_S) == 1
        wait_until_ended(workers)
        assert "error: node node-0: no coordinator for" in fleet.logs()


AN_HOUR_LATE = """
import time
unix_s = time.time
time.time = lambda: unix_s() - 3600
"""


@pytest.mark.slow
def test_a_node_whose_clock_is_wrong_is_kept_out_and_its_log_has_the_reason(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=1, hold_at=5) as fleet:
        (fleet.modules_of("node-1") / "sitecustomize.py").write_text(AN_HOUR_LATE)
        fleet.start_agent("node-1")
        fleet.until(lambda seen: "clock apart" in dict(seen.refused))
        fleet.hold_at(None)
        assert fleet.result()["step"] == 60
        seen = fleet.seen()
        assert seen is not None
        assert [member.name for member in seen.members] == ["node-0"]
        reason = f"the clock of {socket.gethostname()} is 3600 s behind the coordinator's: set it"
        wait_for(lambda: reason in (tmp_path / "logs" / "node-1.log").read_text())
