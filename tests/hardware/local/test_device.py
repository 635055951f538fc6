"""Orders to a device, and the environment in which its libraries start."""

from __future__ import annotations

import pytest
import torch

from phalanx.hardware.local import detect, device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_a_gpu_that_returns_an_old_error_to_every_call_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def poisoned(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", poisoned)
    assert not device.answers(GPU)
    assert device.answers(CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    assert device.answers(GPU)


def test_a_rank_makes_its_own_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device.make_current(CPU)
    device.make_current(GPU)
    assert chosen == [GPU]


def test_a_tensor_for_a_cpu_is_not_copied() -> None:
    batch = torch.arange(6)
    assert device.brought(batch, CPU) is batch


def test_what_is_brought_to_a_gpu_is_page_locked_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps PyTorch would copy it by way of ordinary memory, and the host would wait for all that is queued."""
    locked: list[bool] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor.is_contiguous())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(device, "on_gpu", lambda _device: True)
    samples = torch.arange(12).view(3, 4)
    assert torch.equal(device.brought(samples[:, :-1], CPU), samples[:, :-1])
    assert locked == [True]


def test_only_a_rank_that_survives_its_groups_keeps_pytorch_from_ending_it() -> None:
    mortal: dict[str, str] = {}
    detect.set_for_rank(mortal)
    surviving: dict[str, str] = {}
    detect.set_for_rank(surviving, survives=True)
    assert surviving.items() - mortal.items() == {
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
    }


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),  # its name before PyTorch 2.9
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ],
)
def test_what_the_user_has_set_stays(name: str, meant: str) -> None:
    environ = {name: "the user's"}
    detect.set_for_rank(environ, survives=True)
    assert environ[name] == "the user's"
    assert environ.get(meant, "the user's") == "the user's"


@pytest.mark.parametrize(("name", "expected"), [("cpu", False), ("meta", False), ("cuda:1", True)])
def test_only_a_gpu_has_a_queue(name: str, expected: bool) -> None:
    assert device.on_gpu(torch.device(name)) == expected


@pytest.mark.parametrize("name", ["xpu", "mps", "hpu"])
def test_an_accelerator_of_another_kind_is_refused_and_not_taken_for_a_cpu(name: str) -> None:
    with pytest.raises(ValueError, match=f'GPUs that PyTorch calls "cuda", not on {name}'):
        device.wait_for_device(torch.device(name))
