"""A decoder-only transformer that a newcomer can read top to bottom.

Pre-norm residual blocks with RMSNorm (arXiv 1910.07467) and rotary attention: the Llama family with grouped-query
attention and SwiGLU; with QK-norm, Qwen3; with a plain GELU layer, GPT-3's shape; with mixtures of experts, Mixtral and
Qwen3-MoE; with latent attention as well, DeepSeek-V3 and Kimi K2. The module is plain: no parallelism, no precision, no
initialization. Build it on the meta device and let ``phalanx.parallel`` shard it and ``phalanx.model.init`` fill it.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.block import Block
from phalanx.model.facts.stretching import longest_short
from phalanx.model.layers.attention.cache import Cache
from phalanx.model.layers.attention.documents import Documents
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.layers.attention.soft_cap import soft_capped
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.mtp import PredictionAhead, ReadoutAhead, tokens_ahead
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.run.spec import ModelSpec

Readout = Callable[[Tensor, Tensor], Tensor]
"""A function of the last hidden states ``(b, s, d)`` and the output projection ``(vocab, d)``."""


class Rotation(Protocol):
    """The rotary tables of positions: ``phalanx.model.layers.attention.rotary.rotation``, or what gives the same numbers."""

    def __call__(
        self, spec: ModelSpec, positions: Tensor, *, windowed: bool = False, length: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(s, rotated width)`` of ``positions`` ``(s,)``."""
        ...


