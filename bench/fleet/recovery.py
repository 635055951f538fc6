"""How long is training down after a fault? From the fault to the next completed step, beside what others take.

The same small model on the same machine, three ranks, fp32 on the CPU. Each sample is a run of its own with one fault in it:

- *worker killed*: SIGKILL to a rank's process; the spare steps in;
- *node killed, spare*: SIGKILL to a node's agent and worker, so that its memory is gone; the spare steps in;
- *node killed, no spare*: as before; the fleet shrinks to two ranks;
- *rank stopped*: SIGSTOP; its sockets stay open, and only its lease (1 s) tells;
- *torchrun*: SIGKILL to a rank of the same run under ``torchrun --max-restarts 3``, which starts all ranks anew from the
  newest checkpoint;
- *torchft*: SIGKILL to one of three replicas under torchft 0.2 (``bench.fleet.torchft_loop``); two go on. It needs a Python
  that has torchft: ``--torchft-python``.

A fleet's moment of the fault is when the saboteur left its mark in the run directory; the next step's is that of its event.
Hashes are compared with an undisturbed run's, and process ids of those that were not hit are watched all the time.

    python -m bench.fleet.recovery                                  # 10 samples of each
    python -m bench.fleet.recovery --samples 5 --case "rank stopped" --json
    python -m bench.fleet.recovery --torchft-python VENV/bin/python
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.running import record, run_bench
from phalanx.fleet.node.launcher import WORKER_PROGRAM
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Event, Step
from phalanx.observe.logs.read_lines import LogQuery, read_lines
from phalanx.run.directory.paths import RunDirectory

MODEL = {"layers": 4, "dim": 64, "heads": 4, "kv_heads": 4, "ffn_dim": 128, "vocab_size": 4096}
SEQ_LEN, SEQUENCES, RANKS = 64, 12, 3
RUN = """
name = "recovery"
[model]
layers = {layers}
dim = {dim}
heads = {heads}
kv_heads = {kv_heads}
ffn_dim = {ffn_dim}
[data]
path = "{data}"
corpus = ["python-stdlib"]
[train]
steps = {steps}
batch_size = {sequences}
seq_len = {seq_len}
slots = {sequences}
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
worker_lease_s = {lease_s}
"""
LEASE_S = 1.0
AT_STEP = 12
GOAL_S = 0.5
"""Goal for the time of a recovery, beside the lease and one step."""
HIT = 1
"""The rank, node or replica that faults hit."""
PATIENCE_S = 300.0
_MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Case:
    """A fault in a fleet."""

    fault: str
    spares: int = 1
    lease_s: float = 0.0
    """Time that has to pass before anybody can know."""


CASES = {
    "worker killed": Case(f"kill rank {HIT} at step {AT_STEP}"),
    "node killed, spare": Case(f"kill node {HIT} at step {AT_STEP}"),  # which is not the spare, started last
    "node killed, no spare": Case(f"kill node {HIT} at step {AT_STEP}", spares=0),
    "rank stopped": Case(f"stop rank {HIT} at step {AT_STEP}", lease_s=LEASE_S),
}
OTHERS = ("torchrun", "torchft")


@dataclass(frozen=True)
class Sample:
    """The cost of one fault."""

    recovery_s: float
    """From the fault to the end of the next step."""
    step_s: float
    """Time of a usual step before the fault."""
    ranks_after: int
    same_hash: bool | None = None
    """As an undisturbed run's; ``None`` where there is none to compare with."""
    same_processes: bool | None = None
    """True if each survivor was one process from beginning to end."""
    phases: Mapping[str, float] | None = None
    """Seconds by phase, as the run's own account has them."""


class BenchError(RuntimeError):
    """A run did not do what the bench needs of it."""


def write_run(folder: Path, steps: int) -> Path:
    """The run file."""
    path = folder / "recovery.toml"
    data = Path(__file__).parents[2] / ".cache/data/python-stdlib"
    text = RUN.format(**MODEL, data=data, steps=steps, sequences=SEQUENCES, seq_len=SEQ_LEN, lease_s=LEASE_S)
    path.write_text(text)
    return path


