"""Sampler: for each sampled row of an engine step, a token and its top log-probabilities.

A token is a function of its logits and (seed, choice, position, token), and of nothing that ran before.

A generator's state ties a token to all that was drawn before it, is lost with its process, and lets requests of one batch disturb each
other. Here the token is the arg max of ``logit / T + gumbel`` over the kept tokens (the Gumbel-max trick: the arg max is distributed as
the softmax; Maddison, Tarlow and Minka, arXiv 1411.0030), so a retry, another worker or a speculative check repeats the very draw. Tokens are
kept by temperature, ``top_k``, ``top_p`` (nucleus sampling, Holtzman et al., arXiv 1904.09751), ``min_p`` (Nguyen et al., arXiv 2407.01082), in that order.

Every operation is exact, on integers, or a single rounding of IEEE 754, so devices, vector widths and numbers of threads give the same token.
Gumbel numbers and exponentials come from tables in fixed point, interpolated in integers, as in ``phalanx.model.init``. Masses are sums
of integers, which have no order. A probability is off by less than 1e-5 of itself.

On a CPU each row is drawn by itself, and sorts no more of the vocabulary than it needs. Elsewhere that would wait for the device several times a row; there all rows are
drawn at once by operations of fixed shapes (``drawn_together``), which give the same tokens.

A row is then sampled when its result is requested, while elsewhere the results are copied to the host at once, when the first is requested.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray
from torch import Tensor

from phalanx.hardware.local.device import brought, fetched
from phalanx.model.init import keys_of, random_words, stream_key
from phalanx_serve.traffic.events import Sampling


class SamplingRequest(Struct, frozen=True):
    """A row of a step to sample or to score."""

    row: int
    position: int
    """Index, in prompt and text, of the token to sample."""
    scored: int = field(name="given")
    """Token to score, which is part of the text already; -1 to draw one."""
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
        """Draw, or score, the token of request ``number``; without a token if its logits are not finite.

        The log-probability of a drawn token is 0 unless ``top`` is at least 0.
        """
        request, scores, log_probs = self._requests[number], self._scores[number], self._log_probs[number]
        if not bool(torch.isfinite(scores.max())):
            return SampledToken(False)
        top = likeliest(log_probs[: request.sampling.vocab_size or None], request.top)
        if request.scored >= 0:
            return SampledToken(True, request.scored, float(log_probs[request.scored]), top)
        token = draw(scores, request.sampling, request.position)
        logprob = float(log_probs[token]) if request.top >= 0 else 0.0
        return SampledToken(True, token, logprob, top)


class BatchedSamplerOutput:
    """Output that samples all rows on the device and copies them to the host at the first request, rejected drafts too."""

    def __init__(self, requests: Sequence[SamplingRequest], scores: Tensor, log_probs: Tensor) -> None:
        """Queue the drawing and scoring of all requests on the device, without waiting for it."""
        self._requests, device = requests, scores.device
        scores, log_probs = scores[: len(requests)], log_probs[: len(requests)]
        tokens = brought(torch.tensor([max(request.scored, 0) for request in requests]), device)
        drawing = [number for number, request in enumerate(requests) if request.scored < 0]
        if drawing:
            rows = brought(torch.tensor(drawing), device)
            drawn_requests = [requests[number] for number in drawing]
            drawn_scores = scores if len(drawn_requests) == len(requests) else scores.index_select(0, rows)
            drawn = drawn_together(
                drawn_scores,
                [request.sampling for request in drawn_requests],
                [request.position for request in drawn_requests],
            )
            tokens = tokens.index_copy(0, rows, drawn)  # (requests,)
        logprobs = log_probs.gather(1, tokens[:, None])[:, 0]  # (requests,)
        topped = [number for number, request in enumerate(requests) if request.top > 0]
        self._top = min(max((requests[number].top for number in topped), default=0), log_probs.shape[1])
        self._place = {number: place for place, number in enumerate(topped)}
        parts = [has_number(scores).to(torch.int64), tokens, _as_integers(logprobs)]
        if topped:
            likely = log_probs.index_select(0, brought(torch.tensor(topped), device))  # (topped, vocab)
            likely = without_unknown(likely, [requests[number].sampling for number in topped])
            values, ids = likely.sort(descending=True, stable=True)  # (topped, vocab)
            # (topped most,) each
            parts += [ids[:, : self._top].flatten(), _as_integers(values[:, : self._top].flatten())]
        self._queued = torch.cat(parts)  # (3 requests + 2 topped most,)
        self._results: _HostResults | None = None

    def __getitem__(self, number: int) -> SampledToken:
        """Return the token of request ``number``, without a token if its logits are not finite. The first call waits
        for the device.

        Its log-probability is 0 unless it was scored or log-probabilities were requested.
        """
        if self._results is None:
            self._results = _HostResults.of(fetched(self._queued), len(self._requests), len(self._place))
        results, request = self._results, self._requests[number]
        if not results.finite[number]:
            return SampledToken(False)
        token, log_prob = int(results.tokens[number]), float(results.logprobs[number])
        if request.scored >= 0:
            token = request.scored
        if number not in self._place:
            return SampledToken(True, token, log_prob if request.scored >= 0 or request.top >= 0 else 0.0)
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
        finite, tokens, logprobs = numbers[: 3 * rows].reshape(3, rows)  # (rows,) each
        # (topped, most) each
        ids, values = numbers[3 * rows :].reshape(2, topped, -1) if topped else np.empty((2, 0, 0), np.int64)
        return cls(finite, tokens, logprobs.view(np.float64), ids, values.view(np.float64))


def _as_integers(values: Tensor) -> Tensor:
    """Return numbers of fp32 as int64 with the bits of fp64, so that one tensor has them and the tokens."""
    return values.double().view(torch.int64)


# The draw.


_FRACTION = 30  # bits of a table step, and of gumbel numbers
_CELLS = 8  # bits: table steps in an octave
_OCTAVES = 53
_SIDE = _OCTAVES << _CELLS  # table steps of one side
_MANTISSA = 52

_WEIGHT = 40  # bits of the likeliest token's weight: 2^22 tokens of it fit into 63
_EXPONENT = 24  # bits behind the point of a binary logarithm
_POWER_CELLS = 12
_ONE = 1 << 128  # fixed-point one, from which the table of powers is rounded
_OCTAVE = 1.4426950408889634 * (1 << _EXPONENT)  # log2(e), in these units
_FIRST_LOOK = 1024  # tokens that hold top_p of most distributions
_AT_ONCE = 1 << 24  # logits that are drawn from together: 128 MiB for each of some tensors


class LogitsError(ValueError):
    """Logits that no token can be drawn from."""


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Draw the token at ``position`` of prompt and text from its logits ``(vocab,)`` of any dtype and device.

    Equal arguments draw the same token. ``-inf`` rules a token out. Ties go to the lower id. Raises LogitsError for
    other logits that are not finite.
    """
    return draw_rows(logits[None], [sampling], [position])[0]


