"""What a process is told about its log: where it lies, whose it is, how much is kept. A parent gives it to a child in one environment variable."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from phalanx.observe.logs.log_file import Bounds
from phalanx.observe.logs.tail import raw_of
from phalanx.run.spec import ObserveSpec

VARIABLE = "PHALANX_LOG"


@dataclass(frozen=True)
class LogOrder:
    """The log of one process of a run."""

    path: Path
    """``RUN/logs/attempt-NNN-PROCESS.jsonl``."""
    process: str
    attempt: int
    node: str | None = None
    """The node's name in a fleet, else the machine's; ``None`` for a coordinator that belongs to no node."""
    bounds: Bounds = field(default_factory=Bounds)
    place: int | None = None
    """In a child whose parent reads its descriptors 1 and 2: that of its place."""

    @property
    def raw(self) -> Path:
        """The log of what the process wrote past Python: native code, other programs, a crash."""
        return raw_of(self.path)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.path.parent.parent

    def to_text(self, place: int | None) -> str:
        """The order for a child that inherits the descriptor ``place``."""
        return msgspec.json.encode(msgspec.to_builtins(replace(self, place=place), enc_hook=str)).decode()


def order_for(
    path: Path, process: str, attempt: int, observe: ObserveSpec, node: str | None = ""
) -> LogOrder:
    """The order for a process of a run; without a node's name it is the machine's."""
    bounds = Bounds(observe.log_mib << 20, observe.log_files)
    return LogOrder(path, process, attempt, socket.gethostname() if node == "" else node, bounds)


def taken_from(environment: MutableMapping[str, str]) -> LogOrder | None:
    """The order for this process, taken out of its environment so that no program that it starts takes it for its own; ``None`` if there is none."""
    text = environment.pop(VARIABLE, "")
    if not text:
        return None
    try:
        return msgspec.convert(msgspec.json.decode(text), LogOrder, dec_hook=lambda kind, value: kind(value))
    except msgspec.MsgspecError:
        return None
