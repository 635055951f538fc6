"""Layouts that promise one hash call the same kernels that add: matrix products by shape, attention, norms and reductions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch._inductor import config

from bench.gpu.setting import run_of
from layouts import legal_layouts
from null_gpu.kinds import MIXTURE, changed
from null_gpu.steps import CUDA, kernels_of_a_step
from phalanx.run.layout import SPLIT_BACKWARD, replica_ranks
from phalanx.run.spec import MemorySpec, ModelSpec, ParallelSpec, RunSpec, TrainSpec

ADDING = re.compile(
    r"^(gemm|bgemm|gemv|lt|dot) |flash|fmha|reduce_kernel|layer_norm|GammaBeta|[sS]oft[mM]ax|embedding|indexing_backward|segment|scan|grouped"
    r"|cutlass|^triton:(?!triton_poi_)"
)
"""Names of kernels that add. The compiler's programs do, except pointwise ones."""
EXACT = re.compile(r"double|reduce_kernel<\d+, \d+, at::native::ReduceOp<(long|int),")
"""Kernels on fp64 and integers: losses, exact norms, counts."""
TRAIN = TrainSpec(steps=100, batch_size=8, slots=8, micro_batch_size=1, seq_len=1024)
MODEL = ModelSpec(layers=4, dim=1024, heads=8, kv_heads=8, ffn_dim=2048, vocab_size=4096)
DENSE = run_of(MODEL, TRAIN, CUDA)
LANES = run_of(replace(MODEL, lanes=2), TRAIN, CUDA)
TILES = run_of(replace(MODEL, context_tiles=2), TRAIN, CUDA)
MIXED = run_of(replace(MODEL, moe=MIXTURE), replace(TRAIN, seq_len=4096), CUDA)
"""With more than 128 rows for each expert on any layout: below, PyTorch's grouped product has smaller tiles (``expert_groups.py``)."""
V_SHAPED = changed(DENSE, "parallel", pipeline_schedule="zbv")
FAMILIES: dict[str, tuple[RunSpec, tuple[int, ...]]] = {
    "dense": (DENSE, (4, 8)),
    "dense, V-shaped pipelines": (V_SHAPED, (4, 8)),
    "lanes": (LANES, (4, 8)),
    "tiles": (TILES, (4, 8)),
    "lanes and tiles": (run_of(replace(MODEL, lanes=2, context_tiles=2), TRAIN, CUDA), (4,)),
    "mixture": (MIXED, (4,)),
    "mixture, sums by slot": (changed(MIXED, "train", expert_sums="slot"), (4,)),
    "integer sums": (changed(DENSE, "train", reduction="integer"), (4,)),
    "fp8": (changed(DENSE, "precision", matmul="fp8-rowwise"), (4,)),
    "fp8 mixture": (changed(MIXED, "precision", matmul="fp8-rowwise"), (4,)),
    "compiled": (changed(DENSE, "runtime", compile=True), (4,)),
}
"""By name: a run, and the numbers of ranks in whose legal layouts it adds with the same kernels."""


@dataclass(frozen=True)
class Promise:
    """A layout, and the smallest one that promises its hash."""

    layout: ParallelSpec
    ranks: int
    smallest: ParallelSpec
    smallest_ranks: int

    @property
    def is_part(self) -> bool:
        """Return True if rank 0 computes some of the operations only: a first stage, or the first of several tiles."""
        stages = self.layout.pipeline > 1 and self.layout.pipeline_schedule not in SPLIT_BACKWARD
        return stages or self.layout.context > self.smallest.context


def promises(spec: RunSpec, ranks: int) -> Iterator[Promise]:
    """Return the legal layouts of ``spec`` on ``ranks``, each with the smallest that promises the same hash.

    Of experts' layouts, only those whose loads the null GPU can imagine.
    """

    def made(_: ModelSpec, parallel: ParallelSpec) -> RunSpec:
        schedule = spec.parallel.pipeline_schedule if parallel.pipeline > 1 else "1f1b"
        return replace(spec, parallel=replace(parallel, pipeline_schedule=schedule))

    model = spec.model
    for parallel, layout in legal_layouts(model, ranks, made=made):
        if model.moe is not None and (parallel.expert_tensor > 1 or parallel.expert > 2):
            continue
        smallest = ParallelSpec(
            sharding="zero2",
            context=1 if model.context_tiles else layout.context,
            context_mode=parallel.context_mode,
            tensor=1 if model.lanes else layout.tensor,
            expert=1 if spec.train.expert_sums == "slot" else layout.expert,
        )
        yield Promise(made(model, parallel).parallel, ranks, smallest, replica_ranks(smallest))


@functools.cache
def adding_kernels(spec: RunSpec, ranks: int) -> frozenset[str]:
    """Return the names of the kernels that add numbers whose order matters."""
    if spec.runtime.compile:
        torch.compiler.reset()
        config.compile_threads = 1
    return frozenset(
        name for name in kernels_of_a_step(spec, ranks) if ADDING.search(name) and not EXACT.search(name)
    )


SAME = {
    "ZeRO-2 on 8 ranks": (DENSE, changed(DENSE, "parallel", sharding="zero2"), 8),
    "ZeRO-3 on 8 ranks": (DENSE, changed(DENSE, "parallel", sharding="zero3"), 8),
    "recomputed": (DENSE, replace(DENSE, memory=MemorySpec(recompute="full")), 1),
    "offloaded": (DENSE, replace(DENSE, memory=MemorySpec(offload_activations="host")), 1),
}
"""By name: a run on one rank, and the same run otherwise with this number of ranks."""


def test_the_base_adds_with_products_attention_and_reductions() -> None:
    names = " ".join(adding_kernels(DENSE, 1))
    assert all(word in names for word in ("gemm ", "flash", "reduce_kernel"))


def test_tensor_ranks_without_lanes_add_with_other_kernels() -> None:
    assert adding_kernels(changed(DENSE, "parallel", tensor=2), 2) != adding_kernels(DENSE, 1)


@pytest.mark.parametrize("name", SAME)
def test_a_layout_adds_with_the_kernels_of_one_rank(name: str) -> None:
    spec, other, ranks = SAME[name]
    assert adding_kernels(other, ranks) == adding_kernels(spec, 1)


@pytest.mark.parametrize(
    ("family", "ranks"), [(name, ranks) for name, (_, numbers) in FAMILIES.items() for ranks in numbers]
)
def test_layouts_that_promise_one_hash_add_with_the_same_kernels(family: str, ranks: int) -> None:
    spec, _ = FAMILIES[family]
    differences = {}
    for promise in promises(spec, ranks):
        kernels = adding_kernels(replace(spec, parallel=promise.layout), ranks)
        smallest = adding_kernels(replace(spec, parallel=promise.smallest), promise.smallest_ranks)
        missing = frozenset() if promise.is_part else smallest - kernels
        if others := (kernels - smallest) | missing:
            differences[promise] = sorted(others)
    listed = "\n".join(f"{promise}: {kernels}" for promise, kernels in differences.items())
    assert not differences, listed
