"""The command line as a user runs it: a real process, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forks import FORKS
from phalanx.cli.main import main
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step

TIMEOUT_S = 240.0
RUN_FILE = """
name = "tiny"

[model]
layers = 2
dim = 32
heads = 4
kv_heads = 2
ffn_dim = 64
tie_embeddings = true

[data]
path = "{data}"

[train]
steps = 20
batch_size = 16
seq_len = 24
slots = 8

[optimizer]
lr = 1e-2
clip_norm = 0.5

[schedule]
warmup_steps = 2

[checkpoint]
every_steps = 3

[evaluation]
every_steps = 6
sequences = 5

[runtime]
device = "cpu"
"""

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PHALANX_", "SLURM_")) and name not in ("RANK", "WORLD_SIZE")
}


def start(
    arguments: Sequence[str], folder: Path, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen[str]:
    """Starts ``phalanx ARGUMENTS`` in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """What a started command has printed, once it has ended."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(
    arguments: Sequence[str], folder: Path, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Runs ``phalanx ARGUMENTS`` in ``folder`` to its end, in a forked process: most of a short command is imports."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        process = FORKS.Process(target=_command, args=(arguments, folder, environment, out, err))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"phalanx {' '.join(arguments)}:\n{out.read_text()}\n{err.read_text()}")
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _command(
    arguments: Sequence[str], folder: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    """Does what ``python -m phalanx ARGUMENTS`` does, with its output in files."""
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, "")
    sys.argv = ["phalanx", *arguments]
    main()


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object on the last line that a command printed."""
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def steps_done(run_dir: Path) -> int:
    """The newest step in the run's event stream; 0 while there is none."""
    try:
        return max(
            (e.body.step for e in read_events(run_dir / "events.jsonl") if isinstance(e.body, Step)),
            default=0,
        )
    except Exception:
        return 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits until ``condition`` holds; raises if the process ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before its time:\n{out}\n{err}")
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Process ids of the direct children of a process."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def alive(pid: int) -> bool:
    """True if a process is there and no zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
