"""The cost of a snapshot: the training step's stall against one memory copy of the state, and the work that follows in the background.

Each round, on the same state: one memcpy of it into warm memory (the better of one and two threads), a snapshot by
``SnapshotWriter`` (the stall, then the time until it is complete with its checksums), a push of it to a buddy over loopback,
and restores of all of it from own memory and from the buddy. Ratios are medians over the rounds, each within its round,
since other work on the machine moves all of them together.

    python -m bench.checkpoint.snapshot [--json] [--size-gib 0.5] [--rounds 7]
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import torch

from bench.checkpoint.write import State, make_state, memcpy_s, timed
from bench.running import record, require_memory, run_bench
from phalanx.checkpoint.committed.restore import Shard, dtype_name, restore
from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.snapshot.data_port import SnapshotServer, push
from phalanx.checkpoint.snapshot.segments import SnapshotMemory
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier
from phalanx.checkpoint.snapshot.writer import SnapshotWriter

_RUN, _TOKEN = "bench", "the token of this bench only"


def plain_shards(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Return one shard for each full tensor, as in a run with one rank."""
    return [
        Shard(full_box(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)
        for name, tensor in tensors.items()
    ]


@dataclass(frozen=True)
class Round:
    """One round's times in seconds."""

    memcpy_s: float
    stall_s: float
    complete_s: float
    push_s: float
    own_restore_s: float
    peer_restore_s: float


@dataclass(frozen=True)
class Bench:
    """The settings and buffers that the rounds share."""

    state: State
    target: State
    warm: ByteArray
    memory: SnapshotMemory
    buddy: SnapshotMemory
    writer: SnapshotWriter
    address: str

    def one_round(self, step: int) -> Round:
        copy_s = memcpy_s(self.state, self.warm)
        shards = plain_shards(self.state)
        begin = time.perf_counter()
        taken = self.writer.take(step, shards, {})
        stall_s = time.perf_counter() - begin
        self.writer.wait()
        complete_s = time.perf_counter() - begin
        push_s = timed(lambda: push(self.address, _TOKEN, self.memory, taken.key))
        own = SnapshotTier(1, step, own=self.memory.worker_segments(0))
        peer = SnapshotTier(1, step, holders=[SnapshotHolder(0, self.address)], token=_TOKEN)
        return Round(
            copy_s, stall_s, complete_s, push_s, self.restore_s(own, step), self.restore_s(peer, step)
        )

    def restore_s(self, tier: SnapshotTier, step: int) -> float:
        """Return the seconds to read all of it back, checked, into memory that is mapped already."""
        for tensor in self.target.values():
            tensor.zero_()
        shards: Sequence[Shard] = plain_shards(self.target)
        with closing(tier):
            taken = timed(lambda: restore(tier, step, shards, rank=0))
        if not all(torch.equal(self.target[name], self.state[name]) for name in self.state):
            raise RuntimeError("the restored tensors are not those of the snapshot")
        return taken


def measure(size_gib: float, rounds: int, *, is_printed: bool) -> tuple[int, list[Round]]:
    """Return the state's size in bytes and each round's times, after one round that warms all memory."""
    state = make_state(size_gib)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    warm = page_aligned(nbytes)
    warm.fill(1)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    memory, buddy = SnapshotMemory(_RUN, 1), SnapshotMemory(_RUN, 0)
    with (
        closing(memory),
        closing(buddy),
        closing(SnapshotServer(buddy, _TOKEN)) as server,
        closing(SnapshotWriter(memory.worker_segments(0), _RUN)) as writer,
    ):
        writer.bind(0, 1, 0)
        writer.prepare(plain_shards(state))
        bench = Bench(state, target, warm, memory, buddy, writer, f"127.0.0.1:{server.port}")
        bench.one_round(0)
        bench.one_round(1)  # the second of the two segments on either side
        done = []
        for step in range(2, rounds + 2):
            done.append(bench.one_round(step))
            record({"round": step - 1, **asdict(done[-1])}, is_printed=is_printed)
        return nbytes, done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    require_memory(
        8 * args.size_gib, "give a smaller --size-gib"
    )  # two segments on either side, state, copies
    nbytes, rounds = measure(args.size_gib, args.rounds, is_printed=not args.json)
    medians = {name: statistics.median(getattr(turn, name) for turn in rounds) for name in asdict(rounds[0])}
    ratio = statistics.median(turn.stall_s / turn.memcpy_s for turn in rounds)
    if args.json:
        print(
            json.dumps(
                {"bytes": nbytes, "stall_over_memcpy": ratio, **medians, "rounds": list(map(asdict, rounds))}
            )
        )
        return
    print(f"{nbytes:,} bytes, medians of {len(rounds)} rounds")
    for name, seconds in medians.items():
        print(f"  {name.removesuffix('_s'):14} {seconds:8.3f} s  {nbytes / seconds / 1e9:6.2f} GB/s")
    print(f"  stall over memcpy {ratio:.2f}")


if __name__ == "__main__":
    run_bench(main)
