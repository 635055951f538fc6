"""The time of a real fleet's steps while all its endpoints are scraped five times a second, over that of its steps in between.

    python bench/scraped_fleet.py RUN_FILE [--pairs 40] [--stretch 2] [--port 19600]

Pairs of neighboring stretches of one run, in turns beginning with the one and the other; the median of the pairs' ratios of median steps.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Step

_WARM_STEPS = 20


def steps(run_dir: Path) -> list[tuple[float, float]]:
    """When each step ended, and its seconds."""
    with suppress(EventLogError):
        return [
            (e.t, e.body.step_s) for e in read_events(run_dir / "events.jsonl") if isinstance(e.body, Step)
        ]
    return []


def stretch(seconds: float, ports: range) -> tuple[float, float]:
    """Scrapes ``ports`` for so long (none: waits); returns when it began and ended."""
    began = time.time()
    while time.time() < began + seconds:
        for port in ports:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        time.sleep(0.2)
    return began, time.time()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--stretch", type=float, default=2.0)
    parser.add_argument("--port", type=int, default=19600)
    given = parser.parse_args()
    run_dir = Path(tempfile.mkdtemp()) / "run"
    settings = [f"observe.metrics_port={given.port}", "train.steps=1000000", "evaluation.every_steps=0", "checkpoint.every_steps=1000"]  # fmt: skip
    command = [sys.executable, "-m", "phalanx", "train", str(given.run_file), "--nodes", "2", "--spares", "1"]
    command += ["--run-dir", str(run_dir), *(part for one in settings for part in ("--set", one))]
    fleet = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spans: dict[tuple[int, bool], tuple[float, float]] = {}
    try:
        while len(steps(run_dir)) < _WARM_STEPS and fleet.poll() is None:
            time.sleep(0.5)
        for pair in range(given.pairs):
            for scraped in (True, False) if pair % 2 else (False, True):
                ports = range(given.port, given.port + 4) if scraped else range(0)
                spans[pair, scraped] = stretch(given.stretch, ports)
    finally:
        fleet.send_signal(signal.SIGINT)
        fleet.wait(120)
    done = steps(run_dir)
    usual = {key: [took for t, took in done if began < t <= ended] for key, (began, ended) in spans.items()}
    pairs = [(usual[pair, True], usual[pair, False]) for pair in range(given.pairs)]
    ratios = [statistics.median(on) / statistics.median(off) for on, off in pairs if on and off]
    quartiles = statistics.quantiles(ratios, n=4)
    print(json.dumps({"pairs": len(ratios), "ratio": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "step_s": statistics.median(took for _, took in done)}))  # fmt: skip


if __name__ == "__main__":
    main()
