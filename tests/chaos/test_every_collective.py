"""Each collective of a run is broken in turn, on one rank or another, and the bits stay what they are.

First an undisturbed run writes down which collectives there are: before the first step, in a step (forward, backward,
reduction, loss, clipping, evaluation), and after the last one (evaluation, hash, checkpoint). Then one run goes through all of
the breaks: one a step, at another collective each. Whatever a break had left wrong would be in the loss and the gradient norm of the
next step, so these are compared, bit for bit, for every step that was computed, also for those computed twice; and at the end
the hash of the weights.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import driven_workers
import sweep_worker
from driven_workers import PATIENCE_S, Driver, Node
from phalanx.fleet.core.commands import Fresh, Resume
from phalanx.fleet.node.worker_link import (
    EpochBroken,
    JoinedEpoch,
    LeaveEpoch,
    LeftEpoch,
    TrainingFinished,
    Warm,
)
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step
from phalanx.observe.ledger import recoveries
from phalanx.run.spec import CheckpointSpec, EvalSpec, ObserveSpec, ParallelSpec, RunSpec
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import EndedError
from sweep_worker import END, START, Break, committed, seen_collectives, step_place, write_breaks
from tiny_runs import make_dataset, tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIRST_BROKEN_STEP = 2
SNAPSHOT_EVERY_STEPS = 1
LEAVE_S = 5.0
"""A worker that has not left an epoch after so long is killed. gloo may wait for ever for the rest of a message whose sender
has gone."""
ZERO3 = ParallelSpec()
PIPELINE_TENSOR = ParallelSpec(pipeline=2, tensor=2)


class Gone:
    """Message in the place of those of a worker that has died."""


class SweptNode(Node):
    """A node whose worker may break at any moment."""

    def __init__(self, spec: RunSpec, number: int, program: tuple[str, ...]) -> None:
        self.stuck = 0
        super().__init__(spec, number, program)

    def tell(self, message: Any) -> None:
        """As ever; the dead do not listen."""
        with suppress(EndedError):
            super().tell(message)

    def hear(self, kind: Any, patience_s: float = PATIENCE_S) -> Any:
        """As ever, but nobody waits for ``JoinedEpoch``: an epoch may break before."""
        return None if kind is JoinedEpoch else super().hear(kind, patience_s)

    def left(self) -> LeftEpoch | Gone:
        """The worker's answer to ``LeaveEpoch``. One that does not leave, its agent would kill; so it is here."""
        try:
            message = self.hear((LeftEpoch, Gone), LEAVE_S)
        except queue.Empty:
            self.stuck += 1
            self.process.send_signal(signal.SIGUSR1)  # its log then shows where it hangs
            time.sleep(0.2)
            self.process.kill()
            message = self.hear((LeftEpoch, Gone))
            if isinstance(message, LeftEpoch):
                message = self.hear(Gone)
        assert isinstance(message, LeftEpoch | Gone)
        return message

    def _read(self, link: FramedConnection) -> None:
        super()._read(link)
        self.said.put(Gone())


class Sweep(Driver):
    """Lives through all breaks of a run."""

    def __init__(self, spec: RunSpec, nodes: int, breaks: list[Break]) -> None:
        write_breaks(Path(spec.run_dir), breaks)
        super().__init__(spec, nodes, (sweep_worker.__file__,))

    def live(self, ranks: int) -> str:
        """Binds anew after each break, until the run has ended; the hash at the end."""
        members, spares = self.nodes[:ranks], self.nodes[ranks:]
        while True:
            self.bind(members, self._newest())
            node, news = _first_news(members)
            if isinstance(news, TrainingFinished):
                return str(json.loads(news.result)["weights_sha256"])
            dead = self._park(members, [node] if isinstance(news, Gone) else [])
            members, spares = self._replace(members, spares, dead)

    def _newest(self) -> Resume:
        holds_any = any(node.memory.holdings() for node in self.nodes)
        try:
            return self.resume(self.nodes) if holds_any else Fresh()
        except ValueError:  # no step is held by all of a layout's ranks yet
            return Fresh()

    def _park(self, members: list[Node], dead: list[Node]) -> list[Node]:
        """Ends the epoch on all members; which of them are dead, ``dead`` included."""
        for node in members:
            node.tell(LeaveEpoch(self.epoch))
        for node in members:
            message = Gone() if node in dead else node.left()
            if isinstance(message, LeftEpoch):
                self.meeting[node.number] = message.meeting_point
            elif node not in dead:
                dead.append(node)
        return dead

    def _replace(
        self, members: list[Node], spares: list[Node], dead: list[Node]
    ) -> tuple[list[Node], list[Node]]:
        """Spares take the places of the dead, in whose nodes fresh workers start and are spares."""
        for node in dead:
            node.start()
            self.meeting[node.number] = node.hear(Warm).meeting_point
        waiting = [*spares, *dead]
        after = [waiting.pop(0) if node in dead else node for node in members]
        return after, waiting


