"""Counts against what the profiler counts, and against published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.model.counts import count
from phalanx.model.presets import PRESETS
from phalanx.model.shape import resolve
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec

SMALL = ModelSpec(layers=3, dim=32, heads=4, kv_heads=2, head_dim=10, vocab_size=77)


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        replace(SMALL, tie_embeddings=True),
        replace(SMALL, ffn="gelu", ffn_bias=True, attention_bias=True),
        replace(SMALL, qk_norm=True, kv_heads=4),
    ],
    ids=["plain", "tied", "gelu with biases", "qk norm"],
)
def test_a_training_step_costs_the_flops_that_torch_counts(spec: ModelSpec) -> None:
    spec = resolve(spec)
    batch, seq = 2, 24
    model = Transformer(spec)
    # The plain kernel computes the whole square of scores, as the full count does.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(batch, seq, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == count(spec, seq).flops_per_token * batch * seq


def test_a_causal_mask_needs_half_of_the_square() -> None:
    counts = count(resolve(SMALL), 128)
    assert counts.attention_flops_per_token_causal * 2 == counts.attention_flops_per_token_full
    assert counts.flops_per_token - counts.flops_per_token_causal == counts.attention_flops_per_token_causal


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_module(tied: bool) -> None:
    spec = resolve(replace(SMALL, tie_embeddings=tied))
    counts = count(spec, 1)
    assert counts.parameters == sum(value.numel() for value in Transformer(spec).parameters())
    assert counts.embedding_parameters == spec.vocab_size * spec.dim
    assert counts.matmul_parameters == counts.parameters - sum(
        value.numel() for name, value in Transformer(spec).named_parameters() if "norm" in name
    ) - (0 if tied else counts.embedding_parameters)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        # Exact numbers of weights in the published safetensors; GPT-3's figure is the paper's.
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_a_preset_has_exactly_the_published_number_of_parameters(preset: str, published: int) -> None:
    assert count(resolve(PRESETS[preset]), 1).parameters == published


@pytest.mark.parametrize(
    ("preset", "named"),
    [
        ("toy-4m", 4e6),
        ("llama-100m", 100e6),
        ("llama-1b", 1e9),
        ("llama-3b", 3e9),
        ("gpt3-175b", 175e9),
        ("dense-1t", 1e12),
    ],
)
def test_a_preset_has_about_the_size_in_its_name(preset: str, named: float) -> None:
    spec = resolve(PRESETS[preset], vocab_size=4096)
    assert count(spec, 1).parameters == pytest.approx(named, rel=0.15)


def test_the_cost_of_a_large_model_is_about_six_flops_per_parameter() -> None:
    counts = count(resolve(PRESETS["llama3-405b"]), 8192)
    assert counts.flops_per_token_causal == pytest.approx(6 * counts.parameters, rel=0.05)


@pytest.mark.parametrize(("compute_bytes", "bytes_per_parameter"), [(4, 16), (2, 18)])
def test_a_runs_state_is_master_moments_gradients_and_a_compute_copy(
    compute_bytes: int, bytes_per_parameter: int
) -> None:
    counts = count(resolve(SMALL), 1)
    sizes = counts.state_bytes(compute_bytes)
    assert sum(sizes.values()) == bytes_per_parameter * counts.parameters
    assert ("compute copy" in sizes) == (compute_bytes != 4)
