"""Scheduler of one worker: which requests compute how many rows in a step, and which KV pages they use.

Requests that decode come first, then the prompts of others in chunks (chunked prefill, arXiv 2308.16369). Neither the order nor the size of
the chunks changes a bit of any token. They decide who waits.

The block table has the names, places and reference counts of the worker's KV pages, which are blocks of 64 tokens.
A page's name is a hash chained over all tokens up to its last, rooted in the weights and numerics that computed it. So equal names mean
equal bits, and any request whose text begins with these tokens can use the page (the hashed blocks of vLLM, arXiv 2309.06180). Unused pages
stay until their place is needed. The least recently used leaf of the prefix tree is evicted first.

A page that a worker offers to others is under a lease until it is fetched, or until the lease expires. The worker's own cache does not
evict it. So a fetcher that dies costs memory only for the time of a lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class RequestProgress:
    """Progress of a running request. Callers list requests in the order of their arrival."""

    id: str
    computed: int
    """Tokens whose keys and values are in the cache."""
    length: int
    """Tokens of the text so far, more than ``computed``."""
    drafted: int = 0
    """Drafts of the next tokens, which may be computed behind the last one."""

    @property
    def remaining(self) -> int:
        """Tokens of the text to compute, drafts excluded."""
        return self.length - self.computed


@dataclass(frozen=True)
class ScheduledRows:
    """Consecutive rows of one request in a step: its tokens from ``begin`` up to ``end``."""

    id: str
    begin: int
    end: int
    drafted: int = 0
    """Drafts among them, at their end."""

    def without_drafts(self) -> ScheduledRows:
        """Return the rows of the text's own tokens."""
        return replace(self, end=self.end - self.drafted, drafted=0)


