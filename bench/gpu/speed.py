"""Speed of a step in bf16, compiled, beside a bare PyTorch loop in the same process, and what each choice is worth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.setting import Report, Sizes, attempt, sizes_for, speed_run
from bench.train.step import Step, build_stepper, random_samples, seconds_of
from phalanx.hardware.local.detect import accelerator_named
from phalanx.hardware.local.device import measure_matmul_flops, on_gpu
from phalanx.model.facts.shape import count
from phalanx.model.transformer import Transformer
from phalanx.run.spec import RunSpec

StepBuilder = Callable[[RunSpec, torch.device], Step]


@dataclass(frozen=True)
class Contender:
    """A step whose speed is measured, and the kernels of its attention: ``None`` leaves them to PyTorch."""

    name: str
    build: StepBuilder
    attention: SDPBackend | None = None


def contenders(*, on_gpu: bool) -> tuple[Contender, ...]:
    """Return our step and the bare loop.

    On a GPU the loop runs twice. PyTorch prefers cuDNN's attention on some GPUs. It is not deterministic, so ours is
    FlashAttention: the loop with the same attention shows the cost of our step, the one with cuDNN's the cost of determinism.
    """
    own = Contender("ours", ours)
    if not on_gpu:
        return own, Contender("bare PyTorch", bare)
    return (
        own,
        Contender("bare PyTorch, FlashAttention", bare, SDPBackend.FLASH_ATTENTION),
        Contender("bare PyTorch, cuDNN's attention", bare, SDPBackend.CUDNN_ATTENTION),
    )


def speed(device: torch.device, report: Report, presets: tuple[str, ...]) -> None:
    """Report tokens per second and MFU of our step and of the bare loop, one after the other, for each model."""
    sizes, ranks = sizes_for(device), dist.get_world_size()
    peak = measure_matmul_flops(device, torch.bfloat16)
    report("measured matrix product, FLOP/s", peak)
    report("ranks", ranks)
    for preset in presets or sizes.presets:
        spec = speed_run(preset, sizes, device, ranks)
        for contender in contenders(on_gpu=on_gpu(device)):
            with nullcontext() if contender.attention is None else attention_by(contender.attention):
                find = partial(timed, contender.build, spec, device, sizes, peak * ranks)
                attempt(report, f"{preset}, {contender.name}", device, find)


def variants(device: torch.device, report: Report, presets: tuple[str, ...]) -> None:
    """Time our step with one choice changed at a time. Some choices fail or change the bits, and only show their worth."""
    sizes, ranks = sizes_for(device), dist.get_world_size()
    spec = speed_run((presets or sizes.presets)[0], sizes, device, ranks)
    peak = measure_matmul_flops(device, torch.bfloat16) * ranks
    train = spec.train
    full_slots = replace(train, micro_batch_size=train.batch_size // train.slots)
    one_slot = replace(train, slots=ranks)
    changes: dict[str, RunSpec] = {
        "as it is": spec,
        "not compiled": replace(spec, runtime=replace(spec.runtime, compile=False)),
        "one micro-batch a slot": replace(spec, train=full_slots),
        "one slot a rank": replace(spec, train=one_slot),
        "fast reduction": replace(spec, train=replace(train, reduction="fast")),
        "fp8, a scale a row": replace(spec, precision=replace(spec.precision, matmul="fp8-rowwise")),
        "recompute full": replace(spec, memory=replace(spec.memory, recompute="full")),
        "loss of 8,192 tokens at once": replace(spec, train=replace(train, loss_chunk=8192)),
    }
    for name, changed in changes.items():
        if name == "not compiled" and not sizes.compile:
            continue
        attempt(report, name, device, partial(timed, ours, changed, device, sizes, peak))
    with not_deterministic():
        attempt(report, "not deterministic", device, partial(timed, ours, spec, device, sizes, peak))
        if on_gpu(device):
            with attention_by(SDPBackend.CUDNN_ATTENTION):
                find = partial(timed, ours, spec, device, sizes, peak)
                attempt(report, "not deterministic, cuDNN's attention", device, find)


@contextmanager
def attention_by(backend: SDPBackend) -> Iterator[None]:
    """Compute attention by ``backend`` inside the block. A compiled block fixes its kernel at compile time."""
    torch.compiler.reset()
    try:
        with sdpa_kernel([backend]):
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def not_deterministic() -> Iterator[None]:
    """Let PyTorch choose kernels whose sums have no fixed order inside the block."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def timed(
    build: StepBuilder, spec: RunSpec, device: torch.device, sizes: Sizes, peak_flops_per_s: float
) -> dict[str, float]:
    """Return the median time of a step, and the rates that follow from it, after two steps to warm up."""
    step = build(spec, device)
    for _ in range(2):
        step()
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)
    times = [seconds_of(step, device) for _ in range(sizes.steps)]
    step_s = statistics.median(times)
    tokens = spec.train.batch_size * spec.train.seq_len
    flops_per_s = count(spec.model, spec.train.seq_len).flops_per_token * tokens / step_s
    figures = {
        "step_s": step_s,
        "slowest_step_s": max(times),
        "tokens_per_s": tokens / step_s,
        "of_measured_peak": flops_per_s / peak_flops_per_s,
    }
    if on_gpu(device):
        accelerator = accelerator_named(torch.cuda.get_device_name(device))
        if accelerator is not None:
            figures["mfu"] = flops_per_s / (accelerator.bf16_flops * dist.get_world_size())
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def ours(spec: RunSpec, device: torch.device) -> Step:
    """Build this project's step."""
    return build_stepper(spec, device)[1]


def bare(spec: RunSpec, device: torch.device) -> Step:
    """Build a step of the same model from PyTorch's own parts: FSDP2 with bf16, compiled blocks, fused AdamW, no determinism."""
    with device:
        module = Transformer(spec.model)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in module.blocks.values():
        if spec.runtime.compile:
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu(device)
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = spec.train.batch_size // ranks
    samples = torch.from_numpy(random_samples(spec, spec.train.batch_size))[rank * own : (rank + 1) * own]
    pieces = samples.to(device).split(spec.train.micro_batch_size)

    def loss_of(sample: Tensor) -> Tensor:
        logits = module(sample[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), sample[:, 1:].flatten())

    def step() -> None:
        with not_deterministic():
            for number, sample in enumerate(pieces):
                root.set_requires_gradient_sync(number == len(pieces) - 1)
                (loss_of(sample) / len(pieces)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step
