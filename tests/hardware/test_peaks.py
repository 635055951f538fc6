"""Peaks: by data sheet where the accelerator is known, measured where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.hardware.catalog import cluster
from phalanx.hardware.local import device as local_device
from phalanx.hardware.local.detect import accelerator_named, gpu_count, system_here
from phalanx.hardware.local.device import measure_matmul_flops


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200 SXM5 141 GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80 GB"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe 80 GB"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL 94 GB"),
        ("NVIDIA GB200", "NVIDIA GB200 (one GPU) 186 GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 SXM4 40 GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM4 80 GB"),
    ],
)
def test_a_drivers_name_finds_its_accelerator(reported: str, name: str) -> None:
    named = accelerator_named(reported)
    assert named is not None
    assert named.name == name


def test_an_unknown_accelerator_is_not_guessed() -> None:
    assert accelerator_named("NVIDIA GeForce RTX 9090") is None


def test_the_measured_peak_is_above_what_a_product_reaches_with_checks_around_it() -> None:
    peak = measure_matmul_flops(torch.device("cpu"), torch.float32, budget_s=0.1)
    assert 1e8 < peak < 1e15


def test_gpus_hidden_from_the_process_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.hardware.local.detect.metadata.version", lambda _name: "2.13.0+cu130")
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_count(tmp_path) == 2
    for visible, count in {
        "": 0,
        "-1": 0,
        "1": 1,
        "1, 0": 2,
        "0,1,2,3": 2,
        "0,-1,1": 1,
        "2,0": 0,
        "0,0": 0,
        "GPU-8932f937,GPU-a1b2": 2,
        "MIG-1,MIG-2,MIG-3": 3,
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_count(tmp_path) == count, visible


def test_a_cpu_build_of_torch_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.hardware.local.detect.metadata.version", lambda _name: "2.13.0+cpu")
    (tmp_path / "0000:01:00.0").mkdir()
    assert gpu_count(tmp_path) == 0


@pytest.mark.parametrize(("flops_per_s", "largest"), [(3e8, 256), (1e9, 512), (1e11, 2048), (1e13, 2048)])
def test_a_processor_that_multiplies_slowly_is_measured_on_matrices_that_it_can_multiply_in_time(
    monkeypatch: pytest.MonkeyPatch, flops_per_s: float, largest: int
) -> None:
    sizes: list[int] = []

    def seconds(_device: torch.device, _dtype: torch.dtype, size: int, _budget_s: float) -> float:
        sizes.append(size)
        return 2 * size**3 / flops_per_s

    monkeypatch.setattr(local_device, "_best_s", seconds)
    assert measure_matmul_flops(torch.device("cpu"), torch.bfloat16) == pytest.approx(flops_per_s)
    assert max(sizes) == largest
    for budget_s in (0.05, 0.4):
        sizes.clear()
        measure_matmul_flops(torch.device("cpu"), torch.bfloat16, budget_s)
        assert all(2 * size**3 / flops_per_s < budget_s for size in sizes if size > 256)


def test_plans_take_this_machine_for_what_was_measured_else_for_its_gpus_else_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_THIS_MACHINE", str(tmp_path / "this.toml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("phalanx.hardware.local.detect.metadata.version", lambda _name: "2.13.0+cu130")
    driver = tmp_path / "gpus"
    assert system_here(driver) == "cpu"
    information = driver / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    for model, system in (("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 9090", None)):
        information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
        assert system_here(driver) == system
        assert system is None or cluster(f"{system}:8").accelerator.name.startswith(model)
    (tmp_path / "this.toml").touch()
    assert system_here(driver) == "this"
