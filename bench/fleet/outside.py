"""Real fleets, disturbed from outside: every run must end within a bound, with the undisturbed weights or with a clear error.

``bench.fleet.chaos`` uses faults built into the fleet. Here the faults come from outside of Phalanx: signals to the launcher, the coordinator, agents and
workers (found through /proc as children of the launcher), damaged, truncated and deleted files of the run directory while it trains,
and strangers on every listening port. A disturbance waits until its step is written to the event stream, so it hits a
fleet that trains. A launcher that ends by a signal is started again with the same command. Each run ends in one of these ways:

    same        exit code 0 and the hash of the undisturbed run
    refused     another exit code, an error message and no traceback
    WRONG       another hash; or a traceback; or an exit without a message
    HANG        it has not ended ``--bound-s`` after the last disturbance and the last step

    python -m bench.fleet.outside --runs 20 --seed 0
    python -m bench.fleet.outside --runs 3 --seed 100 --json          # one JSON object a run, and one for all
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.running import run_bench

RUN = """
name = "outside"
[model]
layers = 4
dim = 48
heads = 4
ffn_dim = 96
{moe}
[data]
path = "{data}"
corpus = ["python-stdlib"]
[train]
steps = {steps}
batch_size = 16
seq_len = 48
slots = 8
micro_batch_size = 1
[checkpoint]
every_steps = 5
[evaluation]
every_steps = 0
final_sequences = 8
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
[fleet]
nodes = 2
spares = 1
heartbeat_s = 1.0
lease_s = 5.0
stall_s = 20.0
"""
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero3": ("", ()),
    "replicas": ("", ("parallel.sharding=none",)),
    "pipeline 2": ("", ("parallel.pipeline=2",)),
    "tensor 2": ("", ("parallel.tensor=2",)),
    "experts": ("[model.moe]\nexperts = 4\nper_token = 2\nffn_dim = 48\n", ()),
    "tensor 2 or 1": ("", ("model.lanes=2", "parallel.tensor=2", "fleet.least_tensor=1", "fleet.spares=0")),
}
"""Names, the lines that they add to the run file, and the fields that they set."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
PROGRAMS = ("launcher", "coordinator", "agent", "worker")
FILES = (
    *("fleet.json", "journal", "events.jsonl", "record.json", "run.toml", "fleet.token"),
    *("checkpoint", "checkpoints", "logs"),
)
DAMAGES = ("flip", "cut", "empty", "delete")
STRANGERS = ("garbage", "halves", "idle")
_POLL_S, _MOST_STARTS, _IDLE_CONNECTIONS, _IDLE_S = 0.1, 12, 100, 8.0


@dataclass(frozen=True)
class Disturbance:
    """A fault from outside, which happens once step ``at_step`` has been written."""

    at_step: int
    kind: str
    """A signal, a damage, or a kind of stranger."""
    target: str = ""
    """A program or a file."""
    for_s: float = 0.0
    """Seconds until SIGCONT, for "stop"."""
    then_kill: str = ""
    """The program that is killed afterwards, so that a process has to read the damaged file."""

    def __str__(self) -> str:
        span = f" {self.for_s:.1f} s" if self.for_s else ""
        then = f", kill {self.then_kill}" if self.then_kill else ""
        return f"{self.kind} {self.target}".strip() + f"{span}{then} @{self.at_step}"


@dataclass
class Outcome:
    """The end of one run."""

    layout: str
    seed: int
    ending: str
    disturbances: list[str]
    starts: int
    seconds: float
    message: str = ""
    wrong: bool = field(default=False)


