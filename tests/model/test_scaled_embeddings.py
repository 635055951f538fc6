"""Embeddings that are multiplied by the root of the width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_factor_is_rounded_to_the_vectors_format_as_a_tensor_of_it_is(dtype: torch.dtype) -> None:
    small = resolve(ModelSpec(layers=1, dim=48, heads=4, ffn_dim=64, vocab_size=50))
    scaled = Transformer(replace(small, scale_embeddings=True)).to(dtype)
    tokens = torch.arange(50)
    vectors = scaled.embedding(tokens)
    expected = vectors * vectors.new_tensor(48**0.5)
    assert torch.equal(scaled.embedded(tokens), expected)
