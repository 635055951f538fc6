"""Fit of the constants in ``phalanx/hardware/profiles`` to measured latencies, with the errors on held-out points.

The measurements are those of NVIDIA's ai-dynamo/aiconfigurator (Apache-2.0, github.com/ai-dynamo/aiconfigurator), tables
``gemm_perf``, ``nccl_perf`` and ``wideep_deepep_normal_perf``, as parquet files in one folder. A third of the points, drawn
with a fixed seed, is held out. The fitted law is the one that plans use: this script calls
``phalanx_plan.step_cost.hardware_times``. Needs pyarrow beside the development requirements.

    python -m bench.plan.fit_kernels FOLDER h100          # prints the fitted tables as TOML
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from bench.running import require_catalog_peer, run_bench
from phalanx.hardware.catalog import accelerator, system
from phalanx.hardware.cluster import Accelerator, Domain, System
from phalanx.hardware.profile import CollectiveFit, MatmulFit, Profile, Provenance, profile_of
from phalanx_plan.step_cost.hardware_times import inside_s, matmul_s

Array = npt.NDArray[Any]
_GEMM = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}
_CAST_BYTES = {"fp8": 3.0, "fp4": 2.5625}
"""Read and written for each number."""
_NCCL = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "alltoall",
}
_FILES = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
_COLLECTIVE = ("base_s", "hops", "pipelining", "efficiency", "small_group")
_NO_SOURCE = Provenance("", "")


def main() -> None:
    """Read the command line, fit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="its parquet files")
    parser.add_argument("accelerator", choices=sorted(_FILES), nargs="?", default="h100")
    arguments = parser.parse_args()
    is_there = arguments.folder is not None and arguments.folder.is_dir()
    require_catalog_peer("tables" if is_there else None, "plan.fit_kernels")
    key, folder = arguments.accelerator, arguments.folder
    for format_name, dtype in _GEMM.items():
        fit_gemm(key, folder, format_name, dtype)
    if _nccl_file(key, folder):
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            fit_collective(key, folder, name)
        fit_all_reduce(key, folder)
        fit_point_to_point(key, folder)
    fit_dispatch(key, folder)
    report_energy(key, folder)


def fit_gemm(key: str, folder: Path, format_name: str, dtype: str) -> None:
    """Print ``[profile.matmul.FORMAT]`` if the folder has such points."""
    chip = accelerator(key)
    files = sorted(folder.glob(f"{_FILES[key]}_gemm_trtllm*.parquet"))
    rows = _columns(files, {"gemm_dtype": dtype, "kernel_source": "torch_flow"})
    if not len(rows["latency"]) or format_name not in chip.flops:
        return
    sizes = [rows[axis].astype(float) for axis in "mnk"]
    training = (sizes[0] >= 128) & (sizes[1] >= 256) & (sizes[2] >= 256)
    m, n, k = (size[training] for size in sizes)
    measured = rows["latency"][training] / 1e3  # ms
    template = profile_of(accelerator("h100"))
    start = template.constants.matmul["bf16"]
    names = ("launch_s", "efficiency", "k_half", "memory_efficiency", "wave_share")
    # Serving measures a narrow product with the cast of its left operand, which in training is another operation.
    cast = format_name != "bf16"

    def predict(values: Array, chosen: Array) -> Array:
        fit = dataclasses.replace(start, **dict(zip(names, map(float, values[:5]), strict=True)))
        profile = _with_matmul(chip, template, format_name, fit)
        product = matmul_s(profile, format_name, m[chosen], n[chosen], k[chosen])
        if not cast:
            return product
        rate = chip.memory_bytes_per_s.value
        return product + values[5] + values[6] * _CAST_BYTES[format_name] * m[chosen] * k[chosen] / rate

    values, errors, points = _fit(
        predict,
        measured,
        np.array([4e-6, 0.8, 100.0, 0.8, 0.5] + [5e-6, 1.2] * cast),
        np.array([1e-4, 1.0, 2000, 1.0, 1.0] + [1e-4, 10.0] * cast),
    )
    if cast:
        print(
            f"# with it, a cast of {values[5]:.3g} s and {values[6]:.3g} times its bytes over the data sheet's rate"
        )
    large = 2 * m * n * k > 5e11
    held_out = _held_out(len(measured))
    _print(
        f"profile.matmul.{format_name}",
        dict(zip(names, values[:5], strict=True)),
        rows["version"][0],
        points,
        errors,
    )
    on_large = np.abs(predict(values, large & held_out) / measured[large & held_out] - 1)
    if len(on_large):
        print(f"# above 0.5 TFLOP, held out: median {np.median(on_large):.3f}, mean {on_large.mean():.3f}\n")


