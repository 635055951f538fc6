"""Cost of copying checkpoints to an object store for the steps that run meanwhile.

One run saves every few steps to the disk, and copies every second of these checkpoints to a real S3 server (ministack, on this machine). So stretches
with a copy alternate with stretches without, in one process: other differences, as the place of memory or the machine's other work, slow both equally.
The run computes with one thread: of two cores the other is left for the server, which in a cluster is elsewhere. The report has the median, over all
copied stretches, of the time of the stretch over the mean of its two neighbors, the part of the stretch that the copy took, and the
processor time of the rank for sending, and for reading and checking. A run without copies must end with the same weights.

    python -m bench.checkpoint.uploads [--runs 3] [--steps 240] [--every 10] [--mib-s 0]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.common.small_run import SmallRun, steps_and_weights
from bench.running import record, run_bench
from phalanx.checkpoint.format.manifest import checksum
from phalanx.store.open_store import open_store
from store.servers import ministack
from tiny_runs import make_dataset


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument(
        "--every", type=int, default=10, help="steps between checkpoints, of which every second is copied"
    )
    parser.add_argument("--mib-s", type=float, default=0.0, help="checkpoint.store_mib_s; 0 is no limit")
    args = parser.parse_args()
    if args.steps < 6 * args.every:
        parser.error("--steps must be six times --every or more: fewer stretches give no result")
    ratios: list[float] = []
    shares: list[float] = []
    weights: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, ministack(Path(folder)) as server:
        os.environ |= server.environment
        data = make_dataset(Path(folder) / "data")
        for number in range(args.runs):
            url = server.url(secrets.token_hex(4))
            place = trained(args, data, url, Path(folder) / f"{number}-copied")
            steps, weights_hash = steps_and_weights(place)
            weights.add(weights_hash)
            ratios += over_neighbors(stretches([step["logged_s"] for step in steps], args.every))
            copied_s = statistics.median(copies_s(place))
            shares.append(copied_s / (args.every * statistics.median(step["logged_s"] for step in steps)))
            record({"run": len(shares), "copied_share": shares[-1]}, is_printed=False)
        weights.add(steps_and_weights(trained(args, data, "", Path(folder) / "alone"))[1])
        uploaded_mib = stored_mib(url)
        own_cost = own_cost_ms_per_mib(server.url(secrets.token_hex(4)), Path(folder) / "read")
    assert len(weights) == 1, "copying changes no bit"
    quarters = statistics.quantiles(ratios, n=4)
    report = {
        "with_a_copy_over_without": statistics.median(ratios),
        "quartiles": [quarters[0], quarters[2]],
        "stretches": len(ratios),
        "part_of_a_stretch_that_a_copy_takes": statistics.median(shares),
        "uploaded_mib": uploaded_mib,
        **own_cost,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=1))


def trained(args: argparse.Namespace, data: Path, store: str, place: Path) -> Path:
    """Train in a process of its own, and return its run directory."""
    place.mkdir()
    fields = f"every_steps = {args.every}"
    if store:
        fields += f'\nstore = "{store}"\nstore_every_steps = {2 * args.every}\nstore_mib_s = {args.mib_s}'
    run = SmallRun(
        "uploads",
        str(data),
        args.steps,
        seq_len=64,
        layers=4,
        dim=256,
        ffn_dim=768,
        checkpoint_fields=fields,
    )
    done = subprocess.run(
        run.command(place),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return place / "run"


def stretches(steps_s: list[float], every: int) -> list[float]:
    """Return the time of the steps after each save up to the next one, beginning with the first save."""
    return [sum(steps_s[first : first + every]) for first in range(every, len(steps_s) - every + 1, every)]


def over_neighbors(times_s: list[float]) -> list[float]:
    """Return the time of each copied stretch (the second, the fourth and so on) over the mean of the two beside it."""
    return [
        times_s[at] / statistics.mean((times_s[at - 1], times_s[at + 1]))
        for at in range(1, len(times_s) - 1, 2)
    ]


def copies_s(run: Path) -> list[float]:
    """Return the seconds that each copy of a checkpoint took."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["seconds"] for event in events if event["kind"] == "CheckpointCopied"]


def own_cost_ms_per_mib(url: str, file: Path, mib: int = 40, rounds: int = 5) -> dict[str, float]:
    """Return the processor time of this process alone for each MiB that it sends, and that it reads from a disk and checks; medians."""
    content = secrets.token_bytes(mib << 20)
    file.write_bytes(content)
    blocks = [memoryview(content)[at : at + (8 << 20)] for at in range(0, len(content), 8 << 20)]
    store = open_store(url)
    sending, reading = [], []
    for number in range(rounds):
        begin_s = time.process_time()
        store.put_blocks(str(number), blocks, len(content))
        sent_s = time.process_time()
        with file.open("rb") as opened:
            while block := opened.read(8 << 20):
                checksum(block)
        sending.append(sent_s - begin_s)
        reading.append(time.process_time() - sent_s)
    return {
        "sending_ms_per_mib": statistics.median(sending) * 1e3 / mib,
        "reading_ms_per_mib": statistics.median(reading) * 1e3 / mib,
    }


def stored_mib(url: str) -> float:
    """Return the size of all objects below ``url``, in MiB: the checkpoints that are kept, two by default."""
    return sum(info.nbytes for info in open_store(url).list()) / (1 << 20)


if __name__ == "__main__":
    run_bench(main)
