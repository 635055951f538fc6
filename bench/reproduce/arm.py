"""Are the weights after the first steps of the quickstart the same on 64-bit Arm, under qemu's emulation, as on this machine?

``bench/reproduce/arm_root.sh ROOT`` makes the emulated machine: Python and PyTorch for 64-bit Arm in ROOT, and ROOT/python, which runs them.
Each row is one run with portable numerics, from its start to its result, with one process for each rank. Exit code 1: two rows differ.

    python -m bench.reproduce.arm --root ROOT
    python -m bench.reproduce.arm --root ROOT --set train.steps=5 --set precision.compute=bf16
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import phalanx
from bench.running import record, require_catalog_peer, run_bench
from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run
from phalanx.train.start.prepare import prepare_run

RUN_FILE = Path("configs/quickstart.toml")
FIRST_STEPS = (
    "train.steps=2",
    "runtime.numerics=portable",
    "evaluation.final_sequences=1",
    "expect.weights=[]",
)
"""The fields of the quickstart that are changed, besides those of ``--set``."""


def weights(pythons: Sequence[Path], values: Sequence[str], folder: Path) -> str:
    """Train with one rank under each of ``pythons``, in the run directory ``folder``, and return the hash of the weights."""
    own = (f"parallel.ranks={len(pythons)}", f"run_dir={folder}")
    spec = read_run(RUN_FILE, PRESETS, (*FIRST_STEPS, *values, *own))
    run = prepare_run(spec, RUN_FILE, lambda _name, _done, _total: None)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(phalanx.__file__).parents[1]),
        "OMP_NUM_THREADS": str(run.spec.runtime.threads),
        "PHALANX_RANKS": str(len(pythons)),
        "PHALANX_LAUNCHER": str(os.getpid()),
        "PHALANX_MEETING_POINT": (folder / "meeting-point").as_uri(),
    }
    arguments = ("-m", "phalanx.train.lifecycle.worker", str(folder), "--attempt", str(run.attempt))
    processes = [
        subprocess.Popen(
            [python, *arguments], env=environment | {"PHALANX_RANK": str(rank)}, stdout=subprocess.DEVNULL
        )
        for rank, python in enumerate(pythons)
    ]
    codes = [process.wait() for process in processes]
    result = run.directory.finished_result()
    if any(codes) or result is None:
        raise SystemExit(f"the ranks of {folder.name} ended with {codes}")
    return result.weights_sha256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the folder that arm_root.sh made")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the run file")
    args = parser.parse_args()
    here, arm = Path(sys.executable), (args.root / "python").absolute()
    require_catalog_peer(str(arm) if arm.is_file() else None, "reproduce.arm")
    fleets = {
        "here": (here,),
        "arm": (arm,),
        "arm, 2 ranks": (arm, arm),
        "rank 0 here, rank 1 arm": (here, arm),
    }
    digests = set()
    for name, pythons in fleets.items():
        began = time.monotonic()
        digests.add(digest := weights(pythons, args.set, Path(tempfile.mkdtemp()) / name.replace(" ", "-")))
        record({"fleet": name, "seconds": round(time.monotonic() - began), "weights_sha256": digest})
    return int(len(digests) > 1)


if __name__ == "__main__":
    run_bench(main)
