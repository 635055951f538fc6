"""An engine that computes requests one token each in turn, by the arithmetic of ``phalanx generate``.

Every request has a cache and a generator of its own, so a text is that of ``phalanx generate`` with the same seed, whatever is computed
beside it. Nothing is batched: this is the engine for a model of any kind and a handful of clients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from phalanx.model.custom import Chain
from phalanx.model.facts.stretching import longest_short
from phalanx.model.layers.cache import empty_cache
from phalanx.model.transformer import Transformer, logits
from phalanx.serve.gateway.worker import RequestError
from phalanx.serve.generate import choose
from phalanx.traffic.requests import Ended, PromptScored, Request, Token, Told

_CHOICE_STRIDE = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: seeds of choices lie far apart, and choice 0 has the request's own."""


class TurnsEngine:
    """Requests that take turns of one token."""

    def __init__(self, model: Transformer | Chain, context: int) -> None:
        self._model, self._context = model, context
        self._running: dict[str, Iterator[Told]] = {}
        self._cancelled: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._running or self._cancelled)

    def submit(self, request: Request) -> None:
        """Takes a request. Raises RequestError for what the model cannot do."""
        if request.sampling.min_p:
            raise RequestError("min_p is not done by this engine: leave it out, or use top_p", "min_p")
        if len(request.prompt) + request.max_tokens > self._context:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones do not fit into the "
                f"context of {self._context}",
                "max_tokens",
            )
        self._running[request.id] = self._text(request)

    def cancel(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._cancelled.append(request_id)

    def step(self) -> list[Told]:
        told: list[Told] = [Ended(name, "cancelled") for name in self._cancelled]
        self._cancelled.clear()
        for name, text in list(self._running.items()):
            try:
                one = next(text)
            except Exception as error:  # One request's failure is told to its client, and ends no other.
                one = Ended(name, "error", str(error))
            told.append(one)
            if isinstance(one, Ended):
                del self._running[name]
        return told

    def _text(self, request: Request) -> Iterator[Told]:
        model, sampling = self._model, request.sampling
        weight = next(model.parameters())
        cap = model.spec.logit_cap
        text, unseen = list(request.prompt), list(request.prompt)
        length = len(text) + request.max_tokens
        cached = isinstance(model, Transformer)
        cache = empty_cache(model.spec, 1, length, weight.device, weight.dtype) if cached else None
        seed = (sampling.seed + sampling.choice * _CHOICE_STRIDE) % 2**63
        generator = torch.Generator().manual_seed(seed)
        for index in range(request.max_tokens):
            every = index == 0 and request.prompt_logprobs
            with torch.no_grad():
                ids = torch.tensor([unseen if cached else text], device=weight.device)
                readout = lambda hidden, w: logits(hidden if every else hidden[:, -1:], w, cap)  # noqa: B023, E731
                scores = model(ids, readout=readout, **({"cache": cache} if cached else {}))[0]
            if every:
                yield _scored(request, scores)
            last = scores[-1]
            token = choose(last, sampling.temperature, sampling.top_k, sampling.top_p, generator)
            if token in request.stop_tokens:
                yield Ended(request.id, "stop")
                return
            yield _token(request, index, token, last)
            text.append(token)
            unseen = [token]
            if cached and len(text) == longest_short(model.spec) + 1:
                # From here on all positions are rotated by other factors, those of the cached keys too.
                cache, unseen = empty_cache(model.spec, 1, length, weight.device, weight.dtype), list(text)
        yield Ended(request.id, "length")


def _scored(request: Request, scores: torch.Tensor) -> PromptScored:
    logprobs = scores[:-1].float().log_softmax(-1)
    of = torch.tensor(request.prompt[1:], device=scores.device)
    return PromptScored(request.id, tuple(logprobs.gather(1, of[:, None])[:, 0].tolist()))


def _token(request: Request, index: int, token: int, scores: torch.Tensor) -> Token:
    if request.top_logprobs < 0:
        return Token(request.id, index, token)
    logprobs = scores.float().log_softmax(-1)
    order = logprobs.sort(descending=True, stable=True)
    top = zip(
        order.indices[: request.top_logprobs].tolist(),
        order.values[: request.top_logprobs].tolist(),
        strict=True,
    )
    return Token(request.id, index, token, float(logprobs[token]), tuple(top))
