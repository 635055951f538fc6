"""How long is training down after a fault? From the fault to the next completed step, beside what others take.

The same small model on the same machine, three ranks, fp32 on the CPU. Each sample is a run of its own with one fault in it:

- *worker killed*: SIGKILL to a rank's process; the spare steps in;
- *node killed, spare*: SIGKILL to a node's agent and worker, so that its memory is gone; the spare steps in;
- *node killed, no spare*: as before; the fleet shrinks to two ranks;
- *rank stopped*: SIGSTOP; its sockets stay open, and only its lease (1 s) detects it;
- *torchrun*: SIGKILL to a rank of the same run under ``torchrun --max-restarts 3``, which restarts all ranks from the
  newest checkpoint;
- *torchft*: SIGKILL to one of three replicas under torchft 0.2 (``bench.fleet.torchft_loop``); two continue. It needs a Python
  that has torchft: ``--torchft-python``.

A fleet's fault has the time of the file that marks it in the run directory; the next step has the time of its event.
Hashes are compared with an undisturbed run's, and process ids of the survivors are watched all the time.

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
    """Time that has to pass before the fleet can detect the fault."""


CASES = {
    "worker killed": Case(f"kill rank {HIT} at step {AT_STEP}"),
    "node killed, spare": Case(f"kill node {HIT} at step {AT_STEP}"),  # not the spare, which is started last
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
    """True if the hash is that of an undisturbed run; ``None`` if there is none to compare with."""
    same_processes: bool | None = None
    """True if each survivor was one process from beginning to end."""
    phases: Mapping[str, float] | None = None
    """Seconds by phase, from the run's own ledger."""


class BenchError(RuntimeError):
    """A run ended without the data that the bench needs."""


def write_run(folder: Path, steps: int) -> Path:
    """Write the run file."""
    path = folder / "recovery.toml"
    data = Path(__file__).parents[2] / ".cache/data/python-stdlib"
    text = RUN.format(**MODEL, data=data, steps=steps, sequences=SEQUENCES, seq_len=SEQ_LEN, lease_s=LEASE_S)
    path.write_text(text)
    return path


# --- processes ----------------------------------------------------------------------------------


def start(command: Iterable[str], log: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Start a process in a session of its own, with its output in ``log``."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def phalanx(*arguments: str) -> list[str]:
    """Return the command line of a ``phalanx`` command."""
    return [sys.executable, "-m", "phalanx", *arguments]


def result_of(log: Path) -> dict[str, Any]:
    """Return the object on the last line of a run's output."""
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise BenchError(f"the run ended without a result; its last lines: {lines[-8:]}") from None
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(pattern: str) -> dict[int, str]:
    """Return the first group of ``pattern`` for each running process whose command line matches, by process id."""
    matches = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            match = re.search(pattern, line)
            if match:
                matches[int(entry.name)] = match.group(1)
    return matches


# --- a fleet ------------------------------------------------------------------------------------


def fleet_sample(folder: Path, name: str, number: int, steps: int, expected: str) -> Sample:
    """Run a fleet with one fault. If the node to be killed is the spare by chance, run again."""
    for attempt in range(_MOST_ATTEMPTS):
        sample = _fleet_run(folder, name, f"{number}-{attempt}", steps, expected)
        if sample is not None:
            return sample
    raise BenchError(f"{name}: the fault has hit no node in {_MOST_ATTEMPTS} runs")


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
    """Return the node whose worker committed the fault, by its log."""
    for line in read_lines(RunDirectory(run_dir), LogQuery(grep="^fault: "), None):
        if line.node is not None:
            return line.node
    raise BenchError(f"no worker of {run_dir} has logged the fault")


def _watch_workers(process: subprocess.Popen[bytes], run_dir: Path) -> dict[str, set[int]]:
    """Return the process ids of the workers of each node, gathered until the run has ended."""
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
    """Return the first step that ended in an attempt which began after the fault."""
    events = list(events)
    hit = max(event.attempt for event in events if event.t <= fault_s)
    for event in events:
        if isinstance(event.body, Step) and event.attempt > hit:
            return event
    raise BenchError("no step has ended after the fault")


def usual_step_s(events: Iterable[Event], before_s: float) -> float:
    """Return the median step before a moment, without the first two, which warm up."""
    ends_s = [event.t for event in events if isinstance(event.body, Step) and event.t < before_s]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends_s[2:]))


def ranks_of(events: Iterable[Event], attempt: int) -> int:
    """Return the number of ranks of an attempt."""
    return next(
        event.body.ranks for event in events if event.attempt == attempt and hasattr(event.body, "ranks")
    )


# --- torchrun -----------------------------------------------------------------------------------


