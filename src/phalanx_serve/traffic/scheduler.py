"""Scheduler of one worker: which requests compute how many rows in a step.

Requests that decode come first, then the prompts of others in chunks (chunked prefill, arXiv 2308.16369). Neither the order nor the size of
the chunks changes a bit of any token. They decide who waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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
    """Schedule at most ``rows`` of at most ``max_requests``.

    A request without rows is not in the output. Requests that decode come first, then their drafts, then prompts.
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
