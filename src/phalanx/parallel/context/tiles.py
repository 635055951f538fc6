"""Attention in tiles: blocks of the score matrix, whose partial results are combined by an online softmax.

A softmax over some of the keys can be corrected when more keys arrive (online softmax, Milakov and Gimelshein, arXiv 1805.02867;
FlashAttention, arXiv 2205.14135). Each row's result is kept with the logarithm of its denominator (log-sum-exp). Two results are
averaged with the weights that follow from these. Backward needs no correction: a tile's share of every gradient
follows from the complete row's result and denominator. So a method of context parallelism only defines the tiles and the source
of their keys.

The kernels are those of ``phalanx.model.layers.attention.attend``. Sinks are added to the denominators of complete rows.

Shapes: ``b`` batch, ``h`` query heads, ``k`` key/value heads, ``q`` queries, ``n`` keys, ``e`` head width, ``v`` value width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.attention.attend import (
    Score,
    attend,
    attend_backward,
    mask_bias,
    sink_gradient,
    with_sinks,
)
from phalanx.model.layers.attention.attention import Documents


@dataclass(frozen=True)
class Tile:
    """A block of the score matrix, as ranges of the sequence dimensions of queries and keys."""

    rows: slice
    columns: slice
    causal: bool = False
    """True if row ``i`` sees columns up to ``i`` only; else each row sees all columns."""

    def hidden(self, rule: MaskRule) -> bool:
        """Return True if the window hides all of the tile's keys from all of its rows."""
        rows, columns = rule.row_positions[self.rows], rule.column_positions[self.columns]
        return 0 < rule.window <= int(rows.min()) - int(columns.max())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, score: Score
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the tile's rows ``(b, h, q, v)`` and their log-sum-exp ``(b, h, q)``, in the dtypes of
        ``attend``.

        A row that sees none of the tile's keys gets a log-sum-exp so low that its result has no weight.
        """
        causal, bias = self._mask(rule, query)
        return attend(
            query[:, :, self.rows],
            key[:, :, self.columns],
            value[:, :, self.columns],
            score,
            causal=causal,
            bias=bias,
        )

    def backward(
        self,
        saved: SavedAttention,
        grad_out: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule,
        score: Score,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tile's shares in the gradients of its queries, keys and values, of the tile's rows and columns
        only. See ``attend_backward``.
        """
        causal, bias = self._mask(rule, saved.query)
        return attend_backward(
            grad_out[:, :, self.rows],
            saved.query[:, :, self.rows],
            key[:, :, self.columns],
            value[:, :, self.columns],
            saved.out[:, :, self.rows],
            saved.lse[:, :, self.rows],
            score,
            causal=causal,
            bias=bias,
        )

    def _mask(self, rule: MaskRule, query: Tensor) -> tuple[bool, Tensor | None]:
        """Return (is causal, additive mask ``(b, 1, q, n)`` or None) for the kernel. There is a mask only if the
        window reaches into the tile or there are documents; it then includes causal order.
        """
        hidden = None
        rows, columns = rule.row_positions[self.rows], rule.column_positions[self.columns]
        if 0 < rule.window <= int(rows.max()) - int(columns.min()):
            is_too_far = (rows[:, None] - columns[None, :] >= rule.window).to(query.device)  # (q, n)
            hidden = is_too_far.expand(query.shape[0], -1, -1).clone()  # (b, q, n)
        if rule.documents is not None:
            row_ids, column_ids = rule.documents
            is_other_document = row_ids[:, self.rows, None] != column_ids[:, None, self.columns]  # (b, q, n)
            hidden = is_other_document if hidden is None else hidden | is_other_document
        if hidden is None:
            return self.causal, None
        if self.causal:
            hidden |= torch.ones_like(hidden[0]).triu(1)
        return False, mask_bias(hidden, query.dtype)  # (b, 1, q, n)


@dataclass(frozen=True)
class MaskRule:
    """Mask rule beyond causal order: a sliding window, and the boundaries of documents."""

    row_positions: Tensor
    """Positions of the queries in the sequence, ``(q,)``, int64, in host memory."""
    column_positions: Tensor
    """Positions of the keys, ``(n,)``."""
    window: int = 0
    """Number of tokens that a token sees, including itself; 0 means no limit."""
    documents: tuple[Tensor, Tensor] | None = None
    """The document of each query ``(b, q)`` and of each key ``(b, n)``, int64."""


@dataclass(frozen=True)
class SavedAttention:
    """Tensors saved by forward: complete rows, independent of the tiles in which they were computed."""

    query: Tensor
    out: Tensor
    lse: Tensor


