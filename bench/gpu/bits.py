"""Bits: the same run computed in ways that must not matter, and kernels whose results must not depend on their neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.setting import Report, attempt, run_of, sizes_for, weights_after
from bench.train.step import build_stepper
from phalanx.checkpoint.save.staging import StagingBuffers
from phalanx.hardware.kernels.choose import fused_kernels
from phalanx.hardware.kernels.reference import REFERENCE
from phalanx.hardware.local.device import on_gpu, wait_for_device
from phalanx.model.layers.dense import Linear
from phalanx.model.layers.expert_groups import Groups, groups_of_one_slot, groups_of_slots
from phalanx.model.layers.moe import Experts
from phalanx.parallel.pipeline import postpone_weight_gradients
from phalanx.run.spec import MemorySpec, MlaSpec, ModelSpec, MoeSpec, RunSpec
from phalanx.train.step.state import state_shards


def hashes(device: torch.device, report: Report) -> None:
    """Report hashes of the weights of one run: eager and compiled, under all settings that must not change the bits."""
    sizes = sizes_for(device)
    plain = run_of(sizes.bits, sizes.bits_train, device)
    ways: dict[str, MemorySpec] = {
        "": MemorySpec(),
        ", again": MemorySpec(),
        ", recompute full": MemorySpec(recompute="full"),
        ", offloaded activations": MemorySpec(offload_activations="host"),
        ", offloaded moments": MemorySpec(offload_optimizer="host"),
    }
    for name, memory in (ways | {", recompute selective": MemorySpec(recompute="selective")}).items():
        attempt(report, f"eager{name}", device, partial(weights_after, replace(plain, memory=memory), device))
    attempt(report, "eager, other addresses", device, partial(_at_other_addresses, plain, device))
    if on_gpu(device):
        attempt(
            report, "eager, beside another stream", device, partial(_beside_another_stream, plain, device)
        )
    if not sizes.compile:
        return
    compiled = replace(plain, runtime=replace(plain.runtime, compile=True))
    for name, memory in ways.items():
        attempt(
            report,
            f"compiled{name}",
            device,
            partial(weights_after, replace(compiled, memory=memory), device),
        )
    budget = replace(compiled, memory=MemorySpec(recompute="budget"))
    attempt(report, "compiled, recompute budget", device, partial(weights_after, budget, device))


def hashes_elsewhere(device: torch.device, report: Report) -> None:
    """Report the same hashes from another process, whose compiler starts with an empty cache, or from several ranks."""
    sizes = sizes_for(device)
    plain = run_of(sizes.bits, sizes.bits_train, device)
    ranks = dist.get_world_size()
    for sharding in ("zero2",) if ranks == 1 else ("zero2", "zero3", "none"):
        spec = replace(plain, parallel=replace(plain.parallel, sharding=sharding))  # type: ignore[arg-type]
        attempt(report, f"eager, {ranks} ranks, {sharding}", device, partial(weights_after, spec, device))
    if sizes.compile and ranks == 1:
        compiled = replace(plain, runtime=replace(plain.runtime, compile=True))
        attempt(report, "compiled, 1 ranks, zero2", device, partial(weights_after, compiled, device))


def _at_other_addresses(spec: RunSpec, device: torch.device) -> str:
    keep = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1, 1000, 3_000_001, 70_000_003)]
    digest = weights_after(spec, device)
    del keep
    return digest


def _beside_another_stream(spec: RunSpec, device: torch.device) -> str:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    load = torch.randn(4096, 4096, device=device)
    wait_for_device(device)
    with torch.cuda.stream(stream):
        for _ in range(2000):  # some seconds
            load = (load @ load).clamp(-1, 1)
    return weights_after(spec, device)


def kinds(device: torch.device, report: Report) -> None:
    """Report for each kind of layer if PyTorch has deterministic kernels for its steps."""
    sizes = sizes_for(device)
    base = replace(sizes.bits, layers=2)
    width = base.dim // base.heads
    mixture = MoeSpec(
        experts=4, per_token=2, ffn_dim=base.ffn_dim // 4, shared=1, aux_loss=0.01, z_loss=0.001
    )
    models: dict[str, ModelSpec] = {
        "mixture with balance losses": replace(base, moe=mixture),
        "mixture with groups and biases": replace(
            base,
            moe=replace(
                mixture, score="sigmoid", groups=2, groups_per_token=1, balance_bias=True, aux_loss=0.0
            ),
        ),
        "latent attention": replace(
            base,
            qk_norm=False,
            kv_heads=0,
            mla=MlaSpec(
                query_rank=width,
                kv_rank=width,
                nope_head_dim=width,
                rope_head_dim=width // 2,
                value_head_dim=width,
            ),
        ),
        "multi-token prediction": replace(base, mtp_depth=1),
        "sliding window": replace(
            base, attention_pattern=("window", "full"), window=sizes.bits_train.seq_len // 4
        ),
        "biases and GELU": replace(base, ffn="gelu", attention_bias=True, ffn_bias=True),
        "tied embeddings": replace(base, tie_embeddings=True),
    }
    for name, model in models.items():
        spec = run_of(model, sizes.bits_train, device)
        attempt(report, name, device, partial(_same_twice, spec, device))
    masked = run_of(base, replace(sizes.bits_train, document_mask=True, end_of_document=0), device)
    attempt(report, "document mask", device, partial(_same_twice, masked, device))
    for matmul in ("fp8-tensorwise", "fp8-rowwise", "mxfp8"):
        spec = run_of(base, sizes.bits_train, device)
        spec = replace(spec, precision=replace(spec.precision, matmul=matmul))  # type: ignore[arg-type]
        attempt(report, matmul, device, partial(_same_twice, spec, device))


def _same_twice(spec: RunSpec, device: torch.device) -> bool:
    return weights_after(spec, device) == weights_after(spec, device)


def kernels(device: torch.device, report: Report) -> None:
    """Test the kernels of which the promise assumes that a row's result does not depend on the other rows."""
    width, inner, _experts, tokens = sizes_for(device).experts
    attempt(
        report,
        "grouped product: other rows beside, empty groups",
        device,
        partial(_grouped_rows, device, width, inner),
    )
    attempt(report, "slots of a hand at once and one by one", device, partial(_hand, device, width, inner))
    attempt(report, "put-off weight gradients", device, partial(_put_off, device, width, inner, tokens))
    attempt(report, "attention of a batch and of its sequences", device, partial(_attention, device))
    attempt(report, "update and sums in one pass", device, partial(_one_pass, device))
    attempt(report, "snapshot during the next update", device, partial(_snapshot, device))