def logits(hidden: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
    """The readout that gives every token's scores ``(b, s, vocab)``, with a soft cap unless that is 0."""
    return soft_capped(F.linear(hidden, weight), cap)


class OutputProjection(Linear):
    """The output projection: a module whose call spans all that is computed with its matrix, so that FSDP can gather it by itself."""

    def forward(self, x: Tensor, readout: Readout = logits) -> Tensor:
        """Whatever ``readout`` makes of the last hidden states ``(b, s, d)`` and the matrix."""
        return readout(x, self.weight)


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding whose weights PyTorch draws, but for the meta device, where it would import its compiler to draw nothing."""
    if torch.get_default_device().type != "meta":
        return nn.Embedding(rows, width)
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def rounded(number: float, dtype: torch.dtype) -> float:
    """``number`` rounded to the format of ``dtype``, as where models with scaled embeddings were trained."""
    return torch.tensor(number, dtype=dtype).item()


class Transformer(nn.Module):
    """Embedding, blocks, final norm, and the output projection that the readout applies; or a stage of a pipeline."""

    def __init__(self, spec: ModelSpec, seq_len: int = 0) -> None:
        """Builds the layers of a resolved ``spec`` on the current default device.

        ``seq_len`` is the length of the sequences that each call has a part of; 0 if a call has them from their beginning.
        """
        super().__init__()
        self.spec, self.seq_len = spec, seq_len
        self.rotation: Rotation = rotation
        self.embedding: nn.Embedding | None = _embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.layers)})
        self.norm: RMSNorm | None = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.head = None if spec.tie_embeddings else OutputProjection(spec.dim, spec.vocab_size, bias=False)
        self.mtp = nn.ModuleList(PredictionAhead(spec) for _ in range(spec.mtp_depth))

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cuts the model down to a stage of a pipeline: these layers, which keep their names.

        Only the first stage has the embedding; only the last has norm, head and predictions ahead.
        """
        self.blocks = nn.ModuleDict(
            {name: block for name, block in self.blocks.items() if int(name) in layers}
        )
        if not first:
            self.embedding = None
        if not last:
            self.norm, self.head, self.mtp = None, None, nn.ModuleList()

    def forward(
        self,
        x: Tensor,
        readout: Readout | None = None,
        *,
        positions: Tensor | None = None,
        length: int = 0,
        documents: Documents | None = None,
        cache: Sequence[Cache] | None = None,
        ahead: ReadoutAhead | None = None,
        further: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Whatever ``readout`` makes of the last hidden states; by default logits.

        The loss is a readout, because only inside this call are the projection's weights whole on a rank.

        Args:
            x: Tokens ``(b, s)``, int64, or the first layer's hidden states ``(b, s, d)``, as for a stage without embedding.
            readout: See ``Readout``. A stage without norm does not call it, but returns its hidden states.
            positions: ``(s,)``, int64, of these tokens; by default from 0, or from the end of the cache.
            length: Tokens of the whole text, where the rotation depends on it; 0 takes the last of ``positions`` for its end.
            documents: Tokens of different documents do not see each other; by default each sequence is one.
            cache: One for each layer of the whole model; ``x`` is the continuation of what they hold.
            ahead: Called for each prediction ahead. Then the result is the vector ``(1 + mtp_depth,)`` of what ``readout``
                and ``ahead`` returned (see ``phalanx.model.mtp.training_loss``); without it, none is made.
            further: For each prediction ahead, the tokens ``(b, s)`` that lie so much further in their sequences than those of
                ``x``; by default ``x`` holds them, because it has whole sequences.
        """
        if cache is not None and documents is not None:
            raise ValueError("a cache holds one document: give either a cache or documents")
        hidden = x if x.is_floating_point() else self.embedded(x)
        if positions is None:
            start = cache[0].length if cache is not None else 0
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        length = length or self._length(positions, cache)
        full, windowed = self.tables(positions, hidden.dtype, length)
        for layer, block in self.blocks.items():
            cos, sin = windowed if window_of(self.spec, int(layer)) else full
            hidden = block(hidden, cos, sin, documents, cache[int(layer)] if cache is not None else None)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        read = partial(logits, cap=self.spec.logit_cap) if readout is None else readout
        result: Tensor = read(hidden, self.projection()) if self.head is None else self.head(hidden, read)
        if ahead is None:
            return result
        last = windowed if window_of(self.spec, self.spec.layers - 1) else full
        if further is None:
            further = [tokens_ahead(x, depth) for depth in range(1, len(self.mtp) + 1)]
        predicted = self._predicted(hidden, further, *last, documents)
        weight = self.projection()
        parts = (ahead(states, weight, depth) for depth, states in enumerate(predicted, start=1))
        return torch.stack((result, *parts))

    def embedded(self, tokens: Tensor) -> Tensor:
        """The vectors ``(..., d)`` that the first layer is given for ``tokens``."""
        assert self.embedding is not None, "this stage of a pipeline has no embedding"
        vectors: Tensor = self.embedding(tokens)
        # A Python number: a tensor would be copied to a GPU from ordinary memory, for which the host waits.
        return vectors * rounded(self.spec.dim**0.5, vectors.dtype) if self.spec.scale_embeddings else vectors

    def _length(self, positions: Tensor, cache: Sequence[Cache] | None) -> int:
        """Tokens of the whole sequence, where the rotation depends on it; else 0."""
        short = longest_short(self.spec)
        if not short:
            return 0
        length = self.seq_len or int(positions.max()) + 1
        if cache is not None and 0 < cache[0].length <= short < length:
            raise ValueError(
                f"the cache holds keys of a sequence of at most {short} tokens, and those of a longer one are rotated by "
                "other factors: fill a new cache with the whole text"
            )
        return length

    def tables(
        self, positions: Tensor, dtype: torch.dtype, length: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cosines and sines of ``positions`` for layers that see all tokens, and for those with a window."""
        full = self._rotation(positions, dtype, length)
        if not self.spec.window_rope_theta:
            return full, full
        return full, self._rotation(positions, dtype, length, windowed=True)

    def _rotation(
        self, positions: Tensor, dtype: torch.dtype, length: int, *, windowed: bool = False
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotation(self.spec, positions, windowed=windowed, length=length)
        return cos.to(dtype), sin.to(dtype)

    def projection(self) -> Tensor:
        """The output projection ``(vocab, d)``."""
        if self.head is not None:
            return self.head.weight
        assert self.embedding is not None, "a tied projection needs the embedding: do not divide this model"
        return self.embedding.weight

    def _predicted(
        self,
        hidden: Tensor,
        further: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None,
    ) -> Iterator[Tensor]:
        """The hidden states of each prediction ahead, from the tokens so much ``further``."""
        for tokens, module in zip(further, self.mtp, strict=True):
            hidden = module(hidden, self.embedded(tokens), cos, sin, documents)
            yield hidden