class OnlineSoftmax:
    """Attention rows ``(b, h, q, v)`` and their log-sum-exp ``(b, h, q)`` while tiles are added; fp32."""

    def __init__(self, query: Tensor, width: int) -> None:
        """Start with zero results of ``width`` elements, and a log-sum-exp of minus infinity, for the rows of ``query``."""
        batch, heads, rows, _ = query.shape
        # The heads of a token are contiguous in memory, as the projection after attention reads them.
        self.out = query.new_zeros((batch, rows, heads, width), dtype=torch.float32).transpose(
            1, 2
        )  # (b, h, q, v)
        self.lse = query.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)  # (b, h, q)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a tile's results ``(b, h, rows, v)`` with their log-sum-exp ``(b, h, rows)``.

        Changes the sums of these rows in place.
        """
        # With L the log of a row's denominator: L' = log(exp L1 + exp L2), out' = exp(L1 - L') out1 + exp(L2 - L') out2.
        before = self.lse[:, :, rows]  # (b, h, q)
        total = torch.logaddexp(before, lse)
        merged = self.out[:, :, rows]  # (b, h, q, v)
        merged.mul_((before - total).exp_().unsqueeze(-1)).add_(out * (lse - total).exp_().unsqueeze(-1))
        before.copy_(total)


def attend_tiles(
    tiles: Iterable[Tile], query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, score: Score
) -> tuple[Tensor, Tensor]:
    """Return the rows' results ``(b, h, q, v)`` and log-sum-exp ``(b, h, q)``, both fp32, merged in the order of
    ``tiles``. Tiles that the rule hides completely are skipped.
    """
    rows = OnlineSoftmax(query, value.shape[-1])
    for tile in tiles:
        if not tile.hidden(rule):
            rows.add(tile.rows, *tile.forward(query, key, value, rule, score))
    return rows.out, rows.lse


def differentiate_tiles(
    tiles: Iterable[Tile],
    saved: SavedAttention,
    grad_out: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of ``tiles``, added in this order, in the gradients of queries, keys and values; fp32.

    Tiles that the rule hides completely are skipped.
    """
    grad_query, grad_key, grad_value = (
        torch.zeros_like(tensor, dtype=torch.float32) for tensor in (saved.query, key, value)
    )
    for tile in tiles:
        if tile.hidden(rule):
            continue
        shares = tile.backward(saved, grad_out, key, value, rule, score)
        grad_query[:, :, tile.rows] += shares[0]
        grad_key[:, :, tile.columns] += shares[1]
        grad_value[:, :, tile.columns] += shares[2]
    return grad_query, grad_key, grad_value


class TileMethod(Protocol):
    """Method (ring or all-gather) that delivers key/value tiles to forward and backward of context-parallel attention.

    Queries, keys and values are this rank's; ``documents`` ``(b, s)`` cover the full sequence, or are ``None``.
    """

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows' results and log-sum-exp, both fp32."""
        ...

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values, fp32."""
        ...


class _DividedContext(FunctionContext, Protocol):
    method: TileMethod


class _DividedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _DividedContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None,
        method: TileMethod,
    ) -> Tensor:
        """Attend by ``method`` and merge ``sinks``; the result has the query's dtype. Saves inputs and log-sum-exps."""
        out, lse = with_sinks(*method.mix(query, key, value, documents), sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, sinks, out, lse)
        ctx.method = method
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _DividedContext, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks in the inputs' dtype; ``method`` communicates again."""
        query, key, value, documents, sinks, out, lse = ctx.saved_tensors
        gradients = ctx.method.differentiate(SavedAttention(query, out, lse), grad_out, key, value, documents)
        grad_query, grad_key, grad_value = (gradient.to(query.dtype) for gradient in gradients)
        return grad_query, grad_key, grad_value, None, sink_gradient(grad_out, out, lse, sinks), None


@dataclass(frozen=True)
class DividedCore:
    """Replacement for ``phalanx.model.layers.attention.attention.CausalCore`` on ranks that share a sequence."""

    method: TileMethod

    @uncompiled
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention result ``(b, h, s, v)`` of this rank's tokens. A collective of the group.

        Args:
            query, key, value: This rank's ``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)``.
            documents: Documents of the full sequence of ``s * ranks`` tokens, or ``None``.
            sinks: ``(h,)`` or ``None``.
        """
        ids = documents.ids if documents is not None else None
        return apply_function(_DividedAttention, query, key, value, ids, sinks, self.method)
