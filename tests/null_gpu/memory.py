"""Peaks of PyTorch's allocator in forty-eight layouts, beside the memory that the planner predicts for rank 0.

``python -m null_gpu.memory`` prints a table of all, or ``python -m null_gpu.memory NAME [LIMIT]`` the figures of one in JSON. ``LIMIT`` is the
memory that the allocator may hold, as a factor on the prediction: beyond it, PyTorch reports that memory is exhausted. Each layout runs in
a process of its own: two steps of rank 0, whose peers NCCL imagines. The allocator is PyTorch's own, so its peaks are those of a GPU,
except for the workspaces of libraries. Half of the layouts may be used to improve the planner (``FITTED``); the others judge it.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.gpu.setting import run_of
from null_gpu import answers
from null_gpu.kinds import changed
from null_gpu.programs import printed
from null_gpu.steps import CUDA, stepper_of
from phalanx.hardware.catalog import cluster
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec, RunSpec, TrainSpec
from phalanx_plan.search.layout_text import written_layout
from phalanx_plan.search.query import job_of
from phalanx_plan.step_cost.estimate import prepare
from phalanx_plan.step_cost.memory import OVERHEADS
from phalanx_plan.workload.candidates import candidates_of

DENSE_1B = replace(PRESETS["llama-1b"], layers=8)
DENSE_8B = replace(PRESETS["llama3-8b"], layers=8)
WIDE = ModelSpec(layers=6, dim=3072, heads=24, kv_heads=8, ffn_dim=8192, vocab_size=50_000)
TIED = replace(WIDE, tie_embeddings=True)
MIXTURE = ModelSpec(
    layers=6,
    dim=2048,
    heads=16,
    kv_heads=4,
    ffn_dim=4096,
    vocab_size=32_000,
    moe=MoeSpec(experts=16, per_token=2, ffn_dim=1024),
)


@dataclass(frozen=True)
class Measured:
    """Bytes of one layout on rank 0."""

    allocated: int
    """Most bytes of tensors at once, in the second step."""
    reserved: int
    """Most bytes that the allocator held."""
    predicted: float
    """Tensors, by the planner."""
    kinds: dict[str, float]
    """``predicted`` by kind."""
    retries: int
    """Times in the second step that the allocator gave memory back to the device and tried again."""


def _run(
    model: ModelSpec,
    ranks: int = 1,
    *,
    slots: int = 1,
    each: int = 1,
    at_once: int = 1,
    seq_len: int = 4096,
    **parallel: object,
) -> tuple[RunSpec, int]:
    """``slots`` on each data-parallel rank with ``each`` sequences, ``at_once`` in a micro-batch."""
    degrees = [int(str(parallel.get(axis, 1))) for axis in ("tensor", "context", "pipeline")]
    data = ranks // (degrees[0] * degrees[1] * degrees[2])
    train = TrainSpec(
        steps=100,
        batch_size=slots * each * data,
        slots=slots * data,
        micro_batch_size=at_once,
        seq_len=seq_len,
    )
    return changed(run_of(resolve(model), train, CUDA), "parallel", **parallel), ranks


def _with(run: tuple[RunSpec, int], section: str, **fields: object) -> tuple[RunSpec, int]:
    return changed(run[0], section, **fields), run[1]


FITTED = {
    "1b": _run(DENSE_1B),
    "1b, 8 slots": _run(DENSE_1B, slots=8),
    "1b, 4 sequences at once": _run(DENSE_1B, each=4, at_once=4),
    "1b, 2 micro-batches": _run(DENSE_1B, each=2),
    "1b, recompute full": _with(_run(DENSE_1B, each=4, at_once=4), "memory", recompute="full"),
    "1b, recompute selective": _with(_run(DENSE_1B, each=4, at_once=4), "memory", recompute="selective"),
    "1b, fp32": _with(_run(DENSE_1B, seq_len=2048), "precision", compute="fp32"),
    "1b, 8 ranks ZeRO-1": _run(DENSE_1B, 8, slots=4, sharding="zero1"),
    "1b, 8 ranks ZeRO-2": _run(DENSE_1B, 8, slots=2, sharding="zero2"),
    "1b, 8 ranks ZeRO-3": _run(DENSE_1B, 8, slots=2, sharding="zero3"),
    "1b, 8 ranks unsharded": _run(DENSE_1B, 8, slots=2, sharding="none"),
    "8b": _run(DENSE_8B, seq_len=2048),
    "8b, recompute full": _with(_run(DENSE_8B, each=2, at_once=2), "memory", recompute="full"),
    "8b, 8 ranks ZeRO-2": _run(DENSE_8B, 8, slots=8, sharding="zero2"),
    "8b, 8 ranks ZeRO-3": _run(DENSE_8B, 8, slots=8, sharding="zero3"),
    "8b, tensor 4": _run(DENSE_8B, 4, slots=2, tensor=4),
    "8b, pipeline 2": _run(DENSE_8B, 2, slots=1, each=8, pipeline=2),
    "wide, 4 slots": _run(WIDE, slots=4),
    "wide, int8 moments": _with(_run(WIDE), "optimizer", state="int8"),
    "wide, integer sums": _with(_run(WIDE, 8, slots=2, sharding="zero2"), "train", reduction="integer"),
    "tied, 2 micro-batches": _run(TIED, each=2),
    "mixture": _run(MIXTURE, each=2, at_once=2),
    "mixture, 8 ranks ZeRO-2": _run(MIXTURE, 8, slots=2, sharding="zero2"),
}
"""By name: a run, and its ranks."""
JUDGING = {
    "8b, tensor 2 of 8 ranks": _run(DENSE_8B, 8, slots=4, each=2, tensor=2, sharding="zero2"),
    "llama3-8b, 8 ranks ZeRO-1, 8 slots": _run(PRESETS["llama3-8b"], 8, slots=8, sharding="zero1"),
    "8b, 2 slots of 2": _run(DENSE_8B, slots=2, each=2),
    "wide, recompute selective": _with(_run(WIDE, each=2, at_once=2), "memory", recompute="selective"),
    "wide": _run(WIDE),
    "wide, 16 slots": _run(WIDE, slots=16, seq_len=1024),
    "wide, 3 sequences at once": _run(WIDE, each=3, at_once=3),
    "wide, bf16 moments": _with(_run(WIDE), "optimizer", state="bf16"),
    "wide, moments on the host": _with(_run(WIDE, slots=2), "memory", offload_optimizer="host"),
    "wide, activations on the host": _with(
        _run(WIDE, each=4, at_once=4), "memory", offload_activations="host"
    ),
    "wide, 8 ranks ZeRO-1": _run(WIDE, 8, slots=8, sharding="zero1"),
    "wide, 4 ranks ZeRO-1, 2 micro-batches": _run(WIDE, 4, slots=2, each=2, sharding="zero1"),
    "wide, 16 ranks ZeRO-2": _run(WIDE, 16, slots=4, sharding="zero2"),
    "wide, 16 ranks ZeRO-3": _run(WIDE, 16, slots=4, sharding="zero3"),
    "wide, 4 ranks unsharded": _run(WIDE, 4, slots=4, sharding="none"),
    "wide, tensor 2": _run(WIDE, 2, slots=2, each=2, tensor=2),
    "wide, pipeline 4": _run(replace(WIDE, layers=8), 4, slots=2, each=8, pipeline=4),
    "wide, context 2": _run(WIDE, 2, slots=2, context=2),
    "wide, fast sums": _with(_run(WIDE, 8, slots=2, sharding="zero2"), "train", reduction="fast"),
    "wide, fp32": _with(_run(WIDE, seq_len=2048), "precision", compute="fp32"),
    "wide, fp32, 8 ranks ZeRO-2": _with(
        _run(WIDE, 8, slots=2, seq_len=1024, sharding="zero2"), "precision", compute="fp32"
    ),
    "tied": _run(TIED),
    "mixture, 4 slots": _run(MIXTURE, slots=4),
    "mixture, 4 ranks ZeRO-3": _run(MIXTURE, 4, slots=2, sharding="zero3"),
    "mixture, recompute full": _with(_run(MIXTURE, each=2, at_once=2), "memory", recompute="full"),
}
"""Likewise; none of these was used to improve the planner."""
ALL = {**FITTED, **JUDGING}


def measured(name: str) -> Measured:
    """Run two steps of ``ALL[name]`` in a process of their own."""
    (line,) = printed("memory", name)[-1:]
    return Measured(**json.loads(line))


def _measure(name: str, limit: float = 0.0) -> Measured:
    spec, ranks = ALL[name]
    kinds = _predicted(spec, ranks)
    predicted = sum(kinds.values())
    if limit:
        total = torch.cuda.get_device_properties(CUDA).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * predicted / total)
    answers.pretend()
    with stepper_of(spec, ranks) as (_, step):
        step()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        step()
        found = torch.cuda.memory_stats()
    return Measured(
        found["allocated_bytes.all.peak"],
        found["reserved_bytes.all.peak"],
        predicted,
        kinds,
        found["num_alloc_retries"] - retries,
    )


def _predicted(spec: RunSpec, ranks: int) -> dict[str, float]:
    """Return bytes by kind on the first pipeline rank, without what an allocator does not count."""
    job = job_of(spec, cluster(f"h200:{ranks}"))
    candidates = candidates_of([written_layout(spec, job, ranks)], job.modes)
    kinds = prepare(job, candidates).memory(0)
    return {kind: float(np.max(size)) for kind, size in kinds.items() if kind not in OVERHEADS}


def _row(name: str, found: Measured) -> str:
    error = found.predicted / found.allocated - 1
    return f"| {name} | {found.allocated / 1e9:.2f} | {found.reserved / 1e9:.2f} | {found.predicted / 1e9:.2f} | {error:+.1%} |"


def main() -> None:
    """Print one layout's figures, or the table of all."""
    if sys.argv[1:]:
        name, *limit = sys.argv[1:]
        print(json.dumps(vars(_measure(name, *map(float, limit)))))
        return
    for title, names in (("fitted", FITTED), ("judging", JUDGING)):
        print(f"\n| {title} | allocated, GB | reserved | predicted | error |\n|---|---|---|---|---|")
        errors = []
        for name in names:
            found = measured(name)
            errors.append(abs(found.predicted / found.allocated - 1))
            print(_row(name, found), flush=True)
        print(f"\nmedian {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
