"""``phalanx health``: checks whether this machine is fit to train."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from phalanx.command import FiniteRange
from phalanx.command_help import Command
from phalanx.fleet.health import checks as health_checks
from phalanx.fleet.health import node_health
from phalanx.fleet.health.checks import CheckResult, HealthLimits, fit, guarded
from phalanx.hardware.local.detect import gpu_count

_COLORS = {"good": "green", "bad": "red", "slow": "yellow", "not checked": None}


@click.command("health", cls=Command)
@click.option("--device", default="auto", help="Where to compute: auto, cpu, cuda, cuda:1, ...")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=".",
    help="On the disk to check.",
)
@click.option(
    "--memory-mib",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="How much memory to check.",
)
@click.option(
    "--disk-mib", type=click.IntRange(min=1), default=64, show_default=True, help="How much to write to disk."
)
@click.option("--least-tflops", type=FiniteRange(min=0), default=0.0, help="A slower matrix product fails.")
@click.option("--least-disk-mbps", type=FiniteRange(min=0), default=0.0, help="A slower disk (MB/s) fails.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    device: str,
    folder: Path,
    memory_mib: int,
    disk_mib: int,
    least_tflops: float,
    least_disk_mbps: float,
    as_json: bool,
) -> None:
    """Check this machine: matrix products, memory, disk, network stack, and the reports of its GPUs.

    Exits with code 1 if anything is wrong or too slow.

    \b
      phalanx health
      phalanx health --device cuda:0 --least-tflops 500 --folder /scratch --json
    """
    limits = HealthLimits(matmul_flops=least_tflops * 1e12, disk_bytes_per_s=least_disk_mbps * 1e6)
    device_name = device if device != "auto" else "cuda" if gpu_count() else "cpu"
    checks: dict[str, Callable[[], CheckResult]] = {
        "matrix product": lambda: health_checks.matrix_product(device_name, limits=limits),
        "memory": lambda: health_checks.memory(device_name, memory_mib << 20),
        "disk": lambda: health_checks.disk(folder, disk_mib << 20, limits),
        "link": lambda: health_checks.loopback(limits=limits),
    }
    results = []
    for name, check in checks.items():
        if not as_json:  # Each takes seconds, the first mostly to import torch.
            click.echo(f"checking {name} ...", err=True)
        results.append(guarded(name, check))
        if not as_json:
            _print(results[-1])
    for result in node_health.gpus(limits):
        results.append(result)
        if not as_json:
            _print(result)
    if as_json:
        rows = [dataclasses.asdict(result) for result in results]
        click.echo(json.dumps({"fit": fit(results), "device": device_name, "checks": rows}))
    sys.exit(0 if fit(results) else 1)


def _print(result: CheckResult) -> None:
    status = click.style(f"{result.status:12}", fg=_COLORS[result.status])
    click.echo(f"{status}{result.check:16}{result.text}")