def torchrun_sample(folder: Path, number: int, steps: int, expected: str) -> Sample:
    """Train the same run under ``torchrun``, and kill one of its ranks."""
    run_dir, log = folder / f"torchrun-{number}", folder / f"torchrun-{number}.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    process = start(
        [
            *torchrun, "--nproc-per-node", str(RANKS), "-m", "phalanx", "train", str(write_run(folder, steps)),
            "--run-dir", str(run_dir), "--json",
        ],
        log,
        # Otherwise restarted ranks find the addresses of the ranks before them in torchrun's own store (PyTorch 2.13).
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
            raise BenchError(
                f"the run has not reached the step of the fault; see {log}: {log.read_text()[-800:]}"
            )
        time.sleep(0.02)


def _steps_done(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    steps = [e.body.step for e in read_events(path) if isinstance(e.body, Step)] if path.exists() else []
    return max(steps, default=0)


def _rank_of(pid: int) -> str:
    """Return the RANK of a process's environment; empty if it has none (``torchrun`` itself)."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in environment if entry.startswith(b"RANK=")), "")


# --- torchft ------------------------------------------------------------------------------------


def torchft_sample(folder: Path, number: int, python: Path) -> Sample:
    """Train the same model under torchft, kill one of its three replicas, and end it, since it has no last step."""
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
    together = [step for step in done if step["t"] < fault_s and step["replicas"] == RANKS]
    usual = statistics.median(step["step_s"] for step in together[2:])
    return Sample(after["t"] - fault_s, usual, after["replicas"], same_processes=True)


def _after(done: list[dict[str, Any]], fault_s: float) -> list[dict[str, Any]]:
    """Return the steps without the killed replica; the first ones after the fault may still be with it."""
    return [step for step in done if step["t"] > fault_s and step["replicas"] < RANKS]


def _steps_of_all(log: Path) -> int:
    """Return the number of steps that all replicas committed together."""
    return sum(step["replicas"] == RANKS for step in _committed(log))


def _committed(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"t"') and line.endswith("}")]


# --- all together -------------------------------------------------------------------------------


def summary(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Return the medians of a case, and True under ``met`` if it met its goal."""
    recovery_s = statistics.median(sample.recovery_s for sample in samples)
    step_s = statistics.median(sample.step_s for sample in samples)
    case = CASES.get(name)
    goal_s = case.lease_s + GOAL_S + step_s if case else None
    return {
        "case": name,
        "samples": len(samples),
        "recovery_s": recovery_s,
        "worst_s": max(sample.recovery_s for sample in samples),
        "step_s": step_s,
        "goal_s": goal_s,
        "met": goal_s is None or recovery_s <= goal_s,
        "ranks_after": sorted({sample.ranks_after for sample in samples}),
        "same_hash": _all(sample.same_hash for sample in samples),
        "same_processes": _all(sample.same_processes for sample in samples),
        "each": [asdict(sample) for sample in samples],
    }


def _all(answers: Iterable[bool | None]) -> bool | None:
    measured = [answer for answer in answers if answer is not None]
    return all(measured) if measured else None


def _line(of: Mapping[str, Any]) -> str:
    yes = {True: "yes", False: "no", None: "-"}
    goal = "-" if of["goal_s"] is None else f"{of['goal_s']:.2f}"
    return (
        f"{of['case']:<22} {of['samples']:>3} {of['recovery_s']:>9.2f} {of['worst_s']:>7.2f} {of['step_s']:>7.3f} {goal:>7}"
        f" {yes[of['met']] if of['goal_s'] else '-':>5} {yes[of['same_hash']]:>5} {yes[of['same_processes']]:>10}"
        f"  {RANKS} -> {'/'.join(map(str, of['ranks_after']))}"
    )


def undisturbed(folder: Path, steps: int) -> str:
    """Return the hash of the run without a fault, on one rank."""
    log = folder / "undisturbed.log"
    run_dir = str(folder / "undisturbed")
    arguments = ("train", str(write_run(folder, steps)), "--ranks", "1", "--run-dir", run_dir, "--json")
    start(phalanx(*arguments), log).wait()
    return str(result_of(log)["weights_sha256"])


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cases; the samples of different cases by turns, since the machine's load changes."""
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
    """Print the table. Return 1 if a hash or a survivor's process id differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10, help="of each case")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--case", action="append", choices=[*CASES, *OTHERS])
    parser.add_argument("--torchft-python", type=Path, help="the Python of an environment with torchft 0.2")
    parser.add_argument(
        "--keep", type=Path, help="folder for the files of the runs, which is removed otherwise"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "torchft" in (arguments.case or ()) and not arguments.torchft_python:
        parser.error("torchft needs --torchft-python")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(folder, arguments)
    print(
        f"{'case':<22} {'n':>3} {'median s':>9} {'worst':>7} {'step s':>7} {'goal':>7} {'met':>5} {'hash':>5} {'processes':>10}  ranks"
    )
    for row in rows:
        print(_line(row))
    if arguments.json:
        print(json.dumps(rows))
    ours = [row for row in rows if row["case"] in CASES]
    return 0 if all(row["same_hash"] and row["same_processes"] for row in ours) else 1


if __name__ == "__main__":
    run_bench(main)
