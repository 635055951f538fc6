"""Probes of what is not a product: norms, activations, routers and the softmax over the vocabulary, in few rows and among many.

Vectorized kernels compute the elements that are left over behind whole vectors by other code, which for ``sigmoid``, ``tanh`` and ``exp`` rounds
otherwise. Which elements are left over depends on the width and on the number of rows. So each operation of a model is tried in its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.feed_forward import gated
from phalanx.model.layers.norm import RMSNorm
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.kinds.mixture import dense_width
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx.serve.numerics.facts import Facts, recalled
from phalanx.serve.numerics.products import fewest_rows
from phalanx.serve.numerics.trials import begin_part

_MANY = 576
_WIDE = 1 << 14
"""Elements of a row from which on fewer rows are tried: a vocabulary's softmax goes through each row by itself."""


Find = Callable[[], Facts | None]


def width_facts(spec: ModelSpec, dtype: torch.dtype, shares: int = 1) -> Iterator[tuple[str, Facts | None]]:
    """Each operation of a resolved model that is no product, and how few rows it may have; ``None`` if no number keeps the bits. Activations of dense
    layers are tried in the width of one of ``shares``, too."""
    for name, find in operations(spec, dtype, shares):
        begin_part(name)
        yield name, find()


def operations(spec: ModelSpec, dtype: torch.dtype, shares: int = 1) -> Iterator[tuple[str, Find]]:
    """What ``width_facts`` tries, by name."""
    yield f"the norm of width {spec.dim}", partial(_norm, spec.dim, spec.norm_eps, spec.norm_offset, dtype)
    inner = {dense_width(spec), *((spec.moe.ffn_dim, spec.moe.shared * spec.moe.ffn_dim) if spec.moe else ())}
    dense = {dense_width(spec), spec.moe.shared * spec.moe.ffn_dim if spec.moe else 0}
    for width in sorted((inner | {width // shares for width in dense}) - {0}):
        yield f"the activation of width {width}", partial(_activation, spec, width, dtype)
    yield (
        f"the softmax over {spec.vocab_size} tokens",
        partial(_softmax, spec.vocab_size, spec.logit_cap, dtype),
    )
    if spec.moe is not None:
        yield f"the router of {spec.moe.experts} experts", partial(_router, spec.dim, spec.moe)
        if spec.moe.shared_gate:
            yield "the gate of the shared experts", partial(_shared_gate, spec.dim, dtype)


def _tried(name: str, operation: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> Facts | None:
    """How few rows an operation may have; ``name`` tells what else than width and format decides its bits."""
    many = _MANY if width < _WIDE else 96
    return recalled(
        f"{name} {width} {dtype}",
        lambda: _search(operation, width, dtype, many),
        lambda facts: _keeps(operation, width, dtype, facts),
    )


def _search(operation: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, many: int) -> Facts | None:
    rows = torch.randn(many, width, generator=torch.Generator().manual_seed(0)).mul_(4).to(dtype)
    with torch.no_grad():
        expected = operation(rows)

        def kept(number: int, begin: int) -> bool:
            part = operation(rows[begin : begin + number].contiguous())
            return torch.equal(part, expected[begin : begin + number])

        return fewest_rows(kept, many)


@torch.no_grad()
def _keeps(operation: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, facts: Facts) -> bool:
    """A cheap look at what another process found: few rows among somewhat more, at both ends."""
    many = max(64, 2 * facts.fewest)
    rows = torch.randn(many, width, generator=torch.Generator().manual_seed(1)).mul_(4).to(dtype)
    expected = operation(rows)
    return all(
        torch.equal(
            operation(rows[begin : begin + facts.fewest].contiguous()), expected[begin : begin + facts.fewest]
        )
        for begin in (0, many - facts.fewest)
    )


@functools.cache
def _norm(width: int, eps: float, offset: bool, dtype: torch.dtype) -> Facts | None:
    norm = RMSNorm(width, eps, offset=offset).to(dtype).requires_grad_(False)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return _tried(f"norm {eps} {offset}", norm, width, dtype)


@functools.cache
def _activation(spec: ModelSpec, width: int, dtype: torch.dtype) -> Facts | None:
    if is_gated(spec):
        return _tried(
            f"gated {spec.ffn} {spec.swiglu_limit} {spec.swiglu_gain}",
            lambda x: gated(spec, x, x.flip(1)),
            width,
            dtype,
        )
    return _tried("gelu", F.gelu, width, dtype)


@functools.cache
def _softmax(vocab: int, cap: float, dtype: torch.dtype) -> Facts | None:
    def read(scores: Tensor) -> Tensor:
        bent = torch.tanh(scores.float() / cap) * cap if cap else scores
        return F.log_softmax(bent, dim=-1, dtype=torch.float32)

    return _tried(f"softmax {cap}", read, vocab, dtype)


@functools.cache
def _router(dim: int, moe: MoeSpec) -> Facts | None:
    matrix = torch.randn(moe.experts, dim, generator=torch.Generator().manual_seed(1))

    def scores(tokens: Tensor) -> Tensor:
        logits = F.linear(tokens, matrix)
        chosen = logits.softmax(dim=1) if moe.score == "softmax" else logits.sigmoid()
        return torch.cat((logits, chosen, chosen / (chosen.sum(dim=1, keepdim=True) + 1e-20)), 1)

    return _tried(f"router {moe.experts} {moe.score}", scores, dim, torch.float32)


@functools.cache
def _shared_gate(dim: int, dtype: torch.dtype) -> Facts | None:
    # One element of each row: whole vectors of them need 32 rows.
    matrix = torch.randn(1, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    return _tried("shared gate", lambda tokens: F.linear(tokens, matrix).sigmoid(), dim, dtype)
