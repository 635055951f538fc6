"""The compiler breaks the graph of a block only where a table says so. Programs are compiled for Hopper, through ptxas."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters as dynamo
from torch._inductor import config

from null_gpu import counters
from null_gpu.kinds import all_kinds, changed
from null_gpu.steps import stepper_of
from phalanx.run.spec import RunSpec

BREAKS = {
    "dense": 0,
    "latent attention": 0,
    "windows": 0,
    "Gemma's norms": 0,
    "recompute full": 0,
    "fp8-tensorwise": 0,
    "fp8-rowwise": 0,
    "mxfp8": 0,
    "mixture": 5,  # at FSDP2's hooks around the experts, which are a unit of their own
    "fp8 mixture": 5,
    "sinks": 6,  # at attention by rows, in products and softmax of their own
    "cap on scores": 6,
    "document mask": 4,  # at attention by document, whose lengths depend on the data
    "experts on two ranks": 3,  # at the exchange, whose sizes depend on the data
}
"""Graph breaks of a step of two layers, by kind."""


def compiled(spec: RunSpec) -> Counter[str]:
    """Train some steps of ``spec`` compiled; return the graph breaks by reason."""
    torch.compiler.reset()
    dynamo.clear()
    config.compile_threads = 1
    with stepper_of(changed(spec, "runtime", compile=True), spec.parallel.expert) as (_, step):
        step()
        step()
        counters.reset()
        step()
    assert counters.counts()["triton"] > 0
    return Counter(dynamo["graph_break"])


@pytest.mark.parametrize("name", BREAKS)
def test_a_compiled_step_breaks_the_graph_as_often_as_the_table_says(name: str, tmp_path: Path) -> None:
    reasons = compiled(all_kinds(tmp_path)[name])
    assert reasons.total() == BREAKS[name], reasons


def test_a_memory_budget_compiles_with_fewer_key_than_query_heads(tmp_path: Path) -> None:
    spec = all_kinds(tmp_path)["dense"]
    assert spec.model.kv_heads < spec.model.heads
    assert not compiled(changed(spec, "memory", recompute="budget"))
