"""Peak memory of an accelerator in a step, by kind: the measured side of the planner's memory model."""

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
    """Activations saved for backward, of all micro-batches in flight together; ``None`` if they cannot be measured."""
    buffers: int
    """State that is not trained."""
    other: int
    """The rest of the total peak: gathered weights, gradient accumulators and temporaries."""

    @property
    def total(self) -> int:
        """The peak of everything together, or a little more where the kinds' peaks do not coincide."""
        return sum(value or 0 for value in asdict(self).values())
