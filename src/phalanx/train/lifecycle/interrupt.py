"""Graceful stop: Ctrl-C and SIGTERM become a request that the loop obeys at the next step boundary."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The request to stop, named after its signal; empty if none was made."""

    signal_name: str = ""

    @property
    def made(self) -> bool:
        """True if a stop was requested."""
        return bool(self.signal_name)

    def listen(self) -> None:
        """Installs the handlers of SIGINT and SIGTERM. A second SIGINT acts as usual, at once."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