def draw_rows(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Draw a token for each row of ``(rows, vocab)``, as ``draw`` does, with one device synchronization; ``[]``
    without rows.

    Raises LogitsError as ``draw`` does, if any row is such, and ValueError unless there is one sampling and position
    per row.
    """
    if not len(logits) == len(samplings) == len(positions):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(samplings)} samplings and {len(positions)} positions: one each"
        )
    if not len(logits):
        return []
    if logits.device.type != "cpu":
        drawn = drawn_together(logits, samplings, positions)
        both = torch.stack((drawn, has_number(logits).to(torch.int64)))  # (2, rows)
        tokens, finite = fetched(both).tolist()
        if not all(finite):
            _require_numbers(logits)
        return [int(token) for token in tokens]
    _require_numbers(logits)
    rows = zip(logits, samplings, positions, strict=True)
    return [int(token) for token in torch.stack([_drawn(*row) for row in rows]).tolist()]  # (rows,)


def likeliest(log_probs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` likeliest tokens of ``(vocab,)`` and their log-probabilities, in falling order; ties go
    to the lower id. Empty if ``count`` is below 1.
    """
    if count <= 0:
        return ()
    ids = _likeliest(log_probs, min(count, len(log_probs)))[:count]
    return tuple(zip(ids.tolist(), log_probs[ids].tolist(), strict=True))


def require_sampling(sampling: Sampling) -> None:
    """Raise ValueError for a temperature, top-k, top-p or min-p out of range. The message begins with the field's name."""
    if not 0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature = {sampling.temperature}: at least 0, and finite")
    if sampling.top_k < 0:
        raise ValueError(f"top_k = {sampling.top_k}: at least 0, which leaves all tokens in")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p = {sampling.top_p}: above 0 and at most 1, which leaves all tokens in")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p = {sampling.min_p}: from 0, which leaves all tokens in, to 1")


