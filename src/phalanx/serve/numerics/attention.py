"""Probes of attention: whether a query computed by itself over pages has the bits that it has in a whole training sequence.

The engine's own rule is tried (``phalanx.serve.kv_cache.layer_cache``): keys on to the end of their block or sequence under a mask, queries in multiples of
four. Random queries and keys of one kind of layer go through the trainer's whole sequence, and then in pieces through the engine's; single queries at
the edges of vectors, tiles and blocks, and pieces that leave some over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.block import Block
from phalanx.model.layers.attention.absorbed import latents_as_keys
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.cache import Expand
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.kv_cache.layer_cache import TOGETHER, LayerKVCache, Rule, Span
from phalanx.serve.kv_cache.memory import BLOCK, TextKV
from phalanx.serve.numerics.facts import Facts, recalled
from phalanx.serve.numerics.head_products import heads_of
from phalanx.serve.numerics.trials import begin_part

_LONGEST = 4096
"""Tokens of the longest sequence that is tried; kernels have long settled on their largest tiles then."""
_PLACES = (0, 1, 2, 3, 5, 30, 31, 32, 63, 64, 127, 128, 191, 255, 256, 300, 511, 512, 513, 767, 768, 1023)
_PIECES = ((0, 2), (0, 33), (1, 8), (64, 97), (130, 255), (500, 530))


def dependent_attention(model: Transformer, sequence: int) -> Iterator[str]:
    """Each kind of layer, described, whose queries depend on how they are computed."""
    for case, layer in kinds_of_attention(model, sequence).items():
        begin_part(f"attention of layer {layer}")
        place = _first_difference(case, torch.get_num_threads())
        if place:
            yield f"attention of layer {layer} in {case.dtype} over sequences of {case.length} ({place})"


def kinds_of_attention(model: Transformer, sequence: int) -> dict[_Case, str]:
    """Each kind of layer that ``dependent_attention`` tries, and the name of the first layer of it."""
    kinds: dict[_Case, str] = {}
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "the model's layers"
        attention, core = block.attention, block.attention.core
        assert isinstance(core, CausalCore), "the engine refuses others"
        dtype = next(model.parameters()).dtype
        length = min(sequence or 2 * BLOCK, _LONGEST)
        latent = isinstance(attention, MlaAttention)
        case = _Case(
            _two_heads(model.spec),
            latent,
            # Of a share of a layer, those that this process has.
            heads_of(attention) if isinstance(attention, MlaAttention) and attention.absorbed else 0,
            core.window,
            core.score.scale,
            attention.sinks is not None,
            dtype,
            length,
        )
        kinds.setdefault(case, layer)
    return kinds


@dataclass(frozen=True)
class _Case:
    """A kind of layer, over sequences of one length."""

    spec: ModelSpec
    latent: bool
    absorbed: int
    """Heads that ask the same latents, where attention is absorbed; else 0."""
    window: int
    scale: float | None
    sinks: bool
    dtype: torch.dtype
    length: int

    @property
    def name(self) -> str:
        """What of it decides its bits."""
        spec = self.spec
        if self.absorbed and spec.mla is not None:
            width = spec.mla.kv_rank + spec.mla.rope_head_dim
            return (
                f"attention to latents {self.absorbed} {width} scale {self.scale} {self.dtype} {self.length}"
            )
        return (
            f"attention {spec.heads} {spec.kv_heads} {spec.head_dim} {spec.mla if self.latent else ''} window {self.window} "
            f"scale {self.scale} sinks {self.sinks} {self.dtype} {self.length}"
        )


def _two_heads(spec: ModelSpec) -> ModelSpec:
    """The model with two heads for keys and values: kernels compute each head by itself."""
    if spec.mla is not None:
        return replace(spec, layers=1, heads=2)
    kept = min(spec.kv_heads, 2)
    return replace(spec, layers=1, heads=spec.heads // spec.kv_heads * kept, kv_heads=kept)


@functools.cache
def _first_difference(case: _Case, threads: int) -> str:  # noqa: ARG001  what is found holds for a number of threads
    """The first queries whose bits differ, in words; empty if none do, which is kept for the next process and then tried in a few places."""
    problem = ""

    def search() -> Facts | None:
        nonlocal problem
        problem = _difference(case, _tried(case.length))
        return None if problem else Facts(1, 1)

    recalled(case.name, search, lambda _: not _difference(case, _few(case.length)))
    return problem


@torch.no_grad()
def _difference(case: _Case, tried: Iterable[tuple[int, int]]) -> str:
    """The first of the ``tried`` queries whose bits differ from those of the whole sequence, in words; empty if none do."""
    piece = TextKV(case.spec, case.dtype)
    piece.grow(case.length)
    whole = (_asked_of_latents if case.absorbed else _asked_of_keys)(case, piece.capacity)
    core = CausalCore(case.scale, case.window)
    expected = core(whole.query, whole.key, whole.value, None, whole.sinks)[:1]
    for tensor, held in zip(piece.layers[0], whole.held, strict=True):
        tensor.copy_(held[0])
    for begin, end in tried:
        span = slice(begin, end)
        first, second = (held[:, :, span] for held in whole.held)
        rows = LayerKVCache(0, [Span(piece, begin, end)], Rule(exact=True, sequence=case.length), {})
        query, wanted = whole.query[:1, :, span], expected[:, :, span]
        if case.absorbed:
            # As many heads as are asked together, or just too many for that; some of them alike.
            heads = min(case.absorbed, -(-TOGETHER // (end - begin)))
            alike = -(-heads // query.shape[1])
            query, wanted = (one.repeat(1, alike, 1, 1)[:, :heads] for one in (query, wanted))
        found = rows.mix(core, query, first, second, whole.sinks, whole.expand)
        if not torch.equal(found, wanted):
            return f"queries {begin} to {end - 1}"
    return ""


@dataclass(frozen=True)
class _Whole:
    """Random queries, keys and values of two sequences ``(2, heads, length, width)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    held: tuple[Tensor, Tensor]
    """What an engine keeps of the first ``(1, heads, capacity, width)``: behind the sequence there are zeros, as in its pieces."""
    expand: Expand | None = None
    sinks: Tensor | None = None


