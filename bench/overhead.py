"""What does it cost a step to be watched? The same run on two ranks, with and without a fleet around them, by turns.

*Bare*: ``phalanx train --ranks 2``. *Watched*: ``--nodes 2``, a coordinator, two agents, heartbeats and leases, but no snapshots.
*Kept*: the same with a snapshot after every step, streamed to a buddy. Each number is the median of the steps of a run, without
the first ones; the ratios are those of the medians of all runs. Agents and coordinator share the cores with the ranks here; on
a node with more cores than accelerators they do not.

    python bench/overhead.py
    python bench/overhead.py --runs 5 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step

RUN = """
name = "overhead"
[model]
layers = 6
dim = 384
heads = 6
ffn_dim = 1024
[data]
path = "{data}"
corpus = ["python-stdlib"]
[train]
steps = {steps}
batch_size = 8
seq_len = 256
slots = 4
micro_batch_size = 2
[checkpoint]
every_steps = 1000
[evaluation]
every_steps = 0
final_sequences = 8
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
"""
WAYS: dict[str, tuple[str, ...]] = {
    "bare": ("--ranks", "2"),
    "watched": ("--nodes", "2", "--set", "fleet.snapshot_every_steps=0"),
    "kept": ("--nodes", "2"),
}
WARM_UP_STEPS = 3


def step_s(folder: Path, way: str, number: int, steps: int) -> float:
    """The median step of one run."""
    run_file, run_dir = folder / "run.toml", folder / f"{way}-{number}"
    data = Path(__file__).parent.parent / ".cache/data/python-stdlib"
    run_file.write_text(RUN.format(data=data, steps=steps))
    command = [sys.executable, "-m", "phalanx", "train", str(run_file), *WAYS[way], "--run-dir", str(run_dir)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return statistics.median(
        body.step_s for body in bodies if isinstance(body, Step) and body.step > WARM_UP_STEPS
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each way")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            for way in WAYS:
                taken[way].append(step_s(Path(folder), way, number, arguments.steps))
                print(f"{way}: {taken[way][-1]:.3f} s", file=sys.stderr, flush=True)
    bare = statistics.median(taken["bare"])
    ratios = {way: statistics.median(each) / bare for way, each in taken.items()}
    for way, ratio in ratios.items():
        print(f"{way:<8} {statistics.median(taken[way]):.3f} s a step, {ratio:.3f} of bare")
    if arguments.json:
        print(json.dumps({"step_s": taken, "over_bare": ratios}))


if __name__ == "__main__":
    main()
