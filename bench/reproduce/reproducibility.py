"""The table of ``docs/evidence/reproducibility.md``: one run on every fleet, undisturbed and killed, and its one hash.

Real processes on real text: for 1 to 5 ranks and every way of holding the model, the run is trained once without
disturbance, and once killed with SIGKILL at a random step (the launcher or a rank, at random) and continued on a fleet of
another size. The table is written as Markdown; the exit code is 1 if there were two hashes.

    python -m bench.reproduce.reproducibility                       # prints the table
    python -m bench.reproduce.reproducibility --write docs/evidence/reproducibility.md
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.running import run_bench
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
STEPS = 24
RUN_FILE = """
name = "table"
[model]
layers = 2
dim = 128
heads = 4
kv_heads = 2
tie_embeddings = true
[data]
path = "data"
corpus = ["python-stdlib"]
vocab_size = 1024
[train]
steps = {steps}
batch_size = 16
seq_len = 128
slots = 8
micro_batch_size = 1
[optimizer]
lr = 3e-3
weight_decay = 0.1
clip_norm = 0.5
[schedule]
warmup_steps = 4
[checkpoint]
every_steps = 4
[evaluation]
every_steps = 10
sequences = 10
[runtime]
device = "cpu"
"""


@dataclass(frozen=True)
class Fleet:
    """A number of ranks and a way of holding the model."""

    ranks: int
    name: str
    settings: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The fleet's options of the command line."""
        return [
            "--ranks",
            str(self.ranks),
            *(part for setting in self.settings for part in ("--set", setting)),
        ]


def fleets() -> Iterator[Fleet]:
    """Yield every fleet of the table."""
    for ranks in range(1, 6):
        yield Fleet(ranks, "ZeRO-3", ("parallel.sharding=zero3",))
        yield Fleet(ranks, "ZeRO-2", ("parallel.sharding=zero2",))
        if ranks == 4:
            yield Fleet(ranks, "HSDP 2x2", ("parallel.sharding=zero3", "parallel.shard_ranks=2"))
        yield Fleet(ranks, "replicated", ("parallel.sharding=none",))


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    weights_sha256: str
    held_out_loss: float


def command(run_dir: Path, fleet: Fleet) -> list[str]:
    """Return the command line that trains in ``run_dir`` on ``fleet``."""
    return [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        "run.toml",
        "--run-dir",
        str(run_dir),
        "--json",
        *fleet.arguments,
    ]


def finish(run_dir: Path, fleet: Fleet, folder: Path) -> Outcome:
    """Train to the end."""
    done = subprocess.run(command(run_dir, fleet), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{fleet} failed:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return Outcome(result["weights_sha256"], result["held_out_loss"])


def newest_step(run_dir: Path) -> int:
    """Return the newest step in the event stream."""
    if not (run_dir / "events.jsonl").exists():
        return 0
    return max(
        (e.body.step for e in read_events(run_dir / "events.jsonl") if isinstance(e.body, Step)), default=0
    )


def kill_at(run_dir: Path, fleet: Fleet, folder: Path, step: int, chance: random.Random) -> bool:
    """Train until ``step`` is done, and kill the launcher or one rank. Return False if it has ended before."""
    process = subprocess.Popen(
        command(run_dir, fleet), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while newest_step(run_dir) < step and process.poll() is None:
        time.sleep(0.01)
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    ranks = [int(line) for line in listed.stdout.split()]
    victim = chance.choice([process.pid, *ranks])
    if process.poll() is not None:  # its number may be another process's by now
        if process.returncode:
            raise RuntimeError(f"{fleet} failed: see {run_dir}/logs")
        return False
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        process.wait()
    return True


def table(folder: Path, seed: int, count: int | None) -> tuple[list[str], set[Outcome]]:
    """Return the rows of the table, and all outcomes in it."""
    chance = random.Random(seed)
    (folder / "run.toml").write_text(RUN_FILE.format(steps=STEPS))
    everything = list(fleets())
    rows, outcomes = [], set()
    for number, fleet in enumerate(everything[:count]):
        undisturbed = finish(folder / f"whole-{number}", fleet, folder)
        step = chance.randint(1, STEPS - 2)
        other = chance.choice([candidate for candidate in everything if candidate.ranks != fleet.ranks])
        killed = folder / f"killed-{number}"
        while not kill_at(killed, fleet, folder, step, chance):
            shutil.rmtree(killed)
        resumed = finish(killed, other, folder)
        outcomes |= {undisturbed, resumed}
        rows.append(
            f"| {fleet.ranks} | {fleet.name} | `{undisturbed.weights_sha256[:16]}` | at step {step}, then {other.ranks} ranks, "
            f"{other.name} | `{resumed.weights_sha256[:16]}` |"
        )
        print(rows[-1], flush=True)
    return rows, outcomes


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--seed", type=int, default=0, help="chooses steps, victims and fleets that continue")
    parser.add_argument("--fleets", type=int, help="the first of them alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows, outcomes = table(Path(name), arguments.seed, arguments.fleets)
    head = [
        "| ranks | model held as | undisturbed | killed with SIGKILL, gone on with on | weights |",
        "|---|---|---|---|---|",
    ]
    verdict = "one hash" if len(outcomes) == 1 else f"{len(outcomes)} DIFFERENT OUTCOMES"
    text = "\n".join(
        [*head, *rows, "", f"{2 * len(rows)} runs, {verdict}: `{min(o.weights_sha256 for o in outcomes)}`."]
    )
    print(text)
    if arguments.write:
        page = arguments.write.read_text()
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        arguments.write.write_text(f"{before}\n{text}\n{after}")
    sys.exit(len(outcomes) != 1)


if __name__ == "__main__":
    run_bench(main)
