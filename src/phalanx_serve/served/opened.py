"""An opened model: its engine, with identity, spec and device; and an engine for users' own models, which takes turns.

Blocks of a user's own model keep no keys and values, so requests take turns of one token.
Each token costs a pass over its whole text, by the arithmetic of ``phalanx generate``, and nothing is batched: this is for a handful of
clients. A text does not depend on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from phalanx.checkpoint.interop.huggingface.folders import served_context
from phalanx.hardware.local.device import gpus
from phalanx.model.custom import Chain
from phalanx.model.transformer import logits
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx_serve.engine.errors import EngineError, PartLostError, RequestError
from phalanx_serve.engine.sampler import draw, likeliest
from phalanx_serve.http.worker import Engine, Identity, Streaming
from phalanx_serve.kv_cache.memory import KVFormatName
from phalanx_serve.numerics import computing_on, device_named
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.requests import Ended, EngineOutput, PromptScored, Request, Token

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OpenedEngine:
    """An engine of a run or a pack, and what it computes."""

    engine: Engine
    identity: Identity
    spec: ModelSpec
    step: int | None = None
    """The step whose weights compute; ``None`` for those of a pack."""
    note: str = ""
    """A note for the person who started the server."""
    streaming: Callable[[], Streaming] | None = None
    """Counts of streaming so far, if weights are streamed."""
    trouble: Callable[[], str] | None = None
    """Why nothing can be computed any more, empty if it can, where that depends on other processes; from any thread."""
    device: torch.device = _CPU
    """Where it is computed."""


def device_of(served: ServedRun, number: int = 0) -> torch.device:
    """Where a run is computed, as it is asked for, in the process of this ``number`` of those that serve it here. Raises EngineError."""
    return device_named(served.device, gpus(), only_cpu=served.only_cpu, number=number)


def context_of(served: ServedRun, run: RunSpec, folder: Path) -> int:
    """The most tokens of a request: as many as asked for, else those of the published model that the run in ``folder`` is or goes on from, else of a
    training sequence. Streaming sets memory aside for a whole text, so there it is the sequence. Raises HuggingFaceError for a damaged ``config.json``."""
    sequence = run.train.seq_len
    if served.context or served.stream:
        return served.context or sequence
    return served_context(RunDirectory(folder).published, run.model, sequence) or sequence


# The engine of turns.


class TurnsEngine:
    """Requests that take turns of one token."""

    def __init__(self, model: Chain, context: int, *, kept: KVFormatName = "compute") -> None:
        """``kept`` is the requested format of keys and values. Raises EngineError for another format than that of the computation."""
        if kept != "compute":
            raise EngineError(
                f"--kv {kept}: a model of your own (model.factory) keeps no keys and values; leave it out"
            )
        self._model, self._context = model, context
        self._device = next(model.parameters()).device
        self._running: dict[str, Iterator[EngineOutput]] = {}
        self._cancelled: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._running or self._cancelled)

    def pages(self) -> tuple[int, int]:
        """None: nothing is kept of a text but its ids."""
        return 0, 0

    def drafts(self) -> tuple[int, int]:
        """None: a model of one's own predicts one token."""
        return 0, 0

    def submit(self, request: Request) -> None:
        """Takes a request. Raises RequestError for what the model cannot do."""
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

    def step(self) -> list[EngineOutput]:
        """A token of each request. Raises PartLostError where a GPU does not answer any more."""
        outputs: list[EngineOutput] = [Ended(name, "cancelled") for name in self._cancelled]
        self._cancelled.clear()
        for name, text in list(self._running.items()):
            try:
                with computing_on(self._device, "a pass over a text"):
                    output = next(text)
            except PartLostError:
                raise
            except Exception as error:  # One request's failure is sent to its client, and ends no other.
                output = Ended(name, "error", str(error))
            outputs.append(output)
            if isinstance(output, Ended):
                del self._running[name]
        return outputs

    def _text(self, request: Request) -> Iterator[EngineOutput]:
        model, device = self._model, self._device
        text = list(request.prompt)
        for index in range(request.max_tokens):
            last_alone = index > 0 or not request.prompt_logprobs
            readout = partial(
                _scores, rows=slice(-1, None) if last_alone else slice(None), cap=model.spec.logit_cap
            )
            with torch.no_grad():
                scores = model(torch.tensor([text], device=device), readout=readout)[0]
            if not last_alone:
                yield _scored(request, scores)
            token = draw(scores[-1], request.sampling, len(text))
            if token in request.stop_tokens:
                yield Ended(request.id, "stop")
                return
            yield _token(request, index, token, scores[-1])
            text.append(token)
        yield Ended(request.id, "length")


def _scores(hidden: torch.Tensor, weight: torch.Tensor, *, rows: slice, cap: float) -> torch.Tensor:
    return logits(hidden[:, rows], weight, cap)


def _scored(request: Request, scores: torch.Tensor) -> PromptScored:
    logprobs = scores[:-1].float().log_softmax(-1)
    of = torch.tensor(request.prompt[1:], device=scores.device)
    scored = tuple(logprobs.gather(1, of[:, None])[:, 0].tolist())
    return PromptScored(request.id, scored, _tops(request, logprobs) if request.top_logprobs > 0 else ())


def _tops(request: Request, logprobs: torch.Tensor) -> tuple[tuple[tuple[int, float], ...], ...]:
    rows = logprobs[:, : request.sampling.vocab_size or None]
    return tuple(likeliest(row, request.top_logprobs) for row in rows)


def _token(request: Request, index: int, token: int, scores: torch.Tensor) -> Token:
    if request.top_logprobs < 0:
        return Token(request.id, index, token)
    logprobs = scores.float().log_softmax(-1)
    (top,) = _tops(request, logprobs[None])
    return Token(request.id, index, token, float(logprobs[token]), top)
