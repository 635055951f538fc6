"""The cost of a checkpoint: the training step's stall against one memory copy, the write against the disk's own limit.

Each round, on the same state: one memcpy of it into warm memory (the better of one and two threads), a save by
``AsyncSaver``, the same bytes written by O_DIRECT in 8 MiB blocks from two threads without any format (the disk's limit),
``torch.distributed.checkpoint.save``, and its ``async_save``. Ratios are medians over the rounds, each within its round,
since other work on the machine moves all of them together.

    python -m bench.checkpoint.write [--json] [--size-gib 1.0] [--rounds 5] [--buffers 1] [--folder DIR]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_saver as dcp

from bench.running import record, require_memory, run_bench
from phalanx.checkpoint.committed.restore import Shard, dtype_name, restore
from phalanx.checkpoint.format.blocks import BLOCK_BYTES, page_aligned
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier

State = dict[str, torch.Tensor]


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
    write_s: float
    disk_limit_s: float
    restore_s: float
    dcp_save_s: float
    dcp_async_stall_s: float
    dcp_async_total_s: float


def make_state(size_gib: float) -> State:
    """Return a transformer's weights (bf16) with master weights and two moments (fp32), in matrices of 16 Mi elements if they are that many."""
    width = 4096 if size_gib >= 0.2 else 256
    layer_bytes = width**2 * 14
    layers = max(1, round(size_gib * (1 << 30) / layer_bytes))
    state: State = {}
    for layer in range(layers):
        name = f"layers.{layer}.weight"
        state[f"model/{name}"] = torch.randn(width, width).to(torch.bfloat16)
        state[f"model/layers.{layer}.norm"] = torch.randn(width)
        for moment in ("master", "exp_avg", "exp_avg_sq"):
            state[f"optimizer/{moment}/{name}"] = torch.randn(width, width)
    return state


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def memcpy_s(state: State, target: ByteArray) -> float:
    """Time one copy of the state by plain memcpy: the better of one thread and two."""
    sources = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]
    ends = np.cumsum([source.nbytes for source in sources])
    targets = [target[end - source.nbytes : end] for end, source in zip(ends, sources, strict=True)]
    halves = [
        (t[h], s[h])
        for t, s in zip(targets, sources, strict=True)
        for h in (slice(0, t.nbytes // 2), slice(t.nbytes // 2, None))
    ]
    with ThreadPoolExecutor(2) as pool:
        two = timed(lambda: list(pool.map(np.copyto, *zip(*halves, strict=True))))
    return min(two, timed(lambda: list(map(np.copyto, targets, sources))))


def disk_limit_s(path: Path, data: ByteArray) -> float:
    """Time writing the bytes of ``data`` by direct writes of 8 MiB from two threads, and fsync: no format, no checksum."""
    data = data[: data.nbytes // 4096 * 4096]
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
    starts = range(0, data.nbytes, BLOCK_BYTES)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda start: os.pwrite(descriptor, data[start : start + BLOCK_BYTES].data, start), starts
            )
        )
    os.fsync(descriptor)
    os.close(descriptor)
    taken = time.perf_counter() - begin
    path.unlink()
    return taken


def dcp_async_s(state: State, folder: Path) -> tuple[float, float]:
    """Return stall and total of PyTorch's asynchronous save in a thread."""
    begin = time.perf_counter()
    future = dcp.async_save(
        state, checkpoint_id=folder, no_dist=True, async_checkpointer_type=dcp.AsyncCheckpointerType.THREAD
    )
    stall_s = time.perf_counter() - begin
    if not isinstance(future, Future):
        raise TypeError(f"async_save in a thread returned {type(future)}, not a Future")
    future.result()
    return stall_s, time.perf_counter() - begin


def restore_s(tier: DiskTier, step: int, state: State) -> float:
    """Return the seconds to read all of it back, verified, into memory that is mapped already."""
    target = {name: torch.empty_like(tensor).zero_() for name, tensor in state.items()}
    taken = timed(lambda: restore(tier, step, plain_shards(target)))
    if not all(torch.equal(target[name], state[name]) for name in state):
        raise RuntimeError("the restored tensors are not the saved ones")
    return taken


def one_round(
    root: Path, step: int, state: State, saver: AsyncSaver, tier: DiskTier, warm: ByteArray
) -> Round:
    copy_s = memcpy_s(state, warm)
    receipt = saver.save(step, plain_shards(state), {})
    saver.wait()
    (outcome,) = saver.poll()
    if outcome.error is not None:
        raise outcome.error
    read_s = restore_s(tier, step, state)
    tier.delete(step)
    limit_s = disk_limit_s(root / "raw", warm)
    dcp_s = timed(lambda: dcp.save(state, checkpoint_id=root / f"dcp-{step}", no_dist=True))
    async_stall_s, async_total_s = dcp_async_s(state, root / f"dcp-async-{step}")
    for name in (f"dcp-{step}", f"dcp-async-{step}"):
        for file in sorted((root / name).iterdir()):
            file.unlink()
    return Round(
        copy_s, receipt.stall_s, outcome.seconds, limit_s, read_s, dcp_s, async_stall_s, async_total_s
    )


def measure(root: Path, size_gib: float, rounds: int, buffers: int, *, is_printed: bool) -> dict[str, object]:
    state = make_state(size_gib)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    warm = page_aligned(nbytes)
    warm.fill(0)
    tier = DiskTier(root / "ours")
    saver = AsyncSaver(tier, 0, 1, buffers=buffers)
    saver.prepare(plain_shards(state))
    done = []
    for step in range(rounds + 1):
        seconds = one_round(root, step, state, saver, tier, warm)
        if step > 0:  # the first round warms the memory
            done.append(seconds)
            record({"round": step, **asdict(seconds)}, is_printed=is_printed)
    saver.close()

    def median(value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, done))

    return {
        "bytes": nbytes,
        "median_s": {name: median(lambda r, n=name: asdict(r)[n]) for name in asdict(done[0])},  # type: ignore[misc]
        "stall_over_memcpy": median(lambda r: r.stall_s / r.memcpy_s),
        "write_rate_over_disk_limit": median(lambda r: r.disk_limit_s / r.write_s),
        "dcp_save_stall_over_ours": median(lambda r: r.dcp_save_s / r.stall_s),
        "dcp_async_stall_over_ours": median(lambda r: r.dcp_async_stall_s / r.stall_s),
        "dcp_save_time_over_our_write": median(lambda r: r.dcp_save_s / r.write_s),
        "dcp_async_total_over_our_total": median(lambda r: r.dcp_async_total_s / (r.stall_s + r.write_s)),
    }


def print_table(result: dict[str, object]) -> None:
    nbytes = int(str(result["bytes"]))
    seconds = result["median_s"]
    print(f"state of {nbytes / 1e9:.2f} GB")
    if isinstance(seconds, dict):
        for name, value in seconds.items():
            print(f"  {name:28s} {value:8.3f} s  {nbytes / 1e9 / value:7.2f} GB/s")
    goals = {"stall_over_memcpy": "goal <= 1.2", "write_rate_over_disk_limit": "goal >= 0.7"}
    for name, value in result.items():
        if isinstance(value, float):
            print(f"  {name:32s} {value:8.2f}  {goals.get(name, '')}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buffers", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: the temporary folder"
    )
    args = parser.parse_args()
    require_memory(6 * args.size_gib, "give a smaller --size-gib")  # state, copies, buffers, restored tensors
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.size_gib, args.rounds, args.buffers, is_printed=not args.json)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)


if __name__ == "__main__":
    run_bench(main)
