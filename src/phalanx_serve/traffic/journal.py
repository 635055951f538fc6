"""The journal of requests: what each client asked for, and the tokens that left for it.

It is all that a death of a worker leaves of a request, and all that is needed: the next token is a function of prompt, sampling and the
tokens before it, so that another worker that is given these goes on with the same one. A token is taken from the current job alone and
only at the place behind the last one; so none is told twice and none is left out, whatever late workers still say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phalanx_serve.traffic.requests import Ended, EngineOutput, PromptScored, Request, Token


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
        """True if the text has as many tokens as requested."""
        return len(self.tokens) >= self.request.max_tokens


def open_entry(request: Request, seen: int, *, audited: bool) -> Entry:
    """Return the entry of a new request; tokens that its client has are part of the text already."""
    tokens = list(request.told)
    # Tokens of an earlier worker have no log-probability here: such a text cannot be audited.
    return Entry(
        request,
        max(seen, len(tokens)),
        audited and not tokens,
        tokens,
        [0.0] * len(tokens),
        [-1] * len(tokens),
    )


def rest(entry: Entry) -> Request:
    """Return the request for another worker, with all tokens so far."""
    request = entry.request
    return replace(
        request,
        told=tuple(entry.tokens),
        prompt_logprobs=request.prompt_logprobs and not entry.scored,
        top_logprobs=max(request.top_logprobs, 0) if entry.audited else request.top_logprobs,
    )


class GapError(ValueError):
    """A worker has sent a token that is not the next one."""


def take(entry: Entry, output: Token | PromptScored, worker: int) -> list[EngineOutput]:
    """Record an output of the current job and return the outputs for the client. Raises GapError for a token out of order."""
    request = entry.request
    if isinstance(output, PromptScored):
        if entry.scored or not request.prompt_logprobs:
            return []
        entry.scored = True
        return [replace(output, request=request.id)]
    if output.index != len(entry.tokens) or entry.complete:
        raise GapError(
            f"request {request.id}: token {output.index} where {len(entry.tokens)} of {request.max_tokens} are told"
        )
    entry.tokens.append(output.id)
    entry.logprobs.append(output.logprob)
    entry.makers.append(worker)
    entry.losses = 0
    if output.index < entry.seen:
        return []
    if request.top_logprobs < 0:  # an audit requested them, the client did not
        output = replace(output, logprob=0.0, top=())
    return [replace(output, request=request.id)]


def ended(entry: Entry, output: Ended) -> Ended:
    """Return the last output for the client."""
    cached = output.cached_tokens if entry.cached < 0 else entry.cached
    return replace(output, request=entry.request.id, cached_tokens=min(cached, len(entry.request.prompt)))
