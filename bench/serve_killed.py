"""Worker processes of ``phalanx serve`` against one, and the gap in a stream whose worker is killed: ``python -m bench.serve_killed RUN_DIR``.

Rows: tokens/s of streams on ``prefill:1,decode:1`` (a thread each) over one mixed worker with two (or ``--mixed-threads``); and the seconds from SIGKILL of a decode worker to
the next token, over those to the first token of a prompt as long as the text was. Prompts are random ids below 250.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

_seeds = itertools.count()


@contextmanager
def service(run: Path, *options: str) -> Iterator[tuple[str, dict[int, int]]]:
    """The URL of a service, and its workers' process ids, by number."""
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "serve",
        str(run),
        "--port",
        "0",
        "--json",
        "--context",
        "1024",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids: dict[int, int] = {}
    try:
        for line in process.stdout:
            said = json.loads(line)
            if said["event"] == "worker-ready":
                pids[said["worker"]] = said["pid"]
            if said["event"] == "listening":
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield said["url"], pids
                return
        raise SystemExit("the service did not start; its reason is above")
    finally:
        process.terminate()
        process.wait()


def times_s(url: str, prompt: list[int], tokens: int) -> Iterator[float]:
    """The time of the request, then that of each token."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "seed": 1, "stream": True}
    began = time.perf_counter()
    with httpx.stream(
        "POST", f"{url}/completions", json=body | {"ignore_eos": True, "return_token_ids": True}, timeout=600
    ) as answer:
        yield began
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from [time.perf_counter()] * len(choice.get("token_ids") or ())


def prompt(length: int) -> list[int]:
    draw = random.Random(next(_seeds))
    return [draw.randrange(250) for _ in range(length)]


def tokens_per_s(url: str, streams: int, length: int, tokens: int) -> float:
    """Tokens per second of all streams together, from the first request to the last token."""
    prompts = [prompt(length) for _ in range(streams)]
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        counts = list(pool.map(lambda one: len(list(times_s(url, one, tokens))) - 1, prompts))
    return sum(counts) / (time.perf_counter() - began)


def busy_worker(url: str) -> int:
    """The number of the decode worker that has a job."""
    health = httpx.get(url.replace("/v1", "/health")).json()
    return next(int(w["number"]) for w in health["workers"] if w["role"] == "decode" and w["jobs"])


def gap_s(url: str, pids: dict[int, int], length: int) -> tuple[float, float, float]:
    """Seconds from a kill to the next token, the median between tokens before, and to the first token of so long a text anew."""
    times = times_s(url, prompt(length), 120)
    came = [next(times) for _ in range(41)]
    before = statistics.median(b - a for a, b in itertools.pairwise(came[1:]))
    os.kill(pids[busy_worker(url)], signal.SIGKILL)
    killed = time.perf_counter()
    after = next(one for one in times if one > killed + 4 * before)
    list(times)
    anew = list(itertools.islice(times_s(url, prompt(length + 40), 2), 2))
    return after - killed, before, anew[1] - anew[0]


def main() -> None:
    """Prints both rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed-threads", type=int, default=2)
    given = parser.parse_args()
    common = ("--name", "bench")
    with (
        service(given.run_dir, *common, "--workers", "1", "--threads", str(given.mixed_threads)) as (
            mixed,
            _,
        ),
        service(given.run_dir, *common, "--workers", "prefill:1,decode:1", "--threads", "1") as (apart, _),
    ):
        ratios, rates = [], []
        for _ in range(given.rounds):
            one, two = (tokens_per_s(url, given.streams, 400, 60) for url in (mixed, apart))
            ratios.append(two / one)
            rates.append(two)
        print(
            f"prefill:1,decode:1 over one mixed worker: {statistics.median(ratios):.2f} of its tokens/s "
            f"({min(ratios):.2f} to {max(ratios):.2f}; {statistics.median(rates):.0f} tokens/s)"
        )
    with service(given.run_dir, *common, "--workers", "prefill:1,decode:2", "--threads", "1") as (url, pids):
        tokens_per_s(url, 2, 400, 10)
        gap, step, anew = gap_s(url, pids, 400)
        print(
            f"SIGKILL of a decode worker: next token after {gap:.3f} s (between tokens before: {step:.3f} s; first token of such a text "
            f"anew: {anew:.3f} s; ratio {gap / anew:.2f}, goal 1.2)"
        )


if __name__ == "__main__":
    main()
