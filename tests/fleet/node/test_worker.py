"""Workers that lose peers, and go on in the same process with the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from driven_workers import PATIENCE_S, PROGRAM, Driver, Node
from fleet.small_fleets import settings
from phalanx.fleet.control.fleet_file import ClaimRegister
from phalanx.fleet.core.commands import FromDisk, FromMemory
from phalanx.fleet.core.messages import Holder
from phalanx.fleet.core.succession import Claim
from phalanx.fleet.node.rank.worker import outcome_of
from phalanx.fleet.node.worker_link import (
    CheckpointCommitted,
    Doubted,
    EpochBroken,
    HoldSaves,
    InjectFault,
    StepEnded,
    Unfit,
)
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Finished
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import FleetSpec, ParallelSpec, RunSpec
from phalanx.train.lifecycle.observers import ObserverError
from run.specs import replace_at
from tiny_runs import make_dataset, tiny_run, train_on_this_rank

STEPS = 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "bytes")


def claim_epoch(driver: Driver, epoch: int) -> None:
    """A coordinator has begun ``epoch``."""
    register = ClaimRegister(RunDirectory(Path(driver.spec.run_dir)), 0)
    assert register.make(Claim(1, 1, "", f"epoch {epoch}", settings(2), epoch=epoch))


def a_run(dataset: Path, run_dir: Path) -> RunSpec:
    """Two micro-batches to a slot, between which an epoch may break; and steps not so short that the last is over before a node is lost."""
    return tiny_run(dataset, run_dir, steps=STEPS, micro_batch_size=1)


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> str:
    spec = a_run(dataset, tmp_path_factory.mktemp("undisturbed") / "run")
    (result,) = ranks.run(1, train_on_this_rank, spec)
    return str(result["weights_sha256"])


@pytest.fixture
def make_driver(dataset: Path, tmp_path: Path) -> Iterator[Any]:
    """Workers in processes of their own."""
    made: list[Driver] = []

    def make(
        nodes: int,
        fleet: FleetSpec | None = None,
        every_steps: int | None = None,
        program: tuple[str, ...] = PROGRAM,
        pieces: str = "",
        health_checks: bool = False,
        **parallel: Any,
    ) -> Driver:
        spec = a_run(dataset, tmp_path / "run")
        if pieces:
            spec = replace_at(spec, f"model.{pieces}", 2)
        if every_steps is not None:
            spec = replace_at(spec, "checkpoint.every_steps", every_steps)
        fleet = dataclasses.replace(fleet or spec.fleet, health_checks=health_checks)
        spec = dataclasses.replace(spec, parallel=ParallelSpec(**parallel), fleet=fleet)
        made.append(Driver(spec, nodes, program))
        return made[-1]

    yield make
    for driver in made:
        driver.close()


def test_an_observer_that_fails_ends_the_epoch_and_not_the_run_since_a_peer_may_be_lost_in_its_collective() -> (
    None
):
    message = outcome_of(ObserverError("own failed", "mend it"), 3, over=False, device=torch.device("cpu"))
    assert message == EpochBroken(3, "ObserverError: own failed")


def test_a_spare_steps_into_the_place_of_a_lost_node(make_driver: Any, undisturbed: str) -> None:
    driver = make_driver(3)
    first, second, spare = driver.nodes
    driver.stop_after(3)
    driver.bind([first, second])
    driver.wait_until_stopped()
    safe_step = driver.safe_step()
    second.lose()
    driver.go_on()
    assert first.hear(EpochBroken).epoch == 1
    driver.park([first])
    resume = driver.resume([first, spare])
    assert resume.step >= safe_step, "a step whose snapshots are safe is not lost"
    driver.bind([first, spare], resume)
    assert driver.finish() == undisturbed
    assert first.pids == [first.process.pid], "the survivor is the same process"


def test_after_a_peer_stopped_the_fleet_shrinks_and_grows_again(make_driver: Any, undisturbed: str) -> None:
    driver = make_driver(3)
    first, second, spare = driver.nodes
    driver.stop_after(2)
    driver.bind([first, second])
    driver.wait_until_stopped()
    os.kill(second.process.pid, signal.SIGSTOP)
    driver.go_on()
    driver.park([first])  # it hangs in a collective: nobody has died
    driver.stop_after(5)
    driver.bind([first], driver.resume([first, second]))
    driver.wait_until_stopped()
    driver.order_out([first], planned=True)
    driver.go_on()
    driver.park([first], planned=True)
    resume = driver.resume([first])
    assert resume.step >= 6, "a planned change loses nothing"
    driver.bind([first, spare], resume)
    assert driver.finish() == undisturbed
    assert first.pids == [first.process.pid], "the survivor is the same process"


def test_an_epoch_that_was_left_without_its_node_saves_and_deletes_nothing_and_does_not_finish(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(2, every_steps=2)
    cut_off, second = driver.nodes
    cut_off.tell(InjectFault("stop rank 0 at step 4"))
    driver.bind([cut_off])
    driver.wait_until_stopped()
    resume = driver.resume([cut_off])
    claim_epoch(driver, 2)
    driver.bind([second], resume)
    assert driver.finish() == undisturbed
    checkpoints = Path(driver.spec.run_dir) / "checkpoints"
    committed = {path.name: path.stat().st_ino for path in checkpoints.glob("step-*")}
    cut_off.process.send_signal(signal.SIGCONT)
    assert cut_off.hear(EpochBroken).epoch == 1
    assert {path.name: path.stat().st_ino for path in checkpoints.glob("step-*")} == committed
    finished = [
        event
        for event in read_events(Path(driver.spec.run_dir) / "events.jsonl")
        if isinstance(event.body, Finished)
    ]
    assert [event.attempt for event in finished] == [2]


def test_a_rank_without_a_coordinator_trains_on_and_saves_once_there_is_one(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(1, every_steps=2)
    (node,) = driver.nodes
    driver.stop_after(3)
    driver.bind([node])
    driver.wait_until_stopped()
    node.tell(HoldSaves(hold=True))
    driver.go_on()
    driver.wait_for_step(STEPS)
    checkpoints = Path(driver.spec.run_dir) / "checkpoints"
    assert {path.name for path in checkpoints.glob("step-*")} <= {"step-00000002"}
    node.tell(HoldSaves(hold=False))
    assert driver.finish() == undisturbed
    assert (checkpoints / f"step-{STEPS:08}").exists()


@pytest.mark.servers
def test_a_checkpoint_due_when_an_epoch_was_left_is_written_by_the_next(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(2, every_steps=1)
    driver.stop_after(3)
    driver.bind(driver.nodes)
    driver.wait_until_stopped()
    assert not (Path(driver.spec.run_dir) / "checkpoints" / "step-00000000").exists()
    driver.order_out(driver.nodes, planned=True)
    driver.go_on()
    driver.park(driver.nodes, planned=True)
    resume = driver.resume(driver.nodes)
    checkpoint = Path(driver.spec.run_dir) / "checkpoints" / f"step-{resume.step:08}"
    assert not checkpoint.exists(), "the epoch was left before"
    driver.bind(driver.nodes, resume)
    assert driver.nodes[0].hear(CheckpointCommitted).step == resume.step
    assert checkpoint.exists()
    assert driver.finish() == undisturbed


@pytest.mark.servers
def test_a_planned_change_without_snapshots_goes_by_the_disk_and_loses_nothing(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(2, fleet=FleetSpec(snapshot_every_steps=0), every_steps=100)
    driver.stop_after(3)
    driver.bind(driver.nodes)
    driver.wait_until_stopped()
    driver.order_out(driver.nodes, planned=True)
    driver.go_on()
    saved = driver.nodes[0].hear(CheckpointCommitted).step
    assert saved >= 4
    driver.park(driver.nodes, planned=True)
    driver.bind(driver.nodes, FromDisk(saved))
    assert driver.nodes[0].hear(StepEnded).step == saved + 1
    assert driver.finish() == undisturbed


@pytest.mark.servers
def test_an_audit_after_a_recovery_goes_back_to_the_last_audit_before_it(make_driver: Any) -> None:
    driver = make_driver(3, fleet=FleetSpec(audit_every_steps=6))
    driver.stop_after(8)
    driver.bind(driver.nodes)
    driver.wait_until_stopped()
    first, *others = driver.nodes
    driver.park(others)
    driver.go_on()
    driver.park([first])
    resume = driver.resume(driver.nodes)
    assert 6 < resume.step < 12, "between two audits"
    for node in driver.nodes:
        node.tell(InjectFault("corrupt gradient rank 1 at step 12"))
    driver.bind(driver.nodes, resume)
    assert driver.nodes[0].hear(Doubted).trusted_step == 6, "what came after it nobody has looked at"


def test_a_worker_that_has_left_an_epoch_holds_nothing_of_it(make_driver: Any) -> None:
    driver = make_driver(2)
    first, second = driver.nodes
    before = _sockets(first.process.pid)
    driver.stop_after(2)
    driver.bind([first, second])
    driver.wait_until_stopped()
    assert _sockets(first.process.pid) > before
    driver.order_out([first, second])
    driver.go_on()
    driver.park([first, second])
    # A model that is still referenced keeps its groups, and they their connections. A group closes its own a moment after it is gone;
    # the suite's timeout is the limit.
    while _sockets(first.process.pid) > before:
        time.sleep(0.01)


def _sockets(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a worker at work closes files while they are being counted
            count += os.readlink(descriptor).startswith("socket:")
    return count


def test_workers_that_change_ranks_in_the_same_processes_keep_the_bits(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(3)  # by three the weights cannot be divided evenly
    first, second, third = driver.nodes
    driver.stop_after(3)
    driver.bind([first, second, third])
    driver.wait_until_stopped()
    driver.order_out([first, second, third], planned=True)
    driver.go_on()
    driver.park([first, second, third], planned=True)
    driver.bind([second, third, first], driver.resume(driver.nodes))
    assert driver.finish() == undisturbed
    assert all(len(node.pids) == 1 for node in driver.nodes)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("pieces", "degrees", "fleet"),
    [
        ("lanes", {"tensor": 2}, FleetSpec(least_tensor=1)),
        pytest.param(
            *("context_tiles", {"context": 2, "context_mode": "allgather"}, FleetSpec(least_context=1)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_in_fixed_pieces_goes_on_with_half_of_a_slots_ranks_and_later_with_all_and_keeps_the_bits(
    pieces: str,
    degrees: dict[str, Any],
    fleet: FleetSpec,
    make_driver: Any,
    dataset: Path,
    tmp_path: Path,
    ranks: Any,
) -> None:
    alone = replace_at(a_run(dataset, tmp_path / "alone"), f"model.{pieces}", 2)
    (expected,) = ranks.run(1, train_on_this_rank, alone)
    driver = make_driver(3, fleet=fleet, pieces=pieces, **degrees)
    first, second, spare = driver.nodes
    driver.stop_after(3)
    driver.bind([first, second])
    driver.wait_until_stopped()
    safe_step = driver.safe_step()
    second.lose()
    driver.go_on()
    driver.park([first])
    resume = driver.resume([first])
    assert (resume.ranks, resume.step >= safe_step) == (2, True), "the state is in the memory of the buddy"
    driver.stop_after(7)
    driver.bind([first], resume)
    driver.wait_until_stopped()
    driver.order_out([first], planned=True)
    driver.go_on()
    driver.park([first], planned=True)
    driver.bind([first, spare], driver.resume([first]))
    assert driver.finish() == expected["weights_sha256"]


def test_without_memory_the_newest_checkpoint_on_disk_is_taken(make_driver: Any, undisturbed: str) -> None:
    driver = make_driver(2, sharding="none")
    driver.stop_after(7)
    driver.bind(driver.nodes)
    driver.wait_until_stopped()
    driver.nodes[1].kill()
    driver.go_on()
    driver.park([driver.nodes[0]])
    driver.bind([driver.nodes[0]])
    assert driver.finish() == undisturbed


@pytest.mark.servers
def test_snapshots_that_cannot_be_read_are_tried_again_and_then_all_turn_to_the_disk_together(
    make_driver: Any, undisturbed: str
) -> None:
    driver = make_driver(2)
    driver.stop_after(7)
    driver.bind(driver.nodes)
    driver.wait_until_stopped()
    driver.order_out(driver.nodes)
    driver.go_on()
    driver.park(driver.nodes)
    nowhere = FromMemory(7, 3, (Holder((0, 1, 2), "nowhere", "127.0.0.1", 1),))
    for _ in range(2):
        driver.bind(driver.nodes, nowhere, wait=False)
        assert "cannot be restored" in driver.nodes[0].hear(EpochBroken).text
        driver.park(driver.nodes)
    driver.bind(driver.nodes, nowhere)
    assert driver.finish() == undisturbed


def test_a_worker_whose_machine_computes_wrongly_is_unfit_and_ends(
    make_driver: Any,
) -> None:
    driver = make_driver(0, health_checks=True)
    node = Node(driver.spec, 0, (str(Path(__file__).with_name("miscomputing_worker.py")),))
    driver.nodes.append(node)
    message = node.said.get(timeout=PATIENCE_S)
    assert isinstance(message, Unfit)
    assert message.evidence == "matrix product: bfloat16 product 2 of 2: 1 of 1024 rows are wrong"
    assert node.process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_only_a_worker_that_was_given_faults_imports_the_saboteur(
    make_driver: Any, undisturbed: str, tmp_path: Path
) -> None:
    driver = make_driver(2, program=("-X", "importtime", *PROGRAM))
    driver.nodes[1].tell(InjectFault("kill rank 1 at step 1000"))  # never comes
    driver.bind(driver.nodes)
    assert driver.finish() == undisturbed
    normal, faulty = (
        {line.split("|")[-1].strip() for line in log.read_text().splitlines() if "import time:" in line}
        for log in sorted((tmp_path / "run" / "logs").glob("worker-*.log"))
    )
    assert "phalanx.train.lifecycle.loop" in normal
    assert "phalanx.fleet.saboteur" not in normal
    assert "phalanx.fleet.saboteur" in faulty


def test_a_worker_whose_node_has_another_dataset_is_unfit(make_driver: Any) -> None:
    driver = make_driver(1)
    record = driver.nodes[0].run_dir / "record.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "data_fingerprint": "0" * 64}))
    node = Node(driver.nodes[0].spec, 1)
    try:
        assert "finds other data at data.path" in node.hear(Unfit).evidence
    finally:
        node.close()


def test_a_worker_whose_machine_lacks_an_observer_is_unfit(dataset: Path, tmp_path: Path) -> None:
    spec = replace_at(a_run(dataset, tmp_path / "run"), "observe.observers", ("margin",))
    driver = Driver(spec, 0)
    driver.nodes.append(Node(driver.spec, 0))
    try:
        assert "the observer 'margin' is not known on this machine" in driver.nodes[0].hear(Unfit).evidence
    finally:
        driver.close()


def test_a_worker_whose_machine_rounds_otherwise_than_the_first_one_is_unfit(
    make_driver: Any,
) -> None:
    driver = make_driver(1)
    (reference,) = driver.nodes[0].run_dir.glob("logs/attempt-*-numerics.json")
    first = json.loads(reference.read_text())
    first["probes"]["softmax"] = "0" * 14
    reference.write_text(json.dumps(first))
    node = Node(driver.nodes[0].spec, 1)
    try:
        evidence = node.hear(Unfit).evidence
        assert "computes softmax with other bits than the first of this start (node-0, " in evidence
    finally:
        node.close()
