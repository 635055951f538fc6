"""The lists of operations against the counts of parameters and FLOP, and against published formulas of activations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.operations import AttentionCore, MatrixProduct
from phalanx.run.layout import Layout
from phalanx_plan.step_cost.layer_costs import layer_costs
from phalanx_plan.workload.architecture import KINDS, Layer, layers
from phalanx_plan.workload.candidates import RECOMPUTE
from phalanx_plan.workload.stacks import TrainingJob
from plan.jobs import job, one


def whole_model(mine: TrainingJob) -> list[Layer]:
    """Every layer and both ends."""
    model, kinds = mine.workload.model, layers(mine.workload, mine.stack)
    blocks = [kinds["mixture" if is_mixture(model, layer) else "dense"] for layer in range(model.layers)]
    return [*blocks, kinds["embedding"], kinds["head"]]


def product_flops(product: MatrixProduct, per_token: int) -> int:
    """Forward FLOP of a token."""
    rows = per_token if product.rows == "routed" else 1
    return 2 * rows * product.columns * product.inner


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_products_are_all_the_weights_that_a_token_is_multiplied_with(preset: str) -> None:
    mine = job(dataclasses.replace(PRESETS[preset], vocab_size=PRESETS[preset].vocab_size or 1000))
    model = mine.workload.model
    per_token = model.moe.per_token if model.moe else 0
    flops = sum(
        product_flops(operation, per_token)
        for layer in whole_model(mine)
        for operation in layer.operations
        if isinstance(operation, MatrixProduct)
    )
    counts = mine.workload.counts
    assert flops == 2 * counts.matmul_parameters


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3", "gpt3-175b"])
def test_attention_is_the_half_of_the_square_that_a_causal_mask_needs(preset: str) -> None:
    mine = job(preset, seq_len=8192)
    flops = sum(
        mine.workload.seq_len * operation.heads * operation.widths
        for layer in whole_model(mine)
        for operation in layer.operations
        if isinstance(operation, AttentionCore)
    )
    assert 3 * flops == mine.workload.counts.attention_flops_per_token_causal


@pytest.mark.parametrize(("tensor", "micro_batch"), [(1, 1), (2, 1), (8, 4)])
def test_activations_of_a_layer_are_those_of_the_paper(tensor: int, micro_batch: int) -> None:
    # Korthikanti et al., arXiv 2205.05198, equation 4: s b h (34 + 5 a s / h) / t bytes with sequence parallelism.
    mine = job("gpt3-175b", seq_len=2048, stack="megatron-2022")
    layout = one(Layout(tensor=tensor), micro_batch=micro_batch, zero=0)
    kept = layer_costs(mine, layout).kept_bytes[KINDS.index("dense"), 0, 0]
    s, b, h, a = 2048, micro_batch, 12_288, 96
    assert kept == pytest.approx(s * b * h / tensor * (34 + 5 * a * s / h))


def test_full_recomputation_keeps_the_input_of_a_layer_alone() -> None:
    mine = job("llama3-8b", seq_len=4096)
    kept = layer_costs(mine, one(Layout(tensor=4), zero=0)).kept_bytes[0, :, 0]
    full = [mode.name for mode in RECOMPUTE].index("full")
    assert kept[full] == 4096 * 4096 * 2 / 4


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3"])
def test_recomputing_more_keeps_less_and_takes_longer(preset: str) -> None:
    costs = layer_costs(job(preset), one(Layout(tensor=4, expert=4), zero=0))
    none, pointwise, selective, full = (
        [mode.name for mode in RECOMPUTE].index(name) for name in ("none", "pointwise", "selective", "full")
    )
    for kind in (0, 1):
        kept, again = costs.kept_bytes[kind, :, 0], costs.recompute_s[kind, :, 0]
        if not kept.any():
            continue
        assert kept[none] > kept[pointwise] > kept[selective] > kept[full] > 0
        assert 0 == again[none] < again[pointwise] < again[selective] < again[full]


def test_a_layers_forward_pass_is_what_full_recomputation_repeats() -> None:
    costs = layer_costs(job("deepseek-v3"), one(Layout(tensor=4, context=2, expert=8), zero=0))
    full = [mode.name for mode in RECOMPUTE].index("full")
    forward = costs.seconds.sum(axis=2)[:2, 0, 0]
    assert np.allclose(costs.recompute_s[:2, full, 0], forward)
