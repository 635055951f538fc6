"""Attention with its denominators, with or without a soft cap: the kernels below ``scaled_dot_product_attention``, which keeps those to itself.

With the log-sum-exp of each row's scores a result can be corrected afterwards: by keys that other tiles hold
(``phalanx.parallel.context.tiles``), or by a sink, a learned logit of each head that takes part in the softmax's
denominator and has no value (gpt-oss, arXiv 2508.10925, section 2; "off by one" softmax is a sink of 0).

The kernels are private operators of PyTorch with stable schemas, which ``torch.export`` relies on:

- CPU: flash attention, any mask, grouped heads.
- GPU: flash attention for bf16 without a mask, grouped heads; memory-efficient attention for everything else.

Each wants queries, keys and values of one width, a multiple of 8 on a GPU; narrower ones are filled up with zeros, which
change no score and no gradient. None has a soft cap: capped scores are computed by ``capped_attend``.

Shapes: ``b`` batch, ``h`` query heads, ``k`` key/value heads, ``q`` queries, ``n`` keys, ``e`` head width, ``v`` width of a
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled

_FLASH_WIDTH = 256  # the widest head that flash attention takes on a GPU
_WIDTH_ALIGNMENT = 8
_BIAS_ALIGNMENT = 16  # elements; what memory-efficient attention asks of a mask's rows
_LSE_ALIGNMENT = 32  # rows to which memory-efficient attention fills up its denominators

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
        out, lse = with_sinks(*attend(query, key, value, score, causal=causal, bias=bias), sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.score, ctx.causal = score, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _WholeContext, grad_out: Tensor) -> tuple[Tensor | None, ...]:
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
    seen: Tensor | None = None,
) -> Tensor:
    """``attend`` of rows all of whose keys are here, with the heads' sinks: ``(b, h, q, v)``; it can be differentiated.

    Args:
        query, key, value, score, causal: See ``attend``.
        sinks: ``(h,)``, a logit for each head, or ``None``.
        seen: ``(q, n)`` or ``(b, 1, q, n)``, bool: the keys that a query sees; not together with ``causal``.
    """
    bias = None
    if seen is not None:
        hidden = ~seen if seen.ndim == 2 else ~seen[:, 0]  # (q, n) or (b, q, n)
        bias = mask_bias(hidden.expand(query.shape[0], -1, -1), query.dtype)
    return apply_function(_WholeRows, query, key, value, sinks, bias, causal, score)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results ``(b, h, q, v)`` and log-sum-exp ``(b, h, q)`` of whole rows, with ``sinks`` ``(h,)`` in their denominators."""
    if sinks is None:
        return out, lse
    # With L the log of a row's denominator and s the sink: L' = log(exp L + exp s), out' = exp(L - L') out.
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp().unsqueeze(-1), total


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient ``(h,)`` of the sinks of whole rows, whose ``out`` and ``lse`` are those of ``with_sinks``."""
    if sinks is None:
        return None
    # A sink's share of the softmax is exp(s - L'), and its value is zero: dS = P (dP - D) with dP = 0, D = rowsum(grad_out * out).
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (b, h, q)
    lost = (grad_out.float() * out.float()).sum(-1)
    return -(share * lost).sum((0, 2)).to(sinks.dtype)


def mask_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask as a bias on the scores: from ``hidden`` ``(b, q, n)`` to ``(b, 1, q, n)``.

    Finite, so that a row without any key left is a number that weighs nothing, where infinity would make it NaN.
    """
    keys = hidden.shape[-1]
    bias = hidden.new_zeros((*hidden.shape[:-1], keys + -keys % _BIAS_ALIGNMENT), dtype=dtype)[..., :keys]
    return bias.masked_fill_(hidden, torch.finfo(dtype).min / 4).unsqueeze(1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(score(query key^T) + bias) value`` ``(b, h, q, v)``, and its log-sum-exp ``(b, h, q)``, fp32.

    Args:
        query: ``(b, h, q, e)``.
        key: ``(b, k, n, e)``; ``k`` divides ``h``.
        value: ``(b, k, n, v)``.
        score: What becomes of the products of queries and keys.
        causal: True if query ``i`` sees keys up to ``i`` only.
        bias: ``(b, 1, q, n)`` of the queries' dtype, made by ``mask_bias``; not together with ``causal``.
    """
    if score.cap:
        return capped_attend(query, key, value, score, causal=causal, bias=bias)
    width, scale = value.shape[-1], score.factor(query)
    query, key, value = _widened(query, key, value)
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _takes_flash(query, bias):
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    else:
        key, value, bias = _per_query_head(query, key, value, bias)
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )[:2]
    return out[..., :width], lse[..., : query.shape[2]]


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
    """A tile's share of the gradients of queries ``(b, h, q, e)``, keys ``(b, k, n, e)`` and values ``(b, k, n, v)``.

    ``out`` ``(b, h, q, v)`` and ``lse`` ``(b, h, q)`` are those of whole rows, over the keys of all tiles. So the kernel, which
    takes its rows for whole ones, computes the tile's part of the true softmax, and the shares of all tiles simply add up
    (FlashAttention, arXiv 2205.14135, appendix B.2, with S the scores)::

        P  = exp(scale query key^T + bias - lse)      # (b, h, q, n): this tile's columns of the whole softmax
        dV = P^T grad_out
        dP = grad_out value^T
        D  = rowsum(grad_out * out)                   # (b, h, q): a property of whole rows, hence ``out``
        dS = P * (dP - D)
        dQ = scale dS key                             dK = scale dS^T query
    """
    if score.cap:
        return capped_attend_backward(grad_out, query, key, value, out, lse, score, causal=causal, bias=bias)
    widths, scale = (query.shape[-1], key.shape[-1], value.shape[-1]), score.factor(query)
    query, key, value, out, grad_out = _widened(query, key, value, out, grad_out)
    lse = lse.contiguous()
    if query.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _takes_flash(query, bias):
        seed = torch.empty(0, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
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
    kv_heads = key.shape[1]
    key, value, bias = _per_query_head(query, key, value, bias)
    # Rows that fill up a block of the kernel get a denominator of infinity, so that their P is 0.
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=torch.inf)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes a token's heads to be together
    seed = torch.empty(0, dtype=torch.int64, device=query.device)
    wanted = (True, True, True, False)
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, lse, seed, seed, 0.0, wanted, causal, scale=scale
    )
    # (b, h, n, .) to (b, k, n, .): the query heads of a group share its key and value.
    grad_key, grad_value = (
        gradient.unflatten(1, (kv_heads, -1)).sum(2) for gradient in (grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


def _takes_flash(query: Tensor, bias: Tensor | None) -> bool:
    return bias is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _FLASH_WIDTH


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pads all tensors to one aligned width with zeros."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    width = widest + -widest % _WIDTH_ALIGNMENT
    return tuple(F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors)


def _per_query_head(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias with a head for each query head."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    return key, value, None if bias is None else bias.expand(-1, heads, -1, -1)


# Attention whose scores are bent towards a cap: ``cap tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2.3).
#
# No kernel of ``scaled_dot_product_attention`` computes this, so it is written out here, a few rows of queries at a time: the
# scores of ``rows`` queries are in memory at once, forward and backward, which computes them again from the rows'
# log-sum-exp as flash attention does (arXiv 2205.14135, appendix B). Scores and sums are fp32.
#
# The same bend on the logits of the vocabulary (``soft_capped``) is one more pass over them.


_ROWS = 256  # queries whose scores are in memory at once: (b, h, _ROWS, n)


@dataclass(frozen=True)
class Score:
    """What becomes of the product of a query and a key: multiplied with a factor, and bent if there is a cap."""

    scale: float | None = None
    """The factor; ``None`` is ``1 / sqrt(e)``."""
    cap: float = 0.0
    """0 is none."""

    def factor(self, query: Tensor) -> float:
        """The factor for queries ``(..., e)``."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap tanh(x / cap)``; ``x`` itself if ``cap`` is 0."""
    return x if not cap else cap * torch.tanh(x / cap)


@dataclass(frozen=True)
class _Piece:
    """Some rows of queries with the keys that they may see."""

    rows: slice
    keys: slice
    hidden: Tensor | None
    """``(rows, keys)``, bool: what the order of tokens hides."""


def _pieces(queries: int, keys: int, device: torch.device, rows: int, *, causal: bool) -> Iterator[_Piece]:
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        if not causal:
            yield _Piece(slice(start, stop), slice(0, keys), None)
            continue
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=device).triu(start + 1)
        yield _Piece(slice(start, stop), slice(0, stop), hidden)


