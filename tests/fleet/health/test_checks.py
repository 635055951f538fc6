"""Health checks: a good machine passes, and every kind of damage that can be made here is found."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from phalanx.cli.fleet.health_command import command
from phalanx.fleet.health.checks import (
    CheckResult,
    HealthLimits,
    disk,
    fit,
    guarded,
    loopback,
    matrix_product,
    memory,
    probe_link,
)
from phalanx.fleet.health.node_health import GpuReading, Xid, gpus, judge_gpu, read_gpu, xids

MIB = 1 << 20


def test_a_good_machine_passes_every_check(tmp_path: Path) -> None:
    results = [matrix_product("cpu", 2), memory("cpu", MIB), disk(tmp_path, MIB), loopback(MIB)]
    assert [result.status for result in results] == ["good"] * 4
    assert fit(results)
    assert all(value > 0 for result in results for value in result.measures.values())


@pytest.mark.parametrize("wrong_format", [torch.float32, torch.bfloat16])
def test_one_wrong_element_of_a_product_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong_format: torch.dtype
) -> None:
    multiply = torch.Tensor.__matmul__

    def faulty(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if left.dtype == wrong_format:
            product[700, 13] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    result = matrix_product("cpu", 2)
    assert (result.status, result.measures) == ("bad", {"wrong_rows": 1})


def test_a_bit_of_memory_that_is_stuck_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = torch.Tensor.fill_

    def faulty(block: torch.Tensor, value: int) -> torch.Tensor:
        fill(block, value)
        block[100] |= 1 << 40
        return block

    monkeypatch.setattr(torch.Tensor, "fill_", faulty)
    result = memory("cpu", MIB)
    assert (result.status, result.measures) == ("bad", {"wrong_words": 2})  # where the bit should be 0


def test_a_file_that_changes_on_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(*_: object) -> None:
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[MIB + 5] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(os, "posix_fadvise", damage)
    assert disk(tmp_path, 3 * MIB).measures == {"wrong_mib": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_changes_a_byte_is_found() -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            seen = 0
            while data := bytearray(connection.recv(1 << 16)):
                if seen <= 5000 < seen + len(data):
                    data[5000 - seen] ^= 8
                seen += len(data)
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        assert probe_link(listener.getsockname(), MIB).status == "bad"


def test_each_megabyte_over_a_slow_link_has_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    send, sizes = socket.socket.sendall, list[int]()

    def recorded(connection: socket.socket, data: bytes) -> None:
        sizes.append(len(data))
        send(connection, data)

    monkeypatch.setattr(socket.socket, "sendall", recorded)
    assert loopback(3 * MIB).status == "good"
    assert max(sizes) == MIB


def test_a_link_to_nobody_and_a_missing_folder_are_bad_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    for result in (
        guarded("link", lambda: probe_link(address, MIB)),
        guarded("disk", lambda: disk(Path("/nowhere"), MIB)),
    ):
        assert result.status == "bad"
        assert "Error" in result.text


def test_a_rate_below_its_limit_is_slow_and_not_fit(tmp_path: Path) -> None:
    limits = HealthLimits(1e30, 1e30, 1e30)
    results = [matrix_product("cpu", 1, limits), disk(tmp_path, MIB, limits), loopback(MIB, limits)]
    assert [result.status for result in results] == ["slow"] * 3
    assert not any(fit([result]) for result in results)


def test_what_was_not_checked_does_not_speak_against_a_machine() -> None:
    assert fit([CheckResult("gpu", "not checked", "")])


HEALTHY = GpuReading("H100", "00000000:3B:00.0", 60.0, 87.0, 1980.0, 0x4, 0, False, False)


def test_a_healthy_gpu_is_good() -> None:
    assert judge_gpu(HEALTHY, ()).status == "good"


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"uncorrected_errors": 2}, "bad", "2 uncorrected memory errors"),
        ({"remap_pending": True}, "bad", "wait for a reset"),
        ({"remap_failed": True}, "bad", "could not be replaced"),
        ({"throttle_reasons": 0x40}, "slow", "thermal slowdown"),
        ({"temperature_c": 90.0}, "slow", "limit 87"),
    ],
)
def test_a_gpu_that_reports_trouble_is_not_fit(changes: dict[str, Any], status: str, text: str) -> None:
    result = judge_gpu(dataclasses.replace(HEALTHY, **changes), ())
    assert result.status == status
    assert text in result.text


def test_xid_errors_speak_against_the_gpu_that_they_name_unless_a_program_can_cause_them() -> None:
    log = (
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,1,3,-;NVRM: Xid (PCI:0000:5e:00): 31, pid=2, Ch 00000008\n"
    )
    errors = xids(log)
    assert errors == (Xid("0000:3b:00", 79), Xid("0000:5e:00", 31))
    assert judge_gpu(HEALTHY, errors).status == "bad"
    assert judge_gpu(dataclasses.replace(HEALTHY, bus="00000000:5E:00.0"), errors).status == "good"


def test_a_gpu_that_does_not_support_a_question_is_read_all_the_same() -> None:
    class NotSupportedError(Exception):
        pass

    class Nvml:
        """The least that a GPU answers."""

        NVMLError_NotSupported = NotSupportedError

        def __getattr__(self, name: str) -> Any:
            def refuse(*_: object) -> None:
                raise NotSupportedError(name)

            return name if name.startswith("NVML_") else refuse

        def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
            return number

        def nvmlDeviceGetName(self, _: int) -> str:  # noqa: N802
            return "T4"

        def nvmlDeviceGetPciInfo(self, _: int) -> Any:  # noqa: N802
            return type("Pci", (), {"busId": "00000000:3B:00.0"})

        def nvmlDeviceGetTemperature(self, *_: object) -> int:  # noqa: N802
            return 50

    reading = read_gpu(Nvml(), 0)
    assert reading == GpuReading("T4", "00000000:3B:00.0", 50.0, 0.0, 0.0, 0, 0, False, False)
    assert judge_gpu(reading, ()).status == "good"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_gpus_nothing_is_checked_and_the_result_shows_it() -> None:
    assert [result.status for result in gpus()] == ["not checked"]


def test_the_command_prints_json_and_its_exit_code_is_the_verdict(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--folder", str(tmp_path), "--memory-mib", "1", "--disk-mib", "1"]
    good = CliRunner().invoke(command, [*small, "--json"])
    assert good.exit_code == 0
    report = json.loads(good.output)
    assert report["fit"]
    assert {check["check"] for check in report["checks"]} >= {"matrix product", "memory", "disk", "link"}
    slow = CliRunner().invoke(command, [*small, "--least-tflops", "1e9"])
    assert slow.exit_code == 1
    assert "slow" in slow.output


def test_an_agent_can_import_the_checks_without_torch() -> None:
    modules = "phalanx.fleet.health.checks, phalanx.fleet.health.node_health, phalanx.fleet.health.audit, phalanx.fleet.health.stragglers"
    code = f"import sys, {modules}, phalanx.fleet.control.inquiry, phalanx.fleet.fault; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
