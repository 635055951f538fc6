"""A layer's KV cache in one step: spans of rows that the model computes together, and the attention of each to its own text.

Exact attention gives a query the bits that it has in training on a CPU, where a kernel sees the whole sequence: keys go on to the end of their block
of 512, or of the training sequence if that is shorter, hidden by a mask; queries are repeated up to a multiple of four, because
fewer take another path through the matrix product. A layer with a window is computed in the trainer's blocks of a window's queries.

Fast numerics absorb latent attention's matrix where that is less work, exact ones where training does (``phalanx.model.layers.attention.absorbed``). All
heads then have the same keys, and the few queries of a step that decodes are as many of one head.

On a GPU, where numerics are fast, a text's first piece and each single row go without a mask, which FlashAttention does not take.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.layers.attention.absorbed import LatentExpansion, attend_together, latents_as_keys
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.cache import Expand, Mixing
from phalanx.model.layers.experts.independent_rows import ROWS
from phalanx.serve.kv_cache.format import KVFormat
from phalanx.serve.kv_cache.memory import BLOCK, TextKV

TOGETHER = 768
"""Queries of all heads from which on a kernel takes them in its largest pieces, head by head."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one text in a step, from token ``begin`` up to ``end``."""

    kv: TextKV
    begin: int
    end: int


@dataclass(frozen=True)
class Rule:
    """Padding of keys and queries."""

    exact: bool
    sequence: int
    """Tokens of a training sequence; 0 if unknown."""
    kept: KVFormat | None = None
    """The storage format of keys and values; ``None`` is that of the computation."""

    def keys(self, end: int, capacity: int) -> int:
        """Return the number of keys that are read for a text of ``end`` tokens."""
        if not self.exact:
            return end
        block = end + -end % BLOCK
        return min(self.sequence if end <= self.sequence < block else block, capacity)


def masks_are_dear(device: torch.device) -> bool:
    """Return True if attention kernels without a mask are faster: on all devices but CPUs."""
    return device.type != "cpu"


class LayerKVCache:
    """A layer's ``phalanx.model.layers.attention.cache.Cache`` for the spans of a step."""

    length = 0

    @property
    def takes_any_form(self) -> bool:
        """See ``Cache``: which form takes fewer operations depends on the rows of a step and on what is behind them."""
        return not self._rule.exact

    def __init__(
        self, layer: int, spans: Sequence[Span], rule: Rule, masks: dict[tuple[int, ...], Tensor]
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
        """See ``Cache``; rows are ``(1, heads, rows, width)``, those behind the last span padding."""
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
        if row < query.shape[2]:
            last = mixed[-1][:, :, -1:]
            mixed.append(last.expand(-1, -1, query.shape[2] - row, -1))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)

    def _attend(
        self,
        core: CausalCore,
        query: Tensor,
        span: Span,
        cached: tuple[Tensor, ...],
        sinks: Tensor | None,
        expand: Expand | None,
    ) -> Tensor:
        rule, window = self._rule, core.window
        # Where the trainer's sequence is no longer than the window, it attends to the whole.
        blocked = rule.exact and window > 0 and not 0 < rule.sequence <= window
        cuts = [
            span.begin,
            *(range(span.begin + window - span.begin % window, span.end, window) if blocked else ()),
            span.end,
        ]
        parts = []
        for begin, end in itertools.pairwise(cuts):
            first, last = 0, rule.keys(end, span.kv.capacity)
            if blocked:
                first = max(0, begin // window - 1) * window
                last = (begin // window + 1) * window
                span.kv.grow(last)
                cached = span.kv.layers[self._layer]
            elif window and not rule.exact:
                first = max(0, begin - window + 1)
            keys, values = (tensor[:, first:last].unsqueeze(0) for tensor in cached)
            queries = query[:, :, begin - span.begin : end - span.begin]
            heads, device = query.shape[1], query.device
            if expand is latents_as_keys and heads * (end - begin) < TOGETHER:
                mask = self._mask_of_heads(heads, begin, end, last, device)
                parts.append(attend_together(queries, *expand(keys, values), mask, core.softmax(None)))
                continue
            padding = -(end - begin) % ROWS if rule.exact else 0
            if padding:
                queries = torch.cat((queries, queries[:, :, -1:].expand(-1, -1, padding, -1)), 2)
            if (
                isinstance(expand, LatentExpansion)
                and not rule.exact
                and expand.absorbs(end - begin, last - first)
            ):
                together = heads * (end - begin) < TOGETHER
                mask = (
                    self._mask_of_heads(heads, begin, end, last, device)
                    if together
                    else self._mask(begin, end, 0, first, last, 0, device)
                )
                parts.append(expand.absorbed(queries, keys, values, mask))
                continue
            if expand is not None:
                keys, values = expand(keys, values)
            single = end - begin == 1  # which sees all of these keys
            if masks_are_dear(device) and not rule.exact and (single or (begin == first and not window)):
                parts.append(core.softmax(sinks, causal=not single)(queries, keys, values, None))
                continue
            mask = self._mask(begin, end, padding, first, last, window, device)
            parts.append(core.softmax(sinks)(queries, keys, values, mask)[:, :, : end - begin])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _mask_of_heads(self, heads: int, begin: int, end: int, last: int, device: torch.device) -> Tensor:
        """Return the mask ``(rows, n)`` of the first ``last`` keys for the queries ``begin`` to ``end`` of each head, the last one repeated.

        It is built again in each layer: the masks of all texts of a step would take more memory than their keys.
        """
        mask = self._mask(begin, end, 0, 0, last, 0, device).repeat(heads, 1)
        padding = -len(mask) % ROWS if self._rule.exact else 0
        return torch.cat((mask, mask[-1:].expand(padding, -1))) if padding else mask

    def _mask(
        self, begin: int, end: int, padding: int, first: int, last: int, window: int, device: torch.device
    ) -> Tensor:
        """Return the mask ``(q, n)`` of the keys ``first`` to ``last`` for the queries ``begin`` to ``end``, the last one repeated."""
        name = (begin, end, padding, first, last, window)
        if name not in self._masks:
            query_positions = torch.arange(begin, end + padding, device=device).clamp_(max=end - 1)[:, None]
            keys = torch.arange(first, last, device=device)
            seen = keys <= query_positions
            self._masks[name] = seen & (keys > query_positions - window) if window else seen
        return self._masks[name]
