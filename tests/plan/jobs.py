"""Models, clusters and layouts that the planner's tests share."""

from __future__ import annotations

from typing import Any

from phalanx.hardware import catalog
from phalanx.hardware.profile import profile_of
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec
from phalanx_plan.workload.candidates import RECOMPUTE, Candidates, PlannedLayout, candidates_of
from phalanx_plan.workload.software import STACKS
from phalanx_plan.workload.stacks import Stack, TrainingJob, TrainingWorkload


def job(
    model: str | ModelSpec = "llama3-8b",
    cluster: str = "h100:64",
    *,
    batch: int = 64,
    seq_len: int = 4096,
    stack: str | Stack = "megatron",
) -> TrainingJob:
    """A job by names."""
    fleet = catalog.cluster(cluster)
    shape = resolve(PRESETS[model] if isinstance(model, str) else model)
    software = STACKS[stack] if isinstance(stack, str) else stack
    return TrainingJob(
        TrainingWorkload(shape, seq_len, batch), software, fleet, profile_of(fleet.accelerator)
    )


def small_gpt() -> TrainingJob:
    """Two sequences of a GPT of four layers on one A100, by software without flash attention: small enough to work out by hand."""
    model = ModelSpec(layers=4, dim=256, heads=8, kv_heads=8, ffn_dim=1024, vocab_size=512, ffn="gelu")
    return job(model, "a100:1", batch=2, seq_len=128, stack="megatron-2022")


def planned(mesh: Layout, **choices: Any) -> PlannedLayout:
    """The layout with the degrees of ``mesh``, and with what is chosen beside them."""
    return PlannedLayout(**vars(mesh), **choices)


def one(mesh: Layout, **choices: Any) -> Candidates:
    """A single layout as arrays of length one."""
    return candidates_of([planned(mesh, **choices)], RECOMPUTE)


LAYOUTS = {
    "dense": planned(Layout(pipeline=2, shard=8, tensor=4), zero=1),
    "interleaved": planned(
        Layout(pipeline=4, shard=2, context=2, tensor=4), schedule="interleaved", stages_per_rank=4, zero=1
    ),
    "flat": planned(Layout(shard=64), zero=1, recompute="full"),
}
"""Layouts of 64 ranks for 32 layers and 64 sequences."""
