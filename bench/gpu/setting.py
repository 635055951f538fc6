"""Sizes of the measured runs, on a GPU and in the small stand-in for a CPU, and the functions by which all parts run steps."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from bench.train.step import build_stepper
from phalanx.hardware.local.device import give_back_memory, wait_for_device
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import (
    ModelSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    RuntimeSpec,
    ScheduleSpec,
    TrainSpec,
)
from phalanx.train.step.state import weights_sha256

Report = Callable[[str, object], None]
"""Reports a finding under a name; it is kept even if the part fails later."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the runs that are measured."""

    bits: ModelSpec
    """The model whose hashes are compared."""
    bits_train: TrainSpec
    vocab_size: int
    """Vocabulary of the models whose speed is measured."""
    presets: tuple[str, ...]
    """Models whose speed is measured, the most important first."""
    seq_len: int
    batch: int
    micro_batch: int
    steps: int
    """Steps that are timed, after two that are not."""
    hashed_steps: int
    """Steps after which hashes are compared."""
    experts: tuple[int, int, int, int]
    """Width, inner width, experts and tokens of the mixture."""
    slots: tuple[int, ...]
    """Numbers of slots that the mixture's tokens are divided into."""
    compile: bool


ON_GPU = Sizes(
    bits=ModelSpec(layers=4, dim=1024, heads=8, kv_heads=4, ffn_dim=2816, vocab_size=32_000, qk_norm=True),
    bits_train=TrainSpec(steps=100, batch_size=12, slots=6, micro_batch_size=1, seq_len=1024),
    vocab_size=32_000,
    presets=("llama-1b", "llama-3b"),
    seq_len=4096,
    batch=16,
    micro_batch=4,
    steps=6,
    hashed_steps=3,
    experts=(7168, 2048, 32, 4096),
    slots=(1, 8, 64),
    compile=True,
)
"""Sizes for one GPU of 80 GB or more. The mixture is one rank's share of a layer of DeepSeek-V3."""

STAND_IN = Sizes(
    bits=ModelSpec(layers=2, dim=32, heads=2, ffn_dim=64, vocab_size=64, qk_norm=True),
    bits_train=TrainSpec(steps=100, batch_size=3, slots=3, micro_batch_size=1, seq_len=16),
    vocab_size=64,
    presets=("toy-4m",),
    seq_len=16,
    batch=4,
    micro_batch=1,
    steps=1,
    hashed_steps=2,
    experts=(32, 16, 4, 32),
    slots=(1, 2),
    compile=False,
)


def sizes_for(device: torch.device) -> Sizes:
    """Return the sizes for ``device``."""
    return ON_GPU if device.type == "cuda" else STAND_IN


def run_of(
    model: ModelSpec,
    train: TrainSpec,
    device: torch.device,
    *,
    compiled: bool = False,
    sharding: str = "zero2",
) -> RunSpec:
    """Return a run in bf16 with a constant learning rate."""
    return RunSpec(
        model=resolve(model),
        train=train,
        schedule=ScheduleSpec(kind="constant", warmup_steps=0),
        precision=PrecisionSpec(compute="bf16"),
        parallel=ParallelSpec(sharding=sharding),  # type: ignore[arg-type]
        runtime=RuntimeSpec(device=device.type, compile=compiled),  # type: ignore[arg-type]
    )


def speed_run(preset: str, sizes: Sizes, device: torch.device, ranks: int) -> RunSpec:
    """Return the run whose speed is measured: two slots a rank, so that the tree has something to add."""
    batch = sizes.batch * ranks
    train = TrainSpec(
        steps=1000,
        batch_size=batch,
        slots=2 * ranks,
        seq_len=sizes.seq_len,
        micro_batch_size=min(sizes.micro_batch, batch // (2 * ranks)),
    )
    return run_of(resolve(PRESETS[preset], sizes.vocab_size), train, device, compiled=sizes.compile)


def settings_of(spec: RunSpec) -> dict[str, object]:
    """Return the settings on which the work of a step of a preset depends."""
    train = spec.train
    return {
        "batch_size": train.batch_size,
        "slots": train.slots,
        "micro_batch_size": train.micro_batch_size,
        "seq_len": train.seq_len,
        "vocab_size": spec.model.vocab_size,
        "sharding": spec.parallel.sharding,
        "compile": spec.runtime.compile,
    }


def weights_after(spec: RunSpec, device: torch.device) -> str:
    """Return the SHA-256 of the weights after a few steps on random tokens."""
    stepper, step = build_stepper(spec, device)
    for _ in range(sizes_for(device).hashed_steps):
        step()
    digest = weights_sha256(stepper.built.model.parts, stepper.built.placement)
    del stepper, step
    free(device)
    return digest


def free(device: torch.device) -> None:
    """Give back the memory of what was deleted: FSDP's modules and their hooks refer to each other."""
    gc.collect()
    wait_for_device(device)
    give_back_memory(device)


def attempt(report: Report, name: str, device: torch.device, measure: Callable[[], object]) -> None:
    """Report the result of ``measure``, or the error that it raises; then give its memory back."""
    try:
        finding = measure()
    except Exception as error:
        traceback.print_exc()
        report(name, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})
    else:
        report(name, finding)
    with suppress(RuntimeError):  # a GPU may repeat an old error; the next part then reports it
        free(device)
