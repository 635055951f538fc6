"""NVTX ranges for NVIDIA's profilers: steps, slots, layers and collectives appear by name on the time line of Nsight Systems.

``observe.nvtx`` turns them on for a whole attempt. They are the ranges of ``phalanx profile`` (``instruments.py``). Without the field
nothing of them is there. See https://nvidia.github.io/NVTX/ and ``nsys profile --trace=cuda,nvtx,nccl phalanx train RUN``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from phalanx.train.profile.instruments import instruments, replaced

if TYPE_CHECKING:
    from phalanx.train.assemble import Training
    from phalanx.train.step.step import Stepper, StepReport


class _Opened:
    """A range that has begun on this thread."""

    def __init__(self, pop: Callable[[], object]) -> None:
        self._pop = pop

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None:
        self._pop()


class NvtxRanges:
    """Ranges by ``push(name)`` and ``pop()``; those of PyTorch's CUDA build if none are given."""

    def __init__(
        self,
        push: Callable[[str], object] = torch.cuda.nvtx.range_push,
        pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
    ) -> None:
        self._push, self._pop = push, pop

    @contextmanager
    def around(self, kind: str, name: str, **more: object) -> Iterator[None]:
        """Show the time inside as an NVTX range of kind and name. Of ``more`` the axis of a collective is shown."""
        self._push(f"{kind} {name} ({more['axis']})" if "axis" in more else f"{kind} {name}")
        try:
            yield
        finally:
            self._pop()

    def opened(self, kind: str, name: str) -> _Opened:
        """Begin a range, which ends with the result's ``__exit__``."""
        self._push(f"{kind} {name}")
        return _Opened(self._pop)


@contextmanager
def nvtx_ranges(training: Training, stepper: Stepper, ranges: NvtxRanges) -> Iterator[None]:
    """Context in which all that this rank does is in NVTX ranges, and each step in one of its own."""
    run = stepper.run

    def run_in_range(number: int, *args: Any, **options: Any) -> StepReport:
        with ranges.around("step", str(number)):
            return run(number, *args, **options)

    with instruments(training, stepper, ranges), replaced(stepper, "run", run_in_range):
        yield
