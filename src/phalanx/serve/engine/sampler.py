"""Sampler output of one engine step: for each sampled row, a token and its top log-probabilities.

On a CPU a row is sampled when its result is requested. On another device each such read would wait for the device's queue. So there all rows
are sampled by operations of the device, and the results are copied to the host at once, when the first of them is requested.
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
from phalanx.serve.sampling import draw, drawn_together, has_number, likeliest, without_unknown
from phalanx.traffic.requests import Sampling


@dataclass(frozen=True)
class SamplingRequest:
    """A row of a step to sample or to score."""

    row: int
    position: int
    """Index, in prompt and text, of the token to sample."""
    given: int
    """The token to score, which is there already; -1 to draw one."""
    sampling: Sampling
    top: int
    """Number of the likeliest tokens to return; -1 returns no log-probability of a drawn token."""


@dataclass(frozen=True)
class SampledToken:
    """The token of a sampled row, with log-probabilities in nats."""

    finite: bool
    """False if the logits are not finite, so that nothing can be drawn."""
    token: int = -1
    """The drawn token, or the scored one."""
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class SamplerOutput(Protocol):
    """The ``SampledToken`` of each ``SamplingRequest`` of a step, by its index."""

    def __getitem__(self, number: int, /) -> SampledToken: ...


def sample_rows(requests: Sequence[SamplingRequest], scores: Tensor, log_probs: Tensor) -> SamplerOutput:
    """Sample the first rows of ``scores`` and ``log_probs`` ``(rows, vocab)``, one for each of ``requests``."""
    if scores.device.type == "cpu":
        return LazySamplerOutput(requests, scores, log_probs)
    return BatchedSamplerOutput(requests, scores, log_probs)


class LazySamplerOutput:
    """Output that samples a row on request; rows behind a rejected draft are never drawn."""

    def __init__(self, requests: Sequence[SamplingRequest], scores: Tensor, log_probs: Tensor) -> None:
        self._requests, self._scores, self._log_probs = requests, scores, log_probs

    def __getitem__(self, number: int, /) -> SampledToken:
        request, scores, log_probs = self._requests[number], self._scores[number], self._log_probs[number]
        if not bool(torch.isfinite(scores.max())):
            return SampledToken(False)
        top = likeliest(log_probs[: request.sampling.vocab_size or None], request.top)
        if request.given >= 0:
            return SampledToken(True, request.given, float(log_probs[request.given]), top)
        token = draw(scores, request.sampling, request.position)
        logprob = float(log_probs[token]) if request.top >= 0 else 0.0
        return SampledToken(True, token, logprob, top)


class BatchedSamplerOutput:
    """Output that samples all rows on the device and copies them to the host at the first request, rejected drafts too."""

    def __init__(self, requests: Sequence[SamplingRequest], scores: Tensor, log_probs: Tensor) -> None:
        self._requests, device = requests, scores.device
        scores, log_probs = scores[: len(requests)], log_probs[: len(requests)]
        tokens = brought(torch.tensor([max(request.given, 0) for request in requests]), device)
        drawing = [number for number, request in enumerate(requests) if request.given < 0]
        if drawing:
            rows = brought(torch.tensor(drawing), device)
            drawn_requests = [requests[number] for number in drawing]
            drawn_scores = scores if len(drawn_requests) == len(requests) else scores.index_select(0, rows)
            drawn = drawn_together(
                drawn_scores,
                [request.sampling for request in drawn_requests],
                [request.position for request in drawn_requests],
            )
            tokens = tokens.index_copy(0, rows, drawn)
        logprobs = log_probs.gather(1, tokens[:, None])[:, 0]
        topped = [number for number, request in enumerate(requests) if request.top > 0]
        self._top = min(max((requests[number].top for number in topped), default=0), log_probs.shape[1])
        self._place = {number: place for place, number in enumerate(topped)}
        parts = [has_number(scores).to(torch.int64), tokens, _as_integers(logprobs)]
        if topped:
            likely = log_probs.index_select(0, brought(torch.tensor(topped), device))
            likely = without_unknown(likely, [requests[number].sampling for number in topped])
            values, ids = likely.sort(descending=True, stable=True)
            parts += [ids[:, : self._top].flatten(), _as_integers(values[:, : self._top].flatten())]
        self._queued = torch.cat(parts)
        self._results: _HostResults | None = None

    def __getitem__(self, number: int) -> SampledToken:
        if self._results is None:
            self._results = _HostResults.of(fetched(self._queued), len(self._requests), len(self._place))
        results, request = self._results, self._requests[number]
        if not results.finite[number]:
            return SampledToken(False)
        token, log_prob = int(results.tokens[number]), float(results.logprobs[number])
        if request.given >= 0:
            token = request.given
        if number not in self._place:
            return SampledToken(True, token, log_prob if request.given >= 0 or request.top >= 0 else 0.0)
        place = self._place[number]
        ids, values = (
            results.top_ids[place, : request.top].tolist(),
            results.top_values[place, : request.top].tolist(),
        )
        return SampledToken(True, token, log_prob, tuple(zip(ids, values, strict=True)))


@dataclass(frozen=True)
class _HostResults:
    """Results of a step, on the host."""

    finite: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    """The likeliest tokens of the rows that request them ``(rows, most)``, and their log-probabilities."""
    top_values: NDArray[np.float64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64], rows: int, topped: int) -> _HostResults:
        """Divide the numbers of ``rows``, and of the ``topped`` rows that request the likeliest tokens."""
        finite, tokens, logprobs = numbers[: 3 * rows].reshape(3, rows)
        ids, values = numbers[3 * rows :].reshape(2, topped, -1) if topped else np.empty((2, 0, 0), np.int64)
        return cls(finite, tokens, logprobs.view(np.float64), ids, values.view(np.float64))


def _as_integers(values: Tensor) -> Tensor:
    """Return numbers of fp32 as int64 with the bits of fp64, so that one tensor has them and the tokens."""
    return values.double().view(torch.int64)
