"""Run directories as the real writers leave them, without any training: for tests of what reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomli_w

from phalanx.fleet.control.fleet_file import FleetFile, FleetIncident, Member, write_fleet_file
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import (
    CheckpointSaved,
    EpochLeft,
    Evaluated,
    Finished,
    MemoryMeasured,
    Message,
    Restored,
    RunStarted,
    Step,
)
from phalanx.observe.metrics.exporter import RunSampler
from phalanx.observe.metrics.samples import Sample
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.run.spec import OptimizerSpec, RunSpec, TrainSpec

STEP_S = 2.0


class RecordedRun:
    """A run directory whose events are written as a run writes them, two seconds a step on a clock of its own."""

    def __init__(
        self, path: Path, name: str, steps: int, lr: float = 1e-3, began: float = 1_790_000_000.0
    ) -> None:
        path.mkdir(parents=True)
        self.directory, self.steps, self.step, self.now = RunDirectory(path), steps, 0, began
        self._in_steps = self._starting = 0.0
        self.spec = RunSpec(
            name=name, run_dir=str(path), train=TrainSpec(steps=steps), optimizer=OptimizerSpec(lr=lr)
        )
        write_atomically(self.directory.run_file, tomli_w.dumps(to_table(self.spec)).encode())
        self.log = EventLog(self.directory.events, 0, lambda: self.now)
        self.start(0)

    def start(self, attempt: int, restored: int = 0) -> None:
        """An attempt begins, from ``restored`` if it is not the first."""
        self.log.close()
        self.log = EventLog(self.directory.events, attempt, lambda: self.now)
        self._in_steps, self._starting = 0.0, 3.0
        self.now += self._starting
        commit = {"code": {"git_commit": "0123456789abcdef", "git_dirty": False}}
        self.log.append(
            RunStarted(
                self.spec.name, self.steps, 2, {"replicate": 2}, "cpu", 4_000_000, 1e11, "", 1.6, commit
            )
        )
        if attempt:
            self.log.append(Restored(restored, "memory", 0.3, moved_bytes=1 << 20))
        self.step = restored

    def ledger(self) -> dict[str, float]:
        """Where the attempt's time went so far."""
        return {
            "start.process": self._starting,
            "step.compute": 0.8 * self._in_steps,
            "step.comm_exposed.dp": 0.2 * self._in_steps,
        }

    def train(self, steps: int, spike_at: int = -1) -> None:
        """So many steps more; ``spike_at`` has a loss of 99."""
        for _ in range(steps):
            self.step += 1
            self.now += STEP_S
            self._in_steps += STEP_S
            loss = 99.0 if self.step == spike_at else 2 + 6 * math.exp(-self.step / 50)
            self.log.append(
                Step(
                    step=self.step,
                    steps=self.steps,
                    loss=loss,
                    grad_norm=1.0 + loss / 10,
                    lr=self.spec.optimizer.lr,
                    tokens=2048 * self.step,
                    tokens_per_s=1024.0,
                    step_s=STEP_S,
                    mfu=0.41,
                    bits_per_byte=loss / 3,
                    goodput=0.9,
                    ledger=self.ledger(),
                    peak_memory_bytes=1 << 30,
                )
            )

    def evaluate(self) -> None:
        """The held-out text is scored, and memory measured."""
        self.log.append(Evaluated(self.step, 2.5 + 1 / self.step, 1.1, 0.5))
        self.log.append(
            MemoryMeasured(self.step, {"parameters": 1 << 28, "optimizer": 1 << 29, "total": 3 << 28})
        )

    def save(self) -> None:
        """A checkpoint became durable."""
        path = str(self.directory.checkpoints / f"step-{self.step:08d}")
        self.log.append(CheckpointSaved(self.step, path, 48_000_000, 0.4, 0.05))

    def say(self, text: str) -> None:
        """A warning for people."""
        self.log.append(Message("warning", text))

    def finish(self) -> None:
        """The run is complete."""
        self.log.append(Finished({"run_dir": str(self.directory.path), "step": self.step}, self.ledger()))

    def log_lines(self, rank: int, texts: Sequence[str], level: str = "warning") -> None:
        """A rank says some lines, a second apart from now on."""
        from phalanx.observe.logs.line import LogLine, encode

        path = self.directory.log(0, rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            for number, text in enumerate(texts):
                line = LogLine(
                    self.now + number, level, f"node-{rank}", rank, 0, 0, self.step, text, f"rank-{rank:05d}"
                )
                file.write(encode(line))

    def sit_on(self, nodes: list[str], ranks: int) -> None:
        """The run's ranks sit on these nodes, dealt out one by one."""
        members = tuple(
            Member(name, "member", "10.0.0.1", tuple(range(place, ranks, len(nodes))), attached=True)
            for place, name in enumerate(nodes)
        )
        self._tell_fleet(members, ranks)

    def measure_ranks(self, ranks: int, slow: int | range, steps: int) -> None:
        """Each rank measures itself in steps that were done; some compute for half as long again as the others from the middle on."""
        import numpy as np

        from phalanx.observe.rank_stream import RankFrame, RankStreamWriter

        writer = RankStreamWriter(self.directory.ranks)
        for step in range(1, steps + 1):
            compute_s = np.full(ranks, 1.0, np.float32)
            if step > steps // 2:
                compute_s[slow] = 1.5
            columns = dict.fromkeys(
                ("data_wait_s", "memory_bytes", "temperature_c"), np.full(ranks, np.nan, np.float32)
            )
            writer.append(
                RankFrame(
                    step, self.now - STEP_S * (steps - step), 0, ranks, {"compute_s": compute_s, **columns}
                )
            )
        writer.close()

    def lose_a_node(self) -> None:
        """A worker of the fleet is lost; the next epoch goes on one step before."""
        why = "worker 0 exited with code -9"
        left_at = self.now
        self.log.append(EpochLeft(0, f"node node-1: {why}"))
        self.start(1, restored=self.step - 1)
        happenings = (
            FleetIncident(left_at, 0, "node-1", why),
            FleetIncident(left_at, 0, "", f"leave epoch 0: node node-1: {why}"),
        )
        members = (
            Member("node-0", "member", "10.0.0.1", (0,), True),
            Member("node-2", "member", "10.0.0.3", (1,), True),
            Member("node-1", "lost", "10.0.0.2", (), False, 9.0, why),
        )
        self._tell_fleet(members, ranks=2, happenings=happenings)

    def _tell_fleet(
        self, members: tuple[Member, ...], ranks: int, happenings: tuple[FleetIncident, ...] = ()
    ) -> None:
        content = FleetFile(
            run=self.spec.name, coordinator="10.0.0.1:1", coordinator_pid=1, leader="", reign=1,
            written_unix_s=self.now, phase="running", reason="", epoch=1, ranks=ranks, expected_nodes=3,
            step=self.step, step_s=STEP_S, recoveries=1, regroups=0, restarts=0, stopping=False,
            durable_steps=(), unsaved_steps=0, result_json="", members=members, happenings=happenings,
            stale=0, refused={},
        )  # fmt: skip
        write_fleet_file(self.directory.path, content)


def a_folder_of_runs(folder: Path) -> Iterator[RecordedRun]:
    """A long finished run with a spike, a fleet that lost a node, and one that goes on."""
    long = RecordedRun(folder / "long", "long", 3000)
    long.train(3000, spike_at=1234)
    long.evaluate()
    long.finish()
    yield long
    fleet = RecordedRun(folder / "fleet", "fleet", 60, lr=2e-3)
    fleet.train(20)
    fleet.evaluate()
    fleet.save()
    fleet.train(5)
    fleet.lose_a_node()
    fleet.train(20)
    yield fleet


def renamed(run: RecordedRun, name: str) -> None:
    """The run gets a name that no run file's check would let through, as a hostile directory may have."""
    run.spec = dataclasses.replace(run.spec, name=name)
    write_atomically(run.directory.run_file, tomli_w.dumps(to_table(run.spec)).encode())


def run_samples(directory: Path) -> list[Sample]:
    """Return all samples of the metrics of the run in ``directory``."""
    return RunSampler(directory).samples(patience_s=60.0)