def fit_collective(key: str, folder: Path, name: str) -> None:
    """Print ``[profile.collectives.NAME]``."""
    rows = _nccl(key, folder, name)
    members = rows["num_gpus"].astype(float)
    volume = rows["message_size"].astype(float) * 2  # counted in elements of two bytes
    domain = _system(key).domain
    _fit_inside(name, domain, volume, (members - 1) / members, members, rows["latency"] / 1e3, rows)


def fit_all_reduce(key: str, folder: Path) -> None:
    """Print the tables of the all-reduce: a ring, and if the switch adds, the better of ring and switch.

    With four members at most the ring always wins; then the switch's constants cannot be found, and are not printed.
    """
    rows = _nccl(key, folder, "all_reduce")
    members = rows["num_gpus"].astype(float)
    volume, measured = rows["message_size"].astype(float) * 2, rows["latency"] / 1e3
    domain = _system(key).domain
    switch = bool(domain.in_switch_reduction and members.max() > 4)

    def predict(values: Array, chosen: Array) -> Array:
        size, count = volume[chosen], members[chosen]
        ring = CollectiveFit(*map(float, values[:5]), provenance=_NO_SOURCE)
        seconds = inside_s(domain, ring, size, 2 * (count - 1) / count, count)
        if switch:  # its latency does not grow with the members
            adding = CollectiveFit(float(values[5]), 0.0, *map(float, values[6:]), 0.0, provenance=_NO_SOURCE)
            seconds = np.minimum(seconds, inside_s(domain, adding, size, 1.0, count))
        return seconds

    start = np.array([8e-6, 0.5, 1.0, 0.8, 0.3] + [1.6e-5, 1.0, 0.5] * switch)
    values, errors, points = _fit(
        predict, measured, start, np.array([1e-3, 20, 10, 1, 5] + [1e-3, 10, 1] * switch)
    )
    fitted = {"all_reduce": values[:5]}
    if switch:
        fitted["all_reduce_in_switch"] = np.array([values[5], 0.0, *values[6:], 0.0])
    for name, constants in fitted.items():
        table = dict(zip(_COLLECTIVE, constants, strict=True))
        _print(f"profile.collectives.{name}", table, rows["version"][0], points, errors)


def fit_point_to_point(key: str, folder: Path) -> None:
    """Print ``[profile.collectives.point_to_point]``: two members' all-to-all is a send and a receive of half."""
    rows = _nccl(key, folder, "all_to_all")
    pair = rows["num_gpus"] == 2
    volume, two = rows["message_size"][pair].astype(float), np.full(pair.sum(), 2.0)
    _fit_inside("point_to_point", _system(key).domain, volume, 1.0, two, rows["latency"][pair] / 1e3, rows)


def fit_dispatch(key: str, folder: Path) -> None:
    """Print ``[profile.collectives.dispatch]``: DeepEP's normal kernels on the ranks of one node."""
    where = _system(key)
    files = sorted(folder.glob(f"{_FILES[key]}_comm_*deepep_normal*.parquet"))
    if not files:
        return
    rows = _columns(files, {"op_name": "normal"})
    ranks = float(where.per_node)
    tokens, hidden, top = (rows[name].astype(float) for name in ("num_token", "hidden_size", "num_topk"))
    best = (rows["combine_sms"] == 24) & (tokens >= 64)
    reached = ranks * (1 - (1 - 1 / ranks) ** top)
    volume = (tokens * hidden * 2 * reached)[best]  # the way back, 16 bits
    measured = rows["combine_transmit_us"][best] / 1e6
    _fit_inside(
        "dispatch", where.domain, volume, (ranks - 1) / ranks, np.full(best.sum(), ranks), measured, rows
    )