def _one_pass(device: torch.device) -> bool:
    """Return True if the one-pass kernels have the bits of PyTorch's operations, and so are in use."""
    return fused_kernels(device) is not REFERENCE


def _grouped_rows(device: torch.device, width: int, inner: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    matrices, mine = draw(4, inner, width), draw(24, width)

    def product(before: Tensor, after: Tensor) -> Tensor:
        ends = torch.tensor([len(before), len(before) + len(mine), len(before) + len(mine), 0], device=device)
        ends[3] = len(before) + len(mine) + len(after)
        rows = torch.cat((before, mine, after))
        result = F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.to(torch.int32))
        return result[len(before) : len(before) + len(mine)]

    alone = product(draw(0, width), draw(0, width))
    # From more than 128 rows for each of the four experts on, PyTorch's kernel has larger tiles.
    beside = ((8, 0), (40, 136), (0, 4000), (3001, 1000))
    return all(torch.equal(alone, product(draw(n, width), draw(m, width))) for n, m in beside)


def _hand(device: torch.device, width: int, inner: int) -> bool:
    """Return True if slots computed at once have the results, gradients of rows and leaves that they have one by one."""
    moe = MoeSpec(experts=4, per_token=2, ffn_dim=inner)
    experts, generator = Experts(ModelSpec(dim=width), moe).to(device, torch.bfloat16), torch.Generator()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    counts = torch.randint(0, 150, (4, 8), generator=generator.manual_seed(0)).to(device)
    counts[1, 3] = 0
    x, slope = (torch.randn(int(counts.sum()), width, device=device).bfloat16() for _ in range(2))

    def through(rows: Tensor, groups: Groups, slope: Tensor) -> list[Tensor]:
        rows = rows.detach().requires_grad_()
        result = experts(rows, groups)
        return [result, *torch.autograd.grad(result, [rows, *experts.parameters()], slope)]

    def take(name: str, _: range, leaves: Tensor) -> None:
        taken.setdefault(name, []).append(leaves)

    taken: dict[str, list[Tensor]] = {}
    places = torch.split(torch.arange(len(x), device=device), counts.flatten().tolist())
    alone = []
    for slot in range(8):
        mine = torch.cat(places[slot::8])
        alone.append((mine, through(x[mine], groups_of_one_slot(counts[:, slot].contiguous()), slope[mine])))
    experts.take = take
    rows = x.detach().requires_grad_()
    result = experts(rows, groups_of_slots(counts, counts.sum(1).tolist(), apart=device.type != "cuda"))
    result.backward(slope)
    assert rows.grad is not None
    same = [
        torch.equal(result[mine], tensors[0]) and torch.equal(rows.grad[mine], tensors[1])
        for mine, tensors in alone
    ]
    for number, (name, _) in enumerate(experts.named_parameters()):
        leaves = torch.stack([tensors[2 + number] for _, tensors in alone], 1)
        same.append(torch.equal(torch.cat(taken[name]), leaves))
    return all(same)


