"""Journal of requests, with each client's request and the tokens sent to it; and audits, which score some requests
again on other workers.

The journal survives the death of a worker, and suffices: the next token is a function of prompt, sampling and the
tokens before it. So another worker continues with the same token. A token is accepted only from the current job and
only at the next index, so none is sent twice or lost, even if late workers still send.

Audits find a worker whose bits differ from the majority's. Equal weights and numerics give equal log-probabilities to
the last bit, so a difference of one bit is a defect and needs no tolerance. The first difference starts a vote: all
workers that contributed to the text, the auditor, and others score the same tokens again. At least three must score,
and more than half must agree. If the text was wrong and all workers score it right, the difference counts as
unexplained: a transient fault, or a page from a worker that has left. No worker is quarantined on suspicion.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from phalanx_serve.traffic.events import Ended, EngineOutput, PromptScored, Request, Token


@dataclass
class Entry:
    """Record of one request."""

    request: Request
    seen: int = 0
    """Number of tokens that the client already has; they are not sent again."""
    audited: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    """Worker that computed each token."""
    pages_from: set[int] = field(default_factory=set)
    """Workers whose pages were used."""
    job: int = 0
    """Job whose tokens are accepted; 0 while the request waits."""
    scored: bool = False
    losses: int = 0
    """Workers that were lost or failed on it since its last token."""
    moves: int = 0
    cached: int = -1
    """Prompt tokens that the first job found cached; -1 if unknown. Later jobs reuse the pages of the first."""

    @property
    def complete(self) -> bool:
        """True if the text has as many tokens as requested."""
        return len(self.tokens) >= self.request.max_tokens


def open_entry(request: Request, seen: int, *, audited: bool) -> Entry:
    """Return the entry of a new request, whose text begins with ``request.generated``.

    The first ``seen`` tokens of the text are not delivered again.
    """
    tokens = list(request.generated)
    # Tokens of an earlier worker have no log-probability here: such a text cannot be audited.
    return Entry(
        request,
        max(seen, len(tokens)),
        audited and not tokens,
        tokens,
        [0.0] * len(tokens),
        [-1] * len(tokens),
    )


def remaining_request(entry: Entry) -> Request:
    """Return the request for another worker: ``generated`` has all tokens so far; ``prompt`` and ``max_tokens`` stay.

    Its prompt is scored only if it was not yet. An audited text gets log-probabilities.
    """
    request = entry.request
    return structs.replace(
        request,
        generated=tuple(entry.tokens),
        prompt_logprobs=request.prompt_logprobs and not entry.scored,
        top_logprobs=max(request.top_logprobs, 0) if entry.audited else request.top_logprobs,
    )


class GapError(ValueError):
    """A worker has sent a token that is not the next one."""


def take(entry: Entry, output: Token | PromptScored, worker: int) -> list[EngineOutput]:
    """Record an output of the current job and return the outputs for the client, at most one.

    Log-probabilities that it did not request are removed. Outputs that the client has seen already are not returned.
    Raises GapError for a token out of order.
    """
    request = entry.request
    if isinstance(output, PromptScored):
        if entry.scored or not request.prompt_logprobs:
            return []
        entry.scored = True
        return [structs.replace(output, request=request.id)]
    if output.index != len(entry.tokens) or entry.complete:
        raise GapError(
            f"request {request.id}: token {output.index} where {len(entry.tokens)} of {request.max_tokens} are sent"
        )
    entry.tokens.append(output.id)
    entry.logprobs.append(output.logprob)
    entry.makers.append(worker)
    entry.losses = 0
    if output.index < entry.seen:
        return []
    if request.top_logprobs < 0:  # an audit requested them, the client did not
        output = structs.replace(output, logprob=0.0, top=())
    return [structs.replace(output, request=request.id)]


def ended(entry: Entry, output: Ended) -> Ended:
    """Return the last output for the client."""
    cached = output.cached_tokens if entry.cached < 0 else entry.cached
    return structs.replace(
        output, request=entry.request.id, cached_tokens=min(cached, len(entry.request.prompt))
    )


# Audits of workers by comparing bits.


VOTERS = 3


def chosen(request_id: str, share: float) -> bool:
    """Return True if a request is audited. The result is the same on every gateway."""
    number = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def bits(logprobs: Sequence[float]) -> bytes:
    """Return the numbers as bytes: equal bytes mean equal bits."""
    return struct.pack(f"<{len(logprobs)}d", *logprobs)


@dataclass
class TextAudit:
    """Audit of one text."""

    tokens: tuple[int, ...]
    text: int
    """Number of generated tokens, at the end."""
    served: bytes
    """Bits of the log-probabilities that the client received."""
    makers: frozenset[int]
    """Workers that computed tokens or pages of the text."""
    scoring: set[int] = field(default_factory=set)
    """Workers that are scoring."""
    scores: dict[int, bytes] = field(default_factory=dict)
    """Bits of each worker's own scores."""
    voting: bool = False


@dataclass(frozen=True)
class AuditResult:
    """Result of an audit."""

    wrong: frozenset[int] = frozenset()
    """Workers whose scores differ from the majority."""
    unexplained: bool = False
    """The text was wrong, but every worker scores it right."""
    difference: bool = False
    undecided: bool = False
    right: bytes = b""
    """Bits of the majority."""


def judge(audit: TextAudit, others: frozenset[int]) -> AuditResult | frozenset[int]:
    """Return the result, or the workers that must score next, chosen from ``others``: none yet while some are
    scoring.

    Scores equal to the served text's end it. A first difference begins a vote (``audit.voting``) of makers and
    others, at least ``VOTERS``; the absolute majority is right. Without one, one more worker votes, or the result is
    undecided.
    """
    if audit.scoring:
        return frozenset()
    if not audit.voting:
        if all(score == audit.served for score in audit.scores.values()):
            return AuditResult()
        audit.voting = True
        missing = (audit.makers & others) - audit.scores.keys()
        more = sorted(others - audit.scores.keys() - missing)
        missing |= set(more[: max(0, VOTERS - len(audit.scores) - len(missing))])
        if missing:
            return frozenset(missing)
    counts = Counter(audit.scores.values())
    ranked = counts.most_common(1)
    if not ranked or ranked[0][1] < 2 or 2 * ranked[0][1] <= len(audit.scores):
        more = sorted(others - audit.scores.keys())
        return frozenset(more[:1]) if more else AuditResult(difference=True, undecided=True)
    right = ranked[0][0]
    wrong = frozenset(worker for worker, score in audit.scores.items() if score != right)
    return AuditResult(wrong, not wrong and right != audit.served, difference=True, right=right)


def evidence(audit: TextAudit, worker: int, right: bytes) -> str:
    """Return the reason why ``worker`` is wrong, with the first log-probability that differs, in hexadecimal for a check by hand."""
    numbers = [struct.unpack(f"<{len(each) // 8}d", each) for each in (audit.scores[worker], right)]
    agree = sum(score == right for score in audit.scores.values())
    for place, (wrong, expected) in enumerate(zip(*numbers, strict=False)):
        if struct.pack("<d", wrong) != struct.pack("<d", expected):
            at = len(audit.tokens) - audit.text + place
            return (
                f"it computes other bits than the majority: the log-probability of token {at} (id {audit.tokens[at]}) of an audited text is "
                f"{wrong.hex()} by it and {expected.hex()} by {agree} others"
            )
    return f"it computes other bits than the majority: {len(numbers[0])} log-probabilities where {agree} others have {len(numbers[1])}"
