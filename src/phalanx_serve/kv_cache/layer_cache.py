"""A layer's cache of keys and values in one step: spans of rows that the model computes together, and the attention of each to its own text.

A query reads the keys up to its own position. Exact attention adds over them in an order that counts from the text's first key
(``phalanx.hardware.portable``), so it has the bits that a whole sequence gives it in training. A layer with a window counts from the first
key of the trainer's block, of which training computes one after the other (``phalanx.model.layers.attention.attention.windowed_attention``).

Fast numerics absorb latent attention's matrix where that is less work, exact ones where training does (``phalanx.model.layers.attention.mla``).
All heads then have the same keys, and the few queries of a step that decodes are as many of one head.

A text's first piece and each single row need no mask. FlashAttention on a GPU takes none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.model.layers.attention.attention import CausalCore, Core, Expand
from phalanx.model.layers.attention.mla import LatentExpansion, attend_together, latents_as_keys
from phalanx_serve.kv_cache.memory import KVFormat, RowSpan

TOGETHER = 768
"""Number of queries of all heads from which a kernel computes head by head."""
_CHAIN = 256
"""Keys of a chain of portable attention: of keys that weigh nothing, so many can be left out without a change of a bit."""


@dataclass(frozen=True)
class Rule:
    """Numerics of attention, and the storage format of keys and values."""

    exact: bool
    kept: KVFormat | None = None
    """``None`` is the format of the computation."""


class SpanAttention(Protocol):
    """Attention of several texts at once, on a GPU: for the spans of one step."""

    def takes(self, span: RowSpan) -> bool:
        """Return True for spans that ``attend`` computes."""
        ...

    def store(self, layer: int, core: CausalCore, key: Tensor, value: Tensor) -> None:
        """Store new keys and values ``(1, k, rows, .)`` of all spans in their texts."""
        ...

    def attend(self, layer: int, core: CausalCore, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Return ``(1, h, rows, width)``: the attention of queries ``(1, h, rows, width)`` to stored keys, for the spans that it takes.

        Other rows are not initialized.
        """
        ...


