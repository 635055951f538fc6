"""The journal of requests: what each client asked for, and the tokens that left for it.

It is all that a death of a worker leaves of a request, and all that is needed: the next token is a function of prompt, sampling and the
tokens before it, so that another worker that is given these goes on with the same one. A token is taken from the current job alone and
only at the place behind the last one; so none is told twice and none is left out, whatever late workers still say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phalanx.traffic.requests import Ended, PromptScored, Request, Token, Told


@dataclass
class Entry:
    """The life of one request."""

    request: Request
    seen: int = 0
    """Tokens that its client has from before; they are computed and not told again."""
    audited: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    """The worker that computed each token."""
    pages_from: set[int] = field(default_factory=set)
    """Workers whose pages were used."""
    job: int = 0
    """The one whose tokens are taken; 0 while it waits."""
    scored: bool = False
    losses: int = 0
    """Workers that were lost or failed with it since its last token."""
    moves: int = 0
    cached: int = -1
    """Prompt tokens that its first job did not compute, as far as it is known; -1 before. Later ones find the pages of the first."""

    @property
    def complete(self) -> bool:
        """Whether the text is as long as was asked for."""
        return len(self.tokens) >= self.request.max_tokens


def open_entry(request: Request, seen: int, *, audited: bool) -> Entry:
    """The entry of a request that has just come; tokens told before are part of the text already."""
    told = list(request.told)
    # Tokens of an earlier worker have no log-probability here: such a text cannot be audited.
    return Entry(
        request, max(seen, len(told)), audited and not told, told, [0.0] * len(told), [-1] * len(told)
    )


def rest(entry: Entry) -> Request:
    """The request as another worker is to be asked: with all that was told."""
    request = entry.request
    return replace(
        request,
        told=tuple(entry.tokens),
        prompt_logprobs=request.prompt_logprobs and not entry.scored,
        top_logprobs=max(request.top_logprobs, 0) if entry.audited else request.top_logprobs,
    )


class GapError(ValueError):
    """A worker tells a token that is not the next one."""


def take(entry: Entry, told: Token | PromptScored, worker: int) -> list[Told]:
    """Takes what the current job tells, and returns what leaves for the client. Raises GapError for a token out of its place."""
    request = entry.request
    if isinstance(told, PromptScored):
        if entry.scored or not request.prompt_logprobs:
            return []
        entry.scored = True
        return [replace(told, request=request.id)]
    if told.index != len(entry.tokens) or entry.complete:
        raise GapError(
            f"request {request.id}: token {told.index} where {len(entry.tokens)} of {request.max_tokens} are told"
        )
    entry.tokens.append(told.id)
    entry.logprobs.append(told.logprob)
    entry.makers.append(worker)
    entry.losses = 0
    if told.index < entry.seen:
        return []
    if request.top_logprobs < 0:  # an audit asked for them, the client did not
        told = replace(told, logprob=0.0, top=())
    return [replace(told, request=request.id)]


def ended(entry: Entry, told: Ended) -> Ended:
    """The last word to the client."""
    cached = told.cached_tokens if entry.cached < 0 else entry.cached
    return replace(told, request=entry.request.id, cached_tokens=min(cached, len(entry.request.prompt)))
