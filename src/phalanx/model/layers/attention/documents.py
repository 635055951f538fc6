"""Attention that keeps to the documents of packed sequences, one document after the other.

A mask over whole sequences would cost more than it saves: ``s * s`` bytes a sequence, the scores of every pair of tokens, and no flash
kernel, since those take no mask. Here each document is a sequence of its own to the causal kernel, so that the work is the sum of the
squares of the documents' lengths. The lengths are numbers on the host: a kernel is launched for each, and nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.model.autograd import uncompiled


@dataclass(eq=False)
class Documents:
    """The documents of a batch of packed sequences; tokens of different documents do not see each other. Nobody changes one.

    It is not frozen, since Dynamo of PyTorch 2.11 looks into every field of a frozen dataclass (``FrozenDataClassVariable``) and compiles a
    block anew for each number of ``lengths``; of other objects it looks at what is read.
    """

    ids: Tensor
    """``(b, s)``, int64: the number of each token's document, the same for neighbors of one document and no others."""
    lengths: tuple[int, ...]
    """Tokens of each document, sequence after sequence: they add up to ``b * s``."""

    @classmethod
    def numbered(cls, ids: Tensor) -> Self:
        """Counts the lengths of the documents of ``ids`` ``(b, s)``, which should lie on the host: others are waited for."""
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = first.flatten().nonzero().flatten()
        ends = torch.cat((starts[1:], starts.new_full((1,), ids.numel())))
        return cls(ids, tuple((ends - starts).tolist()))

    def to(self, device: torch.device) -> Self:
        """The same documents, with their numbers on ``device``."""
        return type(self)(brought(self.ids, device), self.lengths)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of ``(1, h, n, e)``, ``(1, k, n, e)`` and ``(1, k, n, v)`` to ``(1, h, n, v)``."""


@uncompiled
def attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, attend: Attend
) -> Tensor:
    """``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)`` to ``(b, h, s, v)``: ``attend`` for each document by itself.

    A compiler would make another program for every batch, so it leaves this function as it is.
    """
    batch, _, seq, _ = query.shape
    # Documents lie behind each other in (b s, heads, width). The backward pass of split is one concatenation.
    lengths = list(documents.lengths)
    pieces = (torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (query, key, value))
    mixed = [
        attend(*(piece.transpose(0, 1).unsqueeze(0) for piece in document)).squeeze(0).transpose(0, 1)
        for document in zip(*pieces, strict=True)
    ]
    together = torch.cat(mixed)  # (b s, h, v)
    return together.view(batch, seq, *together.shape[1:]).transpose(1, 2)