# --- processes ----------------------------------------------------------------------------------


def start(command: Iterable[str], log: Path, environment: Mapping[str, str] | None = None) -> Any:
    """A process in a session of its own, that prints into ``log``."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def phalanx(*arguments: str) -> list[str]:
    """The command line of a ``phalanx`` command."""
    return [sys.executable, "-m", "phalanx", *arguments]


def result_of(log: Path) -> dict[str, Any]:
    """The object on the last line of what a run has printed."""
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise BenchError(f"the run ended without a result; its last words: {lines[-8:]}") from None
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(pattern: str) -> dict[int, str]:
    """The running processes whose command line matches, by process id: what the pattern's group holds."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            match = re.search(pattern, line)
            if match:
                found[int(entry.name)] = match.group(1)
    return found


# --- a fleet ------------------------------------------------------------------------------------


def fleet_sample(folder: Path, name: str, number: int, steps: int, expected: str) -> Sample:
    """One run of a fleet with one fault. A node that is to be killed may turn out to be the spare: then another run."""
    for attempt in range(_MOST_ATTEMPTS):
        sample = _fleet_run(folder, name, f"{number}-{attempt}", steps, expected)
        if sample is not None:
            return sample
    raise BenchError(f"{name}: the fault has hit nobody in {_MOST_ATTEMPTS} runs")


def _fleet_run(folder: Path, name: str, number: str, steps: int, expected: str) -> Sample | None:
    case, run_dir = CASES[name], folder / f"{name} {number}".replace(" ", "-")
    log = folder / f"{run_dir.name}.log"
    process = start(
        phalanx(
            "train", str(write_run(folder, steps)), "--nodes", str(RANKS), "--spares", str(case.spares),
            "--fault", case.fault, "--run-dir", str(run_dir), "--json",
        ),
        log,
    )  # fmt: skip
    seen = _watch_workers(process, run_dir)
    result = result_of(log)
    events = list(read_events(run_dir / "events.jsonl"))
    mark = run_dir / "faults" / "0"
    if not mark.exists():
        return None
    fault_s = mark.stat().st_mtime
    after = next_step(events, fault_s)
    survivors = [pids for node, pids in seen.items() if node != hit_node(run_dir)]
    return Sample(
        after.t - fault_s,
        usual_step_s(events, fault_s),
        ranks_of(events, after.attempt),
        same_hash=result["weights_sha256"] == expected,
        same_processes=len(survivors) == RANKS + case.spares - 1
        and all(len(pids) == 1 for pids in survivors),
        phases=result["recoveries"][0]["seconds"],
    )


def hit_node(run_dir: Path) -> str:
    """The node whose worker committed the fault, by its log."""
    for line in read_lines(RunDirectory(run_dir), LogQuery(grep="^fault: "), None):
        if line.node is not None:
            return line.node
    raise BenchError(f"no worker of {run_dir} says that it was hit")


def _watch_workers(process: subprocess.Popen[bytes], run_dir: Path) -> dict[str, set[int]]:
    """The process ids of the workers of each node, gathered until the run has ended."""
    seen: dict[str, set[int]] = defaultdict(set)
    pattern = rf"{re.escape(WORKER_PROGRAM[-1])} .*{re.escape(run_dir.name)} .*--node (\S+)"
    deadline_s = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        for pid, node in processes(pattern).items():
            seen[node].add(pid)
        if time.monotonic() > deadline_s:
            end(process)
            raise BenchError(f"the run in {run_dir} has not ended after {PATIENCE_S} s")
        time.sleep(0.25)
    return seen


def next_step(events: Iterable[Event], fault_s: float) -> Event:
    """The first step that ended in an attempt which began after the fault."""
    events = list(events)
    hit = max(event.attempt for event in events if event.t <= fault_s)
    for event in events:
        if isinstance(event.body, Step) and event.attempt > hit:
            return event
    raise BenchError("no step has ended after the fault")


def usual_step_s(events: Iterable[Event], before_s: float) -> float:
    """The median step before a moment, without the first two, which warm up."""
    ends_s = [event.t for event in events if isinstance(event.body, Step) and event.t < before_s]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends_s[2:]))


