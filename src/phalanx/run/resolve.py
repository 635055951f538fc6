"""The values that "auto" stands for in a run file, by one rule for the trainer, the planner and ``phalanx show``.

Who asks knows whether there is a GPU: the trainer looks at its machine, the planner at the cluster that it plans for, ``show``
takes one for granted. Dimensions of the model that a file leaves open are filled in by ``phalanx.run.kinds.whole_model.resolve``.
"""

from __future__ import annotations

from typing import Literal

from phalanx.run.spec import PrecisionSpec, RuntimeSpec

Device = Literal["cpu", "cuda"]


def device_of(runtime: RuntimeSpec, *, has_gpu: bool) -> Device:
    """The kind of device that a run computes on: the one that is asked for, else a GPU where there is one."""
    if runtime.device == "auto":
        return "cuda" if has_gpu and runtime.numerics != "portable" else "cpu"
    return runtime.device


def compute_format(precision: PrecisionSpec, device: Device) -> Literal["fp32", "bf16"]:
    """The format of weights and activations in forward and backward: the one that is asked for, else bf16 on a GPU."""
    if precision.compute == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return precision.compute
