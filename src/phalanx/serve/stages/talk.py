"""What is said to a process that has a part of a model, and what it means when it does not answer."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.serve.engine.errors import PartLostError
from phalanx.serve.stages import messages as m
from phalanx.serve.stages.link import StageLink

_T = TypeVar("_T", bound=m.FromStage)


class StepFailedError(RuntimeError):
    """A step did not come through a process, which goes on."""


class Talk:
    """A conversation with ``whom``, as people know it. Methods raise PartLostError where it is gone, StepFailedError where a step failed there."""

    def __init__(self, whom: object, link: StageLink) -> None:
        self._whom, self._link = whom, link

    def say(self, message: m.ToStage, body: memoryview | bytes = b"") -> None:
        """Says what is not answered."""
        try:
            self._link.say(message, body)
        except (CheckpointError, OSError) as error:
            raise self._lost(str(error)) from error

    def hear(self, kind: type[_T]) -> _T:
        """What it says, which must be of ``kind``."""
        try:
            message = m.from_stage.decode(self._link.hear())
        except (CheckpointError, OSError, msgspec.MsgspecError) as error:
            raise self._lost(str(error)) from error
        if isinstance(message, m.Unable):
            raise self._lost(message.why)
        if isinstance(message, m.Failed):
            raise StepFailedError(f"{self._whom}: {message.why}")
        if not isinstance(message, kind):
            raise self._lost(f"it answers with {type(message).__name__}")
        return message

    def ask(self, message: m.ToStage, kind: type[_T], body: memoryview | bytes = b"") -> _T:
        """Says something, and hears the answer."""
        self.say(message, body)
        return self.hear(kind)

    def body(self, nbytes: int) -> bytearray:
        """The raw bytes that the last answer has announced."""
        try:
            return self._link.body(nbytes)
        except (CheckpointError, OSError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> PartLostError:
        return PartLostError(gone(self._whom, why))


def gone(whom: object, why: str) -> str:
    """What is told when ``whom`` has a part of the model no more."""
    return f"{whom} of the model is gone, so nothing can be computed: {why}"


def looked(whom: object, link: StageLink) -> str:
    """Why a process that nothing is asked of is gone; empty if it is there."""
    try:
        said = link.look()
        message = None if said is None else m.from_stage.decode(said)
    except (CheckpointError, OSError, ValueError) as error:
        return gone(whom, str(error))
    if message is None:
        return ""
    return gone(whom, message.why if isinstance(message, m.Unable) else "it says what nobody has asked for")
