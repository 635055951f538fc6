"""Requests to a process that holds a part of a model, and what it means if it does not answer."""

from __future__ import annotations

from typing import TypeVar

from phalanx.serve.engine.errors import PartLostError
from phalanx.serve.stages import messages as m
from phalanx.serve.stages.link import StageLink
from phalanx.wire.messages import WireError

_T = TypeVar("_T", bound=m.FromStage)


class StepFailedError(RuntimeError):
    """A step failed in a process, which continues."""


class Talk:
    """A conversation with ``whom``, the process by its name for people. Methods raise PartLostError if it is gone, StepFailedError if a step failed there."""

    def __init__(self, whom: object, link: StageLink) -> None:
        self._whom, self._link = whom, link

    def send(self, message: m.ToStage, body: memoryview | bytes = b"") -> None:
        """Send a message without an answer."""
        try:
            self._link.send(message, body)
        except WireError as error:
            raise self._lost(str(error)) from error

    def receive(self, kind: type[_T]) -> _T:
        """Return the next message, which must be of ``kind``."""
        try:
            message = self._link.receive(m.FROM_STAGE)
        except WireError as error:
            raise self._lost(str(error)) from error
        if isinstance(message, m.Unable):
            raise self._lost(message.why)
        if isinstance(message, m.Failed):
            raise StepFailedError(f"{self._whom}: {message.why}")
        if not isinstance(message, kind):
            raise self._lost(f"it answers with {type(message).__name__}")
        return message

    def request(self, message: m.ToStage, kind: type[_T], body: memoryview | bytes = b"") -> _T:
        """Send a message and return its answer."""
        self.send(message, body)
        return self.receive(kind)

    def body(self, nbytes: int) -> bytearray:
        """Return the raw bytes that the last answer announced."""
        try:
            return self._link.receive_body(nbytes)
        except WireError as error:
            raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> PartLostError:
        return PartLostError(gone(self._whom, reason))


def gone(whom: object, reason: str) -> str:
    """Return the error's text for the loss of a part of the model."""
    return f"{whom} of the model is gone, so nothing can be computed: {reason}"


def loss_of_idle(whom: object, link: StageLink) -> str:
    """Return why a process with no request at present is gone; empty if it is there."""
    try:
        message = link.look()
    except WireError as error:
        return gone(whom, str(error))
    if message is None:
        return ""
    return gone(
        whom, message.why if isinstance(message, m.Unable) else "it sends an answer without a request"
    )
