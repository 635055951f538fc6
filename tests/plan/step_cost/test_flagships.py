"""Published flagship runs in their own layouts: how near the predicted step is with no factor of the software.

Meta's runs are those of arXiv 2407.21783, table 4 (a chunk of one layer each, as its section 3.3.2 says); the runs of GPT-3 those of
MegaScale, arXiv 2402.15627, table 2; DeepSeek-V3 that of arXiv 2412.19437, table 1. None of these rows fits a constant but
MegaScale's, whose growth with the fleet the scale tax is from.

What the sources make again in backward is no mode of the search: DeepSeek-V3's norms, latents' projections and products of gates (section
3.2.3 of its report), and the product of gates of Meta's fused kernel (xformers, ops/swiglu_op.py keeps its inputs), which Meta's report does not
name but calls no checkpointing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.step_cost.estimate import Estimate, estimate
from phalanx.plan.workload.candidates import RECOMPUTE, Recompute
from phalanx.run.layout import Layout
from plan.jobs import job, planned

GOAL = 0.10


FUSED_GATES = Recompute("fused gates", frozenset({"activation"}))
OF_DEEPSEEK = Recompute("DeepSeek-V3's", frozenset({"norm", "latent_up", "activation", "expert_activation"}))


def llama(
    ranks: int, context: int, shard: int, seq_len: int, batch: int, mode: Recompute = RECOMPUTE[0]
) -> Estimate:
    run = job("llama3-405b", f"meta-h100-24k:{ranks}", batch=batch, seq_len=seq_len)
    mesh = Layout(tensor=8, context=context, pipeline=16, shard=shard)
    layout = planned(mesh, zero=1, schedule="interleaved", stages_per_rank=8, recompute=mode.name)
    return estimate(replace(run, modes=(*run.modes, mode)), layout)


def gpt3(ranks: int, batch: int, stack: str) -> Estimate:
    run = job("gpt3-175b", f"a100:{ranks}", batch=batch, seq_len=2048, stack=stack)
    mesh = Layout(tensor=8, pipeline=8, shard=ranks // 64)
    return estimate(run, planned(mesh, zero=1, schedule="interleaved", stages_per_rank=6))


def deepseek(precision: str) -> Estimate:
    run = job("deepseek-v3", "h800:2048", batch=15_360, seq_len=4096, stack="deepseek")
    mesh = Layout(pipeline=16, expert=64, shard=128)
    layout = planned(
        mesh,
        zero=1,
        schedule="dualpipev",
        stages_per_rank=2,
        precision=precision,
        recompute=OF_DEEPSEEK.name,
    )
    return estimate(replace(run, modes=(*run.modes, OF_DEEPSEEK)), layout)


def million_gpu_hours(found: Estimate) -> float:
    """Millions of GPU hours for 14.8 T tokens on 2,048 GPUs."""
    return 14.8e12 / found.tokens * found.step_s * 2048 / 3600 / 1e6


def teraflops(found: Estimate, *, causal: bool) -> float:
    """Model TFLOP/s of an accelerator; ``causal`` counts only the scores that the mask leaves."""
    return (found.mfu_causal if causal else found.mfu) * found.peak_flops / 1e12


def test_llama_on_16384_gpus_is_as_fast_as_published() -> None:
    assert teraflops(llama(16_384, 1, 128, 8192, 2048), causal=False) == pytest.approx(400, rel=GOAL)


def test_llama_on_8192_gpus_misses_the_goal_by_less_than_another_tenth() -> None:
    reached = teraflops(llama(8192, 1, 64, 8192, 2048), causal=False) / 430 - 1
    assert GOAL < reached < 2 * GOAL, "where the goal is met: say so in docs/planning.md"


def test_llama_of_131072_tokens_is_near_if_its_masked_scores_are_not_counted() -> None:
    """The paper does not say how it counts attention: with all scores, the prediction is half as fast again as published."""
    found = llama(16_384, 16, 8, 131_072, 128)
    assert teraflops(found, causal=True) == pytest.approx(380, rel=0.12)
    assert teraflops(found, causal=False) / 380 > 1.4


def test_megascale_and_plain_megatron_are_told_apart_on_12288_gpus_by_less_than_published() -> None:
    """The abstract says 1.34 times the MFU. The goal is missed for plain Megatron-LM."""
    tuned, plain = (gpt3(12_288, 6144, stack).mfu for stack in ("megatron", "megatron-2022"))
    assert tuned == pytest.approx(0.552, rel=GOAL)
    assert GOAL < plain / (0.552 / 1.34) - 1 < 2 * GOAL
    assert 1.1 < tuned / plain < 1.34


def test_gpt3_on_1024_gpus_takes_as_long_as_megascale() -> None:
    assert gpt3(1024, 768, "megatron").step_s == pytest.approx(8.9, rel=GOAL)


def test_deepseek_v3_lies_between_its_layout_in_fp8_and_in_bf16() -> None:
    """The goal is missed: fp8 is a fifth too fast."""
    reached = million_gpu_hours(deepseek("fp8"))
    assert reached < (1 - GOAL) * 2.664 < 2.664 < million_gpu_hours(deepseek("bf16"))
    assert reached > 0.75 * 2.664


@pytest.mark.parametrize(
    "run", [(8192, 1, 64, 8192, 2048), (16_384, 1, 128, 8192, 2048), (16_384, 16, 8, 131_072, 128)]
)
def test_llama_fits_its_layouts_if_one_kernel_makes_the_product_of_gates_again(
    run: tuple[int, int, int, int, int],
) -> None:
    assert llama(*run, FUSED_GATES).fits
    assert not llama(*run).fits


def test_deepseek_v3_fits_its_layout_in_fp8_alone() -> None:
    assert deepseek("fp8").fits
    assert not deepseek("bf16").fits
