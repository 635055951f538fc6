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

from dataclasses import dataclass, field
from typing import Literal

# Requests and engine outputs.

Outcome = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: at a stop token, at ``max_tokens``, because its client cancelled or left, or by the error in ``Ended.text``."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    """The likeliest tokens that are left in; 0 leaves in all."""
    top_p: float = 1.0
    """Keeps of these the smallest set that holds so much of the probability."""
    min_p: float = 0.0
    """Keeps of these those at least so likely as this share of the likeliest."""
    seed: int = 0
    choice: int = 0
    """The index of this text among the ``n`` of a request; each draws other numbers."""
    vocab_size: int = 0
    """Ids from here on are never drawn: a model may embed more than its tokenizer has. 0 leaves all in."""


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    id: str
    """Unique among those that a worker holds."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to generate at most, including those in ``told``."""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end the text; the one that does is not returned."""
    top_logprobs: int = -1
    """Number of top log-probabilities of each token; -1 for no log-probabilities."""
    prompt_logprobs: bool = False
    """True if log-probabilities of the prompt's tokens are returned (``PromptScored``)."""
    told: tuple[int, ...] = ()
    """Tokens that were generated before the request came to this worker."""


@dataclass(frozen=True)
class Token:
    """One more token of a request's text."""

    request: str
    index: int
    """Its place in the generated text, from 0."""
    id: int
    logprob: float = 0.0
    """In nats, of the model's own distribution (temperature 1, nothing cut), whatever ``Sampling`` says."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, falling; ties by lower id."""
    weights: str = ""
    """The weights that made it, of several with ``+`` between; empty where the worker has no others than those it began with."""


@dataclass(frozen=True)
class PromptScored:
    """The log-probabilities of a prompt's tokens after the first, in nats."""

    request: str
    logprobs: tuple[float, ...] = field(default=())
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each, the likeliest tokens as ``Token.top`` has them; empty unless ``Request.top_logprobs`` is above 0."""


@dataclass(frozen=True)
class Ended:
    """The last output of a request."""

    request: str
    outcome: Outcome
    text: str = ""
    cached_tokens: int = 0
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


class RequestError(ValueError):
    """A request cannot be computed; the message says why and what to change, ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(ValueError):
    """A model cannot be served as asked; the message says why and what to change."""


class NotExactError(EngineError):
    """This process cannot compute with exact numerics; the message has the reason and the remedy."""


class PartLostError(RuntimeError):
    """A process that had layers of the model is gone, and the engine computes nothing any more; the message says which and why."""


class DeviceMemoryError(EngineError):
    """A GPU has no memory for what was asked of it; the message says for what, and what would help."""


# Events and commands of a service of several workers.

Role = Literal["prefill", "decode", "both"]
Bits = Literal["trainer", "request", "unspecified"]
"""Origin of the bits of a token and its log-probability: the trainer computes the same ones; they depend on the request and the weights alone; or neither."""
NOBODY = -1


@dataclass(frozen=True)
class Identity:
    """What must be equal of two workers for their bits to be equal."""

    weights: str
    numerics: str
    pages: str = ""
    """The format of a page: dtype, layers, widths."""


@dataclass(frozen=True)
class Joined:
    """A worker has proven itself and waits for work; a new life."""

    worker: int
    life: int
    identity: Identity
    role: Role = "both"
    pages: int = 1 << 20
    rows_per_s: float = 1000.0


@dataclass(frozen=True)
class Beat:
    """A worker's sign of life."""

    worker: int
    life: int
    steps: int
    """Steps of its engine so far. A worker that has jobs and makes no step for long is late, whatever it says."""
    jobs: tuple[int, ...] = ()
    """Those that it holds."""


@dataclass(frozen=True)
class Left:
    """The connection of a worker has ended."""

    worker: int
    life: int
    why: str = "its connection ended"


@dataclass(frozen=True)
class Submitted:
    """A client asks for a text, of which it has the first ``seen`` tokens (from a gateway that is lost, say)."""

    request: Request
    seen: int = 0


@dataclass(frozen=True)
class Abandoned:
    """A client takes back its request."""

    request: str


@dataclass(frozen=True)
class Heard:
    """A worker has sent an output of a job. ``output.request`` is ignored; the job identifies the request."""

    worker: int
    life: int
    job: int
    output: EngineOutput


@dataclass(frozen=True)
class Drain:
    """A worker is to be emptied and sent away."""

    worker: int


@dataclass(frozen=True)
class Admit:
    """A worker in quarantine may join again."""

    worker: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


PoolEvent = Joined | Beat | Left | Drain | Admit | Tick
Event = PoolEvent | Submitted | Abandoned | Heard


@dataclass(frozen=True)
class Run:
    """Orders a worker to compute ``request``; pages are pulled from ``source`` first, and whatever does not come is computed."""

    worker: int
    job: int
    request: Request
    source: int = NOBODY
    source_job: int = 0
    """The job of ``source`` under whose lease the pages are offered."""
    pages: tuple[bytes, ...] = ()
    """Names of those to pull."""
    offer: bool = False
    """Whether the pages are to be offered when the job ends."""


@dataclass(frozen=True)
class Stop:
    """Orders a worker to drop a job."""

    worker: int
    job: int


@dataclass(frozen=True)
class Forget:
    """Orders a worker to drop all pages, since one that miscomputes was found among those that they came from."""

    worker: int


@dataclass(frozen=True)
class Tell:
    """Sends an output to the client."""

    output: EngineOutput


@dataclass(frozen=True)
class Refuse:
    """Ends the connection of a worker that may not work here."""

    worker: int
    life: int
    why: str


@dataclass(frozen=True)
class Dismiss:
    """Sends a drained worker away."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """A worker's jobs are to go on elsewhere; for the dispatcher itself. ``gone`` if the worker will say no more."""

    worker: int
    jobs: tuple[int, ...]
    gone: bool


Command = Run | Stop | Forget | Tell | Refuse | Dismiss
PoolCommand = Lost | Refuse | Dismiss
