"""A decoder-only transformer that reads top to bottom: one layer, multi-token prediction, and the model.

Pre-norm residual blocks with RMSNorm (arXiv 1910.07467) and rotary attention: the Llama family with grouped-query attention and
SwiGLU; with QK-norm, Qwen3; with a plain GELU layer, GPT-3's shape; with mixtures of experts, Mixtral and Qwen3-MoE; with latent
attention as well, DeepSeek-V3 and Kimi K2. The module has no parallelism, precision or initialization. Build it on the meta device;
``phalanx.parallel`` shards it and ``phalanx.model.init`` fills it.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.facts.shape import longest_short
from phalanx.model.layers.attention.attend import soft_capped
from phalanx.model.layers.attention.attention import Attention, Cache, Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.layers.dense import FeedForward, Linear, RMSNorm
from phalanx.model.layers.moe import MoE
from phalanx.run.kinds import grouped_attention, latent_attention
from phalanx.run.kinds.attention import AttentionKind, attention_kind
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.run.spec import ModelSpec

# One layer: attention and feed-forward, each normalized before or after and added to the residual stream.

_ATTENTION: Mapping[AttentionKind, Callable[[ModelSpec, int], Attention | MlaAttention]] = {
    grouped_attention: Attention,
    latent_attention: MlaAttention,
}


class Block(nn.Module):
    """Layer ``layer`` of a resolved model, counted from 0."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        """Build attention and feed-forward layer of the kinds that ``spec`` has at ``layer``, from 0, with norms
        before them, after them or both, as ``norm_placement`` states.
        """
        super().__init__()
        before, after = spec.norm_placement != "after", spec.norm_placement != "before"
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if before else None
        self.attention = _ATTENTION[attention_kind(spec)](spec, layer)
        self.attention_post_norm = (
            RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if after else None
        )
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if before else None
        mixture = spec.moe is not None and is_mixture(spec, layer)
        self.ffn = MoE(spec, spec.moe) if mixture and spec.moe else FeedForward(spec, spec.ffn_dim)
        self.ffn_post_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if after else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return hidden states ``(b, s, d)`` plus the results of attention, then of the feed-forward layer. New keys
        and values are added to ``cache``, if given.
        """
        mixed = self.attention(_normed(x, self.attention_norm), cos, sin, documents, cache)
        x = x + _normed(mixed, self.attention_post_norm)
        return x + _normed(self.ffn(_normed(x, self.ffn_norm)), self.ffn_post_norm)


