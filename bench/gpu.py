"""The checks to run first on a machine with a GPU: speed of a compiled bf16 step, and one hash in two runs.

For each preset: a few steps of ours on one GPU (Llama-shaped, bf16 compute, fp32 master weights, compiled blocks), stated as
MFU by PaLM's convention against the data sheet's peak and against the matrix-multiply peak measured in the same run; then the
same steps again from the start, and whether the weights hash the same.

    python bench/gpu.py
    python bench/gpu.py --preset llama-1b --batch 16 --seq-len 4096 --json
    python bench/gpu.py --device cpu --preset toy-4m --seq-len 128 --no-compile     # the same code, anywhere
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from phalanx.hardware.device import give_back_memory
from phalanx.hardware.device_peak import accelerator_named
from phalanx.hardware.environment import set_for_rank
from phalanx.hardware.matmul_peak import measure_matmul_flops
from phalanx.model.facts.counts import count
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import resolve
from phalanx.parallel.process_group.rendezvous import RankEnvironment, device_for, join, leave
from phalanx.run.spec import ParallelSpec, PrecisionSpec, RunSpec, RuntimeSpec, ScheduleSpec, TrainSpec
from phalanx.train.lifecycle.assemble import make_deterministic
from phalanx.train.step.state import weights_sha256
from step import build_stepper, seconds_of


def spec_for(arguments: argparse.Namespace, preset: str) -> RunSpec:
    """The run that is measured: two slots, so that the tree has something to add."""
    return RunSpec(
        model=resolve(PRESETS[preset], 32_000),
        train=TrainSpec(
            steps=1000,
            batch_size=arguments.batch,
            slots=2,
            seq_len=arguments.seq_len,
            micro_batch_size=arguments.micro_batch,
        ),
        schedule=ScheduleSpec(kind="constant", warmup_steps=0),
        precision=PrecisionSpec(compute="bf16"),
        parallel=ParallelSpec(sharding="zero2"),
        runtime=RuntimeSpec(device=arguments.device, compile=not arguments.no_compile),
    )


def measure(arguments: argparse.Namespace, preset: str) -> dict[str, Any]:
    """Speed, MFU and the hashes of two equal runs."""
    spec, device = spec_for(arguments, preset), device_for(arguments.device, 0)
    hashes, times, peak = [], [], 0.0
    for _ in range(2):
        stepper, step = build_stepper(spec, device)
        times = [seconds_of(step, device) for _ in range(arguments.steps)]
        hashes.append(weights_sha256(stepper.built.model.parts, stepper.built.placement))
        peak = max(peak, measure_matmul_flops(device, torch.bfloat16))
        del stepper, step
        gc.collect()  # FSDP's modules and their hooks refer to each other
        give_back_memory(device)
    step_s = statistics.median(times[2:] or times)
    tokens = spec.train.batch_size * spec.train.seq_len
    flops_per_s = count(spec.model, spec.train.seq_len).flops_per_token * tokens / step_s
    known = accelerator_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "preset": preset,
        "parameters": count(spec.model, spec.train.seq_len).parameters,
        "tokens_per_s": tokens / step_s,
        "mfu_of_data_sheet": flops_per_s / known.bf16_flops if known else None,
        "mfu_of_measured_peak": flops_per_s / peak,
        "measured_peak_flops_per_s": peak,
        "same_hash_twice": hashes[0] == hashes[1],
        "weights_sha256": hashes[0],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", action="append", choices=sorted(PRESETS), help="default: llama-1b and llama-3b"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_for_rank()
    device = device_for(arguments.device, 0)
    make_deterministic(spec_for(arguments, "toy-4m"), device)
    with tempfile.TemporaryDirectory() as folder:
        join(RankEnvironment(0, 1, 0, (Path(folder) / "store").as_uri(), "phalanx"), device, 60.0)
        rows = [measure(arguments, preset) for preset in arguments.preset or ["llama-1b", "llama-3b"]]
        leave()
    for row in rows:
        print(json.dumps(row) if arguments.json else "\n".join(f"{k:28} {v}" for k, v in row.items()) + "\n")


if __name__ == "__main__":
    main()
