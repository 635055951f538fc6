"""Attention in tiles: blocks of the score matrix, whose partial results are combined by an online softmax.

A softmax over keys that are not all there can be corrected when more come: with each row's result one keeps the logarithm
of its denominator (log-sum-exp), and two results are averaged with the weights that these give (online softmax, Milakov and
Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). Backward needs no correction: a tile's share of every
gradient follows from the whole row's result and denominator. So whoever divides a sequence over ranks only says which tiles
there are and where their keys come from.

The kernels are PyTorch's own, below ``scaled_dot_product_attention``, because that keeps the denominators to itself. They
are private operators with stable schemas, which ``torch.export`` relies on:

- CPU: flash attention, any mask, grouped heads.
- GPU: flash attention for bf16 without a mask, grouped heads; memory-efficient attention for everything else.

Each wants queries, keys and values of one width, a multiple of 8 on a GPU; narrower ones are filled up with zeros, which
change no score and no gradient.

Shapes: ``b`` batch, ``h`` query heads, ``k`` key/value heads, ``q`` queries, ``n`` keys, ``e`` head width, ``v`` width of a
value.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Tile:
    """A block of the score matrix, as ranges of the sequence dimensions of queries and keys."""

    rows: slice
    columns: slice
    causal: bool = False
    """True if row ``i`` sees columns up to ``i`` only; else it sees all."""

    def hidden(self, sight: Sight) -> bool:
        """True if the window hides all of the tile's keys from all of its rows."""
        rows, columns = sight.row_positions[self.rows], sight.column_positions[self.columns]
        return 0 < sight.window <= int(rows.min()) - int(columns.max())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Results of the tile's rows ``(b, h, q, v)`` and their log-sum-exp ``(b, h, q)``, fp32.

        A row that sees none of the tile's keys has a log-sum-exp so low that its result weighs nothing.
        """
        causal, bias = self._mask(sight, query)
        return attend(
            query[:, :, self.rows],
            key[:, :, self.columns],
            value[:, :, self.columns],
            scale,
            causal=causal,
            bias=bias,
        )

    def backward(
        self,
        saved: SavedAttention,
        grad_out: Tensor,
        key: Tensor,
        value: Tensor,
        sight: Sight,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of the gradients of its queries, its keys and its values."""
        causal, bias = self._mask(sight, saved.query)
        return attend_backward(
            grad_out[:, :, self.rows],
            saved.query[:, :, self.rows],
            key[:, :, self.columns],
            value[:, :, self.columns],
            saved.out[:, :, self.rows],
            saved.lse[:, :, self.rows],
            scale,
            causal=causal,
            bias=bias,
        )

    def _mask(self, sight: Sight, query: Tensor) -> tuple[bool, Tensor | None]:
        hidden = None
        rows, columns = sight.row_positions[self.rows], sight.column_positions[self.columns]
        if 0 < sight.window <= int(rows.max()) - int(columns.min()):
            far = (rows[:, None] - columns[None, :] >= sight.window).to(query.device)
            hidden = far.expand(query.shape[0], -1, -1).clone()
        if sight.documents is not None:
            of_rows, of_columns = sight.documents
            other = of_rows[:, self.rows, None] != of_columns[:, None, self.columns]
            hidden = other if hidden is None else hidden | other
        if hidden is None:
            return self.causal, None
        if self.causal:
            hidden |= torch.ones_like(hidden[0]).triu(1)
        return False, _bias(hidden, query.dtype)


@dataclass(frozen=True)
class Sight:
    """The rule that hides keys at hand from queries at hand, beside their order: a sliding window, and the ends of documents."""

    row_positions: Tensor
    """Positions of the queries in the sequence, ``(q,)``, int64, in the host's memory."""
    column_positions: Tensor
    """Positions of the keys, ``(n,)``."""
    window: int = 0
    """Tokens that a token sees, itself among them; 0 is no limit."""
    documents: tuple[Tensor, Tensor] | None = None
    """The document of each query ``(b, q)`` and of each key ``(b, n)``, int64."""


