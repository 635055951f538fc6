"""Cost of each phase of a start for one node or rank, measured here, and its projection to thousands (``phalanx_plan.whole_run.recovery``).

    python -m bench.fleet.start                                  # about a minute on two cores
    python -m bench.fleet.start --only attach --agents 500 1000 2000 --tls
    python -m bench.fleet.start --only imports meet --json

- *attach*: real agents' connections (``bench.fleet.coordinator``: TCP, the proof of the token, sealed messages; with ``--tls`` mutual TLS) to a
  real coordinator on loopback, without workers. Processor time of its event loop, which is one thread, and of the whole process, for one agent; all but
  two attach, then those two, with which the first epoch forms. A straight line through the event loop's time for one agent separates the
  constant cost of an agent from the cost that grows with the number of agents.
- *imports*: time of an agent's and a worker's imports, their calls that name a file (by strace) and the bytes that they read and map.
- *meet*: time of the store's thread for a connection and a call, and of a rank for the proof of another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.fleet.coordinator import SimulatedAgent, make_run, until
from bench.running import run_bench
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import read_fleet_file
from phalanx.parallel.process_group.meeting import challenge_of, proof_of
from phalanx.run.spec import RunSpec
from phalanx_plan.whole_run.recovery import start

HEARTBEAT_S, PATIENCE_S = 5.0, 300.0
AT_ONCE, PAUSE_S = 50, 0.1
PROGRAMS = {"agent": "phalanx.fleet.node.agent", "worker": "phalanx.fleet.node.rank.worker"}
_LOOK = """
import os, sys
read = int(open("/proc/self/io").readline().split()[1])
files = {line.split()[-1] for line in open("/proc/self/maps") if line.split()[-1].startswith("/")}
print("seen", read + sum(os.path.getsize(file) for file in files if os.path.exists(file)))
"""


def threads_s(pid: int | str) -> dict[str, float]:
    """Return the processor seconds of each living thread of a process."""
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended since it was listed
            seconds[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def certificates(folder: Path) -> Path:
    """Make a folder with certificates for mutual TLS on loopback."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=run", "-days", "2")
    openssl("req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
    return folder


async def attached(folder: Path, spec: RunSpec, pid: int, shown: Path | None) -> dict[str, float]:
    """Return milliseconds of the coordinator's event loop, and of all its threads, for one agent: to attach, and to form the first epoch."""
    await until(folder, "listening", lambda _: True, PATIENCE_S, pid)
    address, credentials = read_fleet_file(folder).coordinator, credentials_of(folder, spec, 0, shown)
    total = spec.fleet.nodes + spec.fleet.spares
    agents = [SimulatedAgent(number, address, credentials, HEARTBEAT_S) for number in range(total)]
    tasks = []
    marks = [threads_s(pid)]
    for most, condition in (
        (total - 2, lambda f: sum(x.attached for x in f.members) == total - 2),
        (total, lambda f: f.phase == "running"),
    ):
        for number in range(len(tasks) // 2, most):
            tasks += [
                asyncio.create_task(agents[number].link.run()),
                asyncio.create_task(agents[number].beat()),
            ]
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(PAUSE_S)
        await until(folder, f"ready with {most}", condition, PATIENCE_S, pid)
        marks.append(threads_s(pid))
    report = {"agents": float(total), "tls": float(shown is not None)}
    for name, before, after in (("attach", marks[0], marks[1]), ("form", marks[1], marks[2])):
        loop_s = after[str(pid)] - before[str(pid)]
        all_s = sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
        report |= {f"{name}_loop_ms": 1e3 * loop_s / total, f"{name}_all_ms": 1e3 * all_s / total}
    return report


def attach(agents: int, tls: bool) -> dict[str, float]:
    """Return the result of ``attached`` from a process of its own: thousands of connections are not closed one by one."""
    words = [sys.executable, "-m", "bench.fleet.start", "--one", str(agents), *(["--tls"] if tls else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return report


def attach_here(agents: int, tls: bool) -> None:
    """Print the result of ``attached`` for so many agents, and end this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec, shown = make_run(folder, agents, HEARTBEAT_S), certificates(folder / "keys") if tls else None
        words = [sys.executable, "-m", "phalanx.fleet.control.coordinator", "--run-dir", name]
        process = subprocess.Popen(
            [*words, *(["--certificates", str(shown)] if shown else [])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        async def measure() -> None:
            try:
                print(json.dumps(await attached(folder, spec, process.pid, shown)), flush=True)
            finally:
                process.kill()
                subprocess.run(["rm", "-rf", name], check=False)
                os._exit(0)

        asyncio.run(measure())


def imports(module: str) -> dict[str, float]:
    """Return the seconds of a module's import, its calls that name a file (-1 without strace), and the bytes that it reads and maps."""
    began_s = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", f"import {module}{_LOOK}"], capture_output=True, text=True, check=True
    ).stdout
    took_s = time.monotonic() - began_s
    with tempfile.NamedTemporaryFile("r") as counted:
        words = ["strace", "-f", "-c", "-e", "trace=%file,getdents64", "-o", counted.name]
        try:
            subprocess.run(
                [*words, sys.executable, "-c", f"import {module}"], check=True, capture_output=True
            )
            calls = float(re.split(r"\s+", counted.read().splitlines()[-1].strip())[3])
        except (FileNotFoundError, subprocess.CalledProcessError):
            calls = -1.0
    return {"seconds": took_s, "file_calls": calls, "bytes": float(output.split()[-1])}


def meet(ranks: int) -> dict[str, float]:
    """Return microseconds of the store's thread for one connection and one call, and of a rank for one proof."""
    before = threads_s("self").keys()
    store = TCPStore("127.0.0.1", 0, ranks + 1, True, timedelta(seconds=60), wait_for_workers=False)
    own = threads_s("self").keys() - before

    def served_s() -> float:
        return sum(seconds for thread, seconds in threads_s("self").items() if thread in own)

    def connected(_: int) -> TCPStore:
        return TCPStore(
            "127.0.0.1", store.port, ranks + 1, False, timedelta(seconds=60), wait_for_workers=False
        )

    began_s = served_s()
    with ThreadPoolExecutor(64) as pool:
        clients = list(pool.map(connected, range(ranks)))
    connected_s = served_s()
    for number, client in enumerate(clients):
        client.set(f"key-{number}", "x" * 128)
        client.get("key-0")
        client.add("all", 1)
    called_s = served_s()
    challenge = challenge_of([secrets.token_bytes(32) for _ in range(ranks)])
    proving_s = time.process_time()
    for rank in range(ranks):
        proof_of("a token of the bench", "epoch-1", rank, challenge)
    proved_s = time.process_time() - proving_s
    return {
        "ranks": float(ranks),
        "connection_us": 1e6 * (connected_s - began_s) / ranks,
        "call_us": 1e6 * (called_s - connected_s) / ranks / 3,
        "proof_us": 1e6 * proved_s / ranks,
    }


def main() -> None:
    """Print the measurements, and the results of the closed forms."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["attach", "imports", "meet"])
    parser.add_argument("--agents", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--tls", action="store_true", help="attach over mutual TLS")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one:
        attach_here(options.one, options.tls)
        return
    phases = options.only or ["attach", "imports", "meet"]
    report: dict[str, object] = {}
    if "imports" in phases:
        report["imports"] = {name: imports(module) for name, module in PROGRAMS.items()}
    if "meet" in phases:
        report["meet"] = meet(options.ranks)
    if "attach" in phases:
        each = [attach(agents, options.tls) for agents in options.agents]
        report["attach"] = each
        if len(each) > 1:
            for name in ("attach", "form"):
                slope, same = np.polyfit([x["agents"] for x in each], [x[f"{name}_loop_ms"] for x in each], 1)
                report[f"{name}_line"] = {"ms": float(same), "ms_more_for_each_1000": 1e3 * float(slope)}
    if options.json:
        print(json.dumps(report))
        return
    print(json.dumps(report, indent=1))
    for nodes in (1, 100, 1_000, 10_000, 25_000):
        local, shared = start(nodes), start(nodes, files="shared")
        print(
            f"{nodes:>6} nodes of 8: {local.total_s:.0f} s, with a shared file system {shared.total_s:.0f} s"
        )


if __name__ == "__main__":
    run_bench(main)
