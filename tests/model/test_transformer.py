"""The model and its cache: causal, independent of the batch, and the same in one piece or in many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.growing_cache import empty_cache
from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

SMALL = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=40, init_std=0.3)
SPECS = {
    "llama": SMALL,
    "tied, qk norm": replace(SMALL, tie_embeddings=True, qk_norm=True),
    "gpt": replace(SMALL, ffn="gelu", kv_heads=4, attention_bias=True, ffn_bias=True),
    "mixture": replace(SMALL, moe=MoeSpec(experts=4, ffn_dim=16)),
    "latent attention, mixture": replace(
        SMALL,
        kv_heads=0,
        mla=MlaSpec(kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=10),
        moe=MoeSpec(experts=4, ffn_dim=16, shared=1, first_dense=1, score="sigmoid", balance_bias=True),
    ),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(batch * seq))


@each_spec
def test_a_token_changes_nothing_before_it(spec: ModelSpec) -> None:
    model, text = initialized(spec), tokens(1, 20)
    before = model(text)
    text[0, 12] = (text[0, 12] + 1) % SMALL.vocab_size
    after = model(text)
    torch.testing.assert_close(after[:, :12], before[:, :12])
    assert ((after - before)[0, 12:].abs().amax(dim=-1) > 1e-3).all()


@each_spec
def test_sequences_of_a_batch_do_not_see_each_other(spec: ModelSpec) -> None:
    model, text = initialized(spec), tokens(3, 15)
    alone = torch.cat([model(text[row : row + 1]) for row in range(3)])
    torch.testing.assert_close(model(text), alone, rtol=1e-4, atol=1e-5)


@each_spec
def test_order_matters(spec: ModelSpec) -> None:
    model = initialized(spec)
    ordered, swapped = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert (ordered[0, -1] - swapped[0, -1]).abs().max() > 1e-3


@each_spec
@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=15)
def test_a_text_through_the_cache_in_any_pieces_gives_the_logits_of_the_whole(
    spec: ModelSpec, pieces: list[int]
) -> None:
    model, text = initialized(spec), tokens(2, sum(pieces))
    cache = empty_cache(model.spec.layers)
    parts = [model(part, cache=cache) for part in text.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text), rtol=1e-3, atol=1e-4)
    assert {layer.length for layer in cache} == {sum(pieces)}


def test_the_readout_is_given_the_last_hidden_states_and_the_output_projection() -> None:
    for spec in SPECS.values():
        model = initialized(spec)
        seen: list[Tensor] = []

        def readout(hidden: Tensor, weight: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.extend((hidden, weight))
            return hidden.sum()

        assert model(tokens(2, 5), readout).shape == ()
        hidden, weight = seen
        assert hidden.shape == (2, 5, spec.dim)
        expected = (
            model.embedding.weight if spec.tie_embeddings else dict(model.named_parameters())["head.weight"]
        )
        assert weight is expected


@each_spec
def test_stages_one_after_the_other_compute_what_the_whole_does(spec: ModelSpec) -> None:
    spec = replace(spec, layers=4, tie_embeddings=False)
    undivided, text = initialized(spec), tokens(2, 9)
    stages = [initialized(spec) for _ in range(3)]
    stages[0].keep(range(1), first=True, last=False)
    stages[1].keep(range(1, 3), first=False, last=False)
    stages[2].keep(range(3, 4), first=False, last=True)
    hidden = text
    for stage in stages:
        hidden = stage(hidden)
    assert torch.equal(hidden, undivided(text))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in undivided.named_parameters()]


def test_only_the_last_stage_predicts_ahead() -> None:
    stages = [initialized(replace(SMALL, mtp_depth=1)) for _ in range(2)]
    stages[0].keep(range(1), first=True, last=False)
    stages[1].keep(range(1, 2), first=False, last=True)
    assert [len(stage.mtp) for stage in stages] == [0, 1]


def test_a_model_on_the_meta_device_has_no_data() -> None:
    with torch.device("meta"):
        model = Transformer(resolve(SMALL))
    assert all(parameter.is_meta for parameter in model.parameters())