def has_number(logits: Tensor) -> Tensor:
    """Return, as bool ``(rows,)``, which rows of ``(rows, vocab)`` a token can be drawn from."""
    return torch.isfinite(logits.amax(dim=-1))  # the maximum is NaN if any logit is


def _require_numbers(logits: Tensor) -> None:
    """Raise LogitsError, with the first wrong token, unless each row has a finite logit and no NaN or +inf."""
    if bool(has_number(logits).all()):
        return
    wrong = (torch.isnan(logits) | (logits == math.inf)).nonzero()  # (wrong, 2)
    detail = (
        f"that of token {int(wrong[0, 1])} is {float(logits[*wrong[0]])}" if len(wrong) else "all are -inf"
    )
    raise LogitsError(
        f"the model's logits are not finite ({detail}): its weights are not, or are too large for the format computed in; "
        "take an earlier step"
    )


def without_unknown(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return ``(rows, vocab)`` logits or log-probabilities with -inf for ids at or above each row's ``vocab_size``.

    A copy, or ``logits`` itself if no row has such ids; 0 sets no limit.
    """
    vocab = logits.shape[1]
    if not any(0 < sampling.vocab_size < vocab for sampling in samplings):
        return logits
    sizes = _column([sampling.vocab_size or vocab for sampling in samplings], torch.int64, logits.device)
    return logits.masked_fill(torch.arange(vocab, device=logits.device) >= sizes, -math.inf)


def _drawn(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Draw a token, a tensor on the device, from the ``(vocab,)`` logits of ``position``; temperature 0 takes the likeliest."""
    logits = logits[: sampling.vocab_size or None]
    if sampling.temperature == 0:
        return logits.argmax()
    scores = _scores(logits, sampling.temperature)
    key = _key(sampling, position)
    if _keeps_all(sampling):
        ids = torch.arange(len(scores), device=scores.device)
        return (scores + gumbel(key, ids)).argmax()
    ids = _kept(logits, scores, sampling)
    ids = ids.sort().values  # the first of equal ones is then the lower id
    return ids[(scores[ids] + gumbel(key, ids)).argmax()]


def _key(sampling: Sampling, position: int) -> int:
    """Return the key of random words for a request's seed, choice and position."""
    return stream_key(sampling.seed, f"text {sampling.choice} {position}")


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Return fp64 scores ``(vocab,)``: the logits less their maximum, over the temperature, so the largest is 0.

    The maximum is subtracted first, so that a tiny temperature cannot overflow to NaN.
    """
    wide = logits.double()
    return (wide - wide.max()) * _factor(temperature)


def _factor(temperature: float) -> float:
    """Return 1 / temperature, finite for a tiny one."""
    return min(1 / temperature, 1e300)


# Many rows at once


_Keep = Callable[[Tensor, Tensor, Sequence[Sampling]], Tensor | None]
"""Function from logits and scores ``(rows, vocab)`` to the kept tokens, bool ``(rows, vocab)``; None keeps all."""


def drawn_together(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], *, max_logits: int = _AT_ONCE
) -> Tensor:
    """Return the tokens ``(rows,)``, int64, that ``draw`` returns for the rows of ``(rows, vocab)``, without
    synchronizing the device.

    A row that no token can be drawn from (``has_number``) gets any token. Rows are drawn in groups of at most
    ``max_logits`` logits.
    """
    logits = without_unknown(logits, samplings)
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return logits.argmax(-1)  # (rows,)
    uncut = [row for row in drawn if _keeps_all(samplings[row])]
    cut = [row for row in drawn if not _keeps_all(samplings[row])]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    most = max(1, max_logits // logits.shape[1])
    kinds: list[tuple[list[int], _Keep | None]] = [(greedy, None), (uncut, _all_kept), (cut, _left_in)]
    for of_kind, find in kinds:
        for first in range(0, len(of_kind), most):
            some = of_kind[first : first + most]
            rows = brought(torch.tensor(some), logits.device)
            logits_of_rows = logits if len(some) == len(logits) else logits.index_select(0, rows)
            if find is None:
                tokens_of_rows = logits_of_rows.argmax(-1)
            else:
                tokens_of_rows = _drawn_rows(
                    logits_of_rows, [samplings[i] for i in some], [positions[i] for i in some], find
                )
            tokens.index_copy_(0, rows, tokens_of_rows)
    return tokens


def _keeps_all(sampling: Sampling) -> bool:
    """Return True if no token is cut off: without top-k, top-p and min-p."""
    return not sampling.top_k and sampling.top_p == 1 and not sampling.min_p


def _drawn_rows(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], keep: _Keep
) -> Tensor:
    """Draw a token for each row of ``(rows, vocab)``, among those in the mask that ``keep`` returns; if it returns
    None, among all.

    Uses Gumbel-max in fp64. Temperatures must be above 0.
    """
    wide, device = logits.double(), logits.device
    factors = [_factor(sampling.temperature) for sampling in samplings]
    scores = (wide - wide.amax(-1, keepdim=True)) * _column(factors, torch.float64, device)  # (rows, vocab)
    named = [_key(sampling, position) for sampling, position in zip(samplings, positions, strict=True)]
    ids = torch.arange(logits.shape[1], device=device)
    drawn = scores + gumbel(keys_of(named, device)[:, None], ids)  # (rows, vocab)
    kept = keep(logits, scores, samplings)
    # The first of equal ones is the lower id.
    return (drawn if kept is None else drawn.masked_fill(~kept, -math.inf)).argmax(-1)


def _all_kept(logits: Tensor, scores: Tensor, samplings: Sequence[Sampling]) -> None:  # noqa: ARG001  a _Keep
    return None


def _left_in(logits: Tensor, scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the mask ``(rows, vocab)`` of the tokens that top-k, then top-p, then min-p keep; at least one a row."""
    vocab, device = logits.shape[1], logits.device
    # (rows, vocab): token ids, the likeliest first
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    # (rows, vocab), (vocab,)
    masses, rank = _masses(scores).gather(1, order), torch.arange(vocab, device=device)
    top_k = _column([min(sampling.top_k or vocab, vocab) for sampling in samplings], torch.int64, device)
    top_p = _column([sampling.top_p for sampling in samplings], torch.float64, device)
    least = _column(
        [math.ceil(sampling.min_p * (1 << _WEIGHT)) for sampling in samplings], torch.int64, device
    )
    total = (masses * (rank < top_k)).sum(-1, keepdim=True)  # top_k: the mass of the kept tokens, (rows, 1)
    # top_p: tokens whose predecessors have the mass already, (rows, vocab)
    reached = (masses.cumsum(-1) - masses >= (total.double() * top_p).ceil().to(torch.int64)) & (top_p < 1)
    count = ((rank < top_k) & ~reached).sum(-1, keepdim=True).clamp(min=1)  # (rows, 1)
    count = ((rank < count) & (masses >= least)).sum(-1, keepdim=True).clamp(min=1)  # min_p
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, rank < count)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values on the device as a column ``(rows, 1)``."""
    return brought(torch.tensor(values, dtype=dtype)[:, None], device)  # (rows, 1)


# The kept tokens


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the ids that ``sampling`` keeps, at least one, the likeliest first, ties by id. ``temperature`` is
    above 0.
    """
    return _kept(logits, _scores(logits, sampling.temperature), sampling)


