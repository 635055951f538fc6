"""Attention that also returns its softmax denominators, with or without a soft cap.

With the log-sum-exp of each row's scores a result can be corrected later: by keys of other tiles
(``phalanx.parallel.context.tiles``), or by a sink. A sink is a learned logit of each head that takes part in the softmax's denominator
and has no value (gpt-oss, arXiv 2508.10925, section 2; "off by one" softmax is a sink of 0).

``scaled_dot_product_attention`` does not return denominators. So this module calls its kernels, private operators of PyTorch with
stable schemas, which ``torch.export`` relies on:

- CPU: flash attention, any mask, grouped heads.
- GPU: flash attention for bf16 without a mask, grouped heads; memory-efficient attention for everything else.

Each requires queries, keys and values of one width, a multiple of 8 on a GPU. Narrower ones are padded with zeros, which change no
score and no gradient. None has a soft cap: ``capped_attend`` computes capped scores.

Shapes: ``b`` batch, ``h`` query heads, ``k`` key/value heads, ``q`` queries, ``n`` keys, ``e`` head width, ``v`` value width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled

_FLASH_WIDTH = 256  # maximum head width of flash attention on a GPU
_WIDTH_ALIGNMENT = 8
_BIAS_ALIGNMENT = 16  # elements; alignment of a mask's rows in memory-efficient attention
_LSE_ALIGNMENT = 32  # rows; memory-efficient attention pads its denominators to a multiple

aten = torch.ops.aten


class _WholeContext(FunctionContext, Protocol):
    score: Score
    causal: bool


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _WholeContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        score: Score,
    ) -> Tensor:
        """Return the attention result ``(b, h, q, v)`` with sinks, in the query's dtype. Saves inputs, result and
        log-sum-exp for backward.
        """
        out, lse = with_sinks(*attend(query, key, value, score, causal=causal, bias=bias), sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.score, ctx.causal = score, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _WholeContext, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks; the first three in the query's dtype, none for the bias."""
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        shares = attend_backward(
            grad_out, query, key, value, out, lse, ctx.score, causal=ctx.causal, bias=bias
        )
        gradients = (gradient.to(query.dtype) for gradient in shares)
        return *gradients, sink_gradient(grad_out, out, lse, sinks), None, None, None


@uncompiled
def attend_whole_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    score: Score,
    *,
    causal: bool = False,
    visible: Tensor | None = None,
) -> Tensor:
    """Return the attention result ``(b, h, q, v)`` of rows with all of their keys, with the heads' sinks; differentiable.

    Args:
        query, key, value, score, causal: See ``attend``.
        sinks: ``(h,)``, a logit for each head, or ``None``.
        visible: ``(q, n)`` or ``(b, 1, q, n)``, bool: the keys that a query sees; not together with ``causal``.
    """
    bias = None
    if visible is not None:
        hidden = ~visible if visible.ndim == 2 else ~visible[:, 0]  # (q, n) or (b, q, n)
        bias = mask_bias(hidden.expand(query.shape[0], -1, -1), query.dtype)  # (b, 1, q, n)
    return apply_function(_WholeRows, query, key, value, sinks, bias, causal, score)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add ``sinks`` ``(h,)`` to the denominators of complete rows, and return results ``(b, h, q, v)`` and
    log-sum-exp ``(b, h, q)``. Without sinks both are returned unchanged.
    """
    if sinks is None:
        return out, lse
    # With L the log of a row's denominator and s the sink: L' = log(exp L + exp s), out' = exp(L - L') out.
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # (b, h, q)
    return out * (lse - total).exp().unsqueeze(-1), total  # (b, h, q, v), (b, h, q)


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient ``(h,)`` of the sinks of complete rows; ``out`` and ``lse`` are the results of
    ``with_sinks``. None without sinks.
    """
    if sinks is None:
        return None
    # A sink's share of the softmax is exp(s - L'), and its value is zero: dS = P (dP - D) with dP = 0, D = rowsum(grad_out * out).
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (b, h, q)
    row_dots = (grad_out.float() * out.float()).sum(-1)  # D: (b, h, q)
    return -(share * row_dots).sum((0, 2)).to(sinks.dtype)  # (h,)


