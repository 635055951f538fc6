"""Layers that see a token at a time, computed by fixed pieces of the sequence.

Norms, routers, the projections into latents and biases that are added after a sum are not divided. With tensor ranks each
computes them for its part of the sequence (``phalanx.parallel.tensor.sequence_comm``). With lanes the sequence is cut into as many
pieces as there are lanes, whatever rank has how many of them: each is computed by itself, and so has the same shape everywhere,
and contributes a leaf to the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from phalanx.parallel.tensor.lanes.shares import SharedParameter, in_place_of
from phalanx.parallel.tensor.tree_sums import dense


def replace_method(module: nn.Module, name: str, method: Callable[..., object]) -> None:
    """Makes ``module`` call ``method`` wherever it, or its owner, calls its method ``name``."""
    if not callable(getattr(module, name)):
        raise TypeError(f"{type(module).__name__}.{name} is no method")
    setattr(module, name, method)


class InPieces:
    """Takes the place of a module's ``forward``: computes one piece after the other, each with its share of the parameters."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        parameters: Sequence[SharedParameter],
        count: int,
        dim: int = 1,
    ) -> None:
        """Cuts the argument of ``forward`` into ``count`` pieces along ``dim``."""
        self._forward, self._count, self._dim = forward, count, dim
        self._parameters = tuple(parameters)
        self._owners = [(parameter.owner, parameter.attribute) for parameter in parameters]

    def __call__(self, x: Tensor) -> Tensor:
        """``(b, s, d)`` to ``(b, s, ...)``; whatever else has its tokens along the dimension that is cut likewise."""
        shares = zip(*(parameter.now() for parameter in self._parameters), strict=True)
        results = []
        for piece, own in zip(x.chunk(self._count, self._dim), shares, strict=True):
            with in_place_of(self._owners, own):
                results.append(dense(self._forward(dense(piece))))
        return results[0] if self._count == 1 else torch.cat(results, self._dim)
