"""Streaming a model's weights against the disk, the closed form and the resident model, in one run.

A model with random weights is saved by the real writers and packed. Then, in turn: the raw O_DIRECT rate with the same blocks and threads;
the resident model's seconds for each layer; streamed passes at several batch sizes. Printed are measured over the closed form (goal: at
least 0.95), measured over the larger of reading everything and computing everything (0.9), and for a mixture what the cache keeps over what
the best possible one would on the same trace (0.8). The closed form knows no experts: there, look at the limit. Ratios are speeds: 1 is the limit.

    python bench/serve_streaming.py
    python bench/serve_streaming.py --layers 24 --dim 1024 --experts 0 --passes 8 --json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import tomli_w
import torch
from torch import nn

from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.boxes import whole
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.pack.reader import PackFile, open_pack
from phalanx.checkpoint.pack.writer import pack
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx.serve.weights.expert_policy import ExpertFrequency, ExpertName, optimal_hits
from phalanx.serve.weights.open_model import open_model
from phalanx.serve.weights.read_pool import ReadPool
from phalanx.serve.weights.residency import resident_bytes
from phalanx.serve.weights.ring import read_ahead
from phalanx.serve.weights.streamed import READ_THREADS, streamed_weights
from phalanx.serve.weights.timeline import timeline


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument(
        "--experts", type=int, default=0, help="of each layer but the first; 0: a dense model"
    )
    parser.add_argument("--share", type=float, default=0.5, help="of the weights that memory has room for")
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = measure(arguments, Path(folder))
    for row in rows:
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{name} {value}" for name, value in row.items())
        )


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """A row for each batch size."""
    path = make_pack(arguments, folder)
    index = open_pack(path).index
    memory = int(arguments.share * resident_bytes(index, "float32"))
    resident, _ = open_model(path)
    rows = []
    for batch in arguments.batches:
        tokens = torch.randint(0, 256, (batch, 1), generator=torch.Generator().manual_seed(batch))
        compute = layer_seconds(resident, tokens, arguments.passes)
        expected = resident(tokens).clone()
        streamed, _ = open_model(path, stream=True, memory_bytes=memory)
        weights = streamed_weights(streamed)
        assert weights is not None
        equal = torch.equal(streamed(tokens), expected)
        streamed(tokens)
        if weights.experts is not None:
            weights.experts.trace = []
            weights.statistics.expert_hits = weights.statistics.expert_misses = 0
        rate = raw_rate(path)
        before, times = weights.statistics.bytes_read, []
        for turn in range(arguments.passes):
            began = time.perf_counter()
            text = tokens if not arguments.experts else (tokens + turn) % 256
            streamed(text)
            times.append(time.perf_counter() - began)
        read = (weights.statistics.bytes_read - before) / arguments.passes
        # Before and after, because what else the machine does changes.
        rate = (rate + raw_rate(path)) / 2
        kept = weights.residency.resident_layers
        bodies = [one.nbytes for one in index.sections if one.kind == "block"]
        reading = [0.0 if layer in kept else nbytes / rate for layer, nbytes in enumerate(bodies)]
        formula = timeline(reading, compute, max(1, weights.residency.buffers)).pass_seconds
        measured = statistics.mean(times)
        row: dict[str, object] = {
            "batch": batch,
            "raw_GB_s": round(rate / 1e9, 2),
            "GB_a_pass": round(read / 1e9, 3),
            "measured_s": round(measured, 4),
            "closed_form": round(formula / measured, 3),
            "limit": round(max(read / rate, sum(compute)) / measured, 3),
            "stalls_s": round(sum(weights.statistics.stall_s.values()), 3),
            "equal": equal,
            "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        if weights.experts is not None and weights.experts.trace is not None:
            trace, slots = weights.experts.trace, weights.experts.slots
            uniform = (arguments.layers - 1) * arguments.experts * (1 - (1 - 2 / arguments.experts) ** batch)
            # What is there when it is needed, prefetched or kept; and what the cache alone keeps, against the best possible one.
            row["there"] = round(weights.statistics.expert_hits / len(trace), 3)
            row["kept"] = round(replayed_hits(trace, slots, arguments.layers) / len(trace), 3)
            row["kept_over_optimum"] = round(
                replayed_hits(trace, slots, arguments.layers) / max(1, optimal_hits(trace, slots)), 3
            )
            row["touched_over_uniform"] = round(len(trace) / arguments.passes / uniform, 3)
        rows.append(row)
        weights.close()
    return rows


def replayed_hits(trace: list[ExpertName], slots: int, layers: int) -> int:
    """Hits of the cache's own policy on a trace, without prefetching."""
    frequency, held, turn, hits = ExpertFrequency(layers), set[ExpertName](), 0, 0
    for place, name in enumerate(trace):
        turn += place > 0 and name[0] < trace[place - 1][0]
        frequency.use(name, turn)
        hits += name in held
        if name not in held and len(held) >= slots:
            victim = frequency.least(held, (), turn)
            assert victim is not None, "something is held"
            held.remove(victim)
        held.add(name)
    return hits


