"""Counts against what the profiler counts, and against published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count, fleet_state_bytes
from phalanx.model.layers.expert_groups import Groups
from phalanx.model.layers.moe import Experts
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, OptimizerSpec

MLA = MlaSpec(kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=14)
SMALL = ModelSpec(layers=3, dim=32, heads=4, kv_heads=2, head_dim=10, vocab_size=77)


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        replace(SMALL, tie_embeddings=True),
        replace(SMALL, ffn="gelu", ffn_bias=True, attention_bias=True),
        replace(SMALL, qk_norm=True, kv_heads=4),
        replace(SMALL, attention_pattern=("window", "full", "no-position"), window=6),
        replace(SMALL, kv_heads=0, head_dim=0, mla=MLA),
        replace(SMALL, kv_heads=0, head_dim=0, mla=replace(MLA, query_rank=12)),
        replace(SMALL, kv_heads=0, head_dim=0, mla=replace(MLA, absorbed=True)),
    ],
    ids=[
        "plain",
        "tied",
        "gelu with biases",
        "qk norm",
        "windows",
        "latent attention",
        "latent queries",
        "absorbed",
    ],
)
def test_a_training_step_costs_the_flops_that_torch_counts(spec: ModelSpec) -> None:
    spec = resolve(spec)
    batch, seq = 2, 24
    model = Transformer(spec)
    # The plain kernel computes the whole square of scores, as the full count does.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(batch, seq, dtype=torch.int64)).sum().backward()
    # Absorbed, values are read as wide as keys, and what of them is rotated is thrown away.
    thrown_away = spec.mla.rope_head_dim if spec.mla is not None and spec.mla.absorbed else 0
    more = 6 * spec.layers * spec.heads * thrown_away * seq
    assert counter.get_total_flops() == (count(spec, seq).flops_per_token + more) * batch * seq


def matrix_products(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """A grouped product as products that the counter can count."""
    parts = rows.tensor_split(groups.ends[:-1].long())
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])


@pytest.mark.parametrize("shared", [0, 2])
def test_of_a_mixture_the_chosen_experts_cost(shared: int) -> None:
    moe = MoeSpec(experts=6, per_token=2, ffn_dim=16, first_dense=1, shared=shared)
    spec = resolve(replace(SMALL, moe=moe, mtp_depth=2))
    batch, seq = 2, 24
    model = Transformer(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for module in model.modules():
        if isinstance(module, Experts):
            module.product = matrix_products
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tokens = torch.randint(77, (batch, seq))
        parts = model(tokens, lambda h, w: (h @ w.t()).sum(), ahead=lambda h, w, _: (h @ w.t()).sum())
        parts.sum().backward()
    assert counter.get_total_flops() == count(spec, seq).flops_per_token * batch * seq


def test_active_parameters_leave_out_the_experts_that_were_not_chosen_and_predictions_ahead() -> None:
    moe = MoeSpec(experts=6, per_token=2, ffn_dim=16, first_dense=1)
    counts = count(resolve(replace(SMALL, moe=moe, mtp_depth=1)), 1)
    main = count(resolve(replace(SMALL, moe=moe)), 1)
    one_expert = 3 * 16 * SMALL.dim
    assert main.active_parameters == main.parameters - 2 * 4 * one_expert
    assert counts.active_parameters == main.active_parameters
    assert counts.parameters > main.parameters
    dense = count(resolve(SMALL), 1)
    assert dense.active_parameters == dense.parameters


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
        ("phi-4", 14_659_507_200),
        ("gemma2-27b", 27_227_128_320),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        # 671,026,419,200 with the balance biases, which are state but no parameters.
        ("deepseek-v3", 671_026_419_200 - 58 * 256),
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
        ("switch-1.6t", 1.571e12),
        ("kimi-k2", 1.04e12),
        ("gpt-oss-120b", 116.83e9),
        ("moe-100t", 1e14),
        ("toy-moe", 8.4e6),
    ],
)
def test_a_preset_has_about_the_size_in_its_name(preset: str, named: float) -> None:
    spec = resolve(PRESETS[preset], vocab_size=4096)
    assert count(spec, 1).parameters == pytest.approx(named, rel=0.15)


@pytest.mark.parametrize(
    ("preset", "published"),
    [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9), ("deepseek-v3", 37e9), ("kimi-k2", 32.6e9)],
)
def test_a_preset_has_about_the_published_number_of_active_parameters(preset: str, published: float) -> None:
    active = count(resolve(PRESETS[preset]), 1).active_parameters
    assert active == pytest.approx(published, rel=0.02)


def test_the_cost_of_a_large_model_is_about_six_flops_per_parameter() -> None:
    counts = count(resolve(PRESETS["llama3-405b"]), 8192)
    assert counts.flops_per_token_causal == pytest.approx(6 * counts.parameters, rel=0.05)


@pytest.mark.parametrize(("compute_bytes", "bytes_per_parameter"), [(4, 16), (2, 18)])
def test_a_runs_state_is_master_moments_gradients_and_a_compute_copy(
    compute_bytes: int, bytes_per_parameter: int
) -> None:
    counts = count(resolve(SMALL), 1)
    sizes = fleet_state_bytes(resolve(SMALL), OptimizerSpec(), compute_bytes)
    assert sum(sizes.values()) == bytes_per_parameter * counts.parameters
    assert ("compute copy" in sizes) == (compute_bytes != 4)
