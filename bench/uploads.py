"""What copying checkpoints to an object store costs the steps that run meanwhile.

Two runs of one model, in turns: both save every few steps to the disk, one of them also copies each checkpoint to a real S3 server (ministack, on this
machine), so that an upload is under way for much of the time. Both compute with one thread: of two cores the other is left for the server, which
in a cluster is elsewhere. Told are the medians over the pairs of the ratio of all steps' time, and of the median step, and how many bytes went up.

    python bench/uploads.py [--pairs 3] [--steps 60] [--every 10] [--mib-s 0]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose ``store`` is not the tests'
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bench.small_run import SmallRun, steps_and_weights
from phalanx.store.open_store import open_store
from store.servers import ministack
from tiny_runs import make_dataset

_WARM = 5
"""Steps at a run's begin that are left out."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--mib-s", type=float, default=0.0, help="checkpoint.store_mib_s; 0 is no limit")
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder, ministack(Path(folder)) as server:
        os.environ |= server.environment
        data = make_dataset(Path(folder) / "data")
        for number in range(args.pairs):
            url = server.url(secrets.token_hex(4))
            runs = [("", Path(folder) / f"{number}-alone"), (url, Path(folder) / f"{number}-copied")]
            times = {store: trained(args, data, store, place) for store, place in runs[:: (-1) ** number]}
            alone, copied = times[""], times[url]
            assert alone["weights"] == copied["weights"], "copying changes no bit"
            pairs.append(
                {
                    "all_steps": copied["steps_s"] / alone["steps_s"],
                    "median_step": copied["step_s"] / alone["step_s"],
                    "step_s": alone["step_s"],
                    "uploaded_mib": stored_mib(url),
                    "steps_s": copied["steps_s"],
                }
            )
    report = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    print(json.dumps(report | {"load": os.getloadavg()[0], "pairs": pairs}, indent=1))


def trained(args: argparse.Namespace, data: Path, store: str, place: Path) -> dict[str, Any]:
    """A run in a process of its own: the time of its steps, and the hash of its weights."""
    place.mkdir()
    checkpoint = f'every_steps = {args.every}\nstore = "{store}"\nstore_mib_s = {args.mib_s}'
    run = SmallRun(
        "uploads",
        str(data),
        args.steps,
        seq_len=64,
        layers=4,
        dim=256,
        ffn_dim=768,
        checkpoint_fields=checkpoint,
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
    events, weights = steps_and_weights(place / "run")
    steps = [event["logged_s"] for event in events][_WARM:]
    return {
        "steps_s": sum(steps),
        "step_s": statistics.median(steps),
        "weights": weights,
    }


def stored_mib(url: str) -> float:
    """What lies below ``url``, in MiB: the checkpoints that are kept, two by default."""
    return sum(info.nbytes for info in open_store(url).list()) / (1 << 20)


if __name__ == "__main__":
    main()
