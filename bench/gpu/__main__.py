"""The command ``python -m bench.gpu``: starts the parts one after another and writes the report; or runs one part as a rank."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.gpu.prediction import comparisons
from bench.gpu.processes import report_finding, run_processes
from bench.gpu.report import PartResult, page, verdicts
from phalanx.hardware.local.detect import set_for_rank
from phalanx.run.directory.files import write_atomically

TESTS = (
    "tests/train/test_cuda.py",
    "tests/serve/engine/test_cuda.py",
    "tests/serve/engine/test_devices.py",
    "tests/parallel/mesh/test_torch_compat.py",
    "tests/train/transforms/test_precision.py",
    "tests/train/transforms/test_offload.py",
    "tests/parallel/pipeline/test_weight_gradients.py",
    "tests/parallel/context/test_tiles.py",
)
"""Tests that need a GPU, or check the features that we expect of this PyTorch."""
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "msgspec",
    "tomli_w",
    "safetensors",
    "tokenizers",
    "xxhash",
    "pytest",
)
_TIMEOUT_S = 600.0
"""Limit of a collective: a rank may compile for minutes while the others wait. Parts have limits of their own."""
_LEAST_S = 8.0
"""With less time left a part is not begun."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the measurement, in ``ranks`` processes; names that begin with "hashes" are compared with each other."""

    name: str
    limit_s: float
    least_s: float
    """Time that the parts before leave for it: enough to start PyTorch and to report the most important findings."""
    ranks: int = 1


def parts_for(gpus: int, ranks: int) -> list[Part]:
    """Return the parts in the order of their worth."""
    counts = (2, 3) if gpus < 2 else sorted({2, 3, ranks} & set(range(2, gpus + 1)))
    return [
        Part("hashes", 150, 75),
        Part("speed", 170, 85, ranks),
        Part("trace", 70, 30, ranks),
        Part("hashes of another process", 60, 25),
        *(Part(f"hashes of {count} ranks", 60, 20, count) for count in counts),
        Part("serve", 100, 25),
        Part("kernels", 40, 20),
        Part("one pass", 30, 15),
        Part("mixture", 40, 15),
        Part("memory", 60, 20, ranks),
        Part("kinds", 80, 20),
        Part("variants", 150, 30, ranks),
        *([Part("tests", 90, 20)] if gpus else []),
    ]


def limit_of(part: Part, later: Sequence[Part], remaining_s: float) -> float:
    """Return the time that ``part`` may take of ``remaining_s``, without the least times of the parts after it."""
    spare_s = remaining_s - sum(following.least_s for following in later)
    return min(part.limit_s, remaining_s, max(part.least_s, spare_s))


