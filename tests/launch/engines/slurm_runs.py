"""Tiny runs on a real Slurm: the command line of a login node, what the fleet says of itself, and the hash of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.engines.slurm_cluster import PATIENCE_S, SlurmCluster
from phalanx_process import ENVIRONMENT, RUN_FILE, last_json, start
from tiny_runs import make_dataset

STEPS = 100


def write_run_file(folder: Path) -> None:
    """Writes tiny.toml, with its data beside it."""
    quick = "\n[fleet]\nheartbeat_s = 0.5\nlease_s = 5.0\nconfirm_s = 0.5\nhealth_checks = false\n"
    text = RUN_FILE.format(data=make_dataset(folder / "words")) + quick
    (folder / "tiny.toml").write_text(text.replace("every_steps = 6", "every_steps = 50"))


def run(
    words: Sequence[str], folder: Path, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Runs ``phalanx WORDS`` in ``folder`` to its end, however busy the machine is."""
    process = start(words, folder, environment)
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def hash_without_slurm(folder: Path) -> str:
    """The hash of the weights of the same run, on one rank of this machine."""
    sets = ["--set", f"train.steps={STEPS}", "--set", 'run_dir="plain"']
    done = run(["train", "tiny.toml", "--ranks", "1", "--json", *sets], folder)
    return str(last_json(done)["weights_sha256"])


ENDLESS = ["--set", "train.steps=1000000", "--set", 'schedule.kind="constant"']
"""For a run that somebody ends: no step depends on how many there were to be."""


def undisturbed_until(folder: Path, step: int, *words: str) -> str:
    """The hash of the weights of an endless run after a step, on one rank of this machine from its begin on."""
    sets = [*ENDLESS, *words, "--set", f"train.steps={step}", "--set", f'run_dir="alone-{step}"']
    done = run(["train", "tiny.toml", "--ranks", "1", "--json", *sets], folder)
    return str(last_json(done)["weights_sha256"])


def saved_hash(run_dir: Path) -> tuple[int, str]:
    """The newest saved step of a run, and the hash of its weights."""
    summary = last_json(run(["hash", str(run_dir), "--json"], run_dir))
    return int(summary["step"]), str(summary["weights_sha256"])


class Phalanx:
    """The command line on a login node."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.folder = folder
        self.environment = {**ENVIRONMENT, **cluster.environment}

    def __call__(self, *words: str, fails: bool = False, **environment: str) -> str:
        done = run(words, self.folder, {**self.environment, **environment})
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The same, and does not wait for its end."""
        return subprocess.Popen(
            [sys.executable, "-m", "phalanx", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, name: str, *words: str) -> Path:
        """Submits the tiny run into a directory of its own."""
        run_dir = self.folder / name
        sets = ["--set", f'run_dir="{run_dir}"', "--set", f"train.steps={STEPS}"]
        self("submit", "tiny.toml", "--on", "slurm", *sets, *words)
        return run_dir


def wait_until(true: Callable[[], bool], problem: str, log: Path | None = None) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline_s:
            log_tail = (
                "".join(path.read_text()[-6000:] for path in sorted(log.glob("job-*.log"))) if log else ""
            )
            raise TimeoutError(f"{problem}\n{log_tail}")
        time.sleep(0.1)


def fleet_of(run_dir: Path) -> dict[str, object]:
    try:
        return dict(json.loads((run_dir / "fleet.json").read_bytes()))
    except (OSError, ValueError):
        return {}


def trains(run_dir: Path, after: int = 5) -> Callable[[], bool]:
    return lambda: (
        fleet_of(run_dir).get("phase") == "running" and int(str(fleet_of(run_dir)["step"])) >= after
    )


def weights(run_dir: Path) -> str:
    wait_until((run_dir / "result.json").exists, f"{run_dir} has not finished", run_dir / "launch")
    return str(json.loads((run_dir / "result.json").read_bytes())["weights_sha256"])


def members(run_dir: Path, role: str) -> list[str]:
    all_members = fleet_of(run_dir)["members"]
    assert isinstance(all_members, list)
    return sorted(member["name"] for member in all_members if member["role"] == role)


def domains(run_dir: Path) -> dict[str, tuple[str, ...]]:
    """Where the nodes of a fleet lie, as they say."""
    all_members = fleet_of(run_dir)["members"]
    assert isinstance(all_members, list)
    return {member["name"]: tuple(member["domain"]) for member in all_members}


def whole_pairs(run_dir: Path) -> tuple[int, int]:
    """How many pairs of nodes that follow each other in the order of ranks lie in one domain, and how many of these nodes could."""
    all_members, domain = fleet_of(run_dir)["members"], domains(run_dir)
    assert isinstance(all_members, list)
    seats = [
        one["name"] for one in sorted(all_members, key=lambda one: one["ranks"]) if one["role"] == "member"
    ]
    pairs = zip(seats[::2], seats[1::2], strict=True)
    most = sum(count // 2 for count in Counter(domain[name] for name in seats).values())
    return sum(domain[one] == domain[other] for one, other in pairs), most
