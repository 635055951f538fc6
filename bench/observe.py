"""The cost of watching a run: a step pays for its ledger entries, one event, and an offer to each sink.

Every figure is a ratio to the least that could be done instead, measured in the same loop: reading the
clock (for a ledger switch), ``json.dumps`` and one ``write`` of the same event (for an append), and
appending to a plain deque (for an offer). Medians of paired runs.

    python bench/observe.py [--json]
"""

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import Event, Step
from phalanx.observe.ledger.ledger import Bucket, Ledger
from phalanx.observe.sinks.background import Background

PAIRS = 15
LEDGER = {bucket.value: 1234.5678 for bucket in list(Bucket)[:20]}
STEP = Step(1000, 5000, 2.3, 0.8, 3e-4, 65_536_000, 1.5e5, 0.41, 0.4, 3.3, 0.95, LEDGER, 3 << 30)


class Sleeping:
    """A sink that never comes back."""

    def write(self, event: Event) -> None:  # noqa: ARG002
        time.sleep(3600)

    def close(self) -> None:
        pass


def seconds_each(work: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def compare(
    name: str, against: str, ours: Callable[[], object], least: Callable[[], object], times: int
) -> dict[str, object]:
    """Medians over pairs that alternate, so that a slow spell of the machine hits both."""
    pairs = [(seconds_each(ours, times), seconds_each(least, times)) for _ in range(PAIRS)]
    return {
        "what": name,
        "against": against,
        "ours_us": 1e6 * median(a for a, _ in pairs),
        "least_us": 1e6 * median(b for _, b in pairs),
        "ratio": median(a / b for a, b in pairs),
    }


def measure(directory: Path) -> list[dict[str, object]]:
    ledger = Ledger()
    log = EventLog(directory / "events.jsonl", 0)
    plain = os.open(directory / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    record = {"t": 1.0, "attempt": 0, "kind": "Step", **asdict(STEP)}
    line = (json.dumps(record) + "\n").encode()
    sink = Background("asleep", Sleeping, queue_events=1 << 20, close_timeout_s=0.0)
    queue: deque[Event] = deque(maxlen=1 << 20)
    event = Event(1.0, 0, STEP)
    rows = [
        compare(
            "ledger switch",
            "one clock reading",
            lambda: ledger.switch(Bucket.EVAL),
            time.monotonic_ns,
            20_000,
        ),
        compare(
            "append a step event",
            "json.dumps and write",
            lambda: log.append(STEP),
            lambda: os.write(plain, (json.dumps(record) + "\n").encode()),
            1000,
        ),
        compare(
            "offer to a hung sink",
            "deque.append",
            lambda: sink.offer(event),
            lambda: queue.append(event),
            20_000,
        ),
    ]
    count = sum(1 for _ in read_events(log.path))
    rows.append(
        compare(
            f"read {count:,} events",
            "json.loads of each line",
            lambda: sum(1 for _ in read_events(log.path)),
            lambda: [json.loads(line) for _ in range(count)],
            1,
        )
    )
    sink.close()
    log.close()
    os.close(plain)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'what':<24}{'ours':>14}{'least':>14}{'ratio':>8}  against")
    for row in rows:
        print(
            f"{row['what']:<24}{row['ours_us']:>11,.2f} us{row['least_us']:>11,.2f} us{row['ratio']:>8.2f}  {row['against']}"
        )


if __name__ == "__main__":
    main()
