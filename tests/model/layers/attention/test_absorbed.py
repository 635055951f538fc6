"""Latent attention with its matrix absorbed gives what expanded keys and values give, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.initialized import initialized
from phalanx.model.layers.attention.attention import Documents
from phalanx.model.layers.attention.mla import AbsorbedUp, LatentExpansion, MlaAttention
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.layers.dense import Linear
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, RopeScalingSpec


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 70),
    st.tuples(*(st.sampled_from([4, 8, 10, 24]) for _ in range(3)), st.sampled_from([4, 8, 12])),
    st.integers(0, 2**20),
)
@torch.no_grad()
def test_both_forms_are_one_function(
    heads: int, queries: int, before: int, widths: tuple[int, int, int, int], seed: int
) -> None:
    rank, nope, value, rope = widths
    mla = MlaSpec(kv_rank=rank, nope_head_dim=nope, value_head_dim=value, rope_head_dim=rope)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    up = Linear(rank, heads * (nope + value), bias=False).double()
    up.weight.copy_(drawn(heads * (nope + value), rank))
    form = LatentExpansion(up, mla, (nope + rope) ** -0.5)
    tokens = before + queries
    query, latent, shared = (
        drawn(1, heads, queries, nope + rope),
        drawn(1, 1, tokens, rank),
        drawn(1, 1, tokens, rope),
    )
    mask = torch.ones(queries, tokens, dtype=torch.bool).tril(before)
    key, content = form(latent, shared)
    scores = (query @ key.transpose(2, 3) * form.scale).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(3) @ content
    torch.testing.assert_close(form.absorbed(query, latent, shared, mask.repeat(heads, 1)), expected)
    torch.testing.assert_close(form.absorbed(query, latent, shared, mask), expected)


def test_a_long_prompt_is_expanded_and_one_token_behind_it_is_not() -> None:
    form = LatentExpansion(Linear(512, 128 * 256, bias=False), MlaSpec(kv_rank=512), 1.0)
    assert form.absorbs(1, 5000)
    assert not form.absorbs(4096, 4096)


@pytest.mark.parametrize("query_rank", [0, 20])
@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_that_absorbs_has_the_results_and_gradients_of_one_that_expands(
    query_rank: int, stretched: bool, packed: bool
) -> None:
    # YaRN's temperature is in the scale, which does not follow from the width of queries.
    scaling = RopeScalingSpec(kind="yarn", factor=4.0, original_max_seq_len=8, mscale_all_dim=1.0)
    mla = MlaSpec(query_rank=query_rank, kv_rank=12, nope_head_dim=6, rope_head_dim=8, value_head_dim=10)
    expanded = resolve(
        ModelSpec(
            layers=1, dim=32, heads=4, vocab_size=40, mla=mla, rope_scaling=scaling if stretched else None
        )
    )
    absorbed = replace(expanded, mla=replace(mla, absorbed=True))
    drawn = torch.randn(2, 2, 13, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[0] * 5 + [1] * 8, [2] * 12 + [3]])
    documents = Documents.numbered(ids) if packed else None
    cos, sin = (table.double() for table in rotation(expanded, torch.arange(13)))

    def learned(spec: ModelSpec) -> dict[str, Tensor]:
        layer = initialized(spec).blocks["0"].attention.double().requires_grad_(True)
        assert isinstance(layer, MlaAttention)
        x = drawn[0].clone().requires_grad_(True)
        result = layer(x, cos, sin, documents)
        (result * drawn[1]).sum().backward()
        assert x.grad is not None
        return {"result": result.detach(), "input": x.grad} | {
            name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None
        }

    expected, actual = learned(expanded), learned(absorbed)
    assert "kv_up.weight" in expected
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_gradients_of_the_absorbed_form_are_those_of_finite_differences() -> None:
    mla = MlaSpec(kv_rank=3, nope_head_dim=2, rope_head_dim=2, value_head_dim=2, absorbed=True)
    generator = torch.Generator().manual_seed(0)
    weight, query, mixed = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2 * 4, 3), (2, 2, 3, 4), (2, 2, 3, 5))
    )
    assert torch.autograd.gradcheck(lambda w, q: AbsorbedUp(w, mla).latent_queries(q), (weight, query))
    assert torch.autograd.gradcheck(lambda w, m: AbsorbedUp(w, mla).values(m), (weight, mixed))
