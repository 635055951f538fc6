"""Hash of a run's first steps under all of the processor's instruction sets, threads and ranks, and on 64-bit Arm: is it one?

Each row is a kind of run: dense, a mixture, lanes, packed data, bf16, each optimizer, operands of 8 bits. It is trained with portable numerics on several machines: this one under each
instruction set, with 1 to 8 threads, and with 2 and 3 ranks. With Debian's ``qemu-user-static``, also on an emulated Haswell, which has AVX2 and no AVX-512.
Exit code 1: a kind has two hashes.

``--root ROOT`` adds 64-bit Arm, alone and as rank 1 of 2. ``bench/reproduce/arm_root.sh ROOT`` makes this machine: Python and PyTorch for 64-bit Arm under qemu's
emulation in ROOT, and ROOT/python, which runs them.

    python -m bench.reproduce.hashes
    python -m bench.reproduce.hashes --kinds dense,mixture --root ROOT
    python -m bench.reproduce.hashes --kinds dense --set train.seq_len=256 --set train.batch_size=16
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import phalanx
from bench.common.instruction_sets import LIMITS, emulated_haswell, instruction_sets
from bench.running import record, run_bench
from phalanx.data.preparing.files import CORPORA
from phalanx.data.preparing.prepare import prepare
from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run
from phalanx.train.start.prepare import prepare_run

FIRST_STEPS = (
    *("train.steps=2", "train.seq_len=32", "train.batch_size=4", "train.slots=4", "train.micro_batch_size=1"),
    *("runtime.numerics=portable", "evaluation.final_sequences=1", "expect.weights=[]"),
)
"""The fields of a run file that are changed, besides those of the kind and of ``--set``."""
OPTIMIZERS = ("adafactor", "muon")
NARROW = ("fp8-tensorwise", "fp8-rowwise", "mxfp8")
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("quickstart", ()),
    "bf16": ("quickstart", ("precision.compute=bf16",)),
    "mixture": ("quickstart-moe", ("parallel.ranks=1",)),
    "lanes": ("quickstart-lanes", ("parallel.ranks=1",)),
    "packed": ("quickstart", ("data.corpus=[]",)),
    **{name: ("quickstart", (f"optimizer.name={name}",)) for name in OPTIMIZERS},
    **{name: ("quickstart", (f"precision.matmul={name}",)) for name in NARROW},
    "mixture-mxfp8": (
        "quickstart-moe",
        ("parallel.ranks=1", "precision.matmul=mxfp8", "precision.compute=bf16"),
    ),
}
"""By name, a run file of ``configs`` and changed fields."""


@dataclass(frozen=True)
class Machine:
    """An interpreter's command for each rank of a run, threads, and variables of the environment."""

    pythons: tuple[tuple[str, ...], ...]
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


def machines(root: Path | None) -> dict[str, Machine]:
    """Return the machines by name, this one without limits first."""
    here = (sys.executable,)
    by_name = {"1 thread": Machine((here,))}
    by_name |= {name: Machine((here,), 1, LIMITS[name]) for name in instruction_sets() if LIMITS[name]}
    by_name |= {f"{threads} threads": Machine((here,), threads) for threads in (2, 3, 4, 8)}
    by_name |= {f"{ranks} ranks": Machine((here,) * ranks) for ranks in (2, 3)}
    if haswell := emulated_haswell():
        by_name["haswell"] = Machine(((*haswell, *here),))
    if root is not None:
        arm = (str((root / "python").absolute()),)
        by_name |= {"arm": Machine((arm,)), "rank 1 on arm": Machine((here, arm))}
    return by_name


def weights(kind: str, values: Sequence[str], machine: Machine, folder: Path) -> str:
    """Train a run of ``kind`` on ``machine`` in the run directory ``folder``, and return the hash of its weights; "failed" if it has none."""
    name, own = KINDS[kind]
    ranks = len(machine.pythons)
    file = Path("configs") / f"{name}.toml"
    layout = (f"parallel.ranks={ranks}", f"run_dir={folder}", f"runtime.threads={machine.threads}")
    run = prepare_run(
        read_run(file, PRESETS, (*FIRST_STEPS, *own, *values, *layout)),
        file,
        lambda _name, _done, _total: None,
    )
    environment = {
        **os.environ,
        **machine.environment,
        "PYTHONPATH": str(Path(phalanx.__file__).parents[1]),
        "OMP_NUM_THREADS": str(machine.threads),
        "PHALANX_RANKS": str(ranks),
        "PHALANX_LAUNCHER": str(os.getpid()),
        "PHALANX_MEETING_POINT": (folder / "meeting-point").as_uri(),
    }
    arguments = ("-m", "phalanx.train.lifecycle.worker", str(folder), "--attempt", str(run.attempt))
    processes = [
        subprocess.Popen(
            [*python, *arguments], env=environment | {"PHALANX_RANK": str(rank)}, stdout=subprocess.DEVNULL
        )
        for rank, python in enumerate(machine.pythons)
    ]
    codes = [process.wait() for process in processes]
    result = run.directory.finished_result()
    return "failed" if any(codes) or result is None else result.weights_sha256


def packed_dataset(folder: Path) -> Path:
    """Prepare full documents packed into sequences of 32 tokens, and return the dataset."""
    documents = CORPORA["python-stdlib"]()[:40]
    prepare(documents, folder, tokenizer="bytes", held_out_fraction=0.1, packed_seq_len=32)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--root", type=Path, help="the folder that arm_root.sh made")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the run files")
    args = parser.parse_args()
    if args.root is not None and not (args.root / "python").is_file():
        parser.error(f"there is no {args.root / 'python'}: bench/reproduce/arm_root.sh {args.root} makes it")
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    differ = False
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.kinds.split(","):
            values = list(args.set)
            if kind == "packed":
                values.append(f"data.path={packed_dataset(Path(scratch) / 'data')}")
            digests = {
                name: weights(kind, values, machine, Path(scratch) / f"{kind}-{name}".replace(" ", "-"))
                for name, machine in machines(args.root).items()
            }
            equal = len(set(digests.values())) == 1 and "failed" not in digests.values()
            differ |= not equal
            first = next(iter(digests.values()))
            others = {name: digest[:12] for name, digest in digests.items() if digest != first}
            record(
                {"kind": kind, "machines": len(digests), "weights_sha256": first, "others": others or "none"}
            )
    return int(differ)


if __name__ == "__main__":
    run_bench(main)
