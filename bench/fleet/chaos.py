"""Faults against real fleets, many of them: every run must end with the weights of the undisturbed one.

Each run is a fleet of three nodes and a spare on this machine, with random faults at random steps and phases: workers, nodes and the
coordinator killed, ranks that hang, links that break, also during recovery. The report has for each: the hash against that
of an undisturbed run of the same layout, recoveries, steps computed again, and the part of wall time that no ledger covers.

    python -m bench.fleet.chaos                                  # 40 runs with 5 faults each
    python -m bench.fleet.chaos --runs 3 --faults 2 --seed 100
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.running import run_bench

RUN = """
name = "chaos"
[model]
layers = 4
dim = 64
heads = 4
ffn_dim = 128
{moe}
[data]
path = "{data}"
corpus = ["python-stdlib"]
[train]
steps = {steps}
batch_size = 24
seq_len = 64
slots = 12
micro_batch_size = 1
[checkpoint]
every_steps = 10
[evaluation]
every_steps = 0
final_sequences = 8
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
[fleet]
nodes = 3
spares = 1
heartbeat_s = 1.0
lease_s = 4.0
"""
MOE = "[model.moe]\nexperts = 4\nper_token = 2\nffn_dim = 64\n"
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero3": ("", ()),
    "zero2": ("", ("parallel.sharding=zero2",)),
    "replicas": ("", ("parallel.sharding=none",)),
    "pipeline 2": ("", ("parallel.pipeline=2", "fleet.workers_per_node=2")),
    "tensor 2": ("", ("parallel.tensor=2", "fleet.workers_per_node=2")),
    "experts over 2": (MOE, ("parallel.expert=2", "parallel.tensor=2", "fleet.workers_per_node=2")),
}
"""Names, the lines that they add to the run file, and the fields that they set."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    layout: str
    seed: int
    same: bool
    seconds: float
    recoveries: tuple[dict[str, Any], ...]
    unaccounted: float
    """Share of the wall time from first to last event that no ledger covers."""
    committed: int = 0
    """Faults that really happened: a fault for a node that is a spare at that time does not."""
    message: str = ""


def phalanx(*arguments: str) -> tuple[int, dict[str, Any] | None, str]:
    """Run the command line. Return the exit code, the object on its last line, and its output."""
    process = subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True, check=False
    )
    lines = process.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if process.returncode == 0 and lines else None
    return process.returncode, result, process.stdout + process.stderr


def undisturbed(folder: Path, layout: str, steps: int) -> str:
    """Return the hash of a layout's run without any fleet."""
    run_file = write_run(folder, layout, steps)
    ranks = "2" if LAYOUTS[layout][1] and "workers" in LAYOUTS[layout][1][-1] else "1"
    sets = [part for field in LAYOUTS[layout][1] for part in ("--set", field)]
    code, result, output = phalanx(
        "train", str(run_file), "--ranks", ranks, *sets, "--run-dir", str(folder / f"calm {layout}"), "--json"
    )
    if result is None:
        raise SystemExit(f"the undisturbed run of {layout} ended with {code}:\n{output[-2000:]}")
    return str(result["weights_sha256"])


def write_run(folder: Path, layout: str, steps: int) -> Path:
    """Write the run file of a layout."""
    path = folder / f"{layout.replace(' ', '-')}.toml"
    data = Path(__file__).parents[2] / ".cache/data/python-stdlib"
    path.write_text(RUN.format(moe=LAYOUTS[layout][0], data=data, steps=steps))
    return path


def disturbed(folder: Path, layout: str, seed: int, faults: int, steps: int, expected: str) -> Outcome:
    """Run once with random faults."""
    run_dir = folder / f"{layout} {seed}"
    sets = [part for field in LAYOUTS[layout][1] for part in ("--set", field)]
    begin = time.monotonic()
    code, result, output = phalanx(
        "train",
        str(write_run(folder, layout, steps)),
        *sets,
        "--fault",
        f"random:{seed}:{faults}",
        "--run-dir",
        str(run_dir),
        "--json",
    )
    seconds = time.monotonic() - begin
    if result is None:
        return Outcome(layout, seed, False, seconds, (), 0.0, 0, f"ended with {code}: {output[-1500:]}")
    same = result["weights_sha256"] == expected
    message = "" if same else f"hash {result['weights_sha256'][:12]} instead of {expected[:12]}"
    ledger_s = sum(result["ledger"].values())
    unattributed = result["ledger"].get("unattributed", 0.0) / ledger_s
    committed = len(list((run_dir / "faults").glob("*")))  # no folder without a fault
    return Outcome(layout, seed, same, seconds, tuple(result["recoveries"]), unattributed, committed, message)


def main() -> int:
    """Print one line a run and the sum of all. Return 1 if any run has another hash or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--faults", type=int, default=5, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument(
        "--keep", type=Path, help="folder for the run directories, which are removed otherwise"
    )
    arguments = parser.parse_args()
    layouts = arguments.layout or list(LAYOUTS)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        calm = {layout: undisturbed(folder, layout, arguments.steps) for layout in layouts}
        for number in range(arguments.runs):
            layout = layouts[number % len(layouts)]
            seed = arguments.seed + number
            outcome = disturbed(folder, layout, seed, arguments.faults, arguments.steps, calm[layout])
            outcomes.append(outcome)
            lost = [recovery["lost_steps"] for recovery in outcome.recoveries]
            print(
                f"{layout}, seed {seed}: {'same' if outcome.same else 'WRONG'}, {outcome.committed} faults, {len(lost)} recoveries, lost steps {lost}, "
                f"{outcome.seconds:.0f} s, unattributed {outcome.unaccounted:.2%} {outcome.message}",
                flush=True,
            )
    summarize(outcomes)
    return 0 if all(outcome.same for outcome in outcomes) else 1


def summarize(outcomes: list[Outcome]) -> None:
    """Print the figures of all runs together."""
    recoveries = [recovery for outcome in outcomes for recovery in outcome.recoveries]
    print(
        f"{len(outcomes)} runs with {sum(o.committed for o in outcomes)} faults that happened: "
        f"{sum(o.same for o in outcomes)} with the same hash"
    )
    if not recoveries:
        return
    lost = [recovery["lost_steps"] for recovery in recoveries]
    print(
        f"{len(recoveries)} recoveries; steps computed again: most {max(lost)}, mean {statistics.mean(lost):.2f}"
    )
    moved = [recovery["moved_bytes"] / 2**20 for recovery in recoveries]
    print(
        f"moved between nodes for a recovery: median {statistics.median(moved):.2f} MiB, most {max(moved):.2f} MiB"
    )
    again = [
        sum(s for phase, s in recovery["seconds"].items() if phase != "fault.undetected")
        for recovery in recoveries
    ]
    print(
        f"from detection to the next step: median {statistics.median(again):.2f} s, worst {max(again):.2f} s"
    )


if __name__ == "__main__":
    run_bench(main)
