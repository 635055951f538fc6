"""Properties of the Triton programs of ``phalanx_serve.kv_cache.decode_attention``, in Triton's interpreter on a CPU: ``interpreted_attention.py NAME``.

A process of its own runs each, with ``TRITON_INTERPRET=1``, which Triton reads when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from phalanx.model.layers.attention.attention import CausalCore
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec
from phalanx_serve.kv_cache.decode_attention import SHORT_SPAN, SPLIT, DecodeAttention
from phalanx_serve.kv_cache.layer_cache import LayerKVCache, Rule
from phalanx_serve.kv_cache.memory import KVFormat, RowSpan, TextKV, kv_format

_patch_tensor = interpreter._patch_lang_tensor


def _with_bounds(tensor: type, scope: object) -> None:
    """Let ``range`` take numbers that a program has loaded: Triton 3.6 converts arrays of one number, which numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _with_bounds

settings.register_profile("interpreted", deadline=None, derandomize=True, database=None)
settings.load_profile("interpreted")

# Triton's interpreter multiplies bf16 as integers.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SPEC = resolve(ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=32))
LATENT = resolve(
    ModelSpec(layers=2, dim=64, heads=4, vocab_size=32, mla=MlaSpec(kv_rank=32, rope_head_dim=6))
)
LAYER = 1

lengths = st.one_of(st.integers(1, 40), st.integers(SPLIT - 2, SPLIT + 2), st.integers(1, 2 * SPLIT + 40))
spans = st.tuples(lengths, st.one_of(st.just(1), st.integers(1, SHORT_SPAN + 2)))
"""Tokens of a text, and how many of them are new."""


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def texts(
    spec: ModelSpec, dtype: torch.dtype, sizes: Sequence[tuple[int, int]], kept: torch.dtype | None = None
) -> list[RowSpan]:
    """Return spans of texts whose earlier tokens, numbers of ``dtype``, are stored in the format ``kept``, by default theirs."""
    steps = []
    for number, (length, new) in enumerate(sizes):
        begin = max(0, length - new)
        kv = TextKV(spec, kept or dtype)
        kv.grow(length)
        for part, tensor in enumerate(kv.layers[LAYER]):
            shape = tensor.shape[0], begin, tensor.shape[2]
            tensor[:, :begin] = numbers(10 * number + part, *shape, dtype=dtype)
        steps.append(RowSpan(kv, begin, length))
    return steps


def rows_of(steps: Sequence[RowSpan]) -> int:
    return sum(step.end - step.begin for step in steps)


def close(computed: Tensor, expected: Tensor) -> bool:
    error = (computed - expected).abs().max()
    return bool(error <= TOLERANCE[computed.dtype] * expected.abs().max())


