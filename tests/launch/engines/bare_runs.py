"""Tiny runs on hosts and in the background of this machine: the command line, what the run says of itself, and what is left of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from phalanx_process import ENVIRONMENT, run

PATIENCE_S = 280


def phalanx(folder: Path, *words: str, fails: bool = False, **environment: str) -> str:
    done = run(words, folder, {**ENVIRONMENT, **environment})
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def hash_without_fleet(folder: Path, name: str, *more: str) -> str:
    words = ["train", "tiny.toml", "--ranks", "1", "--json", "--run-dir", name, *more]
    summary_line = next(line for line in phalanx(folder, *words).splitlines() if line.startswith("{"))
    return str(json.loads(summary_line)["weights_sha256"])


def wait_until(true: Callable[[], bool], problem: str, run_dir: Path, timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            logs = "".join(
                f"--- {path}\n{path.read_text()[-3000:]}" for path in (run_dir / "launch").glob("*.log")
            )
            raise TimeoutError(f"{problem}\n{logs}")
        time.sleep(0.1)


def weights(run_dir: Path) -> str:
    wait_until((run_dir / "result.json").exists, f"{run_dir} has not finished", run_dir)
    return str(json.loads((run_dir / "result.json").read_bytes())["weights_sha256"])


def step_of(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "fleet.json").read_bytes())["step"])
    except (OSError, ValueError):
        return -1


def processes_of(run_dir: Path) -> list[str]:
    listing = subprocess.run(
        ["pgrep", "-af", str(run_dir)], capture_output=True, text=True, check=False
    ).stdout
    return [line for line in listing.splitlines() if "pgrep" not in line]


def sets(run_dir: Path) -> list[str]:
    # sshd gives a clean environment.
    path = [f"PYTHONPATH={ENVIRONMENT['PYTHONPATH']}"] if "PYTHONPATH" in ENVIRONMENT else []
    return ["--set", f'run_dir="{run_dir}"', "--set", f"launch.environment={json.dumps(path)}"]


def members(run_dir: Path) -> set[str]:
    all_members = json.loads((run_dir / "fleet.json").read_bytes())["members"]
    return {str(member["name"]) for member in all_members if member["role"] == "member"}
