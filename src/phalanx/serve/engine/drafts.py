"""Drafts of the next tokens by the model's predictions ahead (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

A step computes a text's last token and, behind it, guesses of the next ones, as more rows of the same products (speculative decoding,
arXiv 2211.17192). A guess is taken if and only if it is the token that the model draws there anyway, so a draft changes no text, at any temperature: sampling
is a function of seed and position (``phalanx.serve.sampling``), and the guess is drawn with the very numbers that the token will be drawn with.

The depth ``d`` reads, at position ``p``, the hidden state of depth ``d - 1`` there and the token at ``p + d``, and predicts that at ``p + d + 1``. So
behind a text of ``L`` tokens, whose hidden states reach to ``L - 2``, each depth guesses at ``p = L - 2``; the last ``d - 1`` rows of depth ``d`` read guesses
themselves and are computed again when the tokens are known. Its attention sees what was computed for this text here, not the prefix that came in pages:
these hold nothing of it, since at a page's last token it depends on the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.model.layers.attention.soft_cap import soft_capped
from phalanx.model.mtp import PredictionAhead
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.serve.kv_cache.layer_cache import LayerKVCache, Rule, Span
from phalanx.serve.kv_cache.memory import TextKV
from phalanx.serve.sampling import LogitsError, draw_rows
from phalanx.traffic.requests import Sampling

_RULE = Rule(exact=False, sequence=0)
"""A guess may have any bits: what is told are those of the model."""


@dataclass(eq=False)
class Ahead:
    """What the depths hold of a text from its token ``begin`` on."""

    kv: TextKV
    """Keys and values of each depth."""
    begin: int
    done: list[int]
    """For each depth, the position up to which its rows have read the text's own tokens."""
    tails: list[Tensor]
    """For each depth, the hidden states ``(n, dim)`` that it is to read from there on, as far as they are known."""


@dataclass(frozen=True)
class Progress:
    """A text of which a step has computed some rows."""

    text: Sequence[int]
    hidden: Tensor
    """``(n, dim)``, of the tokens before ``computed``, behind the model's last norm."""
    computed: int
    wanted: int
    """Tokens to guess, as far as it goes on."""
    sampling: Sampling
    ahead: Ahead | None

    @property
    def guesses(self) -> bool:
        """Whether all but the last token is computed, which a guess goes on from."""
        return self.computed == len(self.text) - 1


class Drafter:
    """Guesses by the first ``depths`` predictions ahead of a model."""

    def __init__(self, model: Transformer, depths: int) -> None:
        self._model, self._depths = model, depths
        self._kept = replace(model.spec, layers=depths)

    @torch.no_grad()
    def guess(self, texts: Sequence[Progress], length: int) -> list[tuple[Ahead, tuple[int, ...]]]:
        """What is held of each text now, and guesses of its next tokens; ``length`` as ``Transformer`` takes it."""
        aheads = [self._begun(one) for one in texts]
        guesses: list[list[int]] = [[] for _ in texts]
        states = [one.hidden for one in texts]
        for depth in range(1, self._depths + 1):
            members = [i for i, one in enumerate(texts) if one.wanted >= depth]
            if not members:
                break
            found = self._depth(
                depth,
                [texts[i] for i in members],
                [aheads[i] for i in members],
                [states[i] for i in members],
                [guesses[i] for i in members],
                length,
            )
            for i, state in zip(members, found, strict=True):
                states[i] = state
            asked = [i for i in members if texts[i].guesses and len(guesses[i]) == depth - 1]
            for i, token in zip(
                asked, self._drawn(depth, [(texts[i], states[i]) for i in asked]), strict=False
            ):
                guesses[i].append(token)
        return [(ahead, tuple(tokens)) for ahead, tokens in zip(aheads, guesses, strict=True)]

    def _begun(self, one: Progress) -> Ahead:
        begin = one.computed - len(one.hidden)
        if one.ahead is not None and one.ahead.done[0] == begin:
            return one.ahead
        nothing = [one.hidden[:0] for _ in range(self._depths)]
        kv = TextKV(self._kept, one.hidden.dtype, device=one.hidden.device)
        return Ahead(kv, begin, [begin] * self._depths, nothing)

    def _depth(
        self,
        depth: int,
        texts: Sequence[Progress],
        aheads: Sequence[Ahead],
        before: Sequence[Tensor],
        guesses: Sequence[Sequence[int]],
        length: int,
    ) -> list[Tensor]:
        """The hidden states ``(n, dim)`` of a depth for each text, of all rows that it can read now."""
        spans: list[Span] = []
        positions: list[int] = []
        tokens: list[int] = []
        hidden: list[Tensor] = []
        for one, ahead, computed, guessed in zip(texts, aheads, before, guesses, strict=True):
            begin = ahead.done[depth - 1]
            known = [*one.text, *guessed]
            end = max(begin, min(one.computed, len(known) - depth))
            states = torch.cat((ahead.tails[depth - 1], computed))
            hidden.append(states[: end - begin])
            positions += range(begin, end)
            tokens += known[begin + depth : end + depth]
            if end > begin:
                ahead.kv.grow(end - ahead.begin)
                spans.append(Span(ahead.kv, begin - ahead.begin, end - ahead.begin))
            # Rows that have read a guess are computed again, from the same states where those have read none.
            done = max(begin, min(end, len(one.text) - depth))
            known_before = ahead.done[depth - 2] if depth > 1 else one.computed
            ahead.done[depth - 1] = done
            ahead.tails[depth - 1] = states[done - begin : known_before - begin]
        if not spans:
            return hidden
        module = self._model.mtp[depth - 1]
        assert isinstance(module, PredictionAhead), "the predictions ahead"
        cache = LayerKVCache(depth - 1, spans, _RULE, {})
        rows = torch.cat(hidden)
        embedded = self._model.embedded(brought(torch.tensor(tokens, dtype=torch.int64), rows.device))
        cos, sin = self._rotation(brought(torch.tensor(positions), rows.device), rows.dtype, length)
        found = module(rows[None], embedded[None], cos, sin, cache=cache)[0]
        return list(torch.split(found, [len(states) for states in hidden]))

    def _drawn(self, depth: int, asked: Sequence[tuple[Progress, Tensor]]) -> list[int]:
        """A token for each text by its last state; none if the logits are not finite, which the model's own may still be."""
        if not asked:
            return []
        cap, weight = self._model.spec.logit_cap, self._model.projection()
        scores = soft_capped(F.linear(torch.stack([states[-1] for _, states in asked]), weight), cap)
        try:
            return draw_rows(
                scores, [one.sampling for one, _ in asked], [len(one.text) + depth - 1 for one, _ in asked]
            )
        except LogitsError:
            return []

    def _rotation(self, positions: Tensor, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        spec = self._model.spec
        windowed = bool(spec.window_rope_theta and window_of(spec, spec.layers - 1))
        cos, sin = self._model.rotation(spec, positions, windowed=windowed, length=length)
        return cos.to(dtype), sin.to(dtype)
