"""``phalanx serve --stream`` under a hard cap smaller than the model, against the disk and the closed form: ``python -m bench.serve.streamed``.

A model with random weights is saved by the real writers, and served three times by the real command:

1. from memory, without a cap: the seconds of a pass of B texts, t(B), and the texts;
2. from memory, under the cap: it must be killed, which proves the cap;
3. streamed, under the cap, with ``--memory`` the cap: tokens/s of B texts at a time, tokens and log-probabilities equal to those of 1.

The closed form is tokens/s = B / max(W / BW, t(B)), where W are the bytes that a pass reads and BW is the rate at which this disk reads the same
file from its beginning to its end (O_DIRECT, 8 MiB at a time, two threads, before and after). For a dense model W is computed from the layers that stay
in memory and compared with the count of the kernel; for a mixture W is counted, and printed beside the bytes that experts chosen uniformly without a cache would
read. Ratios are speeds: 1 is the limit (goal: 0.9).

    python -m bench.serve.streamed
    python -m bench.serve.streamed --experts 16 --layers 10 --batches 1 4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.common.capped import capped
from bench.common.saved_run import save_run_of_bytes
from bench.running import run_bench
from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.pack.reader import open_pack
from phalanx.checkpoint.pack.writer import pack
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec

_BLOCK = 8 << 20
_CONTEXT = 128
_COMMAND = "import sys, torch; torch.set_num_threads(int(sys.argv.pop(1))); from phalanx.cli.main import main; main()"
"""``phalanx`` with a number of threads: PyTorch takes ``OMP_NUM_THREADS`` only up to the number of processors."""


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0, help="of each layer but the first; 0: dense")
    parser.add_argument("--cap-mib", type=int, default=1200, help="of the streaming process, all in all")
    parser.add_argument("--tokens", type=int, default=12, help="of each text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--format", default="fp32", choices=["fp32", "bf16", "fp8", "int8"])
    parser.add_argument("--numerics", default="exact", choices=["exact", "fast"])
    arguments = parser.parse_args()
    # Ended from outside, it still ends its servers, and removes its files and control group.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for row in measure(arguments, Path(folder)):
            print(json.dumps(row), flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Yield a row for the server under the cap, and a row for each number of texts."""
    path = make_pack(arguments, folder)
    index = open_pack(path).index
    options = [
        "--numerics",
        arguments.numerics,
        "--context",
        str(_CONTEXT),
        "--rows",
        "64",
        "--requests",
        "16",
    ]
    options += ["--dtype", "bfloat16" if arguments.format == "bf16" else "float32"]
    resident: dict[int, tuple[float, Any]] = {}
    with served(path, *options) as server:
        for batch in arguments.batches:
            texts(server, batch, 2)
            resident[batch] = texts(server, batch, arguments.tokens)
    cap = arguments.cap_mib << 20
    with capped(cap, 1) as limit:
        code, last_line = ended([str(folder / "run"), *options], limit.enter)
        yield {
            "model_MiB": path.stat().st_size >> 20,
            "cap_MiB": arguments.cap_mib,
            "cap": limit.kind,
            "from_memory_under_the_cap": f"signal {signal.Signals(-code).name}"
            if code < 0
            else f"exit code {code}: {last_line}",
        }
    with (
        capped(cap, 2) as limit,
        served(path, *options, "--stream", "--memory", str(cap), enter=limit.enter) as server,
    ):
        for batch in arguments.batches:
            rate = disk_rate(path)
            texts(server, batch, 2)
            before = read_bytes(server.pid)
            seconds, decoded = texts(server, batch, arguments.tokens)
            read = (read_bytes(server.pid) - before) / arguments.tokens
            rate = (rate + disk_rate(path)) / 2
            pass_s, expected = resident[batch]
            experts = [section.nbytes for section in index.sections if section.kind == "expert"]
            row: dict[str, object] = {
                "texts": batch,
                "disk_GB_s": round(rate / 1e9, 2),
                "GB_a_pass": round(read / 1e9, 3),
                "tokens_s": round(batch / seconds, 2),
                "closed_form_tokens_s": round(batch / max(read / rate, pass_s, 1e-9), 2),
                "measured_over_closed_form": round(max(read / rate, pass_s) / seconds, 3),
                "disk_share": round(read / rate / seconds, 3),
                "resident_tokens_s": round(batch / pass_s, 2),
                "equal_bits": decoded == expected,
                "peak_MiB": peak_bytes(server.pid) >> 20,
                "group_peak_MiB": limit.peak_bytes() >> 20,
            }
            if experts:
                count = arguments.experts
                touched = sum(experts) * (1 - (1 - 2 / count) ** batch)
                row["read_over_uniform_without_cache"] = round(
                    read / (touched + bodies(index, server.note)), 3
                )
            else:
                row["read_over_reckoned"] = round(read / max(1.0, bodies(index, server.note)), 3)
            yield row