def _normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Return ``norm`` of ``x``, or ``x`` without a norm."""
    if norm is None:
        return x
    normalized: Tensor = norm(x)
    return normalized


# Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that each predict one token further ahead.
#
# The module of depth 1 takes the last hidden state of each token and the embedding of the next token, and predicts the token after
# that. Depth 2 takes depth 1's hidden states, and so on. Embedding and output projection are those of the main model. The layers improve
# the hidden states in training; serving drafts tokens with them (``phalanx_serve.engine.drafts``).
#
# A sequence keeps its length at every depth, so that shapes still fit the layout. The last ``depth`` positions have no token that far
# ahead. They get an arbitrary one, and their targets are ignored. Attention is causal, so they affect no other position.
#
# As in DeepSeek's published weights, hidden states are normalized before the projection, and the projection's first half is for the
# embedding.

ReadoutAhead = Callable[[Tensor, Tensor, int], Tensor]
"""Function of the hidden states ``(b, s, d)`` of a depth, the output projection ``(vocab, d)`` and the depth, from 1."""


class PredictionAhead(nn.Module):
    """Prediction of one depth. Its block is of the same kind as the model's last block."""

    def __init__(self, spec: ModelSpec) -> None:
        """Build both input norms, the projection from ``2 d`` to ``d``, a block like the last layer's, and the final norm."""
        super().__init__()
        self.hidden_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.embedding_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.projection = Linear(2 * spec.dim, spec.dim, bias=False)
        self.block = Block(spec, spec.layers - 1)
        self.norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return normalized hidden states ``(b, s, d)``, from those of the previous depth and the ``embedded`` tokens
        further ahead, ``(b, s, d)`` each.

        With a cache, both continue the cached tokens.
        """
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)  # (b, s, 2 d)
        ahead: Tensor = self.norm(self.block(self.projection(joined), cos, sin, documents, cache))
        return ahead


def tokens_ahead(tokens: Tensor, depth: int) -> Tensor:
    """Return for each of ``tokens`` ``(b, s)`` the token ``depth`` positions later; the last ``depth`` are arbitrary."""
    return tokens.roll(-depth, dims=1)


def targets_ahead(targets: Tensor, depth: int, ignored: int, ends: Tensor | None = None) -> Tensor:
    """Return the targets ``(b, s)`` of a depth, from those of the main model: moved by ``depth`` positions; the last
    ``depth`` are ``ignored``.

    ``ends`` ``(b, s)``, bool, marks tokens that end a document. With it, targets beyond an end, in another document,
    are ignored too. (The main model already ignores the target right after an end.)
    """
    ahead = tokens_ahead(targets, depth)
    ahead[:, targets.shape[1] - depth :] = ignored
    if ends is not None:
        for nearer in range(depth):
            ahead = ahead.masked_fill(tokens_ahead(ends, nearer), ignored)
    return ahead


def training_loss(parts: Tensor, spec: ModelSpec) -> Tensor:
    """Return the training loss, 0-dim: the main loss plus ``mtp_loss`` times the mean of those of predictions ahead.

    ``parts`` is the result of ``Transformer``: 0-dim without predictions ahead, else ``(1 + depths,)``.
    """
    return parts if parts.ndim == 0 else parts[0] + spec.mtp_loss * parts[1:].mean()


Readout = Callable[[Tensor, Tensor], Tensor]
"""Function of the last hidden states ``(b, s, d)`` and the output projection ``(vocab, d)``."""


class RotaryTables(Protocol):
    """Function that returns rotary tables: ``phalanx.model.layers.attention.rotary.rotation``, or one with the same results."""

    def __call__(
        self, spec: ModelSpec, positions: Tensor, *, windowed: bool = False, length: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``(s, rotated width)`` of ``positions`` ``(s,)``."""
        ...