@dataclass(frozen=True)
class SchedulerOutput:
    """The rows of a step by request, in the order in which they are computed."""

    requests: tuple[ScheduledRows, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all requests."""
        return sum(request.end - request.begin for request in self.requests)


def schedule(
    requests: Sequence[RequestProgress], rows: int, max_requests: int | None = None
) -> SchedulerOutput:
    """Schedule at most ``rows`` rows of at most ``max_requests`` requests (None: of all).

    Requests that decode get a row each first, then rows for their drafts; the remaining rows go to prompts, in order.
    A request without rows is not in the output.
    """
    counts: dict[str, int] = {}
    remaining = rows
    decoding = [request for request in requests if request.remaining == 1]
    prefilling = [request for request in requests if request.remaining > 1]
    if max_requests is not None:
        decoding = decoding[:max_requests]
        prefilling = prefilling[: max(0, max_requests - len(decoding))]
    # A draft never takes the row of another request's next token.
    for request, needed in (
        *((request, 1) for request in decoding),
        *((request, request.drafted) for request in decoding),
        *((request, request.remaining) for request in prefilling),
    ):
        count = min(remaining, needed)
        if count:
            counts[request.id] = counts.get(request.id, 0) + count
        remaining -= count
    by_id = {request.id: request for request in requests}
    assert len(by_id) == len(requests), "a request is listed once"
    output = SchedulerOutput(tuple(_scheduled(by_id[name], count) for name, count in counts.items()))
    assert output.rows == rows - remaining <= rows
    return output


def _scheduled(request: RequestProgress, count: int) -> ScheduledRows:
    """Return the next ``count`` rows of a request; those beyond its length are drafts."""
    end = request.computed + count
    return ScheduledRows(request.id, request.computed, end, max(0, end - request.length))


def youngest(requests: Sequence[RequestProgress]) -> str:
    """Return the request to preempt when pages run out: the last arrival, so that the oldest request always ends."""
    return requests[-1].id


# Block table.


PAGE = 64
"""Tokens of a page; it divides the block of keys of exact attention."""


def root_name(*identity: str) -> bytes:
    """Return the root of page names: a hash of weights, numerics and storage format."""
    return hashlib.sha256("\0".join(identity).encode()).digest()


def page_names(tokens: Sequence[int], root: bytes) -> list[bytes]:
    """Return the names of the full pages of ``tokens``: each is a hash chained to the one before, the first to ``root``."""
    names: list[bytes] = []
    for end in range(PAGE, len(tokens) + 1, PAGE):
        names.append(next_name(names[-1] if names else root, tokens[end - PAGE : end]))
    return names


def next_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of the page with ``tokens`` behind the page, or the root, named ``before``."""
    return hashlib.sha256(before + b"".join(token.to_bytes(8, "little") for token in tokens)).digest()


@dataclass
class _Page:
    name: bytes | None = None
    before: bytes | None = None
    uses: int = 1
    used_at: int = 0


class BlockTable:
    """Places of ``count`` pages, with reference counts."""

    def __init__(self, count: int) -> None:
        """Begin with ``count`` free places; the lowest are taken first."""
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._pages: dict[int, _Page] = {}
        self._places: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}  # pages behind a name
        self._turn = 0

    @property
    def used(self) -> int:
        """Pages in use."""
        return sum(page.uses > 0 for page in self._pages.values())

    @property
    def available(self) -> int:
        """Pages that can be taken: free, or cached and unused."""
        return self.count - self.used

    def holds(self, name: bytes) -> bool:
        """Return True if a page of this name is here."""
        return name in self._places

    def place(self, name: bytes) -> int:
        """Return the place of the page of this name. Raises KeyError if it is not here."""
        return self._places[name]

    def use_prefix(self, names: Sequence[bytes]) -> list[int]:
        """Use the cached pages of ``names`` up to the first one that is not here. Return their places, each of which must be released."""
        places = []
        for name in names:
            if name not in self._places:
                break
            place = self._places[name]
            self._pages[place].uses += 1
            places.append(place)
        return places

    def take(self) -> int | None:
        """Take a place for a page without a name, and drop the least recently used cached page if none is free;
        ``None`` if all pages are in use.
        """
        if not self._free and not self._evict():
            return None
        place = self._free.pop()
        self._pages[place] = _Page()
        return place

    def name(self, place: int, name: bytes, before: bytes) -> int:
        """Name a page in use that is full now, and return its place.

        If another page has this name, release ``place``, use that page instead, and return its place.
        """
        if name in self._places:
            existing = self._places[name]
            if existing != place:
                self._pages[existing].uses += 1
                self.release([place])
            return existing
        page = self._pages[place]
        page.name, page.before = name, before
        self._places[name] = place
        self._children[before] = self._children.get(before, 0) + 1
        return place

    def release(self, places: Sequence[int]) -> None:
        """End a use of each of ``places``. Pages with a name stay cached, others are free at their last use."""
        self._turn += 1
        for place in places:
            page = self._pages[place]
            page.uses -= 1
            page.used_at = self._turn
            if page.uses == 0 and page.name is None:
                del self._pages[place]
                self._free.append(place)

    def drop_unused(self) -> None:
        """Evict all unused pages."""
        while self._evict():
            pass

    def _evict(self) -> bool:
        """Free the least recently used of the cached pages that are not in use and that no other page follows; False if there is none."""
        leaves = [
            (p.used_at, place)
            for place, p in self._pages.items()
            if p.uses == 0 and p.name not in self._children
        ]
        if not leaves:
            return False
        _, place = min(leaves)
        page = self._pages.pop(place)
        assert page.name is not None, "pages without a name are free when unused"
        assert page.before is not None, "named together"
        del self._places[page.name]
        self._children[page.before] -= 1
        if not self._children[page.before]:
            del self._children[page.before]
        self._free.append(place)
        return True


# Leases.


@dataclass
class Leases:
    """Leases on pages: which pages other workers may still fetch."""

    lease_s: float = 30.0
    until_s: dict[Hashable, float] = field(default_factory=dict)
    names: dict[Hashable, tuple[bytes, ...]] = field(default_factory=dict)
    expired: int = 0

    def offer(self, job: Hashable, names: Sequence[bytes], now_s: float) -> None:
        """Begin a lease on the pages of a job."""
        self.until_s[job], self.names[job] = now_s + self.lease_s, tuple(names)

    def offered(self, job: Hashable, now_s: float) -> tuple[bytes, ...]:
        """Return the names under a job's lease; () if it has ended."""
        return self.names[job] if self.until_s.get(job, now_s) > now_s else ()

    def end(self, job: Hashable) -> bool:
        """End a lease. Return True if there was one."""
        self.names.pop(job, None)
        return self.until_s.pop(job, None) is not None

    def end_all(self) -> None:
        """End all leases."""
        self.until_s.clear()
        self.names.clear()

    def expire(self, now_s: float) -> list[Hashable]:
        """End the leases that are over at ``now_s``, and return their jobs. Counts them in ``expired``."""
        over = [job for job, until_s in self.until_s.items() if until_s <= now_s]
        for job in over:
            self.end(job)
        self.expired += len(over)
        return over

    def leased_pages(self) -> set[bytes]:
        """Return the pages under any lease."""
        return {name for names in self.names.values() for name in names}