@dataclass(frozen=True)
class SavedAttention:
    """The saved tensors of forward: whole rows, whatever tiles they were computed in."""

    query: Tensor
    out: Tensor
    lse: Tensor


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask as a bias on the scores: from ``hidden`` ``(b, q, n)`` to ``(b, 1, q, n)``.

    Finite, so that a row without any key left is a number that weighs nothing, where infinity would make it NaN.
    """
    keys = hidden.shape[-1]
    bias = hidden.new_zeros((*hidden.shape[:-1], keys + -keys % _BIAS_ALIGNMENT), dtype=dtype)[..., :keys]
    return bias.masked_fill_(hidden, torch.finfo(dtype).min / 4).unsqueeze(1)


class OnlineSoftmax:
    """Rows of attention ``(b, h, q, v)`` and their log-sum-exp ``(b, h, q)`` while tiles are added; fp32."""

    def __init__(self, query: Tensor, width: int) -> None:
        batch, heads, rows, _ = query.shape
        # In memory the heads of a token are together, as the projection after attention reads them.
        self.out = query.new_zeros((batch, rows, heads, width), dtype=torch.float32).transpose(1, 2)
        self.lse = query.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Adds a tile's results ``(b, h, rows, v)`` with their log-sum-exp ``(b, h, rows)``."""
        # With L the log of a row's denominator: L' = log(exp L1 + exp L2), out' = exp(L1 - L') out1 + exp(L2 - L') out2.
        before = self.lse[:, :, rows]  # (b, h, q)
        total = torch.logaddexp(before, lse)
        whole = self.out[:, :, rows]  # (b, h, q, v)
        whole.mul_((before - total).exp_().unsqueeze(-1)).add_(out * (lse - total).exp_().unsqueeze(-1))
        before.copy_(total)


class TileMethod(Protocol):
    """Strategy (ring or all-gather) that delivers key/value tiles to forward and backward of context-parallel attention.

    Queries, keys and values are this rank's; ``documents`` ``(b, s)`` is the whole sequence's or ``None``.
    """

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rows' results and log-sum-exp, both fp32."""
        ...

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of this rank's queries, keys and values, fp32."""
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
        method: TileMethod,
    ) -> Tensor:
        out, lse = method.mix(query, key, value, documents)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, out, lse)
        ctx.method = method
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _DividedContext, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, documents, out, lse = ctx.saved_tensors
        gradients = ctx.method.differentiate(SavedAttention(query, out, lse), grad_out, key, value, documents)
        grad_query, grad_key, grad_value = (gradient.to(query.dtype) for gradient in gradients)
        return grad_query, grad_key, grad_value, None, None


@dataclass(frozen=True)
class DividedCore:
    """Takes the place of ``phalanx.model.layers.attention.CausalCore`` on ranks that share a sequence."""

    method: TileMethod

    @uncompiled
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """This rank's ``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)``, and the documents of the whole sequence
        ``(b, s * ranks)`` or ``None``, to ``(b, h, s, v)``. On all ranks of the group together."""
        return apply_function(_DividedAttention, query, key, value, documents, self.method)


def score_scale(given: float | None, query: Tensor) -> float:
    """The factor of attention's scores: ``given``, or one over the root of the heads' width."""
    return query.shape[-1] ** -0.5 if given is None else given


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale query key^T + bias) value`` ``(b, h, q, v)``, and its log-sum-exp ``(b, h, q)``, fp32.

    Args:
        query: ``(b, h, q, e)``.
        key: ``(b, k, n, e)``; ``k`` divides ``h``.
        value: ``(b, k, n, v)``.
        scale: What the products of queries and keys are multiplied with.
        causal: True if query ``i`` sees keys up to ``i`` only.
        bias: ``(b, 1, q, n)`` of the queries' dtype, made by ``Tile``; not together with ``causal``.
    """
    width = value.shape[-1]
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
    scale: float,
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
    widths = query.shape[-1], key.shape[-1], value.shape[-1]
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
