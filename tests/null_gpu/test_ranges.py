"""NVTX ranges of PyTorch's CUDA build, which a CPU build does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from null_gpu.kinds import DENSE
from null_gpu.steps import stepper_of
from phalanx.train.profile.instruments import NvtxRanges, nvtx_ranges


def test_a_step_runs_in_ranges_of_pytorch() -> None:
    with stepper_of(DENSE) as (stepper, step):
        around = SimpleNamespace(save=print, emit=print, ended=print)
        inputs = SimpleNamespace(ledger=stepper.ledger, guardian=around, spec=DENSE)
        training = SimpleNamespace(
            built=stepper.built, inputs=inputs, saver=around, reporter=around, mesh=stepper.built.model.mesh
        )
        with nvtx_ranges(cast(Any, training), stepper, NvtxRanges()):
            step()