def _bent(
    query: Tensor, key: Tensor, piece: _Piece, score: Score, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores of a piece with mask and bias, and ``tanh``, whose square is missing from 1 in the slope: ``(b, h, rows, keys)``, fp32."""
    products = (query[:, :, piece.rows] @ key[:, :, piece.keys].transpose(-1, -2)).float()
    # In the order of operations that Gemma 2 was trained with: near the cap, rounding is an absolute error of the scores.
    # Products stay as they are: selective recomputation keeps them, and takes them for what they were.
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
    """See ``phalanx.model.layers.attention.attend.attend``: results ``(b, h, q, v)``, log-sum-exp ``(b, h, q)``, both fp32.

    The scores of ``rows`` queries are in memory at once.
    """
    key, value = _for_each_query_head(query, key, value)
    out = query.new_empty((*query.shape[:3], value.shape[-1]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for piece in _pieces(query.shape[2], key.shape[2], query.device, rows, causal=causal):
        scores, _ = _bent(query, key, piece, score, bias)
        top = scores.amax(-1, keepdim=True)
        shares = scores.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True)
        out[:, :, piece.rows] = shares.div_(total).to(value.dtype) @ value[:, :, piece.keys]
        lse[:, :, piece.rows] = (top + total.log()).squeeze(-1)
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
    """See ``phalanx.model.layers.attention.attend.attend_backward``; gradients are fp32.

    Between the scores S and the products of queries and keys lies the bend, whose slope is ``1 - tanh^2``. The scores of ``rows`` queries are in memory
    at once.
    """
    grouped = key.shape[1]
    keys, values = _for_each_query_head(query, key, value)
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=torch.float32) for x in (query, keys, values)
    )
    lost = (grad_out.float() * out.float()).sum(-1, keepdim=True)  # D: (b, h, q, 1)
    for piece in _pieces(query.shape[2], keys.shape[2], query.device, rows, causal=causal):
        upstream = grad_out[:, :, piece.rows]
        scores, tanh = _bent(query, keys, piece, score, bias)
        shares = scores.sub_(lse[:, :, piece.rows].unsqueeze(-1)).exp_()  # P
        grad_value[:, :, piece.keys] += shares.to(value.dtype).transpose(-1, -2) @ upstream
        slope = (upstream @ values[:, :, piece.keys].transpose(-1, -2)).float()  # dP
        slope.sub_(lost[:, :, piece.rows]).mul_(shares).mul_(1 - tanh.square()).mul_(score.factor(query))
        narrow = slope.to(query.dtype)
        grad_query[:, :, piece.rows] = narrow @ keys[:, :, piece.keys]
        grad_key[:, :, piece.keys] += narrow.transpose(-1, -2) @ query[:, :, piece.rows]
    # (b, h, n, .) to (b, k, n, .): the query heads of a group share its key and value.
    grad_key, grad_value = (
        x.view(x.shape[0], grouped, -1, *x.shape[2:]).sum(2) for x in (grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


def _for_each_query_head(query: Tensor, *grouped: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in grouped)
