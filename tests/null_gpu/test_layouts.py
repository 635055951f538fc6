"""Layouts that promise one hash call the same kernels that add: matrix products by shape, attention, norms and reductions."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from bench.gpu.setting import run_of
from null_gpu.kinds import changed
from null_gpu.steps import CUDA, kernels_of_a_step
from phalanx.run.spec import MemorySpec, ModelSpec, RunSpec, TrainSpec

ADDING = re.compile(
    r"^(gemm|bgemm|gemv|lt|dot) |flash|fmha|reduce_kernel|layer_norm|GammaBeta|[sS]oft[mM]ax|embedding|segment|scan|grouped|cutlass"
)
EXACT = re.compile(r"double|reduce_kernel<512, 1, at::native::ReduceOp<long")
"""Kernels on fp64 and integers: losses, exact norms, counts."""
TRAIN = TrainSpec(steps=100, batch_size=8, slots=8, micro_batch_size=1, seq_len=1024)
MODEL = ModelSpec(layers=4, dim=1024, heads=8, kv_heads=8, ffn_dim=2048, vocab_size=4096)
DENSE = run_of(MODEL, TRAIN, CUDA)
LANES = run_of(replace(MODEL, lanes=2), TRAIN, CUDA)
TILES = run_of(replace(MODEL, context_tiles=2), TRAIN, CUDA)


@functools.cache
def adding_kernels(spec: RunSpec, ranks: int) -> frozenset[str]:
    """Return the names of the kernels that add numbers whose order matters."""
    return frozenset(
        name
        for name in kernels_of_a_step(spec, ranks)
        if ADDING.search(name) and not EXACT.search(name) and not name.startswith("triton:")
    )


def layout(spec: RunSpec, **parallel: object) -> RunSpec:
    """Return ``spec`` on another layout."""
    return changed(spec, "parallel", **parallel)


SAME = {
    "ZeRO-2 on 8 ranks": (DENSE, layout(DENSE, sharding="zero2"), 8),
    "ZeRO-3 on 8 ranks": (DENSE, layout(DENSE, sharding="zero3"), 8),
    "unsharded on 8 ranks": (DENSE, layout(DENSE, sharding="none"), 8),
    "recomputed": (DENSE, replace(DENSE, memory=MemorySpec(recompute="full")), 1),
    "offloaded": (DENSE, replace(DENSE, memory=MemorySpec(offload_activations="host")), 1),
    "a V-shaped pipeline": (DENSE, layout(DENSE, pipeline=2, pipeline_schedule="zbv"), 2),
    "lanes on 2 tensor ranks": (LANES, layout(LANES, tensor=2), 2),
}
"""By name: a run on one rank, and the same run on another layout with this number of ranks."""
PART = {
    "the first stage of a pipeline": (DENSE, layout(DENSE, pipeline=2), 2),
    "tiles on 2 context ranks": (TILES, layout(TILES, context=2, context_mode="allgather"), 2),
}
"""Layouts on which one rank calls some of the kernels only."""


def test_the_base_adds_with_products_attention_and_reductions() -> None:
    names = " ".join(adding_kernels(DENSE, 1))
    assert all(word in names for word in ("gemm ", "flash", "reduce_kernel"))


@pytest.mark.parametrize("name", SAME)
def test_a_layout_adds_with_the_kernels_of_one_rank(name: str) -> None:
    spec, other, ranks = SAME[name]
    assert adding_kernels(other, ranks) == adding_kernels(spec, 1)


@pytest.mark.parametrize("name", PART)
def test_a_rank_of_a_divided_model_adds_with_no_other_kernels(name: str) -> None:
    spec, other, ranks = PART[name]
    assert adding_kernels(other, ranks) < adding_kernels(spec, 1)
