"""What a reason is: one thing that is wrong with a run, with its evidence and the way out."""

from dataclasses import dataclass
from typing import Literal, get_args

Code = Literal[
    "stalled",
    "waiting-for-nodes",
    "waiting-for-data",
    "events-unwritten",
    "job-held",
    "job-waiting",
    "gone",
    "silent",
    "failed",
    "not-finite",
    "loss-spike",
    "diverged",
    "other-data",
    "data-gone",
    "checkpoint-failed",
    "checkpoint-old",
    "disk-full",
    "disk-filling",
    "no-coordinator",
    "lost-node",
    "fewer-ranks",
    "no-spares",
    "hardware",
    "straggler",
    "throttled",
    "slow-data",
    "slower",
    "low-goodput",
    "expert-imbalance",
    "changed-libraries",
    "mixed-machines",
    "clock-skew",
]
CODES: tuple[Code, ...] = get_args(Code)
"""Every word by which a rule names what it has found; metrics have a series of each."""
Severity = Literal["critical", "warning", "info"]
"""Critical: training stands still or its result is in danger. Warning: it goes on, at a cost. Info: worth knowing, nothing to do."""


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong with a run."""

    code: Code
    """The rule that found it, such as ``stalled``: a word for programs."""
    severity: Severity
    title: str
    where: str
    """What of the fleet is concerned: a rank, node, folder or step; "" if it is the whole run."""
    since: float | None
    """When it began, in Unix seconds, if that is known."""
    evidence: tuple[str, ...]
    """The observations that the rule concludes it from, each with its numbers."""
    doing: str
    """What is being done about it without the user."""
    next: str
    """What the user should do, with a command."""
