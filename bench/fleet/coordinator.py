"""Number of agents that one coordinator serves over real sockets on this machine, and their cost to it.

    python -m bench.fleet.coordinator --nodes 12500 --heartbeat-s 5

A real coordinator process serves simulated agents: real streams of one load generator process (this one). They greet, beat,
park and bind as agents do, without workers. Reported: the coordinator's share of a core and its memory in steady state, the
size of its journal, and how long a re-formation takes after one node's connection breaks (all park, a spare
takes the seat, all bind). The load generator competes for the same cores; its own share is reported too.

    python -m bench.fleet.coordinator --describe 200

The data ports of so many nodes instead, each with one rank's snapshot, after a change of the number of ranks: every rank needs the
descriptions of all. Reported: requests and seconds if each requests all, and if each requests its share and sends it to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import tomli_w
import xxhash

from bench.running import run_bench
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import ImageEntry
from phalanx.checkpoint.format.manifest import Manifest, encode_manifest
from phalanx.checkpoint.snapshot.data_port import SnapshotClient, SnapshotServer
from phalanx.checkpoint.snapshot.segments import Snapshot, SnapshotKey, SnapshotMemory, encode_record
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier, describe
from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, read_fleet_file
from phalanx.fleet.control.security import make_token
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.run.read import to_table
from phalanx.run.spec import DataSpec, FleetSpec, ModelSpec, RunSpec, TrainSpec

WORKERS = 8
TOKEN = "a token of the bench alone"
STEP_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SimulatedAgent:
    """An agent without workers: they are always warm, and obey at once."""

    def __init__(self, number: int, address: str, credentials: Credentials, heartbeat_s: float) -> None:
        self.name, self.heartbeat_s = f"node-{number}", heartbeat_s
        self.epoch, self.bound_s = m.NO_EPOCH, 0.0
        self.points = tuple(f"10.{number >> 8}.{number & 255}.1:{5000 + w}" for w in range(WORKERS))
        self.snapshots: tuple[m.RankSnapshot, ...] = ()
        self.number = number
        self.link = CoordinatorLink(
            lambda: [address], credentials, self.greet, self.on_command, lambda _line: None
        )

    @property
    def step(self) -> int:
        return int((time.monotonic() - self.bound_s) / STEP_S) if self.epoch != m.NO_EPOCH else m.NO_STEP

    def greet(self) -> list[m.AgentReport]:
        rack = (f"switch-{self.number // 640}", f"rack-{self.number // 16}")
        bound = self.epoch != m.NO_EPOCH
        host = f"10.{self.number >> 8}.{self.number & 255}.1"
        return [
            m.Joined(self.name, 1, WORKERS, host, 4000, rack, self.snapshots, self.epoch, bound, self.points)
        ]

    def on_command(self, command: c.Command) -> None:
        match command:
            case c.Bind(epoch=epoch, ranks=ranks, places=places):
                self.epoch, self.bound_s = epoch, time.monotonic()
                self.snapshots = tuple(m.RankSnapshot(ranks, rank, 0, "own", 1, epoch) for _, rank in places)
                self.link.send(m.Bound(self.name, 1, epoch))
            case c.Park(epoch=epoch):
                self.epoch = m.NO_EPOCH
                self.link.send(m.Parked(self.name, 1, epoch, self.points, self.snapshots))
            case c.TellAll():
                for report in self.greet():
                    self.link.send(report)

    async def beat(self) -> None:
        await asyncio.sleep(self.heartbeat_s * (self.number % 1000) / 1000)
        while True:
            phase = m.WorkerPhase.WARM if self.epoch == m.NO_EPOCH else m.WorkerPhase.BOUND
            self.link.send(m.Heartbeat(self.name, 1, self.epoch, self.step, phase))
            await asyncio.sleep(self.heartbeat_s)


def make_run(folder: Path, nodes: int, heartbeat_s: float) -> RunSpec:
    """Write the files of a run with one model copy on each node: every node has its own shards."""
    ranks = nodes * WORKERS
    fleet = FleetSpec(
        nodes=nodes, spares=1, workers_per_node=WORKERS, heartbeat_s=heartbeat_s, lease_s=60.0, confirm_s=1.0
    )
    spec = RunSpec(
        name="bench",
        model=ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=300),
        data=DataSpec(path="none"),
        train=TrainSpec(steps=10**6, batch_size=ranks, seq_len=16, slots=ranks),
        fleet=fleet,
    )
    (folder / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    make_token(folder)
    make_token(folder, "operate")
    return spec


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def until(
    folder: Path, state: str, condition: Callable[[FleetFile], bool], patience_s: float, pid: int
) -> float:
    """Return the seconds until fleet.json meets ``condition``; raise if the coordinator with ``pid`` ends, or after ``patience_s``."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < patience_s:
        with suppress(FleetFileError):
            if condition(read_fleet_file(folder)):
                return time.monotonic() - began_s
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise SystemExit(f"the coordinator (process {pid}) ended before the fleet was {state}")
        await asyncio.sleep(0.5)
    raise SystemExit(
        f"the fleet was not {state} within {patience_s:.0f} s: give fewer nodes or more patience"
    )


