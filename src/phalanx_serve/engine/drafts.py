"""Drafts of the next tokens by the model's multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A step computes a text's last token and, after it, drafts of the next ones, as more rows of the same products
(speculative decoding, arXiv 2211.17192). A draft is accepted if and only if it is the token that the model draws
there anyway, so drafts change no text, at any temperature. Sampling is a function of seed and position
(``phalanx_serve.engine.sampler``), and a draft is drawn with the same numbers as its token.

Depth ``d`` reads, at position ``p``, the hidden state of depth ``d - 1`` there and the token at ``p + d``, and
predicts the token at ``p + d + 1``. For a text of ``L`` tokens, whose hidden states reach to ``L - 2``, each depth
drafts at ``p = L - 2``. The last ``d - 1`` rows of depth ``d`` read drafts themselves, and are computed again when
the tokens are known. Its attention covers what was computed here for this text, not a cached prefix: pages have no
draft states, since the state at a page's last token depends on the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.model.layers.attention.attend import soft_capped
from phalanx.model.transformer import PredictionAhead, Transformer
from phalanx.run.kinds.grouped_attention import window_of
from phalanx_serve.engine.model_runner import batched_attention
from phalanx_serve.engine.sampler import LogitsError, draw_rows
from phalanx_serve.kv_cache.layer_cache import LayerKVCache, Rule
from phalanx_serve.kv_cache.memory import RowSpan, TextKV
from phalanx_serve.traffic.events import Sampling

_RULE = Rule(exact=False)
"""Drafts may have any bits: the returned tokens have those of the model."""


@dataclass(eq=False)
class DraftState:
    """State of all depths for a text, from its token ``begin`` on."""

    kv: TextKV
    """Keys and values of each depth."""
    begin: int
    done: list[int]
    """For each depth, the position up to which its rows have read the text's own tokens."""
    tails: list[Tensor]
    """For each depth, the hidden states ``(n, dim)`` that it must read next, as far as they are known."""


@dataclass(frozen=True)
class DraftInput:
    """A text some of whose rows a step has computed."""

    tokens: Sequence[int]
    hidden: Tensor
    """``(n, dim)``, of the tokens before ``computed``, behind the model's last norm."""
    computed: int
    count: int
    """Tokens to draft."""
    sampling: Sampling
    ahead: DraftState | None

    @property
    def guesses(self) -> bool:
        """True if all but the last token is computed, from which a draft continues."""
        return self.computed == len(self.tokens) - 1


