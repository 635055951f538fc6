"""A layer's KV cache in one step: spans of rows that the model computes together, and the attention of each to its own text.

A query reads the keys up to its own position. Exact attention adds over them in an order that counts from the text's first key (``phalanx.hardware.portable``),
so it has the bits that a whole sequence gives it in training. A layer with a window counts from the first key of the trainer's block, of which training
computes one after the other (``phalanx.model.layers.attention.attention.windowed_attention``).

Fast numerics absorb latent attention's matrix where that is less work, exact ones where training does (``phalanx.model.layers.attention.mla``). All
heads then have the same keys, and the few queries of a step that decodes are as many of one head.

A text's first piece and each single row need no mask. FlashAttention on a GPU takes none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.layers.attention.attention import CausalCore, Expand, Mixing
from phalanx.model.layers.attention.mla import LatentExpansion, attend_together, latents_as_keys
from phalanx_serve.kv_cache.memory import KVFormat, TextKV

TOGETHER = 768
"""Number of queries of all heads from which a kernel computes head by head."""
_CHAIN = 256
"""Keys of a chain of portable attention: of keys that weigh nothing, so many can be left out without a change of a bit."""


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of one text in a step, from token ``begin`` up to ``end``."""

    kv: TextKV
    begin: int
    end: int


@dataclass(frozen=True)
class Rule:
    """Numerics of attention, and the storage format of keys and values."""

    exact: bool
    kept: KVFormat | None = None
    """``None`` is the format of the computation."""


class LayerKVCache:
    """A layer's ``phalanx.model.layers.attention.attention.Cache`` for the spans of a step."""

    length = 0

    @property
    def takes_any_form(self) -> bool:
        """See ``Cache``: which form takes fewer operations depends on the rows of a step and on what is behind them."""
        return not self._rule.exact

    def __init__(
        self, layer: int, spans: Sequence[RowSpan], rule: Rule, masks: dict[tuple[int, ...], Tensor]
    ) -> None:
        self._layer, self._spans, self._rule, self._masks = layer, spans, rule, masks

    def mix(
        self,
        core: Mixing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """Attend for the rows ``(1, heads, rows, width)`` of several texts, each to its own cached tokens.

        Stores the new keys and values (rounded if a narrow format keeps them), and returns the mixed values ``(1,
        heads, rows, width)``.
        """
        assert isinstance(core, CausalCore), "the engine refuses others"
        mixed: list[Tensor] = []
        row = 0
        for span in self._spans:
            rows = slice(row, row + span.end - span.begin)
            row = rows.stop
            keys, values = span.kv.layers[self._layer]
            for part, (cached, new) in enumerate(((keys, key[0, :, rows]), (values, value[0, :, rows]))):
                kept = self._rule.kept
                cached[:, span.begin : span.end] = new if kept is None else kept.rounded(part, new)
            mixed.append(self._attend(core, query[:, :, rows], span, (keys, values), sinks, expand))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)

    def _attend(
        self,
        core: CausalCore,
        query: Tensor,
        span: RowSpan,
        cached: tuple[Tensor, ...],
        sinks: Tensor | None,
        expand: Expand | None,
    ) -> Tensor:
        """Return the mixed values of a span's queries over its cached keys, in pieces that exact numerics prescribe."""
        rule, window, heads, device = self._rule, core.window, query.shape[1], query.device
        borders = (
            range(span.begin + window - span.begin % window, span.end, window)
            if rule.exact and window
            else ()
        )
        parts = []
        for begin, end in itertools.pairwise((span.begin, *borders, span.end)):
            first = self._first_key(core, begin)
            keys, values = (tensor[:, first:end].unsqueeze(0) for tensor in cached)
            queries = query[:, :, begin - span.begin : end - span.begin]
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
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _first_key(self, core: CausalCore, begin: int) -> int:
        """Return the first key that is read for queries from ``begin`` on, which are in one block of the trainer's if numerics are exact."""
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
        """Return the mask ``(q, n)`` of the keys ``first`` to ``end`` for the queries ``begin`` to ``end``.

        True where a key is visible. Each is made once and kept.
        """
        name = (begin, end, first, window)
        if name not in self._masks:
            queries = torch.arange(begin, end, device=device)[:, None]
            keys = torch.arange(first, end, device=device)
            visible = keys <= queries
            self._masks[name] = visible & (keys > queries - window) if window else visible
        return self._masks[name]
