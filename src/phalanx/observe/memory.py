"""What an accelerator's memory holds at most in a step, by kind: the planner's memory model made visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes on one rank's device; each kind at its own peak within a step."""

    parameters: int
    """Master weights, or this rank's share of them."""
    gradients: int
    """As the optimiser finds them."""
    optimizer: int
    """The optimiser's state, unless it is offloaded."""
    activations: int | None
    """What forward passes leave behind for backward, all micro-batches in flight together; ``None`` if it cannot be seen."""
    buffers: int
    """State that is not trained."""
    other: int
    """What the peak of everything together has beyond these: gathered weights, sums in the making, temporaries."""

    @property
    def total(self) -> int:
        """The peak of everything together, or a little more where the kinds' peaks do not coincide."""
        return sum(value or 0 for value in asdict(self).values())


def as_text(ranks: Sequence[MemoryByKind]) -> str:
    """A line for each kind: the most that any rank holds, and the least where that differs."""
    lines = [_line(kind, [getattr(rank, kind) for rank in ranks]) for kind in KINDS]
    return "\n".join([*lines, _line("total", [rank.total for rank in ranks])])


def _line(kind: str, values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{kind:<12} {'not seen':>12}"
    least = f"  (least {size(min(known))})" if min(known) != max(known) else ""
    return f"{kind:<12} {size(max(known)):>12}{least}"


def size(count: int) -> str:
    """Bytes for people: "12.3 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
