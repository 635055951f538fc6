"""Speed of the planner's search of layouts: valid configurations per CPU-second, from enumerating them to the exact finalists.

python -m bench.plan.search
"""

from __future__ import annotations

import argparse
import time

from bench.running import run_bench
from phalanx.hardware import catalog
from phalanx.hardware.profile import profile_of
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx_plan.search.search import search
from phalanx_plan.workload.software import STACKS
from phalanx_plan.workload.stacks import TrainingJob, TrainingWorkload

SPACES = (
    ("llama3-405b", "h100:16384", 2048, 8192, "megatron"),
    ("deepseek-v3", "h100:2048", 15360, 4096, "phalanx"),
    ("kimi-k2", "h100:98304", 16384, 8192, "phalanx"),
    ("moe-100t", "gb200-nvl72:98304", 8192, 8192, "phalanx"),
)
"""Model, cluster, sequences of a step, tokens of a sequence, software."""


def main() -> None:
    """Print a line for each space."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spaces", type=int, default=len(SPACES), help="search the first of them alone")
    spaces = SPACES[: parser.parse_args().spaces]
    print(
        f"{'model':14} {'cluster':20} {'looked at':>12} {'valid':>11} {'CPU s':>7} {'wall s':>7} {'valid/CPU-s':>12}"
    )
    for model, fleet, batch, seq_len, stack in spaces:
        cluster = catalog.cluster(fleet)
        workload = TrainingWorkload(resolve(PRESETS[model]), seq_len, batch)
        job = TrainingJob(workload, STACKS[stack], cluster, profile_of(cluster.accelerator))
        cpu, wall = time.process_time(), time.perf_counter()
        result = search(job)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(
            f"{model:14} {fleet:20} {result.looked_at:12,} {result.valid:11,} {cpu:7.2f} {wall:7.2f} {result.valid / cpu:12,.0f}"
        )


if __name__ == "__main__":
    run_bench(main)
