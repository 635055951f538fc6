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

import forked_python
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
final_sequences = 16

[runtime]
device = "cpu"
"""

ENVIRONMENT = {
    name: value
    for name, value in forked_python.ENVIRONMENT.items()
    if not name.startswith(("PHALANX_", "SLURM_")) and name not in ("RANK", "WORLD_SIZE")
}


def start(
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str] = ENVIRONMENT,
    kind: type[subprocess.Popen[Any]] = forked_python.Popen,
) -> subprocess.Popen[str]:
    """Starts ``phalanx ARGUMENTS`` in ``folder``; it and what it starts are forked, or executed with ``subprocess.Popen``."""
    return kind(
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
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str] = ENVIRONMENT,
    progress: Callable[[], object] = lambda: None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``phalanx ARGUMENTS`` in ``folder`` to its end; it and what it starts are forked: most of a short command is imports.

    Its time is up when ``progress`` has given the same answer for ``TIMEOUT_S``: a busy machine makes a long command longer, not stuck.
    """
    command = [sys.executable, "-m", "phalanx", *arguments]
    with tempfile.TemporaryDirectory() as place:
        files = Path(place) / "out", Path(place) / "err"
        with files[0].open("w") as out, files[1].open("w") as err:
            process = forked_python.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        try:
            code = exit_code_of(process, progress)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TimeoutError(
                "\n".join([" ".join(command), *(file.read_text() for file in files)])
            ) from error
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))


def exit_code_of(
    process: subprocess.Popen[Any], progress: Callable[[], object], timeout_s: float = TIMEOUT_S
) -> int:
    """The exit code of ``process``; raises ``subprocess.TimeoutExpired`` once ``progress`` has stood still for ``timeout_s``."""
    seen, since_s = progress(), time.monotonic()
    while True:
        try:
            return process.wait(min(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            if (now := progress()) != seen:
                seen, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > timeout_s:
                raise


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
    """Waits until ``condition`` holds; raises if the process ends without that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            if condition():  # since the last look
                return
            out, err = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before its time:\n{out}\n{err}")
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return True if a process is there and has not ended.

    A process whose first thread is a zombie still holds its files and sockets until its other threads have ended too.
    """
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(process / "task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False
