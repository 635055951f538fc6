"""Memory of replicas on CPUs that exchange whole gradients, beside what the last backward pass needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.parallel.divisions import BUCKET_ELEMENTS
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.workload.stacks import PHALANX, TrainingJob
from plan.jobs import job, planned

WIDE = ModelSpec(layers=2, dim=512, heads=8, ffn_dim=1536, vocab_size=8192)
ON_CPUS = replace(PHALANX, states=replace(PHALANX.states, frees_gradients=False))


def bytes_after_backward(replicas: int) -> float:
    """Bytes beside weights, one set of gradients and moments once the activations are freed."""
    mine: TrainingJob = job(WIDE, f"a100:{replicas}", batch=4, seq_len=64, stack=ON_CPUS)
    memory = estimate(mine, planned(Layout(replicate=replicas), zero=2)).memory
    freed_kinds = ("activations", "recomputed layer", "gradients of activations", "logits")
    return sum(memory[kind] for kind in (*freed_kinds, "exchange between replicas"))


def test_one_rank_exchanges_nothing() -> None:
    memory = estimate(
        job(WIDE, "a100:1", batch=4, seq_len=64, stack=ON_CPUS), planned(Layout(), zero=2)
    ).memory
    assert memory["exchange between replicas"] == 0


def test_replicas_hold_a_bucket_that_is_sent_and_one_received_and_all_totals_so_far() -> None:
    elements = 2 * 8192 * 512 + 2 * (4 * 512**2 + 3 * 512 * 1536) + 5 * 512
    assert BUCKET_ELEMENTS < elements < 2 * BUCKET_ELEMENTS
    assert bytes_after_backward(2) == pytest.approx(4 * 3 * BUCKET_ELEMENTS)
