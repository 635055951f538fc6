"""One small run of a few layers on a processor, as benches train it in processes of its own: its run file, command and measured steps."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXT = """
name = "{name}"
[model]
layers = {layers}
dim = {dim}
heads = 4
ffn_dim = {ffn_dim}
[data]
path = "{data}"
{data_fields}
[train]
steps = {steps}
batch_size = 8
seq_len = {seq_len}
{train_fields}
[checkpoint]
{checkpoint_fields}
[evaluation]
every_steps = 0
final_sequences = {final_sequences}
[observe]
{observe_fields}
[runtime]
device = "cpu"
"""


@dataclass(frozen=True)
class SmallRun:
    """Fields that differ between the benches' runs; ``data_fields`` and the like are further lines of those tables."""

    name: str
    data: str
    steps: int
    seq_len: int
    layers: int
    dim: int
    ffn_dim: int
    data_fields: str = ""
    train_fields: str = "slots = 1"
    checkpoint_fields: str = ""
    observe_fields: str = "memory_at_step = 0\nlog_every_steps = 1"
    final_sequences: int = 1

    def write(self, file: Path) -> Path:
        """Write the run file, and return its path."""
        file.write_text(_TEXT.format(**self.__dict__))
        return file

    def command(self, place: Path) -> list[str]:
        """Write the run file into ``place`` and return the command that trains it on one rank, in ``place/run``."""
        train = [sys.executable, "-m", "phalanx", "train", str(self.write(place / "run.toml"))]
        return [*train, "--run-dir", str(place / "run"), "--set", "parallel.ranks=1"]


def steps_and_weights(run: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the logged steps of a finished run, and the hash of its weights."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    weights = json.loads((run / "result.json").read_text())["weights_sha256"]
    return [event for event in events if event["kind"] == "Step"], str(weights)
