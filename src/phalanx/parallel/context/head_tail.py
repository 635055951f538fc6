"""Load balance of context ranks: each holds one piece of a sequence's head and one of its tail.

Under a causal mask the last tokens see everything and the first see nothing but themselves, so equal runs of tokens would
be unequal work. Of ``2 c`` equal pieces, rank ``r`` of ``c`` therefore takes piece ``r`` from the head and piece
``2 c - 1 - r`` from the tail: what one lacks the other has, and every rank has the same area of scores to compute. (Striped
attention, arXiv 2311.09431, balances token by token; pieces in this order, used by Llama 3, arXiv 2407.21783, section 3.3.2,
leave long runs that a kernel can work on.) Both pieces of a rank are in the order of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Size, Tensor

# Keys and values in one buffer, so that one message carries both.


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Both, flat, one after the other."""
    return torch.cat((key.flatten(), value.flatten()))


def unpack(packed: Tensor, key: Size, value: Size) -> tuple[Tensor, Tensor]:
    """Views of a packed buffer, with these shapes."""
    keys = math.prod(key)
    return packed[:keys].view(key), packed[keys:].view(value)


def context_positions(seq_len: int, context: int, rank: int) -> Tensor:
    """The positions of the tokens of rank ``rank`` of ``context``, ascending: ``(seq_len / context,)``, int64.

    Raises ``ValueError`` when the sequence has no ``2 * context`` equal pieces.
    """
    if seq_len % (2 * context):
        raise ValueError(
            f"{seq_len} tokens have no {2 * context} equal pieces for {context} context ranks: take a multiple of that"
        )
    return own_pieces(torch.arange(seq_len), context, rank, dim=0)


def own_pieces(whole: Tensor, context: int, rank: int, dim: int) -> Tensor:
    """The head and tail piece of rank ``rank`` of ``context``, of a tensor with the whole sequence in dimension ``dim``."""
    pieces = whole.chunk(2 * context, dim)
    return torch.cat((pieces[rank], pieces[-1 - rank]), dim)


def in_order(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole again, from what each rank holds, in the order of ranks."""
    heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim)
