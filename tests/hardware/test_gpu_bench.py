"""The first run on a GPU: its parts run in small on a CPU, so that they do not fail on the first GPU for reasons of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.gpu.__main__ import Part, limit_of, parts_for
from bench.gpu.prediction import RATES, comparisons, counted_runs
from bench.gpu.processes import run_processes
from bench.gpu.report import PartResult, page, verdicts
from bench.gpu.setting import ON_GPU, settings_of, speed_run
from bench.gpu.speed import contenders
from bench.gpu.trace import kernel_class, summary
from ranks import Ranks


def stand_in(parts: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Results of the parts on a CPU."""
    from bench.gpu import bits, layers, serving, speed, trace
    from phalanx.hardware.portable import operations

    device, results = torch.device("cpu"), {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    for part in parts:
        mine: dict[str, object] = {}
        results[part] = mine
        match part:
            case "hashes":
                bits.hashes(device, mine.__setitem__)
            case "speed":
                speed.speed(device, mine.__setitem__, ())
            case "trace":
                trace.trace(device, mine.__setitem__, ())
            case "serve":
                serving.serve(device, mine.__setitem__)
            case "kernels":
                bits.kernels(device, mine.__setitem__)
            case "one pass":
                layers.one_pass(device, mine.__setitem__)
            case "mixture":
                layers.mixture(device, mine.__setitem__)
            case "memory":
                layers.memory(device, mine.__setitem__, ())
            case "kinds":
                bits.kinds(device, mine.__setitem__)
            case _:
                bits.hashes_elsewhere(device, mine.__setitem__)
        operations.end()  # parts have processes of their own, and exact serving computes by portable kernels in its
    torch.use_deterministic_algorithms(deterministic)
    return results


@pytest.mark.servers
def test_every_part_runs_in_small_on_a_cpu_and_what_should_hold_does(ranks: Ranks) -> None:
    parts_of_one = (
        "hashes",
        "speed",
        "trace",
        "serve",
        "kernels",
        "one pass",
        "mixture",
        "memory",
        "kinds",
    )
    (alone,) = ranks.run(1, stand_in, parts_of_one)
    together = ranks.run(2, stand_in, ("hashes of 2 ranks",))[0]
    parts = {name: PartResult(name, "ok", 1.0, results) for name, results in (alone | together).items()}
    assert [
        (part.name, name, value)
        for part in parts.values()
        for name, value in part.findings.items()
        if isinstance(value, dict) and "error" in value
    ] == []
    judged = verdicts(parts)
    assert {verdict.holds for verdict in judged if not verdict.statement.startswith("compiled")} == {True}
    written = page({"python": "3"}, parts)
    assert all(f"## {name}" in written for name in parts)


def one_part(program: str, limit_s: float, ranks: int = 1) -> PartResult:
    begin = "import json, os, sys, time\ntell = lambda *pair: open(os.environ['BENCH_FOUND'], 'a').write(json.dumps(pair) + '\\n')\n"
    commands = [[sys.executable, "-c", begin + program]] * ranks
    return run_processes("a part", commands, limit_s, {}, threading.Event())


def test_results_of_a_part_are_kept_when_it_hangs_or_fails() -> None:
    limit_s = 3.0
    while not (
        hung := one_part("tell('hash', 'abc')\nprint('waiting', flush=True)\ntime.sleep(600)", limit_s)
    ).output:
        limit_s *= 4  # on a busy machine Python begins late
    assert (hung.ended, hung.findings, hung.output) == ("time over", {"hash": "abc"}, "waiting\n")
    failed = one_part("tell('hash', 'abc')\nsys.exit('no memory')", 60.0)
    assert (failed.ended, failed.findings, failed.output) == ("exit code 1", {"hash": "abc"}, "no memory\n")
    assert one_part("tell('n', 1)", 60.0).findings == {"n": 1}


def test_a_signal_ends_a_part_and_the_report_has_it(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--out", str(out)]
    process = subprocess.Popen([*command, "--only", "hashes", "--only", "kernels"])
    while not out.with_suffix(".md").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    parts = json.loads(out.with_suffix(".json").read_text())["parts"]
    assert parts["hashes"]["ended"] in ("stopped by a signal", "not run: stopped by a signal")
    assert parts["kernels"]["ended"] == "not run: stopped by a signal"
    assert "not run: stopped by a signal" in out.with_suffix(".md").read_text()


def test_hashes_that_differ_are_named_and_missing_ones_prove_nothing() -> None:
    def of(**hashes: object) -> list[bool | None]:
        named = {name.replace("_", ", "): value for name, value in hashes.items()}
        return [verdict.holds for verdict in verdicts({"hashes": PartResult("hashes", "ok", 1.0, named)})]

    assert of(eager="a", eager_again="a", compiled="b", compiled_full="b") == [True, True]
    assert of(eager="a", eager_again="b") == [False, None]
    assert of(eager="a") == [None, None]
    assert of(eager="a", eager_again={"error": "out of memory"}) == [None, None]
    parts = {"kernels": PartResult("kernels", "ok", 1.0, {"attention": False, "grouped": {"error": "no"}})}
    assert [verdict.holds for verdict in verdicts(parts)][2:] == [False, None]


def kernel(name: str, begin_us: float, length_us: float, correlation: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": begin_us,
        "dur": length_us,
        "args": {"correlation": correlation},
    }


def test_a_gap_is_booked_on_the_operation_that_launched_the_kernel_after_it() -> None:
    def host(kind: str, name: str, begin_us: float, length_us: float, **args: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": kind,
            "name": name,
            "ts": begin_us,
            "dur": length_us,
            "tid": 1,
            "args": args,
        }

    trace = summary(
        [
            kernel("nvjet_gemm", 0, 100, 1),
            kernel("memcpy", 50, 100, 2),  # another stream: from 0 to 150 there is no gap
            kernel("multi_tensor_apply", 200, 100, 3),
            host("cpu_op", "aten::item", 140, 60),
            host("cuda_runtime", "cudaLaunchKernel", 160, 5, correlation=3),
            host("cpu_op", "aten::mm", 0, 3),
        ]
    )
    assert trace["kernels"] == 3
    assert trace["span_ms"] == 0.3
    assert abs(trace["busy"] - 250 / 300) < 1e-12
    assert trace["gaps"] == {"aten::item": {"ms": 0.05, "of_span": 50 / 300, "count": 1}}
    assert set(trace["classes"]) == {"matrix product", "copy", "optimizer and norm"}


def test_kernels_have_classes() -> None:
    assert kernel_class("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel") == "attention"
    assert kernel_class("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT") == "matrix product"
    assert kernel_class("triton_poi_fused_mul_silu_1") == "compiled pointwise"
    assert kernel_class("void at::native::multi_tensor_apply_kernel") == "optimizer and norm"


def test_on_a_gpu_the_bare_loop_runs_with_the_attention_of_our_step_and_with_cudnns() -> None:
    attention = {contender.name: contender.attention for contender in contenders(on_gpu=True)}
    assert attention == {
        "ours": None,
        "bare PyTorch, FlashAttention": SDPBackend.FLASH_ATTENTION,
        "bare PyTorch, cuDNN's attention": SDPBackend.CUDNN_ATTENTION,
    }


def test_a_cpu_has_one_kind_of_attention_for_the_bare_loop() -> None:
    assert [(contender.name, contender.attention) for contender in contenders(on_gpu=False)] == [
        ("ours", None),
        ("bare PyTorch", None),
    ]


def test_the_frozen_prediction_is_of_the_runs_that_are_measured_on_one_gpu_and_on_eight() -> None:
    assert {place: run.settings for place, run in counted_runs().items()} == {
        (preset, ranks): settings_of(speed_run(preset, ON_GPU, torch.device("cuda"), ranks))
        for preset in ON_GPU.presets
        for ranks in (1, 8)
    }


def measured_parts(step_s: float, steps: int) -> dict[str, PartResult]:
    """A report of ``llama-1b`` on one GPU: its speed, and a trace of some steps with a gap of 1 ms in each."""
    step = [kernel("nvjet_gemm", 0, 7000, 1), kernel("flash_fwd_kernel", 8000, 2000, 2)]
    events = [event | {"ts": event["ts"] + 10_000 * number} for number in range(steps) for event in step]
    trace = {"preset": "llama-1b", "ranks": 1, "steps": steps, "profile": summary(events)}
    speed = {"ranks": 1, "llama-1b, ours": {"step_s": step_s}}
    return {
        "speed": PartResult("speed", "ok", 1.0, speed),
        "trace": PartResult("trace", "ok", 1.0, trace),
    }


def test_a_report_has_the_predicted_beside_the_measured_time_of_a_step_by_class_of_kernel() -> None:
    parts, work, rates = measured_parts(2.0, 3), counted_runs()["llama-1b", 1].ours, RATES["H200"]
    rows = comparisons("NVIDIA H200, 570.0, 143771 MiB, 700.00 W", parts)
    pairs = {(row.run, row.quantity): (row.predicted, row.measured) for row in rows}
    trace = "llama-1b, trace of ours"
    assert pairs["llama-1b, ours", "step, ms"] == pytest.approx((work.seconds(rates) * 1e3, 2000))
    assert pairs[trace, "matrix product, ms"] == pytest.approx((work.product_flops / 650e9, 7.0))
    assert pairs[trace, "attention, ms"] == pytest.approx((work.attention_flops / 350e9, 2.0))
    assert pairs[trace, "idle, ms"] == pytest.approx((0.0, 1.0))
    assert pairs[trace, "kernels"] == (work.launches, 2.0)
    assert {f"{label}, ms" for label in work.bytes_by_class} <= {quantity for _, quantity in pairs}
    text = page({}, parts, rows)
    error = work.product_flops / 650e9 / 7.0 - 1
    assert f"{error:+.1%} |" in next(line for line in text.splitlines() if "| matrix product, ms |" in line)


def test_an_accelerator_without_assumed_rates_has_no_prediction() -> None:
    assert comparisons("NVIDIA A100-SXM4-80GB", measured_parts(2.0, 3)) == []


def test_a_trace_that_failed_is_compared_with_nothing() -> None:
    failed = {"preset": "llama-1b", "ranks": 1, "steps": 3, "profile": {"error": "out of memory"}}
    assert comparisons("NVIDIA H200", {"trace": PartResult("trace", "ok", 1.0, failed)}) == []


def test_parts_that_are_wanted_most_come_first_and_fit_into_the_ranks() -> None:
    names = [part.name for part in parts_for(1, 1)]
    assert names[:2] == ["hashes", "speed"]
    assert {part.ranks for part in parts_for(1, 1)} == {1, 2, 3}  # several ranks share the GPU
    assert max(part.ranks for part in parts_for(8, 8)) == 8


def limits(parts: Sequence[Part], remaining_s: float) -> list[float]:
    """The limits of parts that all take as long as they may."""
    granted: list[float] = []
    for index, part in enumerate(parts):
        granted.append(limit_of(part, parts[index + 1 :], remaining_s - sum(granted)))
    return granted


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_parts_that_take_all_of_their_time_leave_each_later_one_enough_to_find_something(gpus: int) -> None:
    parts = parts_for(gpus, gpus)
    taken = limits(parts, 9.5 * 60)
    assert sum(taken) <= 9.5 * 60
    assert all(part.least_s <= limit_s <= part.limit_s for part, limit_s in zip(parts, taken, strict=True))


def test_time_that_is_too_short_for_all_parts_goes_to_those_that_are_wanted_most() -> None:
    parts = parts_for(1, 1)
    taken = limits(parts, 180.0)
    assert taken[:2] == [parts[0].least_s, parts[1].least_s]
    assert taken[-1] == 0
