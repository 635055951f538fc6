"""Latent attention with its matrix absorbed gives what expanded keys and values give."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.layers.attention.absorbed import LatentExpansion
from phalanx.model.layers.linear import Linear
from phalanx.run.spec import MlaSpec


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
    torch.testing.assert_close(form.absorbed(query, latent, shared, mask), scores.softmax(3) @ content)


def test_a_long_prompt_is_expanded_and_one_token_behind_it_is_not() -> None:
    form = LatentExpansion(Linear(512, 128 * 256, bias=False), MlaSpec(kv_rank=512), 1.0)
    assert form.absorbs(1, 5000)
    assert not form.absorbs(4096, 4096)
