"""What is wrong with a run: every reason, worst first.

A rule looks at one value, ``Observed``, which a reader fills from what lies in the run directory, and states reasons; it reads neither
clock nor disk. A run to which nothing is wrong has none: what a rule cannot know, it does not say.
"""

from __future__ import annotations

from phalanx.launch.engines.standing import JobStanding
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.why.judge import judge
from phalanx.watch.why.read import observe
from phalanx.watch.why.reason import Reason, Severity

__all__ = ["Reason", "Severity", "reasons"]


def reasons(directory: RunDirectory, now: float, job: JobStanding | None = None) -> list[Reason]:
    """Return everything that is wrong with the run in ``directory`` at ``now`` (Unix seconds), worst first.

    ``job`` is what the engine that the run was submitted to shows of it, if known.
    """
    return judge(observe(directory, now, job))
