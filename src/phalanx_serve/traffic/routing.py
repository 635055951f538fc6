"""Routing: the choice of a worker for a request.

A request goes to the worker with the fewest predicted seconds to its next token. The cost is that of disaggregated
servers (Mooncake, arXiv 2407.00079; NVIDIA Dynamo's router): prefill rows that are not cached, rows queued before
them, and pages to fetch over the link's rate. Ties go to the lower worker number, so the same state gives the same
route, in a replay too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_serve.traffic import events
from phalanx_serve.traffic.scheduler import PAGE


@dataclass(frozen=True)
class Bidder:
    """A worker's load and cached pages, as routing of one request reads them."""

    number: int
    role: events.Role
    queued_rows: int
    held_pages: int
    """Number of the request's leading pages that the worker has."""
    rows_per_s: float


@dataclass(frozen=True)
class Link:
    """Network link that pages are fetched over."""

    page_bytes: int = 1 << 20
    bytes_per_s: float = 1e9
    round_trip_s: float = 1e-3

    def seconds(self, pages: int) -> float:
        """Return the seconds to fetch ``pages`` pages."""
        return self.round_trip_s + pages * self.page_bytes / self.bytes_per_s if pages > 0 else 0.0


@dataclass(frozen=True)
class Route:
    """Worker and page source of a request."""

    worker: int
    prefill: bool
    """True if the worker computes only the prompt and one token, and another worker continues."""
    source: int
    """Worker that the pages are fetched from first. NOBODY: the worker computes missing pages."""
    cost_s: float


def choose(
    rows: int,
    pages: int,
    candidates: Iterable[Bidder],
    sources: Iterable[tuple[int, int]],
    link: Link,
    small_rows: int = PAGE,
) -> Route | None:
    """Return the route of a request of ``rows`` tokens, whose first ``pages`` pages have names: the cheapest in
    seconds.

    None if no worker can take it.

    Args:
        rows: Tokens of prompt and text so far.
        pages: Full pages among them.
        candidates: Workers that accept jobs.
        sources: (worker, cached pages) of the possible page sources.
        link: Network link between workers.
        small_rows: A decode worker computes up to this many rows itself instead of waiting for a prefill worker.

    A decode worker gets a full prompt only if there is no prefill worker, and a prefill worker decodes only if there
    is no decode worker. Ties go to the lower worker number.
    """
    workers = sorted(candidates, key=lambda worker: worker.number)
    decoders = [worker for worker in workers if worker.role != "prefill"] or workers
    prefillers = [worker for worker in workers if worker.role != "decode"]
    ranked = sorted(sources, key=lambda source: (-source[1], source[0]))
    routes = []
    for worker in decoders:
        route = _at(worker, rows, pages, ranked, link)
        rows_to_compute = rows - PAGE * max(
            worker.held_pages, ranked[0][1] if route.source != events.NOBODY else 0
        )
        if worker.role != "decode" or rows_to_compute <= small_rows or not prefillers:
            routes.append(route)
    for worker in prefillers if pages else ():
        if worker.role == "prefill" and decoders[0].role != "prefill":
            route = _at(worker, rows, pages, ranked, link)
            routes.append(Route(worker.number, True, route.source, route.cost_s + link.seconds(pages)))
    if not routes:
        routes = [_at(worker, rows, pages, ranked, link) for worker in decoders]
    return min(routes, key=lambda route: (route.cost_s, route.worker), default=None)


def _at(worker: Bidder, rows: int, pages: int, ranked: list[tuple[int, int]], link: Link) -> Route:
    """Return the faster route on ``worker``: compute the pages that it lacks, or fetch them from the source that has most."""
    held_pages = min(worker.held_pages, pages)
    queued_s = worker.queued_rows / worker.rows_per_s
    compute_s = (rows - PAGE * held_pages) / worker.rows_per_s
    other = next((source for source in ranked if source[0] != worker.number), None)
    if other is not None and other[1] > held_pages:
        got = min(other[1], pages)
        fetch_s = link.seconds(got - held_pages) + (rows - PAGE * got) / worker.rows_per_s
        if fetch_s < compute_s:
            return Route(worker.number, False, other[0], queued_s + fetch_s)
    return Route(worker.number, False, events.NOBODY, queued_s + compute_s)
