"""The cost of each axis: a step divided over two ranks, beside the same step on one, and beside PyTorch's own way.

All in one run on two CPU cores, a thread per rank, medians of rounds in which the contenders take turns:

- *efficiency*: the time of one rank, over twice the time of two ranks that share the same step. 1 would be free; the
  difference is communication, waiting and work done twice.
- *bubble*: of the pipeline, the share of the step in which a rank is idle, beside the closed form of its schedule.
- *over PyTorch*: the same model in a bare loop with PyTorch's own parts for the axis: ``fully_shard`` for shard, the styles
  of ``torch.distributed.tensor.parallel`` for tensor. (torchtitan, which is built of these parts, has no CPU path.)

    python -m bench.train.axes
    python -m bench.train.axes --layers 4 --dim 256 --rounds 3 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bench.common.started_ranks import on_ranks
from bench.running import record, run_bench
from phalanx.model.facts.shape import parameters
from phalanx.model.init import fill
from phalanx.model.transformer import Transformer
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.pipeline_schedules import bubble
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import micro_batches_per_slot, stages_per_rank
from phalanx.run.spec import ModelSpec, MoeSpec, ParallelSpec, PrecisionSpec, RunSpec, RuntimeSpec, TrainSpec
from phalanx.train.assemble import make_deterministic
from phalanx.train.compose import build_model
from phalanx.train.step.state import fill_initial
from phalanx.train.step.step import Stepper

CPU = torch.device("cpu")
Step = Callable[[], None]
DENSE = {
    "shard (ZeRO-3)": ParallelSpec(),
    "shard (ZeRO-2)": ParallelSpec(sharding="zero2"),
    "replicate": ParallelSpec(sharding="none"),
    "tensor": ParallelSpec(tensor=2),
    "context (ring)": ParallelSpec(context=2),
    "context (all-gather)": ParallelSpec(context=2, context_mode="allgather"),
    "pipeline (1f1b)": ParallelSpec(pipeline=2),
    "pipeline (zbv)": ParallelSpec(pipeline=2, pipeline_schedule="zbv"),
}
MIXTURE = {
    "experts whole (ZeRO-3)": ParallelSpec(),
    "expert, over shard": ParallelSpec(expert=2),
    "expert, over tensor": ParallelSpec(tensor=2, expert=2),
}


def spec_for(arguments: argparse.Namespace, parallel: ParallelSpec, *, mixture: bool) -> RunSpec:
    """Return the run of one contender: two slots of four micro-batches."""
    dim = arguments.dim
    moe = MoeSpec(experts=8, per_token=2, ffn_dim=dim, aux_loss=0.01) if mixture else None
    model = ModelSpec(layers=arguments.layers, dim=dim, heads=dim // 64, vocab_size=8192, moe=moe)
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(
            batch_size=arguments.batch, slots=2, micro_batch_size=1, seq_len=arguments.seq_len, steps=10**6
        ),
        precision=PrecisionSpec(compute="fp32"),
        runtime=RuntimeSpec(device="cpu", threads=1),
        parallel=parallel,
    )


def samples_of(spec: RunSpec) -> NDArray[np.int64]:
    """Return token ids of a batch: speed does not depend on their values."""
    shape = (spec.train.batch_size, spec.train.seq_len + 1)
    return np.random.default_rng(0).integers(0, spec.model.vocab_size, shape)


def our_step(spec: RunSpec, ranks: int) -> tuple[Step, Ledger]:
    """Return a step on the ranks of the process group, and the ledger that it fills."""
    mesh = build_mesh(spec, ranks, CPU)
    built, ledger = build_model(spec, mesh), Ledger(time.monotonic_ns(), Bucket.STEP_HOST_GAP)
    fill_initial(built.model.parts, built.placement, spec)
    samples, per_slot = samples_of(spec), spec.train.batch_size // spec.train.slots

    def batches() -> Iterator[NDArray[np.int64]]:
        while True:
            for current in built.rounds:
                yield samples[current.slot * per_slot : (current.slot + 1) * per_slot]

    stepper = Stepper(built, batches(), ledger)

    def step() -> None:
        stepper.run(1)

    return step, ledger


def bare_model(spec: RunSpec) -> Transformer:
    """Return the same model as a plain module, with its weights."""
    module = Transformer(spec.model)
    kinds = {parameter.name: parameter for parameter in parameters(spec.model)}
    for name, weights in module.named_parameters():
        fill(weights.detach(), kinds[name], (0,) * weights.ndim, spec.model, 0)
    return module


def bare_step(module: nn.Module, samples: torch.Tensor, count: int) -> Step:
    """Return a step of ``count`` micro-batches as written without a framework."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        for sample in samples.split(1):
            loss = F.cross_entropy(module(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
            (loss / count).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def pytorch_shard(spec: RunSpec) -> Step:
    """Return a step with ``fully_shard``; each rank has half of the batch, and shares gradients out after every micro-batch."""
    module = bare_model(spec)
    mesh = init_device_mesh("cpu", (2,))
    for block in module.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    samples = torch.from_numpy(samples_of(spec))
    return bare_step(module, samples.chunk(2)[dist.get_rank()], len(samples) // 2)


def pytorch_tensor(spec: RunSpec) -> Step:
    """Return a step with ``parallelize_module`` and PyTorch's tensor-parallel styles; norms and residuals are replicated on both ranks.

    Embedding and head are replicated too, since PyTorch's styles would gather the logits for this loss.
    """
    module = bare_model(spec)
    plan: dict[str, ParallelStyle] = {}
    for layer in module.blocks:
        for name in ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up"):
            plan[f"blocks.{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.output", "ffn.down"):
            plan[f"blocks.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
    samples = torch.from_numpy(samples_of(spec))
    # Without clipping: PyTorch cannot clip over parameters of which only some are divided, nor update them at once.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        for sample in samples.split(1):
            loss = F.cross_entropy(module(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
            (loss / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Step) -> float:
    """Return the wall time of one call, with all ranks starting together."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def rank_main(rank: int, ranks: int, point: str, arguments: argparse.Namespace, results: Any) -> None:
    """Measure all contenders on ``ranks`` ranks, in turns; rank 0 puts medians into ``results``."""
    torch.set_num_threads(1)
    join(RankEnvironment(rank, ranks, rank, point, "phalanx"), CPU, 60.0)
    contenders: dict[str, Step] = {}
    ledgers: dict[str, Ledger] = {}
    for mixture, parallels in ((False, DENSE), (True, MIXTURE)):
        alone = {f"one rank{', mixture' * mixture}": ParallelSpec()}
        for name, parallel in (parallels if ranks == 2 else alone).items():
            spec = spec_for(arguments, parallel, mixture=mixture)
            make_deterministic(spec, CPU)
            contenders[name], ledgers[name] = our_step(spec, ranks)
    if ranks == 2:
        dense = spec_for(arguments, ParallelSpec(), mixture=False)
        contenders |= {"PyTorch shard": pytorch_shard(dense), "PyTorch tensor": pytorch_tensor(dense)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds + 1):
        for name, step in contenders.items():
            seconds = seconds_of(step)
            if number:  # the first warms up
                times[name].append(seconds)
                record({"contender": name, "seconds": seconds}, is_printed=False)
    medians = {f"{name} (s)": statistics.median(taken) for name, taken in times.items()}
    for name, ledger in ledgers.items():
        idle = ledger.seconds().get(Bucket.STEP_BUBBLE, 0.0) / (arguments.rounds + 1)
        medians[f"{name} idle (s)"] = idle
    if rank == 0:
        results.put(medians)
    leave()


def summary(
    single: dict[str, float], pair: dict[str, float], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return efficiencies, bubbles and ratios to PyTorch."""
    figures = {}
    for names, alone in ((DENSE, "one rank (s)"), (MIXTURE, "one rank, mixture (s)")):
        for name in names:
            figures[f"{name}: efficiency"] = single[alone] / (2 * pair[f"{name} (s)"])
    for name, parallel in DENSE.items():
        if parallel.pipeline > 1:
            spec = spec_for(arguments, parallel, mixture=False)
            form = bubble(
                parallel.pipeline_schedule, 2, micro_batches_per_slot(spec), stages_per_rank(parallel)
            )
            idle = pair[f"{name} idle (s)"]
            figures[f"{name}: idle over busy"] = idle / (pair[f"{name} (s)"] - idle)
            figures[f"{name}: closed form"] = form
    figures["shard over PyTorch"] = pair["PyTorch shard (s)"] / pair["shard (ZeRO-3) (s)"]
    figures["tensor over PyTorch"] = pair["PyTorch tensor (s)"] / pair["tensor (s)"]
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, in two slots")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    single, pair = on_ranks(rank_main, 1, arguments), on_ranks(rank_main, 2, arguments)
    figures = summary(single, pair, arguments)
    if arguments.json:
        print(json.dumps({"one rank": single, "two ranks": pair, "summary": figures}))
        return
    for name, value in figures.items():
        print(f"{name:44} {value:8.3f}")


if __name__ == "__main__":
    run_bench(main)