def _kept(logits: Tensor, scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the ids that top-k, top-p and min-p keep, likeliest first; at least one. Top-p is of the mass that top-k leaves."""
    # In the order of the logits themselves: their distances from the largest may round to the same.
    masses = _masses(scores)
    if sampling.top_k and sampling.top_k < len(scores):
        ids = _likeliest(logits, sampling.top_k)[: sampling.top_k]
        ids = _nucleus(ids, masses[ids], int(masses[ids].sum()), sampling.top_p)
    elif sampling.top_p < 1:
        total = int(masses.sum())
        # For most distributions the first _FIRST_LOOK tokens suffice, so the full vocabulary is not sorted.
        ids = _likeliest(logits, min(_FIRST_LOOK, len(logits)))
        if int(masses[ids].sum()) < sampling.top_p * total:
            ids = logits.sort(descending=True, stable=True).indices
        ids = _nucleus(ids, masses[ids], total, sampling.top_p)
    else:
        ids = logits.sort(descending=True, stable=True).indices
    # The first is the most likely token, and is kept even if rounding puts it below min_p.
    return ids[: max(1, int((masses[ids] >= math.ceil(sampling.min_p * (1 << _WEIGHT))).count_nonzero()))]


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the ``count`` likeliest tokens, in falling order, and of all tokens that equal the last of
    them.
    """
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]  # (n,)
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def _nucleus(ids: Tensor, masses: Tensor, total: int, top_p: float) -> Tensor:
    """Return the first ``ids``, up to and with the one whose cumulative mass reaches ``top_p`` of ``total``; at least one."""
    if top_p == 1:
        return ids
    before = masses.cumsum(dim=0) - masses
    return ids[: max(1, int((before < math.ceil(top_p * total)).count_nonzero()))]


