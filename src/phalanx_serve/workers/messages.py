"""Messages between a worker and the router: msgpack of tagged structs, sealed (``phalanx.wire``).

The worker connects, proves that it knows the service's token, and sends ``Opening``; then ``Ready`` with its facts for the router,
or ``Unable`` with the reason. Log-probabilities are sent as 64-bit floats, so no bit is lost.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.wire.messages import MessageDecoder
from phalanx_serve.http.worker import Streaming
from phalanx_serve.traffic import events as e
from phalanx_serve.traffic.events import Ended, EngineOutput, Outcome, PromptScored, Request, Token

PURPOSE = "phalanx serving worker, version 4"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[bytes, Meta(max_length=64)]


class _Message(Struct, frozen=True, tag=True):
    pass


class PageDoor(Struct, frozen=True):
    """Where a worker's pages can be pulled from."""

    host: str
    port: int


class Opening(_Message, frozen=True):
    """The worker is there and opens the model; ``number`` is its place among those that the service starts, -1 for one that joins by itself."""

    number: int
    pid: Count


class Unable(_Message, frozen=True):
    """The worker cannot serve, and ends."""

    why: Annotated[str, Meta(max_length=8192)]


class Ready(_Message, frozen=True):
    """The worker waits for work."""

    identity: e.Identity
    role: e.Role
    root: bytes
    """Root of the names of its pages."""
    context: Count
    """The most tokens of a request."""
    pages: Count
    page_bytes: Count
    rows_per_s: float
    door: PageDoor
    bits: e.Bits = "unspecified"
    """The origin of the bits of its tokens."""


class TokenSaid(_Message, frozen=True):
    """One more token of a job."""

    job: Count
    index: Count
    id: Count
    logprob: float
    top: tuple[tuple[int, float], ...]
    weights: Annotated[str, Meta(max_length=4096)] = ""


class PromptSaid(_Message, frozen=True):
    """The log-probabilities of a job's prompt."""

    job: Count
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class EndSaid(_Message, frozen=True):
    """A job has ended."""

    job: Count
    outcome: Outcome
    text: str
    cached_tokens: Count


JobOutput = TokenSaid | PromptSaid | EndSaid


class Speech(_Message, frozen=True):
    """Outputs of one step of the engine, in their order."""

    said: tuple[JobOutput, ...]


class WorkerBeat(_Message, frozen=True):
    """A sign of life; counts are since the worker began."""

    steps: Count
    jobs: tuple[Count, ...]
    pages_used: Count
    pulled: Count
    """Pages that came from others."""
    not_pulled: Count
    """Pages that were to come, did not, and were computed."""
    drafted: Count = 0
    accepted: Count = 0
    streaming: Streaming | None = None
    """Where its weights are streamed."""
    shared: Count = 0
    """Pages, of those that came, that were read in the memory of the worker that has them, """
    over_nixl: Count = 0
    """and over NIXL."""

    @property
    def counts(self) -> dict[str, float]:
        """All that is counted of it, by name."""
        names = ("pulled", "shared", "over_nixl", "not_pulled", "drafted", "accepted")
        counts: dict[str, float] = {name: getattr(self, name) for name in names}
        return counts | (asdict(self.streaming) if self.streaming is not None else {})


class Leaving(_Message, frozen=True):
    """The worker was asked to end: its jobs are to go on elsewhere, and then it may go."""


class RunJob(_Message, frozen=True):
    """Compute ``request``; pull ``pages`` from ``door`` first, if there is one."""

    job: Count
    request: Request
    source_job: Count = 0
    door: PageDoor | None = None
    pages: tuple[Name, ...] = ()
    offer: bool = False


class StopJob(_Message, frozen=True):
    """Drop a job."""

    job: Count


class ForgetPages(_Message, frozen=True):
    """Drop all pages."""


class Go(_Message, frozen=True):
    """End; ``why`` is empty where nothing is wrong."""

    why: str = ""


ToRouter = Opening | Unable | Ready | Speech | WorkerBeat | Leaving
ToWorker = RunJob | StopJob | ForgetPages | Go
TO_ROUTER: MessageDecoder[ToRouter] = MessageDecoder(ToRouter)
TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)


def encode_output(job: int, output: EngineOutput) -> JobOutput:
    """Return the message of an engine output."""
    if isinstance(output, Token):
        return TokenSaid(job, output.index, output.id, output.logprob, output.top, output.weights)
    if isinstance(output, PromptScored):
        return PromptSaid(job, output.logprobs, output.top)
    return EndSaid(job, output.outcome, output.text, output.cached_tokens)


def decode_output(message: JobOutput) -> EngineOutput:
    """Return the engine output of a message, without the request, which the job identifies."""
    if isinstance(message, TokenSaid):
        return Token("", message.index, message.id, message.logprob, message.top, message.weights)
    if isinstance(message, PromptSaid):
        return PromptScored("", message.logprobs, message.top)
    return Ended("", message.outcome, message.text, message.cached_tokens)
