"""Attention whose scores are bent towards a cap: ``cap tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2.3).

No kernel of ``scaled_dot_product_attention`` computes this, so it is written out here, a few rows of queries at a time: the
scores of ``rows`` queries are in memory at once, forward and backward, which computes them again from the rows'
log-sum-exp as flash attention does (arXiv 2205.14135, appendix B). Scores and sums are fp32.

The same bend on the logits of the vocabulary (``soft_capped``) is one more pass over them.

Shapes as in ``phalanx.model.layers.attention.attend``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