def mask_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as a bias ``(b, 1, q, n)`` on the scores: a large negative number where ``hidden`` ``(b, q, n)``
    is true, else 0.

    The bias is finite. So a row whose keys are all hidden has a finite result without weight; infinity would make it
    NaN.
    """
    keys = hidden.shape[-1]
    # (b, q, n), with aligned rows
    bias = hidden.new_zeros((*hidden.shape[:-1], keys + -keys % _BIAS_ALIGNMENT), dtype=dtype)[..., :keys]
    return bias.masked_fill_(hidden, torch.finfo(dtype).min / 4).unsqueeze(1)  # (b, 1, q, n)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(score(query key^T) + bias) value`` ``(b, h, q, v)`` and its log-sum-exp ``(b, h, q)``, fp32.

    The result is in the queries' dtype by a kernel of the device, or fp32 by ``capped_attend`` if there is a cap.

    Args:
        query: ``(b, h, q, e)``.
        key: ``(b, k, n, e)``; ``k`` divides ``h``.
        value: ``(b, k, n, v)``.
        score: Scale and cap of the products of queries and keys.
        causal: True if query ``i`` sees keys up to ``i`` only.
        bias: ``(b, 1, q, n)`` in the queries' dtype, made by ``mask_bias``; not together with ``causal``.
    """
    if score.cap:
        return capped_attend(query, key, value, score, causal=causal, bias=bias)
    width, scale = value.shape[-1], score.factor(query)
    # (b, h, q, w), (b, k, n, w), (b, k, n, w): one aligned width w
    query, key, value = _widened(query, key, value)
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _takes_flash(query, bias):
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    else:
        # (b, h, n, w), (b, h, n, w), (b, h, q, n)
        key, value, bias = _per_query_head(query, key, value, bias)
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )[:2]
    return out[..., :width], lse[..., : query.shape[2]]  # (b, h, q, v), (b, h, q)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's share of the gradients of queries ``(b, h, q, e)``, keys ``(b, k, n, e)`` and values ``(b, k, n, v)``.

    ``out`` ``(b, h, q, v)`` and ``lse`` ``(b, h, q)`` are those of complete rows, over the keys of all tiles. With these the kernel
    computes the tile's part of the full softmax, and the shares of all tiles add up (FlashAttention, arXiv 2205.14135, appendix B.2,
    with S the scores)::

        P  = exp(scale query key^T + bias - lse)      # (b, h, q, n): this tile's columns of the full softmax
        dV = P^T grad_out
        dP = grad_out value^T
        D  = rowsum(grad_out * out)                   # (b, h, q): of complete rows, hence ``out``
        dS = P * (dP - D)
        dQ = scale dS key                             dK = scale dS^T query
    """
    if score.cap:
        return capped_attend_backward(grad_out, query, key, value, out, lse, score, causal=causal, bias=bias)
    widths, scale = (query.shape[-1], key.shape[-1], value.shape[-1]), score.factor(query)
    # (b, heads, q or n, w) each: one aligned width w
    query, key, value, out, grad_out = _widened(query, key, value, out, grad_out)
    lse = lse.contiguous()
    if query.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _takes_flash(query, bias):
        seed = torch.empty(0, dtype=torch.uint64, device=query.device)  # for dropout, which is not used
        lengths = (None, None, query.shape[2], key.shape[2])
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale
        )
    else:
        gradients = _efficient_backward(grad_out, query, key, value, out, lse, scale, causal, bias)
    grad_query, grad_key, grad_value = (
        gradient[..., :width] for gradient, width in zip(gradients, widths, strict=True)
    )
    return grad_query, grad_key, grad_value


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries ``(b, h, q, w)``, keys ``(b, k, n, w)`` and values ``(b, k, n, v)`` of the
    memory-efficient kernel. It needs equal heads and aligned log-sum-exps, so inputs are repeated and padded.
    """
    kv_heads = key.shape[1]
    key, value, bias = _per_query_head(query, key, value, bias)  # (b, h, n, w), (b, h, n, w), (b, h, q, n)
    # Padding rows get a denominator of infinity, so that their P is 0.
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=torch.inf)  # (b, h, q rounded up)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel requires (b, q, h, v) in memory
    seed = torch.empty(0, dtype=torch.int64, device=query.device)
    needs_gradient = (True, True, True, False)
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, lse, seed, seed, 0.0, needs_gradient, causal, scale=scale
    )
    # (b, h, n, .) to (b, k, n, .): the query heads of a group share its key and value.
    grad_key, grad_value = (
        gradient.unflatten(1, (kv_heads, -1)).sum(2) for gradient in (grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


def _takes_flash(query: Tensor, bias: Tensor | None) -> bool:
    return bias is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _FLASH_WIDTH


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad all tensors to one aligned width with zeros."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    width = widest + -widest % _WIDTH_ALIGNMENT
    return tuple(F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors)


def _per_query_head(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys and values repeated, and the bias expanded, so that each query head has its own: ``(b, h, n, .)``
    twice and ``(b, h, q, n)`` or None.
    """
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))  # (b, h, n, .)
    # (b, h, n, .) twice, (b, h, q, n)
    return key, value, None if bias is None else bias.expand(-1, heads, -1, -1)


# Attention with soft-capped scores: ``cap tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2.3).
#
# No kernel of ``scaled_dot_product_attention`` computes this, so it is implemented here for blocks of query rows. The scores of ``rows``
# queries are in memory at once. Backward recomputes them from the rows' log-sum-exp, like flash attention (arXiv 2205.14135, appendix
# B). Scores and sums are fp32.
#
# The same cap on the logits of the vocabulary (``soft_capped``) is one more pass over them.


_ROWS = 256  # queries whose scores are in memory at once: (b, h, _ROWS, n)


@dataclass(frozen=True)
class Score:
    """Scale and soft cap of the product of a query and a key."""

    scale: float | None = None
    """Factor; ``None`` is ``1 / sqrt(e)``."""
    cap: float = 0.0
    """Soft cap; 0 means none."""

    def factor(self, query: Tensor) -> float:
        """Return the factor for queries ``(..., e)``."""
        return 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return ``cap tanh(x / cap)``; ``x`` itself if ``cap`` is 0."""
    return x if not cap else cap * torch.tanh(x / cap)


@dataclass(frozen=True)
class _Piece:
    """Some query rows and the keys that they may see."""

    rows: slice
    keys: slice
    hidden: Tensor | None
    """``(rows, keys)``, bool: keys hidden by the causal order."""


def _pieces(queries: int, keys: int, device: torch.device, rows: int, *, causal: bool) -> Iterator[_Piece]:
    """Yield pieces of at most ``rows`` queries with their visible keys: all, or if causal the keys up to the piece's
    last query, and the mask ``(rows, keys)`` of the keys after each query.
    """
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        if not causal:
            yield _Piece(slice(start, stop), slice(0, keys), None)
            continue
        # (rows, keys)
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=device).triu(start + 1)
        yield _Piece(slice(start, stop), slice(0, stop), hidden)


def _capped_scores(
    query: Tensor, key: Tensor, piece: _Piece, score: Score, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a piece's scores with bias, and -inf where the piece hides keys, and ``tanh``, of which backward needs
    ``1 - tanh^2``: each ``(b, h, rows, keys)``, fp32.
    """
    # (b, h, rows, keys)
    products = (query[:, :, piece.rows] @ key[:, :, piece.keys].transpose(-1, -2)).float()
    # Same order of operations as in Gemma 2's training: near the cap, rounding is an absolute error of the scores.
    # Products are not changed in place: selective recomputation keeps and reuses them.
    tanh = torch.tanh((products * score.factor(query)).div_(score.cap))
    scores = tanh * score.cap
    if bias is not None:
        scores = scores + bias[:, :, piece.rows, piece.keys]
    return scores if piece.hidden is None else scores.masked_fill_(piece.hidden, -torch.inf), tanh


def capped_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    *,
    causal: bool,
    bias: Tensor | None,
    rows: int = _ROWS,
) -> tuple[Tensor, Tensor]:
    """Return results ``(b, h, q, v)`` and log-sum-exp ``(b, h, q)``, both fp32, with a soft cap. See ``attend``.

    The scores of ``rows`` queries are in memory at once.
    """
    key, value = _for_each_query_head(query, key, value)  # (b, h, n, e), (b, h, n, v)
    out = query.new_empty((*query.shape[:3], value.shape[-1]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for piece in _pieces(query.shape[2], key.shape[2], query.device, rows, causal=causal):
        scores, _ = _capped_scores(query, key, piece, score, bias)
        top = scores.amax(-1, keepdim=True)  # (b, h, rows, 1)
        shares = scores.sub_(top).exp_()  # (b, h, rows, keys)
        total = shares.sum(-1, keepdim=True)  # (b, h, rows, 1)
        # (b, h, rows, v)
        out[:, :, piece.rows] = shares.div_(total).to(value.dtype) @ value[:, :, piece.keys]
        lse[:, :, piece.rows] = (top + total.log()).squeeze(-1)  # (b, h, rows)
    return out, lse


def capped_attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    *,
    causal: bool,
    bias: Tensor | None,
    rows: int = _ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries ``(b, h, q, e)``, keys ``(b, k, n, e)`` and values ``(b, k, n, v)`` with a soft
    cap, fp32. See ``attend_backward``.

    The derivative of the cap is ``1 - tanh^2``. The scores of ``rows`` queries are in memory at once.
    """
    kv_heads = key.shape[1]
    keys, values = _for_each_query_head(query, key, value)  # (b, h, n, e), (b, h, n, v)
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=torch.float32) for x in (query, keys, values)
    )
    row_dots = (grad_out.float() * out.float()).sum(-1, keepdim=True)  # D: (b, h, q, 1)
    for piece in _pieces(query.shape[2], keys.shape[2], query.device, rows, causal=causal):
        upstream = grad_out[:, :, piece.rows]  # (b, h, rows, v)
        scores, tanh = _capped_scores(query, keys, piece, score, bias)
        shares = scores.sub_(lse[:, :, piece.rows].unsqueeze(-1)).exp_()  # P: (b, h, rows, keys)
        # dV = P^T grad_out: (b, h, keys, v)
        grad_value[:, :, piece.keys] += shares.to(value.dtype).transpose(-1, -2) @ upstream
        slope = (upstream @ values[:, :, piece.keys].transpose(-1, -2)).float()  # dP: (b, h, rows, keys)
        # scale dS, with dS = P * (dP - D) * (1 - tanh^2): (b, h, rows, keys)
        slope.sub_(row_dots[:, :, piece.rows]).mul_(shares).mul_(1 - tanh.square()).mul_(score.factor(query))
        narrow = slope.to(query.dtype)
        grad_query[:, :, piece.rows] = narrow @ keys[:, :, piece.keys]  # dQ = scale dS key: (b, h, rows, e)
        # dK = scale dS^T query: (b, h, keys, e)
        grad_key[:, :, piece.keys] += narrow.transpose(-1, -2) @ query[:, :, piece.rows]
    # (b, h, n, .) to (b, k, n, .): the query heads of a group share its key and value.
    grad_key, grad_value = (
        x.view(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2) for x in (grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


def _for_each_query_head(query: Tensor, *grouped: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in grouped)