class Drafter:
    """Multi-token prediction with the first ``depths`` depths of a model."""

    def __init__(self, model: Transformer, depths: int) -> None:
        self._model, self._depths = model, depths
        self._kept = replace(model.spec, layers=depths)
        weight = next(model.parameters())
        self._batching = batched_attention(model.spec, weight.dtype, weight.device)

    @torch.no_grad()
    def guess(self, texts: Sequence[DraftInput], length: int) -> list[tuple[DraftState, tuple[int, ...]]]:
        """Return each text's state and the drafts of its next tokens, at most its ``count``.

        A state that continues is updated in place; else it is a new one. A text gets no drafts unless all but its
        last token is computed, but its state is updated all the same. Drafts are drawn as their tokens will be, by
        the text's sampling and position. If any text's logits are not finite at a depth, the drafts of all texts end
        before it. ``length`` is that of ``Transformer``.
        """
        aheads = [self._state_of(text) for text in texts]
        guesses: list[list[int]] = [[] for _ in texts]
        states = [text.hidden for text in texts]
        for depth in range(1, self._depths + 1):
            members = [i for i, text in enumerate(texts) if text.count >= depth]
            if not members:
                break
            new_states = self._depth(
                depth,
                [texts[i] for i in members],
                [aheads[i] for i in members],
                [states[i] for i in members],
                [guesses[i] for i in members],
                length,
            )
            for i, state in zip(members, new_states, strict=True):
                states[i] = state
            drafting = [i for i in members if texts[i].guesses and len(guesses[i]) == depth - 1]
            for i, token in zip(
                drafting, self._drawn(depth, [(texts[i], states[i]) for i in drafting]), strict=False
            ):
                guesses[i].append(token)
        return [(ahead, tuple(tokens)) for ahead, tokens in zip(aheads, guesses, strict=True)]

    def _state_of(self, text: DraftInput) -> DraftState:
        """Return a text's draft state if it continues where the new hidden states begin, else an empty one."""
        begin = text.computed - len(text.hidden)
        if text.ahead is not None and text.ahead.done[0] == begin:
            return text.ahead
        nothing = [text.hidden[:0] for _ in range(self._depths)]
        kv = TextKV(self._kept, text.hidden.dtype, device=text.hidden.device)
        return DraftState(kv, begin, [begin] * self._depths, nothing)

    def _depth(
        self,
        depth: int,
        texts: Sequence[DraftInput],
        aheads: Sequence[DraftState],
        before: Sequence[Tensor],
        guesses: Sequence[Sequence[int]],
        length: int,
    ) -> list[Tensor]:
        """Return a depth's hidden states ``(n, dim)`` for each text, of all rows that it can compute now.

        Rows need the token ``depth`` further on. Updates the keys, values and tails in ``aheads``, but counts only
        rows of known tokens as done.
        """
        spans: list[RowSpan] = []
        positions: list[int] = []
        tokens: list[int] = []
        hidden: list[Tensor] = []
        for text, ahead, computed, guessed in zip(texts, aheads, before, guesses, strict=True):
            begin = ahead.done[depth - 1]
            sequence = [*text.tokens, *guessed]
            end = max(begin, min(text.computed, len(sequence) - depth))
            states = torch.cat((ahead.tails[depth - 1], computed))  # (n, dim)
            hidden.append(states[: end - begin])
            positions += range(begin, end)
            tokens += sequence[begin + depth : end + depth]
            if end > begin:
                ahead.kv.grow(end - ahead.begin)
                spans.append(RowSpan(ahead.kv, begin - ahead.begin, end - ahead.begin))
            # Rows that depend on a guess are computed again; states that depend on none are reused.
            done = max(begin, min(end, len(text.tokens) - depth))
            known_before = ahead.done[depth - 2] if depth > 1 else text.computed
            ahead.done[depth - 1] = done
            ahead.tails[depth - 1] = states[done - begin : known_before - begin]
        if not spans:
            return hidden
        module = self._model.mtp[depth - 1]
        assert isinstance(module, PredictionAhead), "the predictions ahead"
        batched = None if self._batching is None else self._batching(spans)
        cache = LayerKVCache(depth - 1, spans, _RULE, {}, batched)
        rows = torch.cat(hidden)  # (rows of all texts, dim)
        embedded = self._model.embedded(brought(torch.tensor(tokens, dtype=torch.int64), rows.device))
        cos, sin = self._rotation(brought(torch.tensor(positions), rows.device), rows.dtype, length)
        outputs = module(rows[None], embedded[None], cos, sin, cache=cache)[0]  # (rows of all texts, dim)
        return list(torch.split(outputs, [len(states) for states in hidden]))  # (rows of a text, dim) each

    def _drawn(self, depth: int, inputs: Sequence[tuple[DraftInput, Tensor]]) -> list[int]:
        """Draw a token for each text from its last state; none at all if any row's logits are not finite."""
        if not inputs:
            return []
        cap, weight = self._model.spec.logit_cap, self._model.projection()
        # (texts, vocab)
        scores = soft_capped(F.linear(torch.stack([states[-1] for _, states in inputs]), weight), cap)
        try:
            return draw_rows(
                scores,
                [text.sampling for text, _ in inputs],
                [len(text.tokens) + depth - 1 for text, _ in inputs],
            )
        except LogitsError:
            return []

    def _rotation(self, positions: Tensor, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        """Return the (cos, sin) tables of positions in the layers of multi-token prediction."""
        spec = self._model.spec
        windowed = bool(spec.window_rope_theta and window_of(spec, spec.layers - 1))
        cos, sin = self._model.rotation(spec, positions, windowed=windowed, length=length)
        return cos.to(dtype), sin.to(dtype)