@settings(max_examples=40)
@given(
    sizes=st.lists(spans, min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 16, 20]),
    width=st.sampled_from([8, 16, 18, 64]),
    window=st.sampled_from([0, 0, 1, 30, 600]),
    cap=st.sampled_from([0.0, 4.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    transposed=st.booleans(),
)
def agrees_with_attention_text_by_text(
    sizes: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    width: int,
    window: int,
    cap: float,
    sinks: bool,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    heads = kv_heads * group
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads, head_dim=width)
    rows = sum(min(size) for size in sizes)

    def drawn(seed: int, count: int) -> Tensor:
        if transposed:
            return numbers(seed, 1, rows, count, width, dtype=dtype).transpose(1, 2)
        return numbers(seed, 1, count, rows, width, dtype=dtype)

    query, key, value = drawn(1, heads), drawn(2, kv_heads), drawn(3, kv_heads)
    logits = numbers(4, heads, dtype=dtype) if sinks else None
    core = CausalCore(0.3, window, cap)
    steps, of_reference = texts(spec, dtype, sizes), texts(spec, dtype, sizes, torch.float32)
    assert rows_of(steps) == rows
    cache = LayerKVCache(LAYER, steps, Rule(exact=False), {}, DecodeAttention(steps))
    reference = LayerKVCache(LAYER, of_reference, Rule(exact=False), {})
    computed = cache.mix(core, query, key, value, logits)
    assert close(computed, reference.mix(core, query.float(), key.float(), value.float(), logits))
    for step, expected in zip(steps, of_reference, strict=True):
        stored = [tensor.float() for tensor in step.kv.layers[LAYER]]
        assert all(map(torch.equal, stored, expected.kv.layers[LAYER]))


@settings(max_examples=25)
@given(
    sizes=st.lists(spans, min_size=2, max_size=4),
    window=st.sampled_from([0, 30]),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
)
def a_text_has_the_same_bits_alone(sizes: list[tuple[int, int]], window: int, dtype: torch.dtype) -> None:
    sizes = [(length, min(new, SHORT_SPAN)) for length, new in sizes]
    core = CausalCore(None, window)

    def attended(steps: list[RowSpan], rows: slice) -> Tensor:
        count = sum(min(size) for size in sizes)
        query, key, value = (
            numbers(seed, 1, heads, count, 16, dtype=dtype)[:, :, rows]
            for seed, heads in ((1, 4), (2, 2), (3, 2))
        )
        return LayerKVCache(LAYER, steps, Rule(exact=False), {}, DecodeAttention(steps)).mix(
            core, query, key, value
        )

    together = attended(texts(SPEC, dtype, sizes), slice(None))
    begin = 0
    for number, step in enumerate(texts(SPEC, dtype, sizes)):
        rows = slice(begin, begin + step.end - step.begin)
        begin = rows.stop
        assert torch.equal(attended([step], rows), together[:, :, rows]), number


@settings(max_examples=10)
@given(sizes=st.lists(spans, min_size=1, max_size=3), name=st.sampled_from(["int8", "fp8"]))
def narrow_formats_store_rounded_rows(sizes: list[tuple[int, int]], name: str) -> None:
    spec = replace(SPEC, head_dim=32)
    kept: KVFormat = kv_format("int8" if name == "int8" else "fp8", spec, torch.float32)
    count = sum(min(size) for size in sizes)
    query, key, value = (numbers(seed, 1, heads, count, 32) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    results = []
    for is_batched in (False, True):
        steps = texts(spec, torch.float32, sizes)
        batched = DecodeAttention(steps) if is_batched else None
        cache = LayerKVCache(LAYER, steps, Rule(exact=False, kept=kept), {}, batched)
        mixed = cache.mix(CausalCore(), query, key, value)
        results.append((mixed, [tensor for step in steps for tensor in step.kv.layers[LAYER]]))
    (expected, expected_stored), (computed, stored) = results
    assert close(computed, expected)
    assert all(map(torch.equal, stored, expected_stored))


@settings(max_examples=10)
@given(sizes=st.lists(spans, min_size=1, max_size=3))
def latents_are_stored_together_and_attended_text_by_text(sizes: list[tuple[int, int]]) -> None:
    count = sum(min(size) for size in sizes)
    query, latent, rotated = (
        numbers(1, 1, 4, count, 38),
        numbers(2, 1, 1, count, 32),
        numbers(3, 1, 1, count, 6),
    )
    results = []
    for is_batched in (False, True):
        steps = texts(LATENT, torch.float32, sizes)
        batched = DecodeAttention(steps) if is_batched else None
        cache = LayerKVCache(LAYER, steps, Rule(exact=False), {}, batched)
        mixed = cache.mix(
            CausalCore(0.3),
            query,
            latent,
            rotated,
            None,
            lambda keys, turned: (torch.cat((keys, turned), 3), keys),
        )
        results.append((mixed, [tensor for step in steps for tensor in step.kv.layers[LAYER]]))
    (expected, expected_stored), (computed, stored) = results
    assert torch.equal(computed, expected)
    assert all(map(torch.equal, stored, expected_stored))


@settings(max_examples=10)
@given(before=st.integers(1, 700), after=st.integers(1, 700))
def a_text_that_has_grown_is_found_at_its_new_place(before: int, after: int) -> None:
    (step,) = texts(SPEC, torch.float32, [(before, 1)])
    kv, end = step.kv, before + after
    kv.addresses()
    kv.grow(end)
    query, key, value = (numbers(seed, 1, heads, 1, 16) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    spans = [RowSpan(kv, end - 1, end)]
    mixed = LayerKVCache(LAYER, spans, Rule(exact=False), {}, DecodeAttention(spans)).mix(
        CausalCore(), query, key, value
    )
    keys, values = (tensor[None, :, :end] for tensor in kv.layers[LAYER])
    assert torch.equal(keys[:, :, -1:], key)
    assert close(mixed, CausalCore()(query, keys, values))


PROPERTIES = {
    check.__name__: check
    for check in (
        agrees_with_attention_text_by_text,
        a_text_has_the_same_bits_alone,
        narrow_formats_store_rounded_rows,
        latents_are_stored_together_and_attended_text_by_text,
        a_text_that_has_grown_is_found_at_its_new_place,
    )
}

if __name__ == "__main__":
    PROPERTIES[sys.argv[1]]()
