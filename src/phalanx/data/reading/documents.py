"""Which document each token of a packed sequence belongs to.

Samples are cut from documents that are joined end to end, each closed by the tokenizer's end-of-document token (``phalanx.data.preparing.prepare``;
some tokenizers begin each with a token too), and by nothing else: no text yields that token. So a sample needs no table of its documents:
they can be counted. A sample may begin amid one, and all that matters to attention is which tokens have the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(tokens: Tensor, end_of_document: int) -> Tensor:
    """The number, from 0, of each token's document in its sequence: ``(b, s)``, int64, for tokens ``(b, s)``.

    The token that ends a document belongs to it, and so do further ones behind it: the padding of a record, or documents without text. Each
    as a document of its own would be a kernel of its own to attention, thousands for a record of padding.
    """
    ends = tokens == end_of_document
    begins = torch.zeros_like(tokens)
    begins[..., 1:] = ends[..., :-1] & ~ends[..., 1:]
    return begins.cumsum(-1)
