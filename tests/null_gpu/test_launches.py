"""The update and the norm take all tensors of a model in one launch each."""

from __future__ import annotations

import pytest
import torch

from null_gpu import counters
from null_gpu.kinds import BASE, DENSE, changed, with_model
from null_gpu.steps import CUDA, stepper_of
from phalanx.hardware.kernels.choose import fused_kernels


def triton_launches(layers: int) -> int:
    """Return the launches of Triton programs in a step of a model that is not compiled."""
    with stepper_of(with_model(DENSE, layers=layers)) as (_, step):
        step()
        counters.reset()
        step()
        return counters.counts()["triton"]


def test_triton_launches_of_a_step_do_not_depend_on_the_number_of_tensors() -> None:
    few = triton_launches(BASE.layers)
    assert 0 < few <= 4  # the update of weights that decay and of others, the peak, the sums of squares
    assert triton_launches(3 * BASE.layers) == few


def test_a_tensor_in_the_host_s_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="tensors on cpu, not on cuda:0"):
        fused_kernels(CUDA).peak([torch.zeros(4)], CUDA)


def test_integer_sums_add_a_gradient_in_one_launch_for_each_run_of_equal_spans() -> None:
    runs = 4  # of a block: norms and matrices by turns
    groups = BASE.layers + 2  # blocks, the output projection, and the embedding with the final norm
    with stepper_of(changed(DENSE, "train", reduction="integer")) as (_, step):
        step()
        counters.reset()
        step()
    additions = counters.kernels()["triton:_add_program"]
    assert 0 < additions <= DENSE.train.slots * groups * runs