def _put_off(device: torch.device, width: int, inner: int, tokens: int) -> bool:
    module = Linear(width, inner, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(module.weight, std=0.02)
    x = torch.randn(2, tokens // 2, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def gradients(backward: Callable[[Tensor], None]) -> list[Tensor | None]:
        x.grad = module.weight.grad = None
        y = module(x)
        backward(y)
        return [x.grad, module.weight.grad]

    slope = torch.randn(2, tokens // 2, inner, device=device, dtype=torch.bfloat16)
    undivided = gradients(lambda y: torch.autograd.backward(y, slope))
    store = postpone_weight_gradients(module)
    store.micro_batch = 0

    def divided(y: Tensor) -> None:
        torch.autograd.backward(y, slope)
        store.add(0)

    return all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(undivided, gradients(divided), strict=True)
    )


def _attention(device: torch.device) -> bool:
    shape = (4, 8, 512, 64) if on_gpu(device) else (2, 2, 16, 8)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    batch = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    sequence = F.scaled_dot_product_attention(q[1:2], k[1:2], v[1:2], is_causal=True)
    return torch.equal(batch[1:2], sequence)


def _snapshot(device: torch.device) -> bool:
    """Return True if a copy to pinned memory that is under way is kept from the next update by the fence."""
    sizes = sizes_for(device)
    stepper, step = build_stepper(run_of(sizes.bits, sizes.bits_train, device), device)
    step()
    shards = state_shards(stepper.built.model.parts, stepper.built.optimizer, stepper.built.placement)
    with _staging() as staging:
        wait_for_device(device)
        expected = {shard.box: shard.tensor.detach().clone() for shard in shards}
        staged = staging.stage(shards)
        stepper.run(2, before_update=staging.fence)
        wait_for_device(device)
        image, same = staged.image, []
        for entry in image.layout.entries:
            tensor = expected[entry.box].cpu().contiguous()
            staged_bytes = torch.from_numpy(image.data[entry.start : entry.stop])
            same.append(torch.equal(staged_bytes, tensor.reshape(-1).view(torch.uint8)))
        changed = any(not torch.equal(expected[shard.box], shard.tensor) for shard in shards)
        staging.release(staged)
    return all(same) and changed


@contextmanager
def _staging() -> Iterator[StagingBuffers]:
    staging = StagingBuffers()
    try:
        yield staging
    finally:
        staging.close()