def ranks_of(events: Iterable[Event], attempt: int) -> int:
    """The number of ranks of an attempt."""
    return next(
        event.body.ranks for event in events if event.attempt == attempt and hasattr(event.body, "ranks")
    )


# --- torchrun -----------------------------------------------------------------------------------


def torchrun_sample(folder: Path, number: int, steps: int, expected: str) -> Sample:
    """The same run under ``torchrun``, one of whose ranks is killed."""
    run_dir, log = folder / f"torchrun-{number}", folder / f"torchrun-{number}.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    process = start(
        [
            *torchrun, "--nproc-per-node", str(RANKS), "-m", "phalanx", "train", str(write_run(folder, steps)),
            "--run-dir", str(run_dir), "--json",
        ],
        log,
        # Otherwise ranks that start again find in torchrun's own store where those before them listened (PyTorch 2.13).
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    try:
        _wait_for(lambda: _steps_done(run_dir) >= AT_STEP - 1, process, log)
        (victim,) = [
            pid for pid in processes(rf"(-m phalanx) train .*{run_dir.name} ") if _rank_of(pid) == str(HIT)
        ]
        os.kill(victim, signal.SIGKILL)
        fault_s = time.time()
        process.wait(timeout=PATIENCE_S)
    finally:
        end(process)
    events = list(read_events(run_dir / "events.jsonl"))
    after = next_step(events, fault_s)
    finished = json.loads((run_dir / "result.json").read_text())
    return Sample(
        after.t - fault_s,
        usual_step_s(events, fault_s),
        ranks_of(events, after.attempt),
        same_hash=finished["weights_sha256"] == expected,
        same_processes=False,
    )