def environment() -> dict[str, object]:
    """Describe this machine as far as that needs no PyTorch."""
    facts: dict[str, object] = {"python": platform.python_version(), "machine": platform.node()}
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "absent"
    with suppress(OSError, subprocess.SubprocessError):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit",
            "--format=csv,noheader",
        ]
        facts["GPUs"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    return facts


def gpu_count() -> int:
    """Return the number of GPUs that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return 0


def run_part(part: Part, arguments: argparse.Namespace, limit_s: float, stop: threading.Event) -> PartResult:
    """Run one part in processes of its own."""
    if part.name == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        result = run_processes(part.name, [command], limit_s, {}, stop)
        last_line = result.output.splitlines()[-1:] or result.ended
        return dataclasses.replace(result, findings={"pytest": last_line})
    with tempfile.TemporaryDirectory() as folder:
        own = {"OMP_NUM_THREADS": "4"}
        if part.name.startswith("hashes of"):
            own["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "cache")
        commands = [
            [sys.executable, "-m", "bench.gpu", "--run", part.name, "--device", arguments.device]
            + ["--place", str(rank), str(part.ranks), (Path(folder) / "store").as_uri()]
            + [word for preset in arguments.preset for word in ("--preset", preset)]
            for rank in range(part.ranks)
        ]
        return run_processes(part.name, commands, limit_s, own, stop)


def be_rank(arguments: argparse.Namespace) -> None:
    """Run one part as one of its ranks; rank 0 reports the findings."""
    import torch
    import torch.distributed as dist

    from bench.gpu import bits, layers, serving, speed, trace
    from bench.gpu.setting import run_of, sizes_for
    from phalanx.hardware.local.device import make_current
    from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
    from phalanx.train.assemble import make_deterministic

    rank, ranks, point = int(arguments.place[0]), int(arguments.place[1]), arguments.place[2]
    shared = arguments.device == "cuda" and torch.cuda.device_count() < ranks
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", 0 if shared else rank)
    sizes = sizes_for(device)
    make_deterministic(run_of(sizes.bits, sizes.bits_train, device), device)
    if shared:  # NCCL refuses two ranks on one GPU; gloo takes their tensors through the CPU
        make_current(device)
        store = dist.FileStore(point.removeprefix("file://"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    else:
        join(RankEnvironment(rank, ranks, rank, point, "phalanx"), device, _TIMEOUT_S)
    report = report_finding if rank == 0 else lambda _name, _value: None
    presets = tuple(arguments.preset)
    match arguments.run:
        case "hashes":
            bits.hashes(device, report)
        case "speed":
            speed.speed(device, report, presets)
        case "variants":
            speed.variants(device, report, presets)
        case "trace":
            trace.trace(device, report, presets)
        case "serve":
            serving.serve(device, report)
        case "kernels":
            bits.kernels(device, report)
        case "kinds":
            bits.kinds(device, report)
        case "one pass":
            layers.one_pass(device, report)
        case "mixture":
            layers.mixture(device, report)
        case "memory":
            layers.memory(device, report, presets)
        case _:
            bits.hashes_elsewhere(device, report)
    leave()


def measure(arguments: argparse.Namespace, machine: dict[str, object], stop: threading.Event) -> None:
    """Run the parts until the time is over or ``stop`` is set, and write the report after each."""
    deadline_s = time.monotonic() + arguments.minutes * 60
    gpus = gpu_count() if arguments.device == "cuda" else 0
    parts = [
        dataclasses.replace(
            part, limit_s=part.limit_s * arguments.slower, least_s=part.least_s * arguments.slower
        )
        for part in parts_for(gpus, arguments.ranks or max(1, gpus))
        if not arguments.only or part.name in arguments.only
    ]
    results = {part.name: PartResult(part.name) for part in parts}
    write(arguments.out, machine, results)
    for index, part in enumerate(parts):
        remaining_s = deadline_s - time.monotonic()
        if stop.is_set():
            results[part.name].ended = "not run: stopped by a signal"
        elif remaining_s < _LEAST_S:
            results[part.name].ended = "not run: no time left"
        else:
            limit_s = limit_of(part, parts[index + 1 :], remaining_s)
            results[part.name] = run_part(part, arguments, limit_s, stop)
        write(arguments.out, machine, results)
        print(f"{part.name}: {results[part.name].ended}, {results[part.name].seconds:.0f} s", flush=True)


def write(out: Path, machine: dict[str, object], results: dict[str, PartResult]) -> None:
    """Write the report on ``results`` in place of an earlier one."""
    compared = comparisons(str(machine.get("GPUs", "")), results)
    record = {
        "environment": machine,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(results)],
        "predictions": [dataclasses.asdict(comparison) for comparison in compared],
        "parts": {name: dataclasses.asdict(result) for name, result in results.items()},
    }
    write_atomically(out.with_suffix(".json"), json.dumps(record, indent=1).encode(), durable=False)
    write_atomically(out.with_suffix(".md"), page(machine, results, compared).encode(), durable=False)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=0, help="of the parts that measure speed; 0: one a GPU")
    parser.add_argument("--only", action="append", default=[], help="a part; may be given again")
    parser.add_argument("--preset", action="append", default=[], help="models whose speed is measured")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--slower", type=float, default=1.0, help="factor on the time limits of the parts")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="gives OUT.json and OUT.md")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--place", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    set_for_rank()  # for the parts too, before they import PyTorch: its allocator may read its settings then
    if arguments.run:
        be_rank(arguments)
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # a time limit sends the first
        signal.signal(number, lambda *_: stop.set())
    measure(arguments, environment(), stop)
    print(f"written: {arguments.out.with_suffix('.json')}, {arguments.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
