"""What follows from replaying both runs: which module parts them, or which run's log its own replay does not confirm.

If the replays part, the cause is still there: another layout, kernel, version or collective. If they agree, but one run logged something
else, its cause has gone: memory, a device, or code that was another then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.train.compare.logged import Logged, bits
from phalanx.train.compare.observation import Compared, Replay, compare_replays
from phalanx.train.compare.runs import RunComparison


class NothingToReplayError(RuntimeError):
    """Two runs cannot be replayed from a state that they have in common."""


@dataclass(frozen=True)
class Unconfirmed:
    """A number that a run logged and that its own replay does not give."""

    run: str
    """"A" or "B"."""
    step: int
    name: str
    logged: float
    replayed: float


@dataclass(frozen=True)
class Verdict:
    """The result of replaying two runs."""

    from_step: int
    to_step: int
    compared: Compared
    unconfirmed: tuple[Unconfirmed, ...]
    """The first of either run."""

    @property
    def sentence(self) -> str:
        """The conclusion, for people."""
        if self.compared.parting is not None:
            return f"the replays part at {self.compared.parting}"
        if not self.unconfirmed:
            return "the replays agree in every bit, with each other and with what was logged"
        runs = " and ".join(dict.fromkeys(one.run for one in self.unconfirmed))
        return (
            f"the replays agree in every bit, but not with what {runs} logged: nothing in the layout or in today's code and "
            f"kernels parts the runs; look at the machine, memory and versions that {runs} had then"
        )


MOST_STEPS_FROM_THE_BEGINNING = 20
"""Steps that are replayed from the initial weights without being asked to."""


def steps_to_replay(found: RunComparison, *, from_start: bool) -> tuple[int, int]:
    """The step whose state is restored (0: the beginning) and the last step to compute again.

    Raises ``NothingToReplayError`` if the runs do not part, or have no equal checkpoint before they do.
    """
    end = found.parts_at
    if end is None:
        raise NothingToReplayError("the runs do not part: there is no step to replay")
    newest = max(found.equal_checkpoints, default=0)
    if not newest and end > MOST_STEPS_FROM_THE_BEGINNING and not from_start:
        raise NothingToReplayError(
            f"the runs part at step {end}, and before it they have no checkpoint in common with equal bits: replay all of it with "
            "--from-start, or keep more checkpoints (checkpoint.keep_every)"
        )
    return newest, end


def judge_replays(
    replays: tuple[Replay, Replay], logs: tuple[Logged, Logged], steps: tuple[int, int]
) -> Verdict:
    """Compares two replays with each other and with what the runs logged; ``steps`` are ``steps_to_replay``."""
    unconfirmed = []
    for run, replay, log in zip("AB", replays, logs, strict=True):
        unconfirmed += _unconfirmed(run, replay.numbers, log)[:1]
    return Verdict(*steps, compare_replays(*replays), tuple(unconfirmed))


def _unconfirmed(run: str, numbers: Mapping[int, Mapping[str, float]], log: Logged) -> list[Unconfirmed]:
    return [
        Unconfirmed(run, step, name, logged, value)
        for step, table in sorted(numbers.items())
        for name, value in table.items()
        if (logged := log.steps.get(step, {}).get(name)) is not None and bits(logged) != bits(value)
    ]
