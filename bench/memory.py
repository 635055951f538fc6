"""Memory that recomputation and offload of activations save, and the time that they cost.

One model on one rank, forward and backward without an update. For each way of keeping activations: the most that forward
leaves behind for backward, measured by ``phalanx.train.step.memory_meter``, and the time of a step, both over those of keeping
everything. Ways take turns in each round, and ratios of neighbors in time are what the medians are of. Time is compared
with memory's watch off. On a CPU host memory is the device's own, so that only files are offloaded to; what a step costs with
them depends on the disk and on what the machine has to spare for copying.

    python bench/memory.py
    python bench/memory.py --preset llama-100m --seq-len 1024 --rounds 9 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from phalanx.model.facts.presets import PRESETS
from phalanx.model.transformer import Transformer
from phalanx.observe.throughput import format_bytes
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MemorySpec, ModelSpec, RunSpec
from phalanx.train.step.memory_meter import MemoryMeter
from phalanx.train.transforms.offload import apply_activation_offload
from phalanx.train.transforms.recompute import apply_recompute


@dataclasses.dataclass(frozen=True)
class Row:
    """One way of keeping activations."""

    way: str
    activation_bytes: int
    memory_over_none: float
    step_s: float
    time_over_none: float


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="toy-4m", help="shape of the model")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each way that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = measure(arguments, Path(folder))
    if arguments.json:
        print(json.dumps({"setting": vars(arguments), "rows": [dataclasses.asdict(row) for row in rows]}))
        return
    print(f"{arguments.preset}, {arguments.batch} x {arguments.seq_len} tokens, {arguments.device}")
    print(
        f"{'recompute':<12}{'offload':<10}{'activations':>14}{'over none':>12}{'step':>11}{'over none':>12}"
    )
    for row in rows:
        recompute, offload = row.way.split(" + ")
        print(
            f"{recompute:<12}{offload:<10}{format_bytes(row.activation_bytes):>14}{row.memory_over_none:>12.2f}"
            f"{row.step_s * 1e3:>8.0f} ms{row.time_over_none:>12.2f}"
        )


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """All ways, the one that keeps everything first."""
    device = torch.device(arguments.device)
    shape = resolve(PRESETS[arguments.preset], 4096)
    tokens = torch.randint(0, shape.vocab_size, (arguments.batch, arguments.seq_len), device=device)
    offloads = ("none", "host", "file") if device.type == "cuda" else ("none", "file")
    ways = {
        f"{recompute} + {offload}": build(
            shape,
            MemorySpec(recompute=recompute, offload_activations=offload, offload_path=str(folder)),  # type: ignore[arg-type]
            device,
        )
        for recompute in ("none", "selective", "full")
        for offload in offloads
    }
    kept = {way: activations(model, tokens) for way, model in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, model in ways.items():
            times[way].append(timed(model, tokens))
    first = next(iter(ways))
    return [
        Row(
            way,
            kept[way],
            kept[way] / kept[first],
            statistics.median(times[way]),
            statistics.median(mine / none for mine, none in zip(times[way], times[first], strict=True)),
        )
        for way in ways
    ]


def build(shape: ModelSpec, memory: MemorySpec, device: torch.device) -> Transformer:
    """The model with random weights; bf16 on a GPU."""
    with device:
        model = Transformer(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    apply_recompute(model, RunSpec(memory=memory))
    apply_activation_offload(model, memory, device)
    return model.to(torch.bfloat16) if device.type == "cuda" else model


def step(model: Transformer, tokens: torch.Tensor) -> None:
    """Forward and backward; the readout leaves little behind, so that the blocks are what is measured."""
    model(tokens, lambda hidden, weight: (hidden @ weight[0]).float().square().mean()).backward()


def activations(model: Transformer, tokens: torch.Tensor) -> int:
    """Bytes that forward leaves behind for backward."""
    step(model, tokens)  # gradients exist from now on
    meter = MemoryMeter([model], list, tokens.device, compiled=False)
    with meter:
        step(model, tokens)
    return meter.result().activations or 0


def timed(model: Transformer, tokens: torch.Tensor) -> float:
    """Seconds of one step."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step(model, tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