def _first_news(members: list[Node]) -> tuple[Node, Any]:
    """The message that ended the epoch, and its sender: somebody is broken or gone, or rank 0, which speaks for all, has finished."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for node in members:
            try:
                message = node.said.get(timeout=0.002)
            except queue.Empty:
                continue
            deadline_s = time.monotonic() + PATIENCE_S
            over = isinstance(message, TrainingFinished) and node is members[0]
            if over or isinstance(message, EpochBroken | Gone):
                return node, message
    raise AssertionError(f"for {PATIENCE_S} s no worker sent anything: the fleet hangs")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    weights_sha256: str
    run_dir: Path
    stuck: int
    """Workers that did not leave an epoch and were killed."""


@dataclasses.dataclass
class Fleet:
    """Runs of one layout."""

    spec: RunSpec
    ranks: int
    folder: Path

    def run(self, name: str, steps: int, breaks: list[Break]) -> Outcome:
        """Trains for ``steps`` through ``breaks``."""
        run_dir = self.folder / name
        train = dataclasses.replace(self.spec.train, steps=steps)
        spec = dataclasses.replace(self.spec, train=train, run_dir=str(run_dir))
        sweep = Sweep(spec, self.ranks + 1, breaks)
        try:
            weights_sha256 = sweep.live(self.ranks)
            return Outcome(weights_sha256, run_dir, sum(node.stuck for node in sweep.nodes))
        finally:
            sweep.close()

    def collectives(self) -> list[dict[str, list[str]]]:
        """The collectives of each rank, by place, in an undisturbed run."""
        looked = self.run("look", FIRST_BROKEN_STEP + 1, [])
        return [seen_collectives(looked.run_dir, rank) for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "bytes")


@pytest.fixture
def make_fleet(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ParallelSpec, int], Fleet]:
    monkeypatch.setattr(driven_workers, "Node", SweptNode)

    def make(parallel: ParallelSpec, ranks: int) -> Fleet:
        spec = tiny_run(dataset, tmp_path / "none", micro_batch_size=1)
        spec = dataclasses.replace(
            spec,
            model=dataclasses.replace(
                spec.model, tie_embeddings=False
            ),  # the first and the last stage cannot
            parallel=parallel,
            # So that all steps have the same collectives.
            evaluation=EvalSpec(every_steps=1, sequences=3, final_sequences=3),
            observe=ObserveSpec(log_every_steps=1, memory_at_step=0),
            checkpoint=CheckpointSpec(every_steps=3, keep_last=2),
        )
        return Fleet(spec, ranks, tmp_path)

    return make


Choose = Callable[[int, int], list[tuple[int, str]]]
"""For a collective of a rank: is it to break, and how? Given its number and how many ranks there are: ranks and ways."""


def everything(_call: int, ranks: int) -> list[tuple[int, str]]:
    """Each collective, on each rank, both ways."""
    return [(rank, how) for rank in range(ranks) for how in ("die", "cut")]


def by_turns(call: int, ranks: int) -> list[tuple[int, str]]:
    """Each collective, by turns on each rank and both ways."""
    return [(call % ranks, "die" if call // ranks % 2 else "cut")]


def every_fourth(call: int, ranks: int) -> list[tuple[int, str]]:
    """Every fourth, by turns likewise."""
    return by_turns(call // 4, ranks) if call % 4 == 0 else []


def plan(seen: list[dict[str, list[str]]], choose: Choose) -> list[Break]:
    """The breaks of a run: those of ``START`` and ``END`` one after another, the others in a step each."""
    breaks: list[Break] = []
    step = FIRST_BROKEN_STEP
    for place in (START, step_place(FIRST_BROKEN_STEP), END):
        for call in range(max(len(of_rank[place]) for of_rank in seen)):
            for rank, how in choose(call, len(seen)):
                if call >= len(seen[rank][place]):
                    continue
                where = place if place in (START, END) else step_place(step)
                breaks.append(Break(where, rank, call, how))  # type: ignore[arg-type]
                step += where != place or place not in (START, END)
    return breaks


def numbers(run_dir: Path) -> dict[int, set[tuple[float, float, int]]]:
    """Loss, gradient norm and tokens of each step, as often as it was computed with another outcome."""
    outcomes: dict[int, set[tuple[float, float, int]]] = {}
    for event in read_events(run_dir / "events.jsonl"):
        if isinstance(event.body, Step):
            outcomes.setdefault(event.body.step, set()).add(
                (event.body.loss, event.body.grad_norm, event.body.tokens)
            )
    return outcomes


def sweep(fleet: Fleet, choose: Choose) -> None:
    """Break the collectives that ``choose`` returns, and compare with an undisturbed run of as many steps."""
    seen = fleet.collectives()
    breaks = plan(seen, choose)
    in_steps = sum(planned.place not in (START, END) for planned in breaks)
    steps = FIRST_BROKEN_STEP + in_steps
    calm = fleet.run("calm", steps, [])
    begin = time.monotonic()
    broken = fleet.run("broken", steps, breaks)
    seconds = time.monotonic() - begin
    lost = [recovery.lost_steps for recovery in recoveries(read_events(broken.run_dir / "events.jsonl"), 0)]
    print(
        f"{len(breaks)} breaks ({in_steps} in steps), {seconds:.0f} s; {sum(lost)} steps computed again, "
        f"{broken.stuck} workers did not leave"
    )
    assert committed(broken.run_dir) == len(breaks), "every collective was there to be broken"
    assert numbers(broken.run_dir) == numbers(calm.run_dir)
    assert broken.weights_sha256 == calm.weights_sha256
    assert max(lost) <= SNAPSHOT_EVERY_STEPS + 1


def phases(seen: list[dict[str, list[str]]]) -> set[str]:
    """The phases of training whose collectives ranks were in."""
    return {name.split(":")[0] for of_rank in seen for names in of_rank.values() for name in names}


@pytest.mark.parametrize(
    ("parallel", "ranks"), [(ZERO3, 3), (PIPELINE_TENSOR, 4)], ids=["zero3", "pipeline-tensor"]
)
def test_a_break_before_every_fourth_collective_leaves_no_trace(
    parallel: ParallelSpec, ranks: int, make_fleet: Any
) -> None:
    sweep(make_fleet(parallel, ranks), every_fourth)


def test_a_break_before_any_collective_of_any_rank_leaves_no_trace(make_fleet: Any) -> None:
    sweep(make_fleet(ZERO3, 2), everything)


def test_a_break_before_any_collective_of_pipelines_of_tensor_ranks_leaves_no_trace(make_fleet: Any) -> None:
    sweep(make_fleet(PIPELINE_TENSOR, 4), by_turns)


def test_the_sweep_comes_by_all_that_a_step_does(make_fleet: Any) -> None:
    entered = phases(make_fleet(ZERO3, 2).collectives())
    expected = {"forward", "backward", "reduction", "loss", "clipping", "evaluation"}
    assert entered >= expected | {"hash of the weights", "checkpoint"}, entered
