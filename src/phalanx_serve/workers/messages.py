"""Messages between a worker and the router: msgpack of tagged structs, sealed (``phalanx.wire``).

The worker connects, proves that it knows the service's token, and sends ``Opening``; then ``WorkerReady`` with its
facts for the router, or ``WorkerUnable`` with the reason. Log-probabilities are sent as 64-bit floats, so no bit is
lost.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from msgspec import Meta, Struct, field

from phalanx.wire.messages import MessageDecoder
from phalanx_serve.http.worker import Streaming
from phalanx_serve.traffic import events
from phalanx_serve.traffic.events import EngineOutput, Request

PURPOSE = "phalanx serving worker, version 5"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[bytes, Meta(max_length=64)]


class _Message(Struct, frozen=True, tag=True):
    pass


class PageDoor(Struct, frozen=True):
    """Address of a worker's page port."""

    host: str
    port: int


class Opening(_Message, frozen=True):
    """The worker has started and opens the model. ``number`` is its index among those that the service starts, -1
    if it joined by itself.
    """

    number: int
    pid: Count


class WorkerUnable(_Message, frozen=True, tag="Unable"):
    """The worker cannot serve, and ends."""

    reason: Annotated[str, Meta(max_length=8192)] = field(name="why")


class WorkerReady(_Message, frozen=True, tag="Ready"):
    """The worker waits for work."""

    identity: events.WorkerIdentity
    role: events.Role
    root: bytes
    """Root of its page names."""
    context: Count
    """Most tokens of a request."""
    pages: Count
    page_bytes: Count
    rows_per_s: float
    door: PageDoor
    bits: events.Bits = "unspecified"
    """Origin of the bits of its tokens."""


class OutputBatch(_Message, frozen=True, tag="Speech"):
    """Outputs of one step of the engine, in their order, each with its job."""

    outputs: tuple[tuple[Count, EngineOutput], ...] = field(name="said")


class WorkerBeat(_Message, frozen=True):
    """Heartbeat; counts are since the worker started."""

    steps: Count
    jobs: tuple[Count, ...]
    pages_used: Count
    pulled: Count
    """Pages that were pulled from other workers."""
    not_pulled: Count
    """Pages whose pull failed and that were computed."""
    drafted: Count = 0
    accepted: Count = 0
    streaming: Streaming | None = None
    """Set if its weights are streamed."""
    shared: Count = 0
    """Pulled pages that were read from the other worker's shared memory."""
    over_nixl: Count = 0
    """Pulled pages that were read over NIXL."""

    @property
    def counts(self) -> dict[str, float]:
        """All counts, by name."""
        names = ("pulled", "shared", "over_nixl", "not_pulled", "drafted", "accepted")
        counts: dict[str, float] = {name: getattr(self, name) for name in names}
        return counts | (asdict(self.streaming) if self.streaming is not None else {})


class Leaving(_Message, frozen=True):
    """The worker received a signal to end: its jobs continue elsewhere, and then it may go."""


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
    """End; ``reason`` is empty if nothing is wrong."""

    reason: str = field(default="", name="why")


ToRouter = Opening | WorkerUnable | WorkerReady | OutputBatch | WorkerBeat | Leaving
ToWorker = RunJob | StopJob | ForgetPages | Go
TO_ROUTER: MessageDecoder[ToRouter] = MessageDecoder(ToRouter)
TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
