"""What happens to a service of several workers, and what its router orders: the values that router, workers and simulator exchange.

A *life* is one connection of a worker: a worker that comes back has another one, and what was said in an earlier life is not believed.
A *job* is one piece of work on one worker: a prefill, a decode or a scoring; a request that goes on elsewhere does so under another job, so
that the words of a worker that was only slow are known for stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx_serve.traffic.requests import EngineOutput, Request

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
