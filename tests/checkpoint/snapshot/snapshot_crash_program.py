"""Take snapshots in a child process, kill it at a random moment, and check what is left; print one JSON object a trial.

Run as a program of its own, because it forks: in a process with threads a fork is not safe.
"""

import json
import os
import random
import signal
import sys
import time

import torch

from checkpoint.shards import shards_of
from phalanx.checkpoint.snapshot.segments import NO_STEP, Segment, SnapshotMemory, verified
from phalanx.checkpoint.snapshot.writer import SnapshotWriter

_ELEMENTS = 300_000
_BLOCK_BYTES = 64 << 10


def write_for_ever(descriptors: list[int], resumed_step: int) -> None:
    """Each step's state is its number, in every element."""
    writer = SnapshotWriter(
        [Segment(descriptor) for descriptor in descriptors], "run", block_bytes=_BLOCK_BYTES
    )
    writer.bind(1, 1, 0, resumed_step)
    state = {"a": torch.zeros(_ELEMENTS, dtype=torch.int64), "b": torch.zeros(7, dtype=torch.int64)}
    for step in range(resumed_step + 1, 1 << 40):
        for tensor in state.values():
            tensor.fill_(step)
        writer.take(step, shards_of(state), {"step": step})


def whole_steps(memory: SnapshotMemory) -> list[int]:
    """The steps held, after every byte of them was checked."""
    steps = []
    for holding in memory.holdings():
        with memory.reading(holding.key) as (segment, snapshot):
            image = segment.image(snapshot.nbytes)
            for index, start in enumerate(range(0, snapshot.nbytes, _BLOCK_BYTES)):
                verified(snapshot.manifest, index, image[start : start + _BLOCK_BYTES], "memory")
            values = {
                int(value)
                for entry in snapshot.manifest.entries
                for value in set(image[entry.start : entry.stop].view("int64").tolist())
            }
            assert values == {holding.key.step} == {snapshot.extra["step"]}
        steps.append(holding.key.step)
    return steps


def main(seed: int, trials: int) -> None:
    """One memory for all trials: what a trial leaves is what the next child resumes from."""
    moments = random.Random(seed)
    memory = SnapshotMemory("run", 1)
    descriptors = [segment.descriptor for segment in memory.worker_segments(0)]
    before = NO_STEP
    for _ in range(trials):
        child = os.fork()
        if not child:
            write_for_ever(descriptors, before)
        while not any(holding.key.step > before for holding in memory.holdings()):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = whole_steps(memory)
        print(json.dumps({"before": before, "steps": steps}), flush=True)
        before = max(steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
