"""Forks at a loss spike while the whole run, or a worker of a fleet, is killed: the same child, with the same bits as undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from chaos.test_loss_spikes import run_file
from forked_python import children
from phalanx.observe.event_log import read_events
from phalanx.observe.events import ChildTaken, ChildTrained, Forked
from phalanx_process import alive, last_json, run, start, wait_until
from spiking_runs import SPIKE

FORKS = """
[spike]
candidates = ["rate", "skip", "continue"]
fork_steps = 40
base_every_steps = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file whose fork trains three children of 45 steps."""
    made = run_file(tmp_path)
    text = made.read_text().replace('"skip"', '"fork"').replace("steps = 20", "steps = 60")
    made.write_text(text + FORKS)
    return made


def kinds(run_dir: Path) -> list[object]:
    """The events of forks, as far as they are written."""
    if not (run_dir / "events.jsonl").exists():
        return []
    bodies = (event.body for event in read_events(run_dir / "events.jsonl"))
    return [body for body in bodies if isinstance(body, Forked | ChildTrained | ChildTaken)]


def hash_of(words: list[str], folder: Path) -> str:
    return str(last_json(run([*words, "--json"], folder))["weights_sha256"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "order"),
    [
        pytest.param([], signal.SIGKILL, id="whole run killed"),
        pytest.param([], signal.SIGTERM, id="whole run stopped"),
        pytest.param(["--nodes", "2", "--spares", "1"], signal.SIGKILL, id="worker killed"),
    ],
)
def test_an_interruption_of_a_fork_changes_neither_the_child_nor_the_bits(
    tmp_path: Path, file: Path, fleet: list[str], order: signal.Signals
) -> None:
    undisturbed = hash_of(
        ["train", str(file), "--ranks", "1", "--run-dir", str(tmp_path / "whole")], tmp_path
    )
    train = ["train", str(file), "--run-dir", str(tmp_path / "run")]
    process = start([*train, *(fleet or ["--ranks", "2"])], tmp_path, kind=subprocess.Popen)
    # In the second child: the first one has been saved.
    wait_until(lambda: len(kinds(tmp_path / "run")) >= 2, process)
    assert not any(isinstance(body, ChildTaken) for body in kinds(tmp_path / "run"))
    if fleet:
        agent = next(
            pid for pid in children(process.pid) if b"node-1" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(children(agent)[0], order)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, (out, err)
    else:
        ranks = children(process.pid)
        os.kill(process.pid, order)
        process.communicate(timeout=240)
        wait_until_gone(ranks)
    assert hash_of([*train, *(fleet or ["--ranks", "3"])], tmp_path) == undisturbed
    taken = [body for body in kinds(tmp_path / "run") if isinstance(body, ChildTaken)]
    assert {(body.step, body.candidate) for body in taken} == {(SPIKE, "skip")}
    assert any(isinstance(body, ChildTrained) and body.again for body in kinds(tmp_path / "run"))


def wait_until_gone(pids: list[int]) -> None:
    while any(alive(pid) for pid in pids):
        pass