def _drawn(case: _Case) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(case.dtype)


def _asked_of_keys(case: _Case, capacity: int) -> _Whole:
    spec, mla, length, drawn = case.spec, case.spec.mla, case.length, _drawn(case)
    width = spec.head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim
    kept = spec.kv_heads if mla is None else spec.heads
    query = drawn(2, spec.heads, length, width)
    key = drawn(2, kept, length, width)
    value = drawn(2, kept, length, spec.head_dim if mla is None else mla.value_head_dim)
    sinks = drawn(spec.heads) if case.sinks else None
    first, second = (F.pad(one[:1], (0, 0, 0, capacity - length)) for one in (key, value))
    if mla is None:
        return _Whole(query, key, value, (first, second), sinks=sinks)

    def expand(held: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return first[:, :, : held.shape[-2]], second[:, :, : held.shape[-2]]

    # How latents are expanded is a product like others.
    latents = (first.new_zeros(1, 1, capacity, n) for n in (mla.kv_rank, mla.rope_head_dim))
    return _Whole(query, key, value, (next(latents), next(latents)), expand)


def _asked_of_latents(case: _Case, capacity: int) -> _Whole:
    mla, length, drawn = case.spec.mla, case.length, _drawn(case)
    assert mla is not None, "of latent attention"
    query = drawn(2, case.spec.heads, length, mla.kv_rank + mla.rope_head_dim)
    latent, shared = drawn(2, 1, length, mla.kv_rank), drawn(2, 1, length, mla.rope_head_dim)
    first, second = (F.pad(one[:1], (0, 0, 0, capacity - length)) for one in (latent, shared))
    return _Whole(query, *latents_as_keys(latent, shared), (first, second), latents_as_keys)


def _few(length: int) -> Iterator[tuple[int, int]]:
    """A cheap look at what another process found."""
    yield from ((place, place + 1) for place in sorted({0, length // 2, length - 1}))
    yield (length // 3, length)


def _tried(length: int) -> Iterator[tuple[int, int]]:
    places = {place for place in (*_PLACES, length // 2, length - 2, length - 1) if 0 <= place < length}
    yield from ((place, place + 1) for place in sorted(places))
    yield from (
        (begin, end) for begin, end in (*_PIECES, (length // 3, length), (0, length)) if begin < end <= length
    )
