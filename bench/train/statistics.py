"""The price of the statistics of layers: a measured step over the same step without, in turn on the same ranks.

    python -m bench.train.statistics                                    # one rank, 5 M parameters, 4 slots of 128 tokens
    python -m bench.train.statistics --slots 16                         # a longer step, of the same measurement
    python -m bench.train.statistics --ranks 2                          # zero3 on two ranks
    python -m bench.train.statistics --experts 8
    python -m bench.train.statistics --compile                          # also counts compilations after the first measured step
    python -m bench.train.statistics --write docs/evidence/statistics.md   # all of these, as a table

A ratio is the median of paired steps, of which the first two are not counted. The processor time of a rank is that of all its threads,
without the kernel's; wall time is the slowest rank's. The mean is that of a run which measures every ``statistics.every_steps`` steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bench.running import run_bench
from layouts import random_batches, tiny
from phalanx.run.directory.files import write_atomically
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import ModelSpec, MoeSpec, ParallelSpec, RunSpec
from ranks import Ranks

TABLE = (
    (),
    ("--slots", "16"),
    ("--ranks", "2"),
    ("--experts", "8"),
    ("--compile",),
)
"""The arguments of each row of the table."""


def spec_of(options: argparse.Namespace, every_steps: int) -> RunSpec:
    """Return a run of slots of one sequence."""
    model = ModelSpec(
        layers=options.layers,
        dim=options.dim,
        heads=8,
        ffn_dim=64 * round(options.dim / 24),  # about 8/3 of the width
        vocab_size=options.vocabulary,
        moe=MoeSpec(experts=options.experts, per_token=2, ffn_dim=options.dim) if options.experts else None,
    )
    sharding = "zero3" if options.ranks > 1 else "none"
    spec: RunSpec = tiny(model, ParallelSpec(sharding=sharding), options.seq_len)  # type: ignore[arg-type]
    train = dataclasses.replace(
        spec.train, batch_size=options.slots, slots=options.slots, micro_batch_size=1, loss_chunk=1024
    )
    runtime = dataclasses.replace(spec.runtime, compile=options.compile)
    return dataclasses.replace(spec, train=train, runtime=runtime, statistics=StatisticsSpec(every_steps))


def time_steps(specs: list[RunSpec], steps: int) -> tuple[list[list[tuple[float, float]]], int]:
    """Time the steps of each run, in turn, on this rank.

    Return each run's processor time and wall time of every counted step, in seconds, and the number of programs that were compiled after
    the first two steps.
    """
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.statistics import LayerMeter
    from phalanx.train.step.state import fill_initial
    from phalanx.train.step.step import Stepper

    def compiled() -> int:
        return int(counters["stats"]["unique_graphs"])

    runs: list[tuple[Stepper, LayerMeter]] = []
    for spec in specs:
        device = torch.device("cpu")
        make_deterministic(spec, device)
        built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
        fill_initial(built.model.parts, built.placement, spec)
        slots = [current.slot for current in built.rounds]
        stepper = Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns()))
        sample = next(random_batches(spec, [0]))
        runs.append(
            (stepper, LayerMeter(stepper, lambda _step, _slot, sample=sample: sample, lambda _: None))
        )
    times: list[list[tuple[float, float]]] = [[] for _ in specs]
    graphs = 0
    for number in range(1, steps + 3):
        graphs = compiled() if number == 3 else graphs
        for (stepper, meter), own in zip(runs, times, strict=True):
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.monotonic()
            meter.begin(number)
            meter.end(stepper.run(number, statistics=meter))
            if number > 2:
                used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
                own.append((used, time.monotonic() - began))
    return times, compiled() - graphs


@dataclass(frozen=True)
class Price:
    """Ratio of a measured step to one without, over pairs of steps."""

    without_s: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """Median of the pairs."""
        return statistics.median(self.ratios)

    def mean(self, every_steps: int) -> float:
        """Return the mean of all steps of a run that measures every ``every_steps`` of them, over a run that never does."""
        return 1 + (self.ratio - 1) / every_steps

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"


def measured(options: argparse.Namespace) -> tuple[Price, Price, int]:
    """Return the price in processor time and in wall time, and the number of late compilations."""
    specs = [spec_of(options, every_steps) for every_steps in (0, 1)]
    ranks: list[Any] = Ranks(timeout_s=3600.0).run(options.ranks, time_steps, specs, options.steps)
    prices = []
    for column, over_ranks in ((0, sum), (1, max)):
        without, within = (
            [
                over_ranks(step[column] for step in steps)
                for steps in zip(*(times[run] for times, _ in ranks), strict=True)
            ]
            for run in (0, 1)
        )
        prices.append(
            Price(statistics.median(without), [b / a for a, b in zip(without, within, strict=True)])
        )
    return prices[0], prices[1], max(compilations for _, compilations in ranks)


def row(options: argparse.Namespace, every_steps: int) -> str:
    """Measure, and return a row of the table."""
    used, wall, compilations = measured(options)
    kind = f"{options.experts} experts" if options.experts else "dense"
    kind += ", compiled" if options.compile else ""
    late = str(compilations) if options.compile else "–"
    return (
        f"| {kind}, {options.layers} × {options.dim} | {options.ranks} | {options.slots} × {options.seq_len} | {used.without_s:.2f} s | {used} | "
        f"{wall} | {used.mean(every_steps):.4f} | {late} |"
    )


HEAD = (
    "| model | ranks | slots × tokens | processor time of a step | measured over not | by the clock | mean of a run | compilations later |",
    "|---|---|---|---|---|---|---|---|",
)


def report(rows: Sequence[str], every_steps: int, made: str) -> str:
    """Return the page of evidence; ``made`` has its day and machine."""
    return "\n".join(
        (
            "# Statistics of layers: their price",
            "",
            f"Made by `python -m bench.train.statistics --steps 7 --write docs/evidence/statistics.md` ({made}): a measured step of a run over the same step of a run that does not "
            "measure, in pairs, in turn on the same CPU. Ratios are medians, with the least and the greatest pair. "
            f"The mean is that of a run with `statistics.every_steps = {every_steps}`, the default.",
            "",
            *HEAD,
            *rows,
            "",
            "The forward pass of a measured step is that of one micro-batch, so a step of more slots has a smaller share of it. Programs of compiled blocks "
            "are compiled before the third step; the last column counts those of all later steps. Not measured on a GPU.",
            "",
        )
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        *(("ranks", 1), ("layers", 4), ("dim", 256), ("seq-len", 128), ("slots", 4)),
        *(("vocabulary", 4096), ("experts", 0), ("steps", 5)),
    ):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--write", type=Path)
    return made


def main() -> None:
    """Print the ratio of a measured step, and the mean at the default interval."""
    options, every_steps = parser().parse_args(), StatisticsSpec().every_steps
    if options.write is None:
        print("\n".join((*HEAD, row(options, every_steps))))
        return
    rows = []
    for arguments in TABLE:
        rows.append(row(parser().parse_args([*arguments, "--steps", str(options.steps)]), every_steps))
        print(rows[-1], flush=True)
    made = f"{date.today().isoformat()}, {os.cpu_count()} cores, {platform.machine()} {platform.processor()}".strip()
    write_atomically(options.write, report(rows, every_steps, made).encode())


if __name__ == "__main__":
    run_bench(main)
