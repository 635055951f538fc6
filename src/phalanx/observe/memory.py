"""What an accelerator's memory holds at most in a step, by kind: the planner's memory model made visible."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes on one rank's device; each kind at its own peak within a step."""

    parameters: int
    """Master weights, or this rank's share of them."""
    gradients: int
    """As the optimizer finds them."""
    optimizer: int
    """The optimizer's state, unless it is offloaded."""
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