@functools.cache
def binary_powers() -> tuple[int, ...]:
    """Return 2^-x at 4097 points from 0 to 1, in units of 2^-40: powers of 2^(-1/4096), in integers."""
    ratio = _ONE >> 1
    for _ in range(_POWER_CELLS):
        ratio = math.isqrt(ratio * _ONE)
    powers = accumulate(range(1 << _POWER_CELLS), lambda power, _: power * ratio // _ONE, initial=_ONE)
    unit = _ONE >> _WEIGHT
    return tuple((power + unit // 2) // unit for power in powers)


def _masses(scores: Tensor) -> Tensor:
    """Return ``exp(score)`` in units of 2^-40, int64, interpolated in an integer table. Scores are at most 0."""
    halvings = (scores * -_OCTAVE).clamp(max=float(63 << _EXPONENT)).round().to(torch.int64)
    fraction = halvings & ((1 << _EXPONENT) - 1)
    remainder = _EXPONENT - _POWER_CELLS
    cell, inner = fraction >> remainder, fraction & ((1 << remainder) - 1)
    table = _on(scores.device, binary_powers)
    lower, right = table[cell], table[cell + 1]
    return (lower - (((lower - right) * inner) >> remainder)) >> (halvings >> _EXPONENT)


# Gumbel numbers


@functools.cache
def gumbel_quantiles() -> tuple[int, ...]:
    """Return Gumbel quantiles in units of 2^-30, for ``x`` over the octaves from 2^-54 to 1/2: at 1 - x, and then at
    x.

    Steps shrink with the octave, so both tails are as exact as the middle. No entry is so near the middle between two
    integers that libraries with errors below 1 ulp would round it differently.
    """
    places = [
        math.ldexp(1 + (i % (1 << _CELLS)) / (1 << _CELLS), (i >> _CELLS) - _OCTAVES - 1)
        for i in range(_SIDE + 1)
    ]
    upper = [-math.log(-math.log1p(-x)) for x in places]
    lower = [-math.log(-math.log(x)) for x in places]
    return tuple(round(value * (1 << _FRACTION)) for value in (*upper, *lower))


def gumbel(key: int | Tensor, index: Tensor) -> Tensor:
    """Return a standard Gumbel number, fp64 from -3.7 to 37.5, for each element of the int64 ``index``. ``key`` is
    that of ``random_words``.

    The value is an integer times 2^-30, exact in fp64.
    """
    words = random_words(key, index)
    # An odd number of 53 bits: exact in fp64, never 0. Its exponent is the octave, and its mantissa the place there.
    bits = ((((words >> 12) & ((1 << _MANTISSA) - 1)) << 1) | 1).double().view(torch.int64)
    cell = (bits >> (_MANTISSA - _CELLS)) - (1023 << _CELLS) + (words & 1) * (_SIDE + 1)
    fraction = (bits >> (_MANTISSA - _CELLS - _FRACTION)) & ((1 << _FRACTION) - 1)
    table = _on(index.device, gumbel_quantiles)
    lower, right = table[cell], table[cell + 1]
    fixed = lower + (((right - lower) * fraction) >> _FRACTION)
    return fixed.double() * math.ldexp(1.0, -_FRACTION)


@functools.lru_cache(maxsize=32)
def _on(device: torch.device, table: Callable[[], tuple[int, ...]]) -> Tensor:
    """Return a table as a tensor on a device, copied once."""
    # Not in inference mode, whose tensors could not be used outside it.
    with torch.inference_mode(False):
        return torch.tensor(table(), dtype=torch.int64, device=device)
