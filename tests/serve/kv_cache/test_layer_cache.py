"""A query that is computed by itself over a cache has the bits that training gives it in a whole sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.mla import latents_as_keys
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec
from phalanx_serve.kv_cache.layer_cache import LayerKVCache, Rule
from phalanx_serve.kv_cache.memory import RowSpan, TextKV

pytestmark = pytest.mark.usefixtures("portable_kernels")
SPEC = resolve(ModelSpec(layers=1, dim=64, heads=4, kv_heads=2, head_dim=18, vocab_size=32))
LATENT = resolve(
    ModelSpec(
        layers=1, dim=64, heads=4, vocab_size=32, mla=MlaSpec(kv_rank=20, rope_head_dim=6, absorbed=True)
    )
)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    length=st.integers(1, 1100),
    borders=st.lists(st.integers(1, 1099), max_size=6),
    window=st.sampled_from([0, 0, 1, 7, 40, 300, 512, 600]),
    sinks=st.booleans(),
    cap=st.sampled_from([0.0, 0.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_pieces_of_a_sequence_have_the_bits_of_the_whole(
    length: int, borders: list[int], window: int, sinks: bool, cap: float, dtype: torch.dtype
) -> None:
    query = numbers(1, 1, 4, length, 18, dtype=dtype)
    key, value = (numbers(seed, 1, 2, length, 18, dtype=dtype) for seed in (2, 3))
    logits = numbers(4, 4) if sinks else None
    core = CausalCore(None, window, cap)
    whole = core(query, key, value, None, logits)

    kv = TextKV(SPEC, dtype)
    kv.grow(length)
    cuts = sorted({0, length, *(border for border in borders if border < length)})
    # The last query by itself, as when a text is decoded.
    cuts = sorted({*cuts, length - 1})
    for begin, end in itertools.pairwise(cuts):
        cache = LayerKVCache(0, [RowSpan(kv, begin, end)], Rule(exact=True), {})
        piece = slice(begin, end)
        mixed = cache.mix(core, query[:, :, piece], key[:, :, piece], value[:, :, piece], logits)
        assert torch.equal(mixed, whole[:, :, piece])


@given(
    length=st.integers(1, 700),
    border=st.integers(0, 699),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_queries_of_latents_have_the_bits_of_the_whole_sequence(
    length: int, border: int, dtype: torch.dtype
) -> None:
    query = numbers(1, 1, 4, length, 26, dtype=dtype)
    latent, rotated = numbers(2, 1, 1, length, 20, dtype=dtype), numbers(3, 1, 1, length, 6, dtype=dtype)
    core = CausalCore(0.3)
    whole = core(query, *latents_as_keys(latent, rotated))

    kv = TextKV(LATENT, dtype)
    kv.grow(length)
    cuts = sorted({0, min(border, length), length - 1, length})
    for begin, end in itertools.pairwise(cuts):
        cache = LayerKVCache(0, [RowSpan(kv, begin, end)], Rule(exact=True), {})
        piece = slice(begin, end)
        mixed = cache.mix(
            core, query[:, :, piece], latent[:, :, piece], rotated[:, :, piece], None, latents_as_keys
        )
        assert torch.equal(mixed, whole[:, :, piece])


@pytest.mark.parametrize("window", [0, 7])
def test_rows_of_several_texts_are_those_of_each(window: int) -> None:
    core, spec = CausalCore(None, window), replace(SPEC)
    lengths = (3, 70, 1)
    query, key, value = (
        numbers(seed, 1, heads, sum(lengths), 18) for seed, heads in ((1, 4), (2, 2), (3, 2))
    )
    kvs = [TextKV(spec, torch.float32) for _ in lengths]
    spans, begin = [], 0
    expected = []
    for kv, length in zip(kvs, lengths, strict=True):
        kv.grow(length)
        spans.append(RowSpan(kv, 0, length))
        piece = slice(begin, begin + length)
        expected.append(core(query[:, :, piece], key[:, :, piece], value[:, :, piece]))
        begin += length
    mixed = LayerKVCache(0, spans, Rule(exact=True), {}).mix(core, query, key, value)
    assert torch.equal(mixed, torch.cat(expected, 2))


def test_a_step_keeps_no_mask_of_every_head() -> None:
    # Of all its texts, they would take more than their latents.
    masks: dict[tuple[int, ...], Tensor] = {}
    kv = TextKV(LATENT, torch.float32)
    kv.grow(64)
    cache = LayerKVCache(0, [RowSpan(kv, 40, 43)], Rule(exact=True), masks)
    latent, rotated = torch.zeros(1, 1, 3, 20), torch.zeros(1, 1, 3, 6)
    mixed = cache.mix(CausalCore(1.0), torch.zeros(1, 4, 3, 26), latent, rotated, None, latents_as_keys)
    assert mixed.shape == (1, 4, 3, 26)
    assert sum(mask.numel() for mask in masks.values()) == 3 * 43
