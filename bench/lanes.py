"""The price of lanes: a step with them over the same step without, in processor time, in turn on the same ranks.

    python bench/lanes.py                                   # one rank, 8 lanes: 88 M parameters, 4 slots of 512 tokens
    python bench/lanes.py --tensor 2 --lanes 2              # as many tensor ranks as lanes
    python bench/lanes.py --dim 384 --layers 6 --seq-len 256

The processor time of a rank is that of all its threads, without the kernel's; the ratio is the median of paired steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from layouts import random_batches, tiny
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec
from ranks import Ranks


def spec_of(options: argparse.Namespace, lanes: int) -> RunSpec:
    """Four slots of one sequence each."""
    model = ModelSpec(
        layers=options.layers,
        dim=options.dim,
        heads=8,
        ffn_dim=64 * round(options.dim / 24),  # about 8/3 of the width
        vocab_size=options.vocabulary,
        lanes=lanes,
    )
    spec = tiny(model, ParallelSpec(sharding="none", tensor=options.tensor), options.seq_len)
    train = dataclasses.replace(spec.train, batch_size=4, slots=4, micro_batch_size=1, loss_chunk=1024)
    return dataclasses.replace(spec, train=train)


def timed(specs: list[RunSpec], steps: int) -> list[list[float]]:
    """The processor time, s, of every step but the first of each run, in turn, on this rank."""
    import torch
    import torch.distributed as dist

    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh.mesh import build_mesh
    from phalanx.train.lifecycle.assemble import make_deterministic
    from phalanx.train.lifecycle.compose import build_model
    from phalanx.train.step.state import fill_initial
    from phalanx.train.step.step import Stepper

    steppers = []
    for spec in specs:
        device = torch.device("cpu")
        make_deterministic(spec, device)
        built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
        fill_initial(built.model.parts, built.placement, spec)
        slots = [current.slot for current in built.rounds]
        steppers.append(Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns())))
    times: list[list[float]] = [[] for _ in specs]
    for number in range(1, steps + 1):
        for stepper, found in zip(steppers, times, strict=True):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            stepper.run(number)
            if number > 1:
                found.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
    return times


def main() -> None:
    """Prints the processor time of a step without and with lanes, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        *(("lanes", 8), ("tensor", 1), ("layers", 12), ("dim", 768)),
        *(("seq-len", 512), ("vocabulary", 8192), ("steps", 6)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    specs = [spec_of(options, lanes) for lanes in (0, options.lanes)]
    ranks: list[Any] = Ranks().run(options.tensor, timed, specs, options.steps)
    without, within = (
        [sum(parts) for parts in zip(*(rank[run] for rank in ranks), strict=True)] for run in (0, 1)
    )
    ratio = statistics.median(b / a for a, b in zip(without, within, strict=True))
    print(
        f"{options.lanes} lanes on {options.tensor} tensor ranks, width {options.dim}, {options.layers} layers, slots of "
        f"{options.seq_len} tokens: {statistics.median(within):.2f} s of processor time a step, without lanes "
        f"{statistics.median(without):.2f} s: {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
