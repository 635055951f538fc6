"""Memory and step times of serving workers: formulas in closed form, and the directions in which they must move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.hardware.cluster import with_value
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx_plan.serving.step_cost import (
    Division,
    ServingStep,
    rank_token_bytes,
    requests_held,
    step_parts,
    step_s,
    streamed_bytes,
    token_bytes,
    tokens_per_s,
    touched_experts,
    weight_bytes,
)

DEEPSEEK, LLAMA = resolve(PRESETS["deepseek-v3"]), resolve(PRESETS["llama3-405b"])
MOE = DEEPSEEK.moe
assert MOE is not None
H800 = cluster("h800:144")


def test_a_token_of_deepseek_v3_takes_70272_bytes_in_16_bits() -> None:
    assert token_bytes(DEEPSEEK) == 61 * (512 + 64) * 2 == 70_272


def test_a_token_of_grouped_attention_takes_a_key_and_a_value_of_each_key_head() -> None:
    assert token_bytes(LLAMA) == 2 * 126 * 8 * 128 * 2


def test_key_heads_are_divided_over_tensor_ranks_but_latents_are_not() -> None:
    assert rank_token_bytes(LLAMA, Division(8)) == token_bytes(LLAMA) / 8
    assert rank_token_bytes(LLAMA, Division(16)) == token_bytes(LLAMA) / 8
    assert rank_token_bytes(DEEPSEEK, Division(8)) == token_bytes(DEEPSEEK)


def test_an_undivided_worker_holds_every_parameter() -> None:
    assert weight_bytes(LLAMA, Division(), "bf16") == 2 * count(LLAMA, 8192).parameters


@pytest.mark.parametrize("division", [Division(8), Division(4, 1, 2), Division(2, 1, 8)], ids=str)
def test_ranks_together_hold_at_least_the_whole_model(division: Division) -> None:
    assert weight_bytes(LLAMA, division, "bf16") * division.ranks >= weight_bytes(LLAMA, Division(), "bf16")


def test_more_memory_holds_more_requests() -> None:
    requests = []
    for size in (80e9, 96e9, 141e9):
        place = with_value(H800, "accelerator.memory_bytes", size)
        requests.append(requests_held(DEEPSEEK, place, Division(1, 144), "fp8", 256, 5000))
    assert requests == sorted(requests)
    assert requests[0] < requests[-1]


def test_a_step_gets_no_slower_with_faster_memory_and_no_faster_with_more_rows_or_pages() -> None:
    step = ServingStep(DEEPSEEK, H800, Division(1, 144), "fp8", 64, 4000)
    faster = replace(step, cluster=with_value(H800, "accelerator.memory_bytes_per_s", 5e12))
    assert step_s(faster) < step_s(step)
    assert step_s(step) < step_s(replace(step, rows=128))
    assert step_s(step) < step_s(replace(step, attended_tokens=8000))


def test_one_row_of_a_dense_model_takes_about_the_time_to_read_its_weights() -> None:
    place = cluster("h200:8")
    step = ServingStep(LLAMA, place, Division(8), "bf16", 1, 128)
    reading = weight_bytes(LLAMA, Division(8), "bf16") / place.accelerator.memory_bytes_per_s.value
    assert reading < step_parts(step)["products"] < 1.6 * reading


def test_overlapping_halves_never_take_less_than_the_larger_of_both_parts() -> None:
    step = ServingStep(DEEPSEEK, H800, Division(1, 32), "fp8", 8192, 4000, prefill=True)
    parts = step_parts(step)
    exchange = parts["exchange"]
    assert step_s(step, overlap=True) >= max(exchange, sum(parts.values()) - exchange)


def test_rows_touch_as_many_of_256_experts_as_in_a_uniform_choice() -> None:
    assert [round(touched_experts(256, 8, rows)) for rows in (1, 8, 64)] == [8, 57, 222]


def test_opt_30b_over_12_gigabytes_a_second_gives_at_most_0_80_tokens_for_four_rows() -> None:
    assert tokens_per_s(4, 60e9, 12e9) == pytest.approx(0.80)


def test_a_published_day_of_deepseek_took_226_9_nodes() -> None:
    prefill, decode = 608e9 / 73.7e3 / 86_400, 168e9 / 14.8e3 / 86_400
    assert (round(prefill, 1), round(decode, 1), round(prefill + decode, 1)) == (95.5, 131.4, 226.9)
    assert prefill + decode == pytest.approx(226.75, rel=1e-3)


def test_one_row_of_deepseek_v3_reads_eight_experts_of_44_megabytes_in_each_of_58_layers() -> None:
    experts = [streamed_bytes(replace(DEEPSEEK, moe=replace(MOE, per_token=k)), 1.0, 1) for k in (1, 9)]
    assert experts[1] - experts[0] == pytest.approx(58 * 8 * 44e6, rel=0.01)