def _wait_for(reached: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BenchError(f"no step was reached to break; see {log}: {log.read_text()[-800:]}")
        time.sleep(0.02)


def _steps_done(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    steps = [e.body.step for e in read_events(path) if isinstance(e.body, Step)] if path.exists() else []
    return max(steps, default=0)


def _rank_of(pid: int) -> str:
    """The RANK of a process's environment; empty if it has none (``torchrun`` itself)."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in environment if entry.startswith(b"RANK=")), "")


# --- torchft ------------------------------------------------------------------------------------


def torchft_sample(folder: Path, number: int, python: Path) -> Sample:
    """The same model under torchft, one of whose three replicas is killed; it has no last step, and is ended."""
    port = 29600 + number
    lighthouse = start(
        [
            str(python.parent / "torchft_lighthouse"), "--bind", f"[::]:{port}",
            "--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000",
        ],
        folder / f"lighthouse-{number}.log",
    )  # fmt: skip
    logs = [folder / f"torchft-{number}-{replica}.log" for replica in range(RANKS)]
    environment = {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        str(python), str(Path(__file__).with_name("torchft_loop.py")), "--model", json.dumps(MODEL),
        "--seq-len", str(SEQ_LEN), "--sequences", str(SEQUENCES // RANKS),
    ]  # fmt: skip
    replicas = [
        start([*command, "--replica", str(replica)], log, environment) for replica, log in enumerate(logs)
    ]
    try:
        _wait_for(lambda: _steps_of_all(logs[0]) >= AT_STEP - 1, replicas[0], logs[0])
        replicas[HIT].send_signal(signal.SIGKILL)
        fault_s = time.time()
        _wait_for(lambda: _after(_committed(logs[0]), fault_s), replicas[0], logs[0])
    finally:
        for process in (*replicas, lighthouse):
            end(process)
    done = _committed(logs[0])
    after = _after(done, fault_s)[0]
    together = [one for one in done if one["t"] < fault_s and one["replicas"] == RANKS]
    usual = statistics.median(one["step_s"] for one in together[2:])
    return Sample(after["t"] - fault_s, usual, after["replicas"], same_processes=True)


def _after(done: list[dict[str, Any]], fault_s: float) -> list[dict[str, Any]]:
    """The steps without the replica that was killed; the first ones after the fault may still be with it."""
    return [one for one in done if one["t"] > fault_s and one["replicas"] < RANKS]


def _steps_of_all(log: Path) -> int:
    """How many steps were committed by all replicas together."""
    return sum(one["replicas"] == RANKS for one in _committed(log))


def _committed(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"t"') and line.endswith("}")]


# --- all together -------------------------------------------------------------------------------


def summary(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Medians of a case, and whether it met its goal."""
    recovery_s = statistics.median(one.recovery_s for one in samples)
    step_s = statistics.median(one.step_s for one in samples)
    case = CASES.get(name)
    goal_s = case.lease_s + GOAL_S + step_s if case else None
    return {
        "case": name,
        "samples": len(samples),
        "recovery_s": recovery_s,
        "worst_s": max(one.recovery_s for one in samples),
        "step_s": step_s,
        "goal_s": goal_s,
        "met": goal_s is None or recovery_s <= goal_s,
        "ranks_after": sorted({one.ranks_after for one in samples}),
        "same_hash": _all(one.same_hash for one in samples),
        "same_processes": _all(one.same_processes for one in samples),
        "each": [asdict(one) for one in samples],
    }


def _all(answers: Iterable[bool | None]) -> bool | None:
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None


def _line(of: Mapping[str, Any]) -> str:
    yes = {True: "yes", False: "no", None: "-"}
    goal = "-" if of["goal_s"] is None else f"{of['goal_s']:.2f}"
    return (
        f"{of['case']:<22} {of['samples']:>3} {of['recovery_s']:>9.2f} {of['worst_s']:>7.2f} {of['step_s']:>7.3f} {goal:>7}"
        f" {yes[of['met']] if of['goal_s'] else '-':>5} {yes[of['same_hash']]:>5} {yes[of['same_processes']]:>10}"
        f"  {RANKS} -> {'/'.join(map(str, of['ranks_after']))}"
    )


def undisturbed(folder: Path, steps: int) -> str:
    """The hash of the run when nothing goes wrong, on one rank."""
    log = folder / "undisturbed.log"
    run_dir = str(folder / "undisturbed")
    arguments = ("train", str(write_run(folder, steps)), "--ranks", "1", "--run-dir", run_dir, "--json")
    start(phalanx(*arguments), log).wait()
    return str(result_of(log)["weights_sha256"])


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases; the samples of different cases by turns, since the machine's load changes."""
    names = arguments.case or [*CASES, "torchrun", *(["torchft"] if arguments.torchft_python else [])]
    expected = undisturbed(folder, arguments.steps)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(arguments.samples):
        for name in names:
            if name == "torchrun":
                sample = torchrun_sample(folder, number, arguments.steps, expected)
            elif name == "torchft":
                sample = torchft_sample(folder, number, arguments.torchft_python)
            else:
                sample = fleet_sample(folder, name, number, arguments.steps, expected)
            samples[name].append(sample)
            record({"case": name, **asdict(sample)}, is_printed=False)
            hash_, pids = sample.same_hash, sample.same_processes
            print(
                f"{name}: {sample.recovery_s:.2f} s, a step {sample.step_s:.2f} s, hash {hash_}, processes {pids}",
                file=sys.stderr,
                flush=True,
            )
    return [summary(name, taken) for name, taken in samples.items()]


def main() -> int:
    """Prints the table; 1 if a hash or a process id was not what it had to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10, help="of each case")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--case", action="append", choices=[*CASES, *OTHERS])
    parser.add_argument("--torchft-python", type=Path, help="the Python of an environment with torchft 0.2")
    parser.add_argument("--keep", type=Path, help="folder for what runs leave, which is removed otherwise")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "torchft" in (arguments.case or ()) and not arguments.torchft_python:
        parser.error("torchft needs --torchft-python")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, arguments)
    print(
        f"{'case':<22} {'n':>3} {'median s':>9} {'worst':>7} {'step s':>7} {'goal':>7} {'met':>5} {'hash':>5} {'processes':>10}  ranks"
    )
    for one in found:
        print(_line(one))
    if arguments.json:
        print(json.dumps(found))
    ours = [one for one in found if one["case"] in CASES]
    return 0 if all(one["same_hash"] and one["same_processes"] for one in ours) else 1


if __name__ == "__main__":
    run_bench(main)
