"""Ctrl-C and SIGTERM as a request that the loop answers at the next step boundary."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    signal_name: str = ""

    @property
    def made(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self.signal_name)

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM for requests from now on. A second SIGINT acts as usual, at once."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
