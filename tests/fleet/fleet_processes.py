"""A fleet of real processes on this machine, with stand-in workers: what tests kill, stop and restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import tomli_w

import forked_python
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, read_fleet_file
from phalanx.fleet.control.security import make_token
from phalanx.observe.logs.read_blocks import LineBounds, forward, streams
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.run.spec import DataSpec, FleetSpec, ModelSpec, RunSpec, TrainSpec

PATIENCE_S = 280.0
"""For what takes seconds on an idle machine; soon after it pytest ends a test of the suite, without the logs."""
STAND_IN = str(Path(__file__).with_name("stand_in_worker.py"))
FLEET = FleetSpec(heartbeat_s=0.2, lease_s=60.0, worker_lease_s=60.0, confirm_s=1.0, stall_s=60.0)
"""No lease ends on a busy machine by itself: a test that waits for the end of one sets it."""


def make_run(run_dir: Path, fleet: FleetSpec, steps: int = 60, attempts: int = 1) -> RunSpec:
    """A run directory as an opened run leaves it to its fleet, after so many starts."""
    model = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=300)
    spec = RunSpec(
        name="stand-in",
        model=model,
        data=DataSpec(path="none"),
        train=TrainSpec(steps=steps, batch_size=16, seq_len=24, slots=8),
        fleet=fleet,
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    (run_dir / "record.json").write_text(json.dumps({"attempts": attempts}))
    (run_dir / "logs").mkdir(exist_ok=True)
    make_token(run_dir)
    make_token(run_dir, "operate")
    return spec


class Fleet:
    """Coordinator and agents of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._modules = run_dir, run_dir / "modules"
        self.environment = {**os.environ, "STAND_IN_STEP_S": "0.01", "OMP_NUM_THREADS": "1"}
        self.environment.pop("PHALANX_LAUNCHER", None)
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start_coordinator(self, *extra: str) -> None:
        self.coordinator = self._start("phalanx.fleet.control.coordinator", "coordinator", *extra)

    def start_agent(self, node: str, *extra: str) -> None:
        program = ("--worker-program", sys.executable, STAND_IN)
        self.agents[node] = self._start("phalanx.fleet.node.agent", node, "--node", node, *extra, *program)

    def modules_of(self, node: str) -> Path:
        """Modules in this folder are found first by this node's processes."""
        folder = self._modules / node
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _start(self, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment, own = self.environment, self._modules / name
        if own.exists():
            path = os.pathsep.join(filter(None, (str(own), environment.get("PYTHONPATH", ""))))
            environment = {**environment, "PYTHONPATH": path}
        with (self.run_dir / "logs" / f"{name}.log").open("ab") as log:
            return forked_python.Popen(
                [sys.executable, "-m", module, "--run-dir", str(self.run_dir), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def hold_at(self, step: int | None) -> None:
        """The workers go no further than this step; ``None``: they go on."""
        gate = self.run_dir / "hold-at"
        if step is None:
            gate.unlink()
        else:
            temporary = gate.with_suffix(".new")
            temporary.write_text(str(step))
            temporary.replace(gate)

    def held(self, step: int, epoch: int = 0) -> FleetFile:
        """Waits until the workers stand at this step, in this epoch or a later one, and the coordinator knows."""
        return self.until(lambda seen: seen.phase == "running" and seen.epoch >= epoch and seen.step >= step)

    def gathered(self, step: int) -> FleetFile:
        """Waits until the workers stand at this step, and every node that was started is a member or a warm spare."""
        return self.until(
            lambda seen: (
                seen.phase == "running"
                and seen.step >= step
                and [member.role in ("member", "spare") for member in seen.members]
                == [True] * len(self.agents)
            )
        )

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    def kill_node(self, node: str) -> None:
        """SIGKILL to the agent and its workers: with its memory, the node is gone."""
        os.killpg(self.agents[node].pid, signal.SIGKILL)
        self.agents.pop(node).wait()

    def workers(self, node: str) -> list[int]:
        """Process ids of a node's workers."""
        return forked_python.children(self.agents[node].pid)

    def seen(self) -> FleetFile | None:
        """fleet.json, if there is one."""
        try:
            return read_fleet_file(self.run_dir)
        except FleetFileError:
            return None

    def until(self, condition: Callable[[FleetFile], bool]) -> FleetFile:
        """Waits until fleet.json shows something."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            seen = self.seen()
            if seen is not None and condition(seen):
                return seen
            time.sleep(0.02)
        raise TimeoutError(f"not seen in {PATIENCE_S} s; last: {self.seen()}\n{self.logs()}")

    def logs(self) -> str:
        """The output of all processes."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        texts = [f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files]
        workers = streams(RunDirectory(self.run_dir))
        for worker in workers:
            lines = (
                [line.text for block in forward(worker, LineBounds()) for line in block.lines]
                if not worker.raw
                else []
            )
            texts.append(f"--- {worker.process}\n" + "\n".join(lines))
        return "\n".join(texts)

    def result(self) -> dict[str, object]:
        """The run's result, once it has one."""
        seen = self.until(lambda file: file.over)
        assert seen.result_json, f"{seen.phase}: {seen.reason}\n{self.logs()}"
        result = json.loads(seen.result_json)
        assert isinstance(result, dict)
        return result

    def end(self) -> None:
        """Leaves nothing behind."""
        for process in (*self.agents.values(), self.coordinator):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def running_fleet(
    run_dir: Path,
    nodes: int,
    spares: int = 0,
    steps: int = 60,
    hold_at: int | None = None,
    broken_gpus: dict[str, str] | None = None,
    coordinator_first: bool = False,
    **changes: object,
) -> Iterator[Fleet]:
    """A fleet that has been started, its workers held at a step if one is given; ended and gone afterwards.

    Args:
        run_dir: The run's.
        nodes: Nodes that train.
        spares: Nodes beside them.
        steps: Of the run.
        hold_at: See ``Fleet.hold_at``.
        broken_gpus: Node -> the module that its agent takes for NVML.
        coordinator_first: Start the agents once the coordinator listens: they wait for it no longer than ``coordinator_lease_s``.
        changes: Of fields of ``FLEET``.
    """
    make_run(run_dir, replace(FLEET, nodes=nodes, spares=spares, **changes), steps)  # type: ignore[arg-type]
    fleet = Fleet(run_dir)
    if hold_at is not None:
        fleet.hold_at(hold_at)
    for node, source in (broken_gpus or {}).items():
        (fleet.modules_of(node) / "pynvml.py").write_text(source)
    try:
        fleet.start_coordinator()
        if coordinator_first:
            fleet.until(lambda _: True)
        for number in range(nodes + spares):
            fleet.start_agent(
                f"node-{number}", *(["--started-as-spare"] if number >= nodes and broken_gpus else [])
            )
        yield fleet
    finally:
        fleet.end()
