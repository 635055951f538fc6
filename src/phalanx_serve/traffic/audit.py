"""Audits of workers by comparing bits: some requests are scored again elsewhere, and whoever differs from the majority is found out.

Equal weights and equal numerics give equal log-probabilities to the last bit, so a difference of one bit is a defect and needs no
tolerance. The first comparison accuses nobody: it starts a vote in which all who had a hand in the text, whoever noticed, and others score the
same tokens afresh; at least three, and more than half must agree. Where the text was wrong and all score it right, the difference is
counted as unexplained: a fault that went away again, or a page from a worker that has left; nobody is sent away on suspicion.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

VOTERS = 3


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is among the audited ones; the same on every gateway."""
    number = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def bits(logprobs: Sequence[float]) -> bytes:
    """The numbers as bytes: what compares equal is equal to the bit."""
    return struct.pack(f"<{len(logprobs)}d", *logprobs)


@dataclass
class Audit:
    """One text that is scored again."""

    tokens: tuple[int, ...]
    text: int
    """So many at the end were generated."""
    served: bytes
    """The bits that the client would have been told."""
    makers: frozenset[int]
    """Who computed tokens or pages of it."""
    asked: set[int] = field(default_factory=set)
    """Workers that are scoring."""
    scores: dict[int, bytes] = field(default_factory=dict)
    """Worker -> bits of its own fresh scores."""
    voting: bool = False


@dataclass(frozen=True)
class Verdict:
    """What an audit has come to."""

    wrong: frozenset[int] = frozenset()
    """Workers whose fresh scores the majority contradicts."""
    unexplained: bool = False
    """The text was wrong, and all who were asked score it right."""
    difference: bool = False
    undecided: bool = False
    right: bytes = b""
    """The bits of the majority."""


def judge(audit: Audit, others: frozenset[int]) -> Verdict | frozenset[int]:
    """The verdict, or the workers that are to score next; ``others`` can be asked."""
    if audit.asked:
        return frozenset()
    if not audit.voting:
        if all(score == audit.served for score in audit.scores.values()):
            return Verdict()
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
        return frozenset(more[:1]) if more else Verdict(difference=True, undecided=True)
    right = ranked[0][0]
    wrong = frozenset(worker for worker, score in audit.scores.items() if score != right)
    return Verdict(wrong, not wrong and right != audit.served, difference=True, right=right)


def evidence(audit: Audit, worker: int, right: bytes) -> str:
    """Why ``worker`` is found wrong, with the first number that differs, so that it can be computed again by hand."""
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
