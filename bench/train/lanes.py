"""The price of lanes and of context tiles: a step with them over the same step without, in turn on the same ranks.

    python -m bench.train.lanes                                   # one rank, 8 lanes: 88 M parameters, 4 slots of 512 tokens
    python -m bench.train.lanes --tensor 2 --lanes 2              # as many tensor ranks as lanes
    python -m bench.train.lanes --dim 384 --layers 6 --seq-len 256
    python -m bench.train.lanes --lanes 0 --tiles 4               # one rank, 4 context tiles
    python -m bench.train.lanes --lanes 0 --tiles 2 --context 2   # as many context ranks as tiles, against a ring
    python -m bench.train.lanes --seconds 100                     # begins no pair of steps after that

The processor time of a rank is that of all its threads, without the kernel's; wall time is the slowest rank's. A ratio is the median
of paired steps, of which the first is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import time
from typing import Any

from bench.running import run_bench
from layouts import random_batches, tiny
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec
from ranks import Ranks


def spec_of(options: argparse.Namespace, lanes: int, tiles: int) -> RunSpec:
    """Return a run of four slots of one sequence each."""
    model = ModelSpec(
        layers=options.layers,
        dim=options.dim,
        heads=8,
        ffn_dim=64 * round(options.dim / 24),  # about 8/3 of the width
        vocab_size=options.vocabulary,
        lanes=lanes,
        context_tiles=tiles,
    )
    parallel = ParallelSpec(
        sharding="none",
        tensor=options.tensor,
        context=options.context,
        context_mode="allgather" if tiles else options.against,
    )
    spec = tiny(model, parallel, options.seq_len)
    train = dataclasses.replace(spec.train, batch_size=4, slots=4, micro_batch_size=1, loss_chunk=1024)
    return dataclasses.replace(spec, train=train)


def timed(specs: list[RunSpec], steps: int, seconds: float) -> list[list[tuple[float, float]]]:
    """Return the processor time and the wall time, s, of every step but the first of each run, in turn, on this rank.

    Runs at most ``steps`` of each, and begins none after ``seconds``.
    """
    import torch
    import torch.distributed as dist

    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.step.state import fill_initial
    from phalanx.train.step.step import Stepper

    steppers, ends = [], time.monotonic() + seconds
    for spec in specs:
        device = torch.device("cpu")
        make_deterministic(spec, device)
        built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
        fill_initial(built.model.parts, built.placement, spec)
        slots = [current.slot for current in built.rounds]
        steppers.append(Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns())))
    times: list[list[tuple[float, float]]] = [[] for _ in specs]
    for number in range(1, steps + 1):
        # All ranks stop together: the first rank decides.
        late = torch.tensor(number > 2 and time.monotonic() > ends)
        dist.broadcast(late, 0)
        if late:
            break
        for stepper, own in zip(steppers, times, strict=True):
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.monotonic()
            stepper.run(number)
            if number > 1:
                used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
                own.append((used, time.monotonic() - began))
    return times


def main() -> None:
    """Print the processor time and the wall time of a step without and with lanes or tiles, and their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        *(("lanes", 8), ("tensor", 1), ("tiles", 0), ("context", 1), ("layers", 12), ("dim", 768)),
        *(("seq-len", 512), ("vocabulary", 8192), ("steps", 6)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--against", choices=("ring", "allgather"), default="ring")
    options = parser.parse_args()
    specs = [spec_of(options, *pieces) for pieces in ((0, 0), (options.lanes, options.tiles))]
    ranks: list[Any] = Ranks(timeout_s=3600.0).run(
        options.tensor * options.context, timed, specs, options.steps, options.seconds
    )
    print(
        f"{options.lanes} lanes on {options.tensor} tensor ranks, {options.tiles} tiles on {options.context} context ranks "
        f"(against {options.against}), width {options.dim}, {options.layers} layers, slots of {options.seq_len} tokens"
    )
    for name, column, over_ranks in (("processor time", 0, sum), ("wall time", 1, max)):
        without, within = (
            [
                over_ranks(step[column] for step in steps)
                for steps in zip(*(rank[run] for rank in ranks), strict=True)
            ]
            for run in (0, 1)
        )
        ratios = [b / a for a, b in zip(without, within, strict=True)]
        print(
            f"{name} of a step: {statistics.median(within):.2f} s, without {statistics.median(without):.2f} s: "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
        )


if __name__ == "__main__":
    run_bench(main)