def make_pack(arguments: argparse.Namespace, folder: Path) -> Path:
    """A pack of a model with random weights, saved as training saves."""
    moe = (
        MoeSpec(experts=arguments.experts, per_token=2, ffn_dim=arguments.dim, first_dense=1)
        if arguments.experts
        else None
    )
    spec = resolve(
        ModelSpec(
            layers=arguments.layers,
            dim=arguments.dim,
            heads=16,
            kv_heads=16,
            ffn_dim=4 * arguments.dim,
            vocab_size=256,
            moe=moe,
        )
    )
    run = folder / "run"
    save_run(run, spec)
    return pack(run, None, folder / "model.pack", "fp32")[0]


def save_run(run: Path, spec: ModelSpec, seq_len: int = 1024) -> None:
    """The directory of a run with random weights, saved as training saves."""
    model = Transformer(spec).requires_grad_(False)
    for name, value in model.state_dict().items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.02)
    run.mkdir()
    (run / "run.toml").write_text(tomli_w.dumps({"model": to_table(spec), "train": {"seq_len": seq_len}}))
    saver = AsyncSaver(DiskTier(run / "checkpoints"), rank=0, world_size=1)
    shards = [
        Shard(whole(f"model/{name}", "float32", tuple(value.shape)), value)
        for name, value in model.state_dict().items()
    ]
    saver.save(1, shards, {})
    saver.close()


@torch.no_grad()
def layer_seconds(model: nn.Module, tokens: torch.Tensor, passes: int) -> list[float]:
    """The resident model's seconds of each layer, the median of several passes."""
    times: dict[str, list[float]] = {}
    began: dict[str, float] = {}
    hooks = []
    for name, block in model.blocks.items():  # type: ignore[operator, union-attr]
        hooks.append(
            block.register_forward_pre_hook(lambda *_, at=name: began.__setitem__(at, time.perf_counter()))
        )
        hooks.append(
            block.register_forward_hook(
                lambda *_, at=name: times.setdefault(at, []).append(time.perf_counter() - began[at])
            )
        )
    for _ in range(passes + 1):
        model(tokens)
    for hook in hooks:
        hook.remove()
    return [statistics.median(seconds[1:]) for seconds in times.values()]


def raw_rate(path: Path) -> float:
    """Bytes a second of reading the bodies with the same blocks, threads and checks, without a model."""
    file = open_pack(path)
    numbers = [number for number, one in enumerate(file.index.sections) if one.kind == "block"]
    size = max(file.index.sections[number].nbytes for number in numbers)
    buffers = [page_aligned(-(-size // 4096) * 4096) for _ in range(3)]
    pool = ReadPool(READ_THREADS)
    # The first lap touches the buffers' pages, which costs as much as reading some of them.
    seconds = [_lap(file, pool, numbers, buffers) for _ in range(4)][1:]
    pool.close()
    file.close()
    return sum(file.index.sections[number].nbytes for number in numbers) / statistics.median(seconds)


def _lap(file: PackFile, pool: ReadPool, numbers: list[int], buffers: list[ByteArray]) -> float:
    began, ahead = time.perf_counter(), deque[list[Future[None]]]()
    for place, number in enumerate(numbers):
        if len(ahead) == len(buffers):
            for future in ahead.popleft():
                future.result()
        ahead.append(read_ahead(file, pool, number, buffers[place % len(buffers)], (0, 0)))
    for futures in ahead:
        for future in futures:
            future.result()
    return time.perf_counter() - began


if __name__ == "__main__":
    with torch.no_grad():
        main()
