"""The closed form of streaming: when each layer is read and computed, by the seconds that each takes.

With ``k`` buffers, reading layer *l* starts when layer *l - 1* has been read and layer *l - k* computed, whose buffer it takes; computing it
starts when it has been read and layer *l - 1* computed. The reader runs on into the next pass. For equal layers a pass takes the larger of
all reading and all computing. A layer that is resident is not read and takes no buffer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """Several passes over all layers."""

    pass_ends: tuple[float, ...]
    """When each pass has been computed, in seconds from the first read."""
    stalls: tuple[float, ...]
    """Seconds that each layer of the last pass waited to be read."""

    @property
    def pass_seconds(self) -> float:
        """Seconds of the last pass: with three passes or more, that of the steady state."""
        before = self.pass_ends[-2] if len(self.pass_ends) > 1 else 0.0
        return self.pass_ends[-1] - before


def timeline(read_s: Sequence[float], compute_s: Sequence[float], buffers: int, passes: int = 4) -> Timeline:
    """The timeline of layers that take ``read_s`` (0: resident) and ``compute_s``. Raises ValueError for numbers out of range."""
    if buffers < 1 or passes < 1 or len(read_s) != len(compute_s):
        raise ValueError("streaming needs a buffer, a pass, and both times of each layer")
    free = [0.0] * buffers  # when each buffer's last layer was computed, in the order in which they are taken
    read_end = compute_end = 0.0
    taken, ends, stalls = 0, [], [0.0] * len(read_s)
    for _ in range(passes):
        for layer, (reading, computing) in enumerate(zip(read_s, compute_s, strict=True)):
            ready = 0.0
            if reading:
                read_end = max(read_end, free[taken % buffers]) + reading
                ready = read_end
            stalls[layer] = max(0.0, ready - compute_end)
            compute_end = max(ready, compute_end) + computing
            if reading:
                free[taken % buffers] = compute_end
                taken += 1
        ends.append(compute_end)
    return Timeline(tuple(ends), tuple(stalls))
