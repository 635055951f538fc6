"""What the rows of a step say: of each whose distribution is asked for, a token and a few log-probabilities.

On a CPU a row is read when it is asked for. On another device each question would wait for all that is queued there, so the rows of a step are read
by operations of the device, and what they say comes to the host in one copy, when the first is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.hardware.local.device import brought, fetched
from phalanx.serve.sampling import draw, drawn_together, has_number, likeliest
from phalanx.traffic.requests import Sampling


@dataclass(frozen=True)
class Ask:
    """A row of a step whose distribution is asked for."""

    row: int
    position: int
    """In prompt and text, of the token that the distribution is of."""
    given: int
    """The token that is there already and to be scored; -1 where one is to be drawn."""
    sampling: Sampling
    top: int
    """How many of the likeliest tokens are told; -1 tells no log-probability of a drawn token."""


@dataclass(frozen=True)
class Reading:
    """What a row's distribution says."""

    finite: bool
    """False where nothing can be drawn: the logits are not finite."""
    token: int = -1
    """The one that was drawn, or that was given."""
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class Readings(Protocol):
    """The ``Reading`` of each ``Ask`` of a step, by its number."""

    def __getitem__(self, number: int, /) -> Reading: ...


def readings_of(asks: Sequence[Ask], scores: Tensor, log_probs: Tensor) -> Readings:
    """The readings of ``asks`` by their rows of ``scores`` and ``log_probs`` ``(rows, vocab)``, which may have more rows."""
    if scores.device.type == "cpu":
        return Distributions(asks, scores, log_probs)
    return TogetherRead(asks, scores, log_probs)


class Distributions:
    """Readings as they are asked for: a guess that was wrong is never drawn behind."""

    def __init__(self, asks: Sequence[Ask], scores: Tensor, log_probs: Tensor) -> None:
        self._asks, self._scores, self._log_probs = asks, scores, log_probs

    def __getitem__(self, number: int, /) -> Reading:
        ask, scores, log_probs = self._asks[number], self._scores[number], self._log_probs[number]
        if not bool(torch.isfinite(scores.max())):
            return Reading(False)
        if ask.given >= 0:
            return Reading(True, ask.given, float(log_probs[ask.given]))
        token = draw(scores, ask.sampling, ask.position)
        told = float(log_probs[token]) if ask.top >= 0 else 0.0
        return Reading(True, token, told, likeliest(log_probs, ask.top))


class TogetherRead:
    """Readings that come to the host all at once, on the first that is asked for; guesses that were wrong are drawn behind, too."""

    def __init__(self, asks: Sequence[Ask], scores: Tensor, log_probs: Tensor) -> None:
        self._asks, device = asks, scores.device
        scores, log_probs = scores[: len(asks)], log_probs[: len(asks)]
        tokens = brought(torch.tensor([max(ask.given, 0) for ask in asks]), device)
        drawing = [number for number, ask in enumerate(asks) if ask.given < 0]
        if drawing:
            rows = brought(torch.tensor(drawing), device)
            some = [asks[number] for number in drawing]
            asked = scores if len(some) == len(asks) else scores.index_select(0, rows)
            drawn = drawn_together(asked, [ask.sampling for ask in some], [ask.position for ask in some])
            tokens = tokens.index_copy(0, rows, drawn)
        told = log_probs.gather(1, tokens[:, None])[:, 0]
        topped = [number for number in drawing if asks[number].top > 0]
        self._top = min(max((asks[number].top for number in topped), default=0), log_probs.shape[1])
        self._place = {number: place for place, number in enumerate(topped)}
        parts = [has_number(scores).to(torch.int64), tokens, _as_whole(told)]
        if topped:
            likely = log_probs.index_select(0, brought(torch.tensor(topped), device))
            values, ids = likely.sort(descending=True, stable=True)
            parts += [ids[:, : self._top].flatten(), _as_whole(values[:, : self._top].flatten())]
        self._queued = torch.cat(parts)
        self._come: _Come | None = None

    def __getitem__(self, number: int) -> Reading:
        if self._come is None:
            self._come = _Come.of(fetched(self._queued), len(self._asks), len(self._place))
        come, ask = self._come, self._asks[number]
        if not come.finite[number]:
            return Reading(False)
        token, log_prob = int(come.tokens[number]), float(come.told[number])
        if ask.given >= 0:
            return Reading(True, ask.given, log_prob)
        if number not in self._place:
            return Reading(True, token, log_prob if ask.top >= 0 else 0.0)
        place = self._place[number]
        ids, values = come.top_ids[place, : ask.top].tolist(), come.top_values[place, : ask.top].tolist()
        return Reading(True, token, log_prob, tuple(zip(ids, values, strict=True)))


@dataclass(frozen=True)
class _Come:
    """What has come to the host of a step."""

    finite: NDArray[np.int64]
    tokens: NDArray[np.int64]
    told: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    """The likeliest tokens of the rows that are asked for them ``(rows, most)``, and their log-probabilities."""
    top_values: NDArray[np.float64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64], rows: int, topped: int) -> _Come:
        """Divides the numbers of ``rows``, and of those ``topped`` rows that are asked for the likeliest tokens."""
        finite, tokens, told = numbers[: 3 * rows].reshape(3, rows)
        ids, values = numbers[3 * rows :].reshape(2, topped, -1) if topped else np.empty((2, 0, 0), np.int64)
        return cls(finite, tokens, told.view(np.float64), ids, values.view(np.float64))


def _as_whole(values: Tensor) -> Tensor:
    """Numbers of fp32 as int64 with the bits of fp64, so that they come with whole ones."""
    return values.double().view(torch.int64)
