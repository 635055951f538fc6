"""A mixture's experts alone, the optimizer's kernels alone, and a step's memory by kind."""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bench.gpu.setting import Report, attempt, sizes_for, speed_run
from bench.gpu.trace import profiled, summary
from bench.train.step import build_stepper, seconds_of
from phalanx.hardware.kernels.choose import fused_kernels
from phalanx.hardware.kernels.reference import REFERENCE, Kernels, UpdateFactors
from phalanx.hardware.local.device import on_gpu
from phalanx.model.layers.expert_groups import groups_of_slots
from phalanx.model.layers.moe import Experts
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx.train.step.meters import MemoryMeter

PER_TOKEN = 8


def mixture(device: torch.device, report: Report) -> None:
    """Time forward and backward of one layer's experts, their rows belonging to one slot and to several."""
    for slots in sizes_for(device).slots:
        attempt(report, f"{slots} slots", device, partial(_experts, device, slots))


def _experts(device: torch.device, slots: int) -> dict[str, float]:
    width, inner, number, tokens = sizes_for(device).experts
    with device:
        experts = Experts(ModelSpec(dim=width), MoeSpec(experts=number, per_token=2, ffn_dim=inner))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    experts.to(torch.bfloat16)
    rows = tokens * PER_TOKEN // slots
    chosen = [torch.randint(0, number, (rows,), device=device) for _ in range(slots)]
    counts = torch.stack(
        [experts_of.bincount(minlength=number) for experts_of in chosen], 1
    )  # (experts, slots)
    groups = groups_of_slots(counts, counts.sum(1).tolist(), apart=device.type != "cuda")
    x = torch.randn(rows * slots, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.ones_like(x)

    def step() -> None:
        experts.zero_grad(set_to_none=True)
        torch.autograd.backward(experts(x, groups), slope)

    for _ in range(2):
        step()
    step_s = statistics.median(seconds_of(step, device) for _ in range(5))
    return {
        "ms": step_s * 1e3,
        "tflop_per_s": 3 * 2 * 3 * width * inner * rows * slots / step_s / 1e12,
        "kernels": float(summary(profiled(step, device, 1))["kernels"]),
    }


def one_pass(device: torch.device, report: Report) -> None:
    """Time an AdamW update and of the parts of an exact norm, in one pass over memory and as PyTorch's operations."""
    ways = {"one pass": fused_kernels(device), "PyTorch's operations": REFERENCE}
    for name, kernels in ways.items():
        attempt(report, name, device, partial(_picoseconds, kernels, device))


def _picoseconds(kernels: Kernels, device: torch.device) -> dict[str, float]:
    """Return picoseconds for each element."""
    count = 1 << (28 if on_gpu(device) else 16)
    tensors = [torch.rand(count, device=device) for _ in range(4)]
    factors = UpdateFactors(0.5, 0.9, 0.1, 0.95, 0.05, 0.3, 1e-8, 1e-3, 0.999)
    constants = (1.5 * 2.0**31, 1.5 * 2.0**8)

    def update() -> None:
        size = kernels.chunk_elements(device)
        for pieces in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            kernels.adamw([pieces[0]], [pieces[1]], [pieces[2]], [pieces[3]], factors)

    def norm() -> None:
        kernels.peak(tensors[1:2], device)
        kernels.extracted_sums(tensors[1:2], constants, device)

    figures = {}
    for name, call in (("update_ps_per_element", update), ("norm_ps_per_element", norm)):
        call()
        figures[name] = statistics.median(seconds_of(call, device) for _ in range(5)) / count * 1e12
    return figures


def memory(device: torch.device, report: Report, presets: tuple[str, ...]) -> None:
    """Report memory at a step's peak, by kind, for each model."""
    for preset in presets or sizes_for(device).presets:
        attempt(report, preset, device, partial(_memory_of, preset, device))


def _memory_of(preset: str, device: torch.device) -> dict[str, object]:
    spec = speed_run(preset, sizes_for(device), device, dist.get_world_size())
    stepper, step = build_stepper(spec, device)
    step()
    built = stepper.built
    meter = MemoryMeter(built.model.parts, built.optimizer_tensors, device, compiled=spec.runtime.compile)
    with meter:
        stepper.run(2, before_update=meter.gradients_complete)
    figures: dict[str, object] = dataclasses.asdict(meter.result())
    if on_gpu(device):
        figures["most_allocated"] = torch.cuda.max_memory_allocated(device)
        figures["most_reserved"] = torch.cuda.max_memory_reserved(device)
        figures["allocations_tried_again"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return figures