def report_energy(key: str, folder: Path) -> None:
    """Print the joules of a FLOP in large products if power was measured: at the power limit if any reaches it."""
    for format_name, dtype in _GEMM.items():
        rows = _columns(sorted(folder.glob(f"{_FILES[key]}_gemm_*.parquet")), {"gemm_dtype": dtype})
        if "power" not in rows or not len(rows["latency"]):
            continue
        flops = 2.0 * rows["m"].astype(float) * rows["n"] * rows["k"]
        large = (flops > 1e11) & (np.minimum(np.minimum(rows["m"], rows["n"]), rows["k"]) >= 4096)
        limited = large & (rows["power"] > 0.95 * rows["power_limit"])
        chosen = limited if limited.sum() >= 20 else large & (flops > 2e13)
        joules = rows["power"][chosen] * rows["latency"][chosen] / 1e3 / flops[chosen]
        print(f"# joules_per_flop.{format_name} = {np.median(joules):.3g} ({chosen.sum()} points)")


def _fit_inside(
    name: str,
    domain: Domain,
    volume: Array,
    factor: Array | float,
    members: Array,
    measured: Array,
    rows: Mapping[str, Array],
) -> None:
    factor = np.broadcast_to(factor, volume.shape)

    def predict(values: Array, chosen: Array) -> Array:
        fit = CollectiveFit(*map(float, values), provenance=_NO_SOURCE)
        return inside_s(domain, fit, volume[chosen], factor[chosen], members[chosen])

    several = len(np.unique(members)) > 1  # otherwise no point separates small groups from large
    start = np.array([8e-6, 0.5 * several, 1.0, 0.8, 0.3 * several])
    values, errors, points = _fit(predict, measured, start, np.array([1e-3, 20.0, 10.0, 1.0, 5.0]))
    _print(
        f"profile.collectives.{name}",
        dict(zip(_COLLECTIVE, values, strict=True)),
        rows["version"][0],
        points,
        errors,
    )


def _fit(
    predict: Callable[[Array, Array], Array], measured: Array, start: Array, most: Array
) -> tuple[Array, Array, int]:
    """Return the constants that minimize the mean |log(predicted / measured)|, errors on the held-out third, points used.

    A pattern search in the logarithms: each constant in turn goes up or down by a factor that shrinks. The mean of
    absolute logarithms, because a few points of any table are outliers.
    """
    held_out = _held_out(len(measured))
    values, step = start.astype(float), 1.6
    loss = float(np.abs(np.log(predict(values, ~held_out) / measured[~held_out])).mean())
    while step > 1.002:
        improved = False
        for index in range(len(values)):
            for factor in (step, 1 / step):
                trial = values.copy()
                trial[index] = min(trial[index] * factor, most[index])
                trial_loss = float(np.abs(np.log(predict(trial, ~held_out) / measured[~held_out])).mean())
                if trial_loss < loss - 1e-7:
                    values, loss, improved = trial, trial_loss, True
        step = step if improved else step**0.5
    return values, np.abs(predict(values, held_out) / measured[held_out] - 1), int((~held_out).sum())


def _system(key: str) -> System:
    return system({"gb200": "gb200-nvl72"}.get(key, key))


def _nccl_file(key: str, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_FILES[key]}_comm_nccl*.parquet"))[-1:]


def _nccl(key: str, folder: Path, name: str) -> dict[str, Array]:
    """Return the measurements of one collective from 64 KiB on: smaller messages do not count in a training step."""
    rows = _columns(_nccl_file(key, folder), {"op_name": _NCCL[name], "nccl_dtype": "half"})
    counted = rows["message_size"] >= 2**15
    return {column: values[counted] for column, values in rows.items()}


def _held_out(count: int) -> Array:
    return np.random.default_rng(0).random(count) < 1 / 3


def _columns(files: list[Path], filters: Mapping[str, str]) -> dict[str, Array]:
    tables = [pq.read_table(path) for path in files]
    if not tables:
        return {"latency": np.array([])}
    table = {name: np.concatenate([np.asarray(t[name]) for t in tables]) for name in tables[0].column_names}
    keep = np.all([table[name] == value for name, value in filters.items()], axis=0)
    return {name: column[keep] for name, column in table.items()}


def _with_matmul(chip: Accelerator, template: Profile, format_name: str, fit: MatmulFit) -> Profile:
    constants = dataclasses.replace(template.constants, matmul={format_name: fit}, joules_per_flop={})
    return Profile(chip, constants)


def _print(table: str, values: Mapping[str, float], version: str, points: int, errors: Array) -> None:
    print(f"[{table}]")
    for name, value in values.items():
        print(f"{name} = {value:.4g}")
    print(f'versions = "{version}"\npoints = {points}')
    print(f"median_error = {np.median(errors):.3f}\nmean_error = {errors.mean():.3f}\n")


if __name__ == "__main__":
    run_bench(main)
