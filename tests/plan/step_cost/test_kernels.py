"""Kernels: bounded by the roofline from below, monotone, and free where there is nothing to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.catalog import accelerator, accelerators
from phalanx.hardware.cluster import Accelerator, Fact, HardwareError
from phalanx.hardware.profile import Profile, profile_of
from phalanx_plan.step_cost.hardware_times import (
    attention_s,
    fitted_format,
    grouped_matmul_s,
    host_copy_s,
    matmul_s,
    memory_bound_s,
    sustained_flops,
)

KEYS = st.sampled_from(sorted(accelerators()))
SIZES = st.integers(1, 70_000)
H100 = profile_of(accelerator("h100"))


def formats(entry: Accelerator) -> list[str]:
    return list(entry.flops)


def changed(profile: Profile, **facts: float) -> Profile:
    new = {name: Fact(value, "test") for name, value in facts.items()}
    return dataclasses.replace(profile, accelerator=dataclasses.replace(profile.accelerator, **new))


@given(KEYS, SIZES, SIZES, SIZES, st.integers(1, 64), st.data())
def test_a_product_is_never_faster_than_the_roofline(
    key: str, m: int, n: int, k: int, batch: int, data: Any
) -> None:
    entry = accelerator(key)
    name = data.draw(st.sampled_from(formats(entry)))
    seconds = matmul_s(profile_of(entry), name, m, n, k, batch)
    assert seconds >= 2 * batch * m * n * k / entry.flops[name].value
    width = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}[name]
    assert seconds >= batch * width * (m * k + n * k + m * n) / entry.memory_bytes_per_s.value


@given(KEYS, SIZES, SIZES, SIZES, st.integers(2, 8))
def test_a_longer_inner_dimension_never_takes_less_time(
    key: str, m: int, n: int, k: int, factor: int
) -> None:
    profile = profile_of(accelerator(key))
    name = next(iter(profile.accelerator.flops))
    assert matmul_s(profile, name, m, n, factor * k) >= matmul_s(profile, name, m, n, k)


@given(KEYS, SIZES, SIZES, SIZES)
def test_twice_the_rates_are_never_slower(key: str, m: int, n: int, k: int) -> None:
    entry = accelerator(key)
    name = next(iter(entry.flops))
    faster = dataclasses.replace(
        entry,
        flops={name: Fact(2 * fact.value, "test") for name, fact in entry.flops.items()},
        memory_bytes_per_s=Fact(2 * entry.memory_bytes_per_s.value, "test"),
    )
    assert matmul_s(profile_of(faster), name, m, n, k) <= matmul_s(profile_of(entry), name, m, n, k)
    assert attention_s(profile_of(faster), name, 1e9, True) <= attention_s(profile_of(entry), name, 1e9, True)
    assert memory_bound_s(profile_of(faster), 1e9) < memory_bound_s(profile_of(entry), 1e9)


@pytest.mark.parametrize("shape", [(0, 8, 8, 1), (8, 0, 8, 1), (8, 8, 0, 1), (8, 8, 8, 0)])
def test_an_empty_product_takes_no_time(shape: tuple[int, int, int, int]) -> None:
    assert matmul_s(H100, "bf16", *shape) == 0


def test_products_broadcast_over_arrays_and_agree_with_scalars() -> None:
    m, n = np.array([1, 64, 4096])[:, None], np.array([128, 8192])[None, :]
    grid = matmul_s(H100, "bf16", m, n, 4096)
    assert grid.shape == (3, 2)
    assert grid[2, 1] == matmul_s(H100, "bf16", 4096, 8192, 4096)


def test_a_product_one_row_above_a_tile_pays_for_the_next_tile() -> None:
    """128 rows of tiles of 128 on 132 multiprocessors, against one row more, where the product is bound by compute."""
    fits, spills = (matmul_s(H100, "bf16", 128 * 33, 128 * 4 + extra, 16_384) for extra in (0, 1))
    assert spills > 1.15 * fits


def test_experts_in_one_kernel_are_cheaper_than_one_by_one_and_dearer_than_one_product() -> None:
    together = grouped_matmul_s(H100, "bf16", 32, 256, 2048, 7168)
    assert together < 32 * matmul_s(H100, "bf16", 256, 2048, 7168)
    assert together > matmul_s(H100, "bf16", 32 * 256, 2048, 7168)


def test_a_lower_power_limit_slows_large_products_in_proportion() -> None:
    half = changed(H100, power_w=350.0)
    assert sustained_flops(half, "bf16") == pytest.approx(
        0.975 * 350 / H100.constants.joules_per_flop["bf16"]
    )
    assert sustained_flops(half, "bf16") < 0.55 * sustained_flops(H100, "bf16")


def test_a_power_limit_that_is_not_known_limits_nothing() -> None:
    unknown = changed(H100, power_w=0.0)
    assert sustained_flops(unknown, "bf16") >= sustained_flops(H100, "bf16")


def test_the_largest_products_of_gb200_run_at_its_power_limit() -> None:
    """1.43 PFLOP/s: the median of the published measurements above 2.5 TFLOP (ai-dynamo/aiconfigurator)."""
    assert sustained_flops(profile_of(accelerator("gb200")), "bf16") == pytest.approx(1.43e15, rel=0.02)


def test_time_of_attention_is_linear_in_its_work_beyond_the_launch() -> None:
    launch = H100.constants.attention.launch_s
    single_s, double_s = (attention_s(H100, "bf16", flops, backward=True) - launch for flops in (1e12, 2e12))
    assert double_s == pytest.approx(2 * single_s)
    assert attention_s(H100, "bf16", 0, backward=False) == 0


def test_narrow_heads_wait_for_exponentials_and_wide_ones_less() -> None:
    seconds = [attention_s(H100, "bf16", 1e12, backward=False, widths=widths) for widths in (128, 256, 512)]
    assert seconds[0] > seconds[1] > seconds[2]
    assert seconds[1] == attention_s(H100, "bf16", 1e12, backward=False)
    # 1e12 FLOP are 1e12 / (2 widths) exponentials, at 3.9e12 a second (arXiv 2407.08608).
    assert seconds[0] - seconds[1] == pytest.approx((1 / 128 - 1 / 256) * 1e12 / 2 / 3.9e12)


def test_fp8_speeds_up_the_products_of_attention_but_not_its_exponentials() -> None:
    launch = H100.constants.attention.launch_s
    wide, narrow = (attention_s(H100, format_, 1e12, backward=True) - launch for format_ in ("bf16", "fp8"))
    assert wide / 2 < narrow < wide


def test_an_accelerator_with_twice_the_exponentials_computes_attention_faster_with_the_same_constants() -> (
    None
):
    b200, b300 = (profile_of(accelerator(key)) for key in ("b200", "b300"))
    assert b200.constants.attention == b300.constants.attention
    assert attention_s(b300, "bf16", 1e12, backward=False) < attention_s(b200, "bf16", 1e12, backward=False)


@pytest.mark.parametrize(
    ("backward", "heads", "latent", "measured_s"),
    [
        (False, 64, False, 280e-6),
        (True, 64, False, 837e-6),
        (False, 128, True, 735e-6),
        (True, 128, True, 2377e-6),
    ],
)
def test_attention_takes_on_b200_what_was_measured(
    backward: bool, heads: int, latent: bool, measured_s: float
) -> None:
    """4096 tokens, causal, by Transformer Engine (MooreThreads/SimuMax v1.2)."""
    widths = 320 if latent else 256
    flops = (5 if backward else 2) * 4096**2 * heads * widths / 2
    predicted_s = attention_s(
        profile_of(accelerator("b200")), "bf16", flops, backward=backward, widths=widths, latent=latent
    )
    assert predicted_s == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(
    ("key", "tokens", "heads", "latent", "forward_s", "backward_s"),
    [
        ("gb200", 4096, 64, False, 0.390e-3, 1.198e-3),
        ("gb200", 16384, 128, True, 13.103e-3, 50.424e-3),
        ("gb300", 4096, 64, False, 0.323e-3, 1.101e-3),
        ("gb300", 16384, 128, True, 11.178e-3, 43.911e-3),
    ],
)
def test_attention_takes_on_gb200_and_gb300_what_was_measured(
    key: str, tokens: int, heads: int, latent: bool, forward_s: float, backward_s: float
) -> None:
    """Two causal sequences, by cuDNN (NVIDIA/cudnn-frontend@50c8aeb, benchmark/sdpa_benchmark_training/results).

    Ten repetitions: too short for the power limit, which is for longer work.
    """
    profile = profile_of(accelerator(key))
    cool = dataclasses.replace(profile, constants=dataclasses.replace(profile.constants, joules_per_flop={}))
    widths = 320 if latent else 256
    flops = 2 * 2 * tokens**2 * heads * widths / 2
    for backward, measured_s in ((False, forward_s), (True, backward_s)):
        predicted_s = attention_s(
            cool,
            "bf16",
            flops * (2.5 if backward else 1),
            backward=backward,
            widths=widths,
            latent=latent,
            tokens=tokens,
        )
        assert predicted_s == pytest.approx(measured_s, rel=0.1)


def test_a_sequence_of_half_tokens_takes_attention_twice_the_time_of_its_flop() -> None:
    half = H100.constants.attention.half_tokens
    launch = H100.constants.attention.launch_s
    long, short = (
        attention_s(H100, "bf16", 1e12, backward=False, tokens=tokens) for tokens in (np.inf, half)
    )
    assert half > 0
    assert short - launch == pytest.approx(2 * (long - launch))


def test_memory_bound_work_is_bytes_over_the_reached_rate_and_a_gap_for_each_kernel() -> None:
    alone = memory_bound_s(H100, 1e9, 0)
    assert alone == pytest.approx(1e9 / (0.8 * 3.35e12))
    assert memory_bound_s(H100, 1e9, 3) - alone == pytest.approx(3 * H100.constants.memory.kernel_s)
    assert host_copy_s(H100, 64e9) == pytest.approx(1)


def test_a_format_without_its_own_fit_uses_the_nearest() -> None:
    v100 = profile_of(accelerator("v100"))
    assert fitted_format(v100, "fp16") == "bf16"
    assert sustained_flops(v100, "fp16") < 125e12


def test_a_format_that_the_accelerator_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(HardwareError, match=r"does not multiply in 'fp8'.*bf16"):
        matmul_s(profile_of(accelerator("a100")), "fp8", 8, 8, 8)
