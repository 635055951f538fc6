"""Predictions of the planner for runs of the trainer on this machine, against measurements.

The machine's constants come from ``phalanx calibrate``. Then real steps of the trainer are timed and their memory is measured,
for models of several sizes, on one rank and two, in several layouts; none of them was calibrated with. The result is the median of the absolute
errors (goals: 10 % of step time, 3 % of peak memory).

    phalanx calibrate --out this.toml
    python -m bench.plan.loop --cluster this.toml
    python -m bench.plan.loop --cluster this.toml --clock cpu --json    # on a machine that others use too
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics

import torch

from bench.running import record, run_bench
from phalanx.hardware.catalog import cluster
from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import layout_problems
from phalanx.run.spec import MemorySpec, ModelSpec, MoeSpec, ParallelSpec, PrecisionSpec, RunSpec, TrainSpec
from phalanx.train.measure.calibrate import measure_step, usual_clock
from phalanx_plan.search.layout_text import estimate_written


@dataclasses.dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    ranks: int
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def time_error(self) -> float:
        """Predicted over measured step, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


SMALL = ModelSpec(layers=4, dim=256, heads=4, head_dim=64, kv_heads=2, ffn_dim=768, vocab_size=2048)
WIDE = ModelSpec(layers=2, dim=512, heads=8, head_dim=64, ffn_dim=1536, vocab_size=4096)
DEEP = ModelSpec(layers=8, dim=256, heads=4, head_dim=64, ffn_dim=1024, vocab_size=1024)
MIXED = ModelSpec(
    layers=2, dim=256, heads=4, head_dim=64, ffn_dim=512, vocab_size=2048, moe=MoeSpec(experts=4, per_token=2)
)


def run(
    model: ModelSpec, *, batch: int = 4, seq: int = 256, slots: int = 0, micro: int = 1, **more: object
) -> RunSpec:
    """Return a run on the CPU, in fp32."""
    train = TrainSpec(batch_size=batch, seq_len=seq, slots=slots or batch, micro_batch_size=micro)
    spec = RunSpec(
        model=resolve(model, model.vocab_size), train=train, precision=PrecisionSpec(compute="fp32")
    )
    return dataclasses.replace(spec, **more)  # type: ignore[arg-type]


RUNS: dict[str, tuple[RunSpec, int]] = {
    "small": (run(SMALL), 1),
    "small, micro-batch 2": (run(SMALL, slots=2, micro=2), 1),
    "small, 512 tokens": (run(SMALL, seq=512), 1),
    "small, selective": (run(SMALL, memory=MemorySpec(recompute="selective")), 1),
    "small, full recompute": (run(SMALL, memory=MemorySpec(recompute="full")), 1),
    "wide": (run(WIDE), 1),
    "wide, micro-batch 4": (run(WIDE, batch=8, slots=2, micro=4), 1),
    "deep": (run(DEEP), 1),
    "mixture": (run(MIXED), 1),
    "small, zero3": (run(SMALL), 2),
    "small, zero2": (run(SMALL, parallel=ParallelSpec(sharding="zero2")), 2),
    "wide, replicas": (run(WIDE, parallel=ParallelSpec(sharding="none")), 2),
    "wide, tensor 2": (run(WIDE, parallel=ParallelSpec(tensor=2)), 2),
    "deep, pipeline 2": (run(DEEP, batch=8, slots=2, parallel=ParallelSpec(pipeline=2)), 2),
    "small, context 2": (run(SMALL, seq=512, parallel=ParallelSpec(context=2, context_mode="allgather")), 2),
    "mixture, expert 2": (run(MIXED, parallel=ParallelSpec(expert=2)), 2),
}


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="this", help="the output of phalanx calibrate")
    parser.add_argument("--clock", choices=["wall", "cpu"], default=usual_clock(torch.device("cpu")))
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed, of each run")
    parser.add_argument("--only", nargs="*", default=[], help="names of runs to do; by default all")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    arguments = parser.parse_args()
    rows = [
        measured_row(name, spec, ranks, cluster(f"{arguments.cluster}:{ranks}"), arguments)
        for name, (spec, ranks) in RUNS.items()
        if not arguments.only or name in arguments.only
    ]
    medians = {
        "time": statistics.median(abs(row.time_error) for row in rows),
        "memory": statistics.median(abs(row.memory_error) for row in rows),
    }
    if arguments.json:
        print(
            json.dumps(
                {"clock": arguments.clock, "median": medians, "rows": list(map(dataclasses.asdict, rows))}
            )
        )
        return
    for row in rows:
        print(
            f"{row.name:<24}{row.ranks:>2} ranks {row.predicted_s * 1e3:>8.1f} ms {row.measured_s * 1e3:>8.1f} ms "
            f"{row.time_error:>+7.1%}{row.predicted_bytes / 2**20:>9.1f} MiB{row.measured_bytes / 2**20:>8.1f} MiB "
            f"{row.memory_error:>+7.1%}"
        )
    print(
        f"median error of {len(rows)} runs: time {medians['time']:.1%} (goal 10%), memory {medians['memory']:.1%} (goal 3%)"
    )


def measured_row(name: str, spec: RunSpec, ranks: int, here: Cluster, arguments: argparse.Namespace) -> Row:
    """Predict and measure one run."""
    problems = layout_problems(spec, ranks)
    if problems:
        raise SystemExit(f"{name}: {problems[0]}")
    predicted = estimate_written(spec, here, ranks)
    measured = measure_step(spec, ranks, arguments.steps)
    seconds = measured.cpu_s if arguments.clock == "cpu" else measured.wall_s
    row = Row(
        name, ranks, predicted.step_s, seconds, predicted.allocated_bytes, measured.memory_bytes["total"]
    )
    record(dataclasses.asdict(row), is_printed=False)
    return row


if __name__ == "__main__":
    run_bench(main)
