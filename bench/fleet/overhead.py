"""Cost of a fleet to a step: the same run on two ranks, with and without a fleet around them, by turns.

*Bare*: ``phalanx train --ranks 2``. *Watched*: ``--nodes 2``, a coordinator, two agents, heartbeats and leases, but no snapshots.
*Kept*: the same with a snapshot after every step, streamed to a buddy. Each number is the median of the steps of a run, without
the first ones; the ratios are those of the medians of all runs. Agents and coordinator share the cores with the ranks here; on
a node with more cores than accelerators they do not.

If a machine's noise hides a hundredth of a step, processor time shows it: the report has the processor time that agents and
coordinator used a second while the steps ran, beside the ranks.

    python -m bench.fleet.overhead
    python -m bench.fleet.overhead --runs 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.running import record, run_bench
from phalanx.observe.event_log import newest_event, read_events
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
WATCHERS = ("phalanx.fleet.node.agent", "phalanx.fleet.control.coordinator")


def step_s(folder: Path, way: str, number: int, steps: int) -> tuple[float, float]:
    """Return the median step of one run, and the processor time that all watchers use in a second (s)."""
    run_file, run_dir = folder / "run.toml", folder / f"{way}-{number}"
    data = Path(__file__).parents[2] / ".cache/data/python-stdlib"
    run_file.write_text(RUN.format(data=data, steps=steps))
    command = [sys.executable, "-m", "phalanx", "train", str(run_file), *WAYS[way], "--run-dir", str(run_dir)]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        share = watchers_share(process, run_dir, steps)
        _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{way}: {errors[-2000:]}")
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    median_s = statistics.median(
        body.step_s for body in bodies if isinstance(body, Step) and body.step > WARM_UP_STEPS
    )
    return median_s, share


def watchers_share(process: subprocess.Popen[str], run_dir: Path, steps: int) -> float:
    """Return the share of a core that agents and coordinator used while the steps after the first ones ran."""
    samples = []
    while process.poll() is None:
        time.sleep(0.2)
        if WARM_UP_STEPS < steps_done(run_dir) < steps:
            samples.append((time.monotonic(), processor_s(run_dir)))
    if len(samples) < 2:
        return 0.0
    (begin_s, used_s), (end_s, used_end_s) = samples[0], samples[-1]
    return (used_end_s - used_s) / (end_s - begin_s)


def steps_done(run_dir: Path) -> int:
    """Return the number of the newest step that has ended."""
    if not (run_dir / "events.jsonl").exists():
        return 0
    event = newest_event(run_dir / "events.jsonl", lambda event: isinstance(event.body, Step))
    return event.body.step if event is not None and isinstance(event.body, Step) else 0


def processor_s(run_dir: Path) -> float:
    """Return the processor time that the agents and the coordinator of a run have used."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(run_dir) in words and any(program in words for program in WATCHERS):
                ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each way")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            for way in WAYS:
                step_time_s, share = step_s(Path(folder), way, number, arguments.steps)
                taken[way].append(step_time_s)
                shares[way].append(share)
                record({"way": way, "step_s": step_time_s, "share": share}, is_printed=False)
                print(f"{way}: {step_time_s:.3f} s, {share:.1%} of a core", file=sys.stderr, flush=True)
    bare = statistics.median(taken["bare"])
    ratios = {way: statistics.median(each) / bare for way, each in taken.items()}
    for way, ratio in ratios.items():
        share = statistics.median(shares[way])
        print(
            f"{way:<8} {statistics.median(taken[way]):.3f} s a step, {ratio:.3f} of bare; "
            f"agents and coordinator used {share:.1%} of a core"
        )
    if arguments.json:
        print(json.dumps({"step_s": taken, "over_bare": ratios, "watchers_of_a_core": shares}))


if __name__ == "__main__":
    run_bench(main)