class LayerKVCache:
    """A layer's ``phalanx.model.layers.attention.attention.Cache`` for the spans of a step."""

    length = 0

    @property
    def takes_any_form(self) -> bool:
        """See ``Cache``: which form takes fewer operations depends on the rows of a step and on what is behind them."""
        return not self._rule.exact

    def __init__(
        self,
        layer: int,
        spans: Sequence[RowSpan],
        rule: Rule,
        masks: dict[tuple[int, ...], Tensor],
        batched: SpanAttention | None = None,
    ) -> None:
        """Cache ``spans`` in ``layer``. ``masks`` and ``batched`` are the step's, of all layers; without ``batched``, texts are attended one
        by one.
        """
        self._layer, self._spans, self._rule, self._masks = layer, spans, rule, masks
        self._batched = batched

    def mix(
        self,
        core: Core,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """Attend for the rows ``(1, heads, rows, width)`` of several texts, each to its own cached tokens.

        Stores the new keys and values (rounded if a narrow format keeps them) in the spans, and returns the mixed
        values ``(1, heads, rows, width)``. ``sinks`` None has none; ``expand`` makes keys and values of cached
        latents, None takes them as they are.
        """
        assert isinstance(core, CausalCore), "the engine refuses others"
        self._store(core, key, value)
        if self._batched is None or expand is not None:
            parts = [
                self._attend(core, query[:, :, rows], span, sinks, expand) for span, rows in self._rows()
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 2)  # (1, heads, rows, width)
        mixed = self._batched.attend(self._layer, core, query, sinks)
        for span, rows in self._rows():
            if not self._batched.takes(span):
                mixed[:, :, rows] = self._attend(core, query[:, :, rows], span, sinks, expand)
        return mixed

    def _rows(self) -> Iterator[tuple[RowSpan, slice]]:
        """Yield the spans with their rows in the step."""
        row = 0
        for span in self._spans:
            rows = slice(row, row + span.end - span.begin)
            row = rows.stop
            yield span, rows

    def _store(self, core: CausalCore, key: Tensor, value: Tensor) -> None:
        """Store new keys and values ``(1, k, rows, .)``, rounded if a narrow format keeps them."""
        kept = self._rule.kept
        if self._batched is not None:
            if kept is not None:
                key, value = kept.rounded(0, key), kept.rounded(1, value)
            self._batched.store(self._layer, core, key, value)
            return
        for span, rows in self._rows():
            for part, (cached, new) in enumerate(
                zip(span.kv.layers[self._layer], (key[0, :, rows], value[0, :, rows]), strict=True)
            ):
                cached[:, span.begin : span.end] = new if kept is None else kept.rounded(part, new)

    def _attend(
        self,
        core: CausalCore,
        query: Tensor,
        span: RowSpan,
        sinks: Tensor | None,
        expand: Expand | None,
    ) -> Tensor:
        """Return the mixed values ``(1, heads, q, width)`` of a span's queries over its cached keys.

        Exact numerics cut windowed queries at the trainer's blocks. Latents are absorbed or expanded by the rule that
        ``expand`` prescribes.
        """
        rule, window, heads, device = self._rule, core.window, query.shape[1], query.device
        borders = (
            range(span.begin + window - span.begin % window, span.end, window)
            if rule.exact and window
            else ()
        )
        cached = span.kv.layers[self._layer]  # (heads, capacity, width) each
        parts = []
        for begin, end in itertools.pairwise((span.begin, *borders, span.end)):
            first = self._first_key(core, begin)
            keys, values = (tensor[:, first:end].unsqueeze(0) for tensor in cached)  # (1, heads, n, width)
            queries = query[:, :, begin - span.begin : end - span.begin]  # (1, heads, q, width)
            together = heads * (end - begin) < TOGETHER
            # A single query without a mask sees all of these keys.
            sees_all = end - begin == 1 and not 0 < window < end - first
            is_causal = begin == first and not 0 < window < end - first
            if expand is latents_as_keys and together:
                mask = None if sees_all else self._mask_of_heads(heads, begin, end, device)
                softmax = core.softmax(None, causal=False)
                parts.append(attend_together(queries, *expand(keys, values), mask, softmax))
                continue
            if (
                isinstance(expand, LatentExpansion)
                and not rule.exact
                and expand.absorbs(end - begin, end - first)
            ):
                mask = (
                    self._mask_of_heads(heads, begin, end, device)
                    if together
                    else self._mask(begin, end, first, 0, device)
                )
                parts.append(expand.absorbed(queries, keys, values, mask))
                continue
            if expand is not None:
                keys, values = expand(keys, values)
            mask = None if sees_all or is_causal else self._mask(begin, end, first, window, device)
            parts.append(core.softmax(sinks, causal=is_causal)(queries, keys, values, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)  # (1, heads, q, width)

    def _first_key(self, core: CausalCore, begin: int) -> int:
        """Return the first key that is read for queries from ``begin`` on: 0 without a window, else the first visible
        one.

        Exact numerics read from the trainer's block on, or from so many keys earlier that sums are in its order.
        """
        window = core.window
        if not window:
            return 0
        visible_keys = max(0, begin - window + 1)
        if not self._rule.exact:
            return visible_keys
        # The trainer's block of queries reads its own block of keys and the one before.
        block = max(0, begin // window - 1) * window
        # Capped scores are summed in longer pieces, which would begin elsewhere.
        return block if core.score.cap else visible_keys - (visible_keys - block) % _CHAIN

    def _mask_of_heads(self, heads: int, begin: int, end: int, device: torch.device) -> Tensor:
        """Return the mask ``(heads rows, end)`` of all keys for the queries ``begin`` to ``end`` of each head.

        It is built again in each layer: the masks of all texts of a step would take more memory than their keys.
        """
        return self._mask(begin, end, 0, 0, device).repeat(heads, 1)

    def _mask(self, begin: int, end: int, first: int, window: int, device: torch.device) -> Tensor:
        """Return the mask ``(q, n)`` of the keys ``first`` to ``end`` for the queries ``begin`` to ``end``, True
        where a key is visible.

        A key is visible to its own and later queries, at most ``window`` of them; 0 sets no limit. Each mask is made
        once a step and kept.
        """
        name = (begin, end, first, window)
        if name not in self._masks:
            queries = torch.arange(begin, end, device=device)[:, None]  # (q, 1)
            keys = torch.arange(first, end, device=device)  # (n,)
            visible = keys <= queries  # (q, n)
            self._masks[name] = visible & (keys > queries - window) if window else visible
        return self._masks[name]