def planned(seed: int, count: int, steps: int, kinds: tuple[str, ...]) -> list[Disturbance]:
    """Draw the disturbances of a run, in the order of their steps; the same for the same seed."""
    chance = random.Random(seed)
    disturbances = []
    for _ in range(count):
        at_step, kind = chance.randint(2, max(3, steps * 2 // 3)), chance.choice(kinds)
        if kind == "signals":
            sent = chance.choice(tuple(SIGNALS))
            for_s = round(chance.choice((0.5, 2.0, 8.0, 12.0)), 1) if sent == "stop" else 0.0
            disturbances.append(Disturbance(at_step, sent, chance.choice(PROGRAMS), for_s))
        elif kind == "files":
            reader = chance.choice(("coordinator", "worker", "agent", "launcher"))
            disturbances.append(
                Disturbance(at_step, chance.choice(DAMAGES), chance.choice(FILES), then_kill=reader)
            )
        else:
            disturbances.append(Disturbance(at_step, chance.choice(STRANGERS)))
    return sorted(disturbances, key=lambda disturbance: disturbance.at_step)


# --- processes ------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Return the process ids of the direct children, in the order of their start."""
    pids = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return sorted(pids)


def programs(launcher: int) -> dict[str, list[int]]:
    """Return the living processes of a fleet, by kind."""
    pids_of: dict[str, list[int]] = {name: [] for name in PROGRAMS}
    pids_of["launcher"] = [launcher]
    for child in children(launcher):
        with suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"phalanx.fleet.control.coordinator" in command:
                pids_of["coordinator"].append(child)
            elif b"phalanx.fleet.node.agent" in command:
                pids_of["agent"].append(child)
                pids_of["worker"] += children(child)
    return pids_of


def listening_ports(pid: int) -> list[tuple[str, int]]:
    """Return the IPv4 addresses on which a process listens."""
    inodes, addresses = set(), []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.append(("127.0.0.1", int(fields[1].partition(":")[2], 16)))
    return addresses


# --- disturbances ---------------------------------------------------------------------------------


def disturb(disturbance: Disturbance, launcher: int, run_dir: Path, chance: random.Random) -> str:
    """Commit a disturbance. Return its text for the report, "" if there was nothing to disturb."""
    kind, target = disturbance.kind, disturbance.target
    if kind in SIGNALS:
        return f"{disturbance}" if hit(target, kind, launcher, chance, disturbance.for_s) else ""
    if kind in STRANGERS:
        doors = [
            door for pids in programs(launcher).values() for pid in pids for door in listening_ports(pid)
        ]
        for door in doors:
            threading.Thread(target=visit, args=(kind, door, chance.random()), daemon=True).start()
        return f"{disturbance} on {len(doors)} ports"
    damaged = damage(run_dir, target, kind, chance)
    hit(disturbance.then_kill, "kill", launcher, chance)
    return f"{disturbance}" if damaged else ""


def hit(program: str, sent: str, launcher: int, chance: random.Random, for_s: float = 0.0) -> bool:
    """Send a signal to one process of a program. Return False if there is none."""
    pids = programs(launcher)[program]
    if not pids:
        return False
    victim = chance.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(victim, SIGNALS[sent])
    if sent == "stop":
        threading.Timer(for_s, wake, (victim,)).start()
    return True


def wake(pid: int) -> None:
    """Send SIGCONT."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def damage(run_dir: Path, name: str, kind: str, chance: random.Random) -> bool:
    """Damage a file of the run directory. Return False if it does not exist."""
    path = run_dir / name
    if name == "journal":
        path = max((run_dir / "fleet").glob("journal-*"), default=path)
    elif name == "checkpoint":
        files = sorted(file for file in run_dir.glob("checkpoints/step-*/*") if file.is_file())
        path = chance.choice(files) if files else path
    try:
        if path.is_dir():
            if kind == "delete":
                shutil.rmtree(path, ignore_errors=True)
            return kind == "delete"
        size = path.stat().st_size
        if kind == "delete":
            path.unlink()
        elif kind in ("cut", "empty"):
            os.truncate(path, size // 2 if kind == "cut" else 0)
        elif size:
            with path.open("r+b") as file:
                file.seek(chance.randrange(size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes((byte[0] ^ (1 << chance.randrange(8)),)))
    except OSError:
        return False
    return True


def visit(kind: str, door: tuple[str, int], seed: float) -> None:
    """Connect to a port as one kind of stranger."""
    noise = random.Random(seed)
    connections = []
    for _ in range(_IDLE_CONNECTIONS if kind == "idle" else 3):
        with suppress(OSError):
            connections.append(socket.create_connection(door, timeout=2.0))
            if kind == "garbage":
                connections[-1].sendall(noise.randbytes(noise.choice((1, 100, 1 << 16))))
            elif kind == "halves":
                connections[-1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + (1 << 20).to_bytes(4, "little"))
    time.sleep(_IDLE_S)
    for connection in connections:
        connection.close()


# --- runs -----------------------------------------------------------------------------------------


def steps_written(run_dir: Path) -> int:
    """Return the number of the newest step in the event stream; -1 before the first."""
    newest = -1
    with suppress(OSError):
        for line in (run_dir / "events.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "loss" in event and "step" in event:
                    newest = max(newest, int(event["step"]))
    return newest


def phalanx(*arguments: str) -> list[str]:
    """Return a command line of Phalanx."""
    return [sys.executable, "-m", "phalanx", *arguments]


def settings(layout: str) -> list[str]:
    """Return the options that set a layout's fields."""
    return [part for setting in LAYOUTS[layout][1] for part in ("--set", setting)]


def undisturbed(run_file: Path, layout: str, folder: Path) -> str:
    """Return the hash of a layout's undisturbed run."""
    command = phalanx("train", str(run_file), *settings(layout), "--run-dir", str(folder / f"calm-{layout}"))
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"the undisturbed run of {layout} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return str(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])


def disturbed(
    run_file: Path,
    layout: str,
    seed: int,
    plan: list[Disturbance],
    expected: str,
    run_dir: Path,
    bound_s: float,
) -> Outcome:
    """Train with disturbances to the end of the run."""
    chance, happened, todo = random.Random(seed), list[str](), list(plan)
    command = phalanx("train", str(run_file), *settings(layout), "--run-dir", str(run_dir), "--json")
    output = run_dir.with_suffix(".out")
    began_s = moved_s = time.monotonic()
    step, starts, before = -1, 0, -1
    process = None

    def outcome(ending: str, message: str = "") -> Outcome:
        wrong = ending not in ("same", "refused")
        return Outcome(layout, seed, ending, happened, starts, time.monotonic() - began_s, message, wrong)

    while True:
        if process is None:
            starts += 1
            with output.open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            moved_s = time.monotonic()
        code = process.poll()
        if code is not None:
            process = None
            log_text = output.read_text(errors="replace")
            if code == 0:
                same = expected in log_text
                return outcome("same" if same else "WRONG", "" if same else log_text[-300:])
            stopped = code < 0 or code in (75, 128 + signal.SIGTERM)
            if not stopped or starts >= _MOST_STARTS:
                clear = "Traceback" not in log_text and "rror: " in log_text
                return outcome(
                    "refused" if clear else "WRONG", _last_error(log_text) if clear else log_text[-1500:]
                )
            continue
        step = max(step, steps_written(run_dir))
        if step > before:
            before, moved_s = step, time.monotonic()
        if todo and step >= todo[0].at_step:
            if text := disturb(todo.pop(0), process.pid, run_dir, chance):
                happened.append(text)
            moved_s = time.monotonic()
        if time.monotonic() - moved_s > bound_s:
            state = _state(run_dir)
            end(process)
            return outcome("HANG", f"no step after {step} and no end within {bound_s:.0f} s; {state}")
        time.sleep(_POLL_S)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a fleet that hangs: the kernel ends the rest with its launcher."""
    for pids in programs(launcher.pid).values():
        for pid in pids:
            wake(pid)
    launcher.kill()
    launcher.wait()


def _last_error(log_text: str) -> str:
    return next(line for line in reversed(log_text.splitlines()) if "rror: " in line)[:300]


def _state(run_dir: Path) -> str:
    try:
        seen = json.loads((run_dir / "fleet.json").read_text())
        last = [happening["what"] for happening in seen["happenings"][-2:]]
        return f"{seen['phase']}, epoch {seen['epoch']}: {last}"
    except (OSError, ValueError, KeyError) as error:
        return f"fleet.json: {error!r}"


def outcomes_of(arguments: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Run all, one after the other."""
    layouts, kinds = arguments.layout or list(LAYOUTS), tuple(arguments.kinds)
    calm: dict[str, str] = {}
    for number in range(arguments.runs):
        layout, seed = layouts[number % len(layouts)], arguments.seed + number
        run_file = folder / f"{layout.replace(' ', '-')}.toml"
        data = Path(__file__).parents[2] / ".cache/data/python-stdlib"
        run_file.write_text(RUN.format(moe=LAYOUTS[layout][0], data=data, steps=arguments.steps))
        if layout not in calm:
            calm[layout] = undisturbed(run_file, layout, folder)
        plan = planned(seed, arguments.count, arguments.steps, kinds)
        run_dir = folder / f"run-{seed}"
        outcome = disturbed(run_file, layout, seed, plan, calm[layout], run_dir, arguments.bound_s)
        if not outcome.wrong and not arguments.keep:
            shutil.rmtree(run_dir, ignore_errors=True)
        yield outcome


def table(outcomes: list[Outcome]) -> str:
    """Return all runs as a table in Markdown."""
    rows = ["| seed | layout | from outside | starts | ending | wall s |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        ending = outcome.ending if outcome.ending == "same" else f"{outcome.ending}: {outcome.message[:200]}"
        things = ", ".join(outcome.disturbances) or "nothing was there to disturb"
        rows.append(
            f"| {outcome.seed} | {outcome.layout} | {things} | {outcome.starts} | {ending} | {outcome.seconds:.0f} |"
        )
    return "\n".join(rows)


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    """Run and report. Return 1 if any run ended as WRONG or HANG."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--count", type=int, default=4, help="disturbances of each run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bound-s", type=float, default=300.0)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("signals", "files", "strangers"),
        default=["signals", "files", "strangers"],
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the run directories, which are removed otherwise"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a run, and one for all")
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in outcomes_of(options, folder):
            outcomes.append(outcome)
            if options.json:
                show(json.dumps(asdict(outcome)))
            else:
                things = ", ".join(outcome.disturbances)
                ended = f"{outcome.ending} after {outcome.seconds:.0f} s {outcome.message[:200]}".rstrip()
                show(f"seed {outcome.seed}, {outcome.layout}: {ended} ({things})")
            sys.stdout.flush()
    endings = Counter(outcome.ending for outcome in outcomes)
    disturbances = sum(len(outcome.disturbances) for outcome in outcomes)
    if options.json:
        show(json.dumps({"runs": len(outcomes), "disturbances": disturbances, "endings": endings}))
    else:
        counted = ", ".join(f"{number} {ending}" for ending, number in sorted(endings.items()))
        show(
            f"\n{table(outcomes)}\n\n{len(outcomes)} runs, {disturbances} disturbances from outside: {counted}"
        )
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    run_bench(main)
