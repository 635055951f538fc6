"""Events of the profiler have the same kinds on every release of PyTorch."""

from __future__ import annotations

import pytest
import torch

from phalanx.train.profile.capture import activity_of_name, make_profiler


def test_instants_are_classified_by_name_as_by_pytorch() -> None:
    with make_profiler(torch.device("cpu")) as profiler:
        (torch.ones(8, 8) @ torch.ones(8, 8)).sum()
    events = profiler.kineto_results.events()
    assert len(events) > 4
    for event in events:
        if hasattr(event, "activity_type"):
            kind = activity_of_name(event.name(), False)
            assert (kind == "cpu_instant_event") == (event.activity_type() == "cpu_instant_event"), (
                event.name()
            )


@pytest.mark.parametrize(
    ("name", "on_device", "activity"),
    [
        ("Memcpy HtoD (Pinned -> Device)", True, "gpu_memcpy"),
        ("Memset (Device)", True, "gpu_memcpy"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, "kernel"),
        ("cudaLaunchKernel", False, "cuda_runtime"),
        ("cuLaunchKernelEx", False, "cuda_runtime"),
        ("hipExtLaunchKernel", False, "cuda_runtime"),
        ("aten::mm", False, "cpu_op"),
        ("cudagraph_capture of a user", False, "cpu_op"),
        ("[memory]", False, "cpu_instant_event"),
        ("[OutOfMemory]", False, "cpu_instant_event"),
    ],
)
def test_kinds_that_an_older_pytorch_does_not_report_follow_from_names(
    name: str, on_device: bool, activity: str
) -> None:
    assert activity_of_name(name, on_device) == activity