def bodies(index: Any, note: str) -> float:
    """Return the bytes of the layers' bodies that a pass reads, from the number of layers that stay in memory."""
    sizes = [section.nbytes for section in index.sections if section.kind == "block"]
    match = re.search(r"(\d+) of \d+ layers stay", note)
    assert match, note
    return sum(sizes) * (1 - int(match[1]) / len(sizes))


class Server:
    """A server that takes requests."""

    def __init__(self, url: str, pid: int, errors: list[str]) -> None:
        self.url, self.pid, self._errors = url, pid, errors

    @property
    def note(self) -> str:
        """The server's standard error so far."""
        return "".join(self._errors)


@contextmanager
def served(
    path: Path, *options: str, enter: Callable[[], None] | None = None, threads: int = 1
) -> Iterator[Server]:
    """Run ``phalanx serve`` until the block ends."""
    process = start([str(path), *options], enter, threads)
    assert process.stdout is not None
    assert process.stderr is not None
    note: list[str] = []
    reader = threading.Thread(target=lambda: note.extend(process.stderr or []), daemon=True)
    reader.start()
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        if match is None:
            reader.join()
            raise SystemExit("".join(note) or f"the server ended with {process.wait()}")
        yield Server(match[0], process.pid, note)
    finally:
        process.terminate()
        process.wait()


def start(words: list[str], enter: Callable[[], None] | None, threads: int = 1) -> subprocess.Popen[str]:
    """Start the command. By default one thread computes, so that the two reading threads have a processor."""
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(threads), "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "2"},
        preexec_fn=enter,
    )


def ended(words: list[str], enter: Callable[[], None]) -> tuple[int, str]:
    """Start a server that must fail. Return its exit code and last line; it is ended if it listens."""
    process = start(words, enter)
    assert process.stdout is not None
    if process.stdout.readline():
        process.terminate()
    _, errors = process.communicate()
    return process.returncode, (errors.strip().splitlines() or ["it served"])[-1]


def texts(server: Server, batch: int, tokens: int) -> tuple[float, Any]:
    """Return the seconds of a token of ``batch`` texts at a time, and their ids and log-probabilities."""
    with httpx.Client(timeout=600) as client:
        model = client.get(f"{server.url}/models").json()["data"][0]["id"]

        def complete(number: int) -> Any:
            body = {
                "model": model,
                "prompt": [number + 1, 7, 9],
                "max_tokens": tokens,
                "seed": number,
                "ignore_eos": True,
                "logprobs": 1,
                "return_token_ids": True,
            }
            answer = client.post(f"{server.url}/completions", json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        with ThreadPoolExecutor(batch) as pool:
            began = time.perf_counter()
            choices = list(pool.map(complete, range(batch)))
            return (time.perf_counter() - began) / tokens, choices


def disk_rate(path: Path) -> float:
    """Return the bytes a second of reading a file from its beginning to its end, past the page cache."""
    size = path.stat().st_size // _BLOCK * _BLOCK
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    half = size // 2 // _BLOCK * _BLOCK

    def read(span: tuple[int, int]) -> None:
        buffer = page_aligned(_BLOCK)
        for start_at in range(*span, _BLOCK):
            os.preadv(descriptor, [buffer.data], start_at)

    with ThreadPoolExecutor(2) as pool:
        began = time.perf_counter()
        list(pool.map(read, [(0, half), (half, size)]))
        seconds = time.perf_counter() - began
    os.close(descriptor)
    return size / seconds


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has read from disks (proc(5), /proc/PID/io)."""
    match = re.search(r"^read_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert match
    return int(match[1])


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    match = re.search(r"^VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) << 10


def make_pack(arguments: argparse.Namespace, folder: Path) -> Path:
    """Make the pack of a run with random weights."""
    moe = (
        MoeSpec(experts=arguments.experts, per_token=2, ffn_dim=2 * arguments.dim, first_dense=1)
        if arguments.experts
        else None
    )
    spec = ModelSpec(
        layers=arguments.layers,
        dim=arguments.dim,
        heads=16,
        kv_heads=2,
        ffn_dim=4 * arguments.dim,
        vocab_size=264,
        moe=moe,
    )
    torch.manual_seed(0)
    save_run_of_bytes(folder / "run", resolve(spec), _CONTEXT)
    return pack(folder / "run", None, folder / "model.pack", arguments.format)[0]


if __name__ == "__main__":
    run_bench(main)
