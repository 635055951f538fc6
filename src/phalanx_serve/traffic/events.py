"""Requests for text, engine outputs and errors, and the events and commands of a service of several workers.

These are the values that engine, HTTP server, router, workers and simulator exchange.

A token's bits belong to its request: no value here depends on the worker, on the other requests of a batch, or on the chunks of a prompt. A
request that moves to another worker is the same request with the tokens that its client has. By the counter-based sampling
(``phalanx_serve.engine.sampler``) its next token is the same.

A *life* is one connection of a worker: a worker that comes back has another one, and messages of an earlier life are stale.
A *job* is one piece of work on one worker: a prefill, a decode or a scoring. A request that continues elsewhere does so under another job, so
that messages of a worker that was only slow are known to be stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

# Requests and engine outputs.

Outcome = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: at a stop token, at ``max_tokens``, because its client canceled or left, or by the error in ``Ended.text``."""


_Count = Annotated[int, Meta(ge=0, lt=2**53)]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of these tokens with at least this probability."""
    min_p: float = 0.0
    """Keeps the tokens with at least this fraction of the highest probability."""
    seed: int = 0
    choice: int = 0
    """Index of this text among the ``n`` of a request; each draws different numbers."""
    vocab_size: int = 0
    """Ids from here on are never drawn: a model may embed more than its tokenizer has. 0 sets no limit."""


class Request(Struct, frozen=True):
    """A text to continue."""

    id: str
    """Unique among a worker's requests."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to generate at most, including those in ``generated``."""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end the text; the one that does is not returned."""
    top_logprobs: int = -1
    """Number of top log-probabilities of each token; -1 for no log-probabilities."""
    prompt_logprobs: bool = False
    """True if log-probabilities of the prompt's tokens are returned (``PromptScored``)."""
    generated: tuple[int, ...] = field(default=(), name="told")
    """Tokens that were generated before the request came to this worker."""


class Token(Struct, frozen=True, tag=True):
    """One more token of a request's text."""

    request: str
    index: _Count
    """Its place in the generated text, from 0."""
    id: _Count
    logprob: float = 0.0
    """In nats, of the model's own distribution (temperature 1, nothing cut), independent of ``Sampling``."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, falling; ties by lower id."""
    weights: Annotated[str, Meta(max_length=4096)] = ""
    """Weights that computed the token, joined with ``+``; empty if the worker's weights were never swapped."""


class PromptScored(Struct, frozen=True, tag=True):
    """The log-probabilities of a prompt's tokens after the first, in nats."""

    request: str
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each, the likeliest tokens as ``Token.top`` has them; empty unless ``Request.top_logprobs`` is above 0."""


class Ended(Struct, frozen=True, tag=True):
    """The last output of a request."""

    request: str
    outcome: Outcome
    text: str = ""
    cached_tokens: _Count = 0
    """Prompt tokens whose pages were cached already."""


EngineOutput = Token | PromptScored | Ended
"""An output of an engine for one of its requests."""


# Errors of requests and engines.

NOT_EXACT = (
    "exact numerics are computed by kernels for CPUs: serve with --numerics fast, or with --device cpu"
)
"""Why exact numerics are refused on a GPU."""
ONLY_STREAMED = "--stream reads weights into the host's memory, where the CPU computes with them: leave out --stream, or --device"
"""Why streamed weights are refused on a GPU."""


class GenerationRequestError(ValueError):
    """A request that cannot be computed. The message has the reason and the remedy; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ServeError(ValueError):
    """A model that cannot be served as requested. The message has the reason and the remedy."""


class NotExactError(ServeError):
    """This process cannot compute with exact numerics; the message has the reason and the remedy."""


class PartLostError(RuntimeError):
    """A process or GPU that had a part of the model is lost, so the engine stops. The message names the part and
    the reason.
    """


class DeviceMemoryError(ServeError):
    """A GPU is out of memory. The message has the allocation and the remedy."""


# Events and commands of a service of several workers.

Role = Literal["prefill", "decode", "both"]
Bits = Literal["trainer", "request", "unspecified"]
"""Origin of the bits of a token and its log-probability: the trainer computes the same ones; they depend on the request and the weights alone; or neither."""
NOBODY = -1


@dataclass(frozen=True)
class WorkerIdentity:
    """Facts that two workers must share for equal bits."""

    weights: str
    numerics: str
    pages: str = ""
    """The format of a page: dtype, layers, widths."""


@dataclass(frozen=True)
class WorkerJoined:
    """A worker has authenticated and waits for work: a new life."""

    worker: int
    life: int
    identity: WorkerIdentity
    role: Role = "both"
    pages: int = 1 << 20
    rows_per_s: float = 1000.0


@dataclass(frozen=True)
class Beat:
    """A worker's heartbeat."""

    worker: int
    life: int
    steps: int
    """Steps of its engine so far. A worker that has jobs and makes no step for long counts as late."""
    jobs: tuple[int, ...] = ()
    """The worker's jobs."""


@dataclass(frozen=True)
class Left:
    """The connection of a worker has ended."""

    worker: int
    life: int
    reason: str = "its connection ended"


@dataclass(frozen=True)
class RequestSubmitted:
    """A client requests a text, whose first ``seen`` tokens it has (from a lost gateway, for example)."""

    request: Request
    seen: int = 0


@dataclass(frozen=True)
class Abandoned:
    """A client cancels its request."""

    request: str


@dataclass(frozen=True)
class OutputReceived:
    """A worker has sent an output of a job. ``output.request`` is ignored; the job identifies the request."""

    worker: int
    life: int
    job: int
    output: EngineOutput


@dataclass(frozen=True)
class DrainWorker:
    """Move a worker's jobs to others, and dismiss it."""

    worker: int


@dataclass(frozen=True)
class AdmitWorker:
    """Let a quarantined worker join again."""

    worker: int


@dataclass(frozen=True)
class ClockTick:
    """Time has passed."""


PoolEvent = WorkerJoined | Beat | Left | DrainWorker | AdmitWorker | ClockTick
Event = PoolEvent | RequestSubmitted | Abandoned | OutputReceived


@dataclass(frozen=True)
class ComputeJob:
    """Order a worker to compute ``request`` after pulling pages from ``source``; pages that do not arrive are
    computed.
    """

    worker: int
    job: int
    request: Request
    source: int = NOBODY
    source_job: int = 0
    """Job of ``source`` whose lease covers the pages."""
    pages: tuple[bytes, ...] = ()
    """Names of the pages to pull."""
    offer: bool = False
    """True if the pages are offered to other workers when the job ends."""


@dataclass(frozen=True)
class CancelJob:
    """Order a worker to drop a job."""

    worker: int
    job: int


@dataclass(frozen=True)
class Forget:
    """Order a worker to drop all pages, because a worker that miscomputed contributed to them."""

    worker: int


@dataclass(frozen=True)
class DeliverOutput:
    """Send an output to the client."""

    output: EngineOutput


@dataclass(frozen=True)
class Refuse:
    """Close the connection of a worker that may not work here."""

    worker: int
    life: int
    reason: str


@dataclass(frozen=True)
class Dismiss:
    """Dismiss a drained worker."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """A worker's jobs must continue elsewhere; for the dispatcher itself. ``is_gone`` if the worker sends nothing
    more.
    """

    worker: int
    jobs: tuple[int, ...]
    is_gone: bool


Command = ComputeJob | CancelJob | Forget | DeliverOutput | Refuse | Dismiss
PoolCommand = Lost | Refuse | Dismiss