def logits(hidden: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
    """Readout that returns every token's scores ``(b, s, vocab)``, with a soft cap unless that is 0."""
    return soft_capped(F.linear(hidden, weight), cap)


class OutputProjection(Linear):
    """Output projection. Its call spans all computation with its matrix, so that FSDP can gather it as a separate unit."""

    def forward(self, x: Tensor, readout: Readout = logits) -> Tensor:
        """Return ``readout`` of the last hidden states ``(b, s, d)`` and the matrix."""
        return readout(x, self.weight)


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Build an embedding. On the meta device pass empty weights: PyTorch would import its compiler to draw random ones."""
    if torch.get_default_device().type != "meta":
        return nn.Embedding(rows, width)
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return ``number`` rounded to ``dtype``, as in the training of models with scaled embeddings."""
    return torch.tensor(number, dtype=dtype).item()


class Transformer(nn.Module):
    """Embedding, blocks, final norm, and the output projection that the readout applies; or a stage of a pipeline."""

    def __init__(self, spec: ModelSpec, seq_len: int = 0) -> None:
        """Build the layers of a resolved ``spec`` on the current default device. ``phalanx.model.init`` fills the weights.

        ``seq_len`` is the length of the full sequences if each call has a part of them; 0 if a call has them from their beginning.
        """
        super().__init__()
        self.spec, self.seq_len = spec, seq_len
        self.rotation: RotaryTables = rotation
        self.embedding: nn.Embedding | None = _embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.layers)})
        self.norm: RMSNorm | None = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.head = None if spec.tie_embeddings else OutputProjection(spec.dim, spec.vocab_size, bias=False)
        self.mtp = nn.ModuleList(PredictionAhead(spec) for _ in range(spec.mtp_depth))

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Reduce the model to a stage of a pipeline: these layers, which keep their names.

        Only the first stage has the embedding; only the last has norm, head and predictions ahead. Changes the model in
        place.
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
        """Return ``readout`` of the last hidden states; by default logits.

        The loss is a readout, because a rank has the full projection weights only inside this call. New tokens are
        added to ``cache``. Raises ``ValueError`` for both a cache and documents, or if the cache
        has keys that were rotated for a shorter text.

        Args:
            x: Tokens ``(b, s)``, int64, or the first layer's hidden states ``(b, s, d)``, as for a stage without embedding.
            readout: See ``Readout``. A stage without norm does not call it, but returns its hidden states.
            positions: ``(s,)``, int64, of these tokens; by default from 0, or from the end of the cache.
            length: Tokens of the full text, if the rotation depends on it; 0 means that it ends at the last of ``positions``.
            documents: Tokens of different documents do not see each other; by default each sequence is one.
            cache: One for each layer of the full model; ``x`` continues the cached tokens.
            ahead: Called for each prediction ahead. Then the result is the vector ``(1 + mtp_depth,)`` of the results of ``readout``
                and ``ahead`` (see ``training_loss``). Without it, there are no predictions ahead.
            further: For each prediction ahead, the tokens ``(b, s)`` that many positions after those of ``x``; by default taken
                from ``x``, which then must have full sequences.
        """
        if cache is not None and documents is not None:
            raise ValueError("a cache holds one document: give either a cache or documents")
        hidden = x if x.is_floating_point() else self.embedded(x)  # (b, s, d)
        if positions is None:
            start = cache[0].length if cache is not None else 0
            positions = torch.arange(start, start + x.shape[1], device=x.device)  # (s,)
        length = length or self._length(positions, cache)
        full, windowed = self.tables(positions, hidden.dtype, length)
        for layer, block in self.blocks.items():
            cos, sin = windowed if window_of(self.spec, int(layer)) else full
            hidden = block(hidden, cos, sin, documents, cache[int(layer)] if cache is not None else None)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        apply_readout = partial(logits, cap=self.spec.logit_cap) if readout is None else readout
        result: Tensor = (
            apply_readout(hidden, self.projection())
            if self.head is None
            else self.head(hidden, apply_readout)
        )
        if ahead is None:
            return result
        last_tables = windowed if window_of(self.spec, self.spec.layers - 1) else full
        if further is None:
            further = [tokens_ahead(x, depth) for depth in range(1, len(self.mtp) + 1)]
        predicted = self._predicted(hidden, further, *last_tables, documents)
        weight = self.projection()
        parts = (ahead(states, weight, depth) for depth, states in enumerate(predicted, start=1))
        return torch.stack((result, *parts))  # (1 + mtp_depth,)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the input vectors ``(..., d)`` of the first layer for ``tokens`` ``(...)``; times sqrt(d), rounded
        to their dtype, with ``scale_embeddings``.
        """
        assert self.embedding is not None, "this stage of a pipeline has no embedding"
        vectors: Tensor = self.embedding(tokens)
        if not self.spec.scale_embeddings:
            return vectors
        # A Python number: a tensor would be copied to the GPU from pageable memory, and the host would wait.
        return vectors * rounded(math.sqrt(self.spec.dim), vectors.dtype)

    def _length(self, positions: Tensor, cache: Sequence[Cache] | None) -> int:
        """Return the number of tokens in the full sequence if the rotation depends on it; else 0.

        Raises ``ValueError`` if the cache has keys that were rotated for a shorter one.
        """
        short = longest_short(self.spec)
        if not short:
            return 0
        length = self.seq_len or int(positions.max()) + 1
        if cache is not None and 0 < cache[0].length <= short < length:
            raise ValueError(
                f"the cache has keys of a sequence of at most {short} tokens, and those of a longer one are rotated by "
                "other factors: fill a new cache with the full text"
            )
        return length

    def tables(
        self, positions: Tensor, dtype: torch.dtype, length: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return cosines and sines, each ``(s, rotated elements)``, of ``positions`` for layers with full attention,
        and for those with a window: the same unless the window has its own theta.
        """
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
        """Return the output projection ``(vocab, d)``: the head's weight, or the embedding's if tied."""
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
        """Yield the hidden states ``(b, s, d)`` of each prediction ahead, each computed from the previous ones and
        its entry ``(b, s)`` of ``further``.
        """
        for tokens, module in zip(further, self.mtp, strict=True):
            hidden = module(hidden, self.embedded(tokens), cos, sin, documents)
            yield hidden