async def measure(
    folder: Path, spec: RunSpec, pid: int, seconds: float, patience_s: float
) -> dict[str, float]:
    """Attach all agents, measure steady state, then break one connection and measure the re-formation."""
    await until(folder, "listening", lambda _: True, patience_s, pid)
    address, credentials = read_fleet_file(folder).coordinator, credentials_of(folder, spec, 0, None)
    agents = [
        SimulatedAgent(number, address, credentials, spec.fleet.heartbeat_s)
        for number in range(spec.fleet.nodes + spec.fleet.spares)
    ]
    tasks: dict[str, asyncio.Task[None]] = {}
    beats = []
    began_s = time.monotonic()
    for number, agent in enumerate(agents):
        tasks[agent.name] = asyncio.create_task(agent.link.run())
        beats.append(asyncio.create_task(agent.beat()))
        if number % 50 == 49:
            await asyncio.sleep(0.1)
    total = len(agents)
    await until(folder, "attached", lambda f: sum(x.attached for x in f.members) == total, patience_s, pid)
    attached_s = time.monotonic() - began_s
    print(f"{total} attached after {attached_s:.1f} s", file=sys.stderr, flush=True)
    await until(folder, "running", lambda f: f.phase == "running", patience_s, pid)
    await asyncio.sleep(5.0)
    mine_s, its_s, began_s = time.process_time(), cpu_s(pid), time.monotonic()
    (journal,) = (folder / "fleet").glob("journal-*")
    journal_bytes = journal.stat().st_size
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - began_s
    report = {
        "agents": float(sum(member.attached for member in read_fleet_file(folder).members)),
        "ranks": float(read_fleet_file(folder).ranks),
        "heartbeat_s": spec.fleet.heartbeat_s,
        "attach_all_s": attached_s,
        "coordinator_cpu_share": (cpu_s(pid) - its_s) / passed_s,
        "coordinator_rss_bytes": float(rss_bytes(pid)),
        "journal_bytes_per_s": (journal.stat().st_size - journal_bytes) / passed_s,
        "load_generator_cpu_share": (time.process_time() - mine_s) / passed_s,
        "load_average": os.getloadavg()[0],
    }
    victim = next(x.name for x in read_fleet_file(folder).members if x.role == "member")
    epoch, its_s = read_fleet_file(folder).epoch, cpu_s(pid)
    began_s = time.monotonic()
    tasks[victim].cancel()
    await until(folder, "re-formed", lambda f: f.epoch > epoch and f.phase == "running", patience_s, pid)
    report["reform_s_with_confirm_1s"] = time.monotonic() - began_s
    report["reform_cpu_s"] = cpu_s(pid) - its_s
    return report


def describe_all(nodes: int) -> dict[str, float]:
    """Return requests to data ports, and seconds, until each of ``nodes`` readers has the descriptions of all snapshots."""
    memories = [SnapshotMemory("bench", 1) for _ in range(nodes)]
    for rank, memory in enumerate(memories):
        image = np.full(4096, rank % 251, dtype=np.uint8)
        segment = memory.worker_segments(0)[0]
        segment.begin(image.nbytes)[:] = image
        box = full_box("w", "uint8", (4096 * nodes,)).rows(4096 * rank, 4096 * (rank + 1))
        manifest = Manifest(rank, "", image.nbytes, 1 << 20, (), (ImageEntry(box, 0),))
        snapshot = Snapshot("bench", 0, SnapshotKey(nodes, rank, 1), -1, {}, manifest)
        digest = xxhash.xxh3_64_intdigest(image).to_bytes(8, "little")
        segment.complete(image.nbytes, encode_record(snapshot, encode_manifest(manifest), digest))
    servers = [SnapshotServer(memory, TOKEN) for memory in memories]
    holders = [SnapshotHolder(rank, f"127.0.0.1:{server.port}") for rank, server in enumerate(servers)]
    requests = 0
    fetch_record = SnapshotClient.record

    def counting(client: SnapshotClient, key: SnapshotKey) -> bytes:
        nonlocal requests
        requests += 1
        return fetch_record(client, key)

    SnapshotClient.record = counting  # type: ignore[method-assign]
    began_s = time.monotonic()
    shared_records: dict[int, bytes] = {}
    for holder in holders:
        shared_records |= describe(nodes, 1, [holder], token=TOKEN)
    report = {"nodes": float(nodes), "shared_requests": float(requests)}
    for known_records, name in ((shared_records, "shared"), ({}, "unshared")):
        began_s, requests = (began_s, requests) if known_records else (time.monotonic(), 0)
        for reader in range(nodes):
            tier = SnapshotTier(nodes, 1, holders=holders, records=known_records, token=TOKEN, reader=reader)
            assert len(tier.boxes(1)) == nodes
            tier.close()
        report |= {f"{name}_requests": float(requests), f"{name}_s": time.monotonic() - began_s}
    for server in servers:
        server.close()
    return report


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--heartbeat-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of steady state")
    parser.add_argument("--patience-s", type=float, default=300.0)
    parser.add_argument("--describe", type=int, help="measure the data ports of so many nodes instead")
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe_all(options.describe)))
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = make_run(folder, options.nodes, options.heartbeat_s)
        with (folder / "coordinator.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.fleet.control.coordinator", "--run-dir", name],
                stdout=log,
                stderr=log,
            )
        try:
            asyncio.run(_measured(folder, spec, process, options.seconds, options.patience_s))
        finally:
            process.kill()


async def _measured(
    folder: Path, spec: RunSpec, process: subprocess.Popen[bytes], seconds: float, patience_s: float
) -> None:
    try:
        print(json.dumps(await measure(folder, spec, process.pid, seconds, patience_s), indent=1), flush=True)
    except TimeoutError as error:
        print(error, (folder / "coordinator.log").read_text()[-3000:], sep="\n", flush=True)
    process.kill()
    shutil.rmtree(folder)
    os._exit(0)  # not closing 12,500 channels one by one


if __name__ == "__main__":
    run_bench(main)
