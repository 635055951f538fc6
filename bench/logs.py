"""What logs cost: a step of a run that says much, a line, and the reading of what many processes have said.

- *step*: the same steps on one rank, without a word and with 1,000 lines a second, in blocks that alternate; the ratio of each pair's medians.
  The lines are printed by a thread of the rank, as libraries do it, through the real capture into a real file. A third kind of block prints the
  same lines into a file of Python's, as before there was a capture.
- *line*: processor time of one line, by ``print`` and by ``logging``, and of one that holds a secret.
- *reader*: files of 100 processes with 100,000 lines each: all of them merged, the last 500, warnings only, one pattern.

    python bench/logs.py                       # about three minutes
    python bench/logs.py --only reader --processes 100 --lines 100000
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.observe.logs.line import LogLine, encode
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.logs.groups import grouped
from phalanx.watch.logs.read import LogQuery, all_lines, read_lines

LINE = "step 1234: bucket 17 of 64 reduced over 8 ranks in 3.21 ms, 118.2 MB; next gather begins at layer 12"


def step_bench(pairs: int, per_block: int) -> None:
    """Runs in a process whose output is caught."""
    import torch

    from phalanx.observe.logs.capture import capture_output

    place = capture_output(os.environ)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(512, 256)
    talk = threading.Event()
    plain = open(os.devnull, "w")  # noqa: SIM115
    target: list[object] = [None]

    def talker() -> None:
        while True:
            talk.wait()
            for _ in range(10):
                print(LINE, file=target[0])  # type: ignore[call-overload]
            time.sleep(0.01)

    threading.Thread(target=talker, daemon=True).start()

    def block(stream: object | None) -> float:
        target[0] = stream
        (talk.set if stream is not None else talk.clear)()
        times = []
        for number in range(per_block):
            place.step = number
            began = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
        talk.clear()
        return statistics.fmean(times)

    block(None)
    caught, python = [], []
    for number in range(pairs):
        order: list[Callable[[], float]] = [
            lambda: block(None),
            lambda: block(sys.stdout),
            lambda: block(plain),
        ]
        turned = order[number % 3 :] + order[: number % 3]
        found = {order.index(one): one() for one in turned}
        caught.append(found[1] / found[0])
        python.append(found[2] / found[0])
    for name, ratios in (("caught", caught), ("into a plain file", python)):
        low, middle, high = statistics.quantiles(ratios, n=4)
        sys.__stderr__.write(
            f"BENCH step with 1,000 lines a second over none, {name}: {middle:.4f} ({low:.4f} to {high:.4f}), {pairs} pairs\n"
        )  # type: ignore[union-attr]


def line_bench(lines: int) -> None:
    """Processor time of a line in a process whose output is caught."""
    from phalanx.observe.logs.capture import capture_output

    capture_output(os.environ)
    told = logging.getLogger("bench")
    for name, say in (
        ("print", lambda: print(LINE)),
        ("logging", lambda: told.warning(LINE)),
        ("print of a line that is masked", lambda: print("GET https://user:hunter2hunter2@host/path")),
    ):
        time.sleep(4.0)  # the process may say so much again
        began = time.process_time()
        for _ in range(lines):
            say()
        took = (time.process_time() - began) / lines
        sys.__stderr__.write(f"BENCH {name}: {took * 1e6:.1f} us a line\n")  # type: ignore[union-attr]


def in_child(mode: str, *arguments: str) -> None:
    """Runs a part of this program as a child whose output is caught, and prints its figures."""
    from phalanx.observe.logs.child_output import ChildOutput
    from phalanx.observe.logs.order import LogOrder
    from phalanx.observe.logs.tail import last_lines

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        order = LogOrder(Path(folder) / "logs" / "attempt-000-rank-00000.jsonl", "rank-00000", 0, "host")
        output = ChildOutput(order, os.environ)
        process = subprocess.Popen(
            [sys.executable, __file__, "--inside", mode, *arguments],
            env={**os.environ, **output.environment},
            stdout=output.descriptor,
            stderr=subprocess.STDOUT,
            pass_fds=output.inherited,
        )
        output.started()
        process.wait()
        output.ended()
        for line in last_lines(order.path, 1 << 20):
            if line.text.startswith("BENCH ") or line.level == "error":
                print(line.text.removeprefix("BENCH "), flush=True)


def reader_bench(processes: int, lines: int) -> None:
    """Writes the files through the encoder of logs, and reads them."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        directory.logs.mkdir()
        for rank in range(processes):
            with directory.log(0, rank).open("wb") as file:
                for number in range(lines):
                    level = "warning" if number % 1000 == 7 else "info"
                    t = 1.7e9 + number * 0.01 + rank * 1e-5
                    file.write(
                        encode(
                            LogLine(
                                t,
                                level,
                                f"node-{rank // 8}",
                                rank,
                                0,
                                0,
                                number // 10,
                                LINE,
                                f"rank-{rank:05d}",
                            )
                        )
                    )
        total = processes * lines
        nbytes = sum(path.stat().st_size for path in directory.logs.iterdir())
        print(f"{processes} processes x {lines:,} lines: {nbytes / 1e9:.2f} GB", flush=True)
        cases: list[tuple[str, Callable[[], int]]] = [
            ("all, merged", lambda: sum(1 for _ in all_lines(directory))),
            ("the last 500", lambda: len(read_lines(directory, LogQuery(), 500))),
            ("the last 500 warnings", lambda: len(read_lines(directory, LogQuery(level="warning"), 500))),
            ("all warnings, grouped", lambda: len(grouped(all_lines(directory, LogQuery(level="warning"))))),
            (
                "since the last tenth, of one rank",
                lambda: len(
                    read_lines(directory, LogQuery(frozenset([3]), since=1.7e9 + lines * 0.009), None)
                ),
            ),
        ]
        for name, read in cases:
            began, began_cpu = time.perf_counter(), time.process_time()
            found = read()
            took, used = time.perf_counter() - began, time.process_time() - began_cpu
            rate = f", {total / used / 1e6:.2f} million lines a processor's second" if "all" in name else ""
            print(f"{name}: {took:.2f} s ({used:.2f} s of a processor) for {found:,}{rate}", flush=True)


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["step", "line", "reader"])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60, help="in a block")
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--inside", choices=["step", "line"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside == "step":
        step_bench(given.pairs, given.steps)
    elif given.inside == "line":
        line_bench(5_000)
    else:
        if given.only in (None, "step"):
            in_child("step", "--pairs", str(given.pairs), "--steps", str(given.steps))
        if given.only in (None, "line"):
            in_child("line")
        if given.only in (None, "reader"):
            reader_bench(given.processes, given.lines)


if __name__ == "__main__":
    main()
