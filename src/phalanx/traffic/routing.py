"""Which worker computes a request: the least seconds until its next token, by what each worker holds and has to do.

The cost is that of the design of disaggregated servers (Mooncake, arXiv 2407.00079; NVIDIA Dynamo's router): prefill rows that are not held,
rows queued before them, and pages to fetch over the link's rate. Ties go to the lower worker number, so that the same state gives the same
route, in a replay too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.traffic.events import NOBODY, Role

PAGE_ROWS = 64


@dataclass(frozen=True)
class Bidder:
    """What the router knows of a worker with regard to one request."""

    number: int
    role: Role
    queued_rows: int
    held_pages: int
    """The first so many pages of the request are there."""
    rows_per_s: float


@dataclass(frozen=True)
class Link:
    """How pages travel."""

    page_bytes: int = 1 << 20
    bytes_per_s: float = 1e9
    round_trip_s: float = 1e-3

    def seconds(self, pages: int) -> float:
        """The time to fetch so many pages."""
        return self.round_trip_s + pages * self.page_bytes / self.bytes_per_s if pages > 0 else 0.0


@dataclass(frozen=True)
class Route:
    """Where a request goes next."""

    worker: int
    prefill: bool
    """It computes the prompt and one token, and another worker goes on."""
    source: int
    """Whose pages it fetches first; NOBODY: it computes what it does not hold."""
    cost_s: float


def choose(
    rows: int,
    pages: int,
    candidates: Iterable[Bidder],
    sources: Iterable[tuple[int, int]],
    link: Link,
    small_rows: int = PAGE_ROWS,
) -> Route | None:
    """The route of a request of ``rows`` tokens, whose first ``pages`` pages have names; None if nobody can take it.

    Args:
        rows: Tokens of prompt and text so far.
        pages: Whole pages among them.
        candidates: Workers that may be given work.
        sources: (worker, pages held) of those that pages can be fetched from.
        link: How pages travel.
        small_rows: A worker that decodes computes so many rows itself, rather than wait for one that prefills.

    A decode worker is given a whole prompt only if nobody else prefills; and a prefill worker decodes only if nobody else does.
    """
    workers = sorted(candidates, key=lambda worker: worker.number)
    decoders = [worker for worker in workers if worker.role != "prefill"] or workers
    prefillers = [worker for worker in workers if worker.role != "decode"]
    ranked = sorted(sources, key=lambda source: (-source[1], source[0]))
    routes = []
    for worker in decoders:
        route = _at(worker, rows, pages, ranked, link)
        left = rows - PAGE_ROWS * max(worker.held_pages, ranked[0][1] if route.source != NOBODY else 0)
        if worker.role != "decode" or left <= small_rows or not prefillers:
            routes.append(route)
    for worker in prefillers if pages else ():
        if worker.role == "prefill" and decoders[0].role != "prefill":
            route = _at(worker, rows, pages, ranked, link)
            routes.append(Route(worker.number, True, route.source, route.cost_s + link.seconds(pages)))
    if not routes:
        routes = [_at(worker, rows, pages, ranked, link) for worker in decoders]
    return min(routes, key=lambda route: (route.cost_s, route.worker), default=None)


def _at(worker: Bidder, rows: int, pages: int, ranked: list[tuple[int, int]], link: Link) -> Route:
    """The better of computing and fetching what a worker does not hold."""
    held = min(worker.held_pages, pages)
    queued_s = worker.queued_rows / worker.rows_per_s
    compute_s = (rows - PAGE_ROWS * held) / worker.rows_per_s
    other = next((source for source in ranked if source[0] != worker.number), None)
    if other is not None and other[1] > held:
        got = min(other[1], pages)
        fetch_s = link.seconds(got - held) + (rows - PAGE_ROWS * got) / worker.rows_per_s
        if fetch_s < compute_s:
            return Route(worker.number, False, other[0], queued_s + fetch_s)
    return Route(worker.number, False, NOBODY, queued_s + compute_s)
