"""Latent attention, its keys and values expanded or its matrix absorbed: decoding behind long texts, and the cost of a step of training.

    python -m bench.serve.latent [--lengths 256,1024,4096] [--training] [--rounds 3]

A line for each length of text has the median milliseconds of a step of one text: with exact numerics expanded and absorbed (``model.mla.absorbed``), and with
fast numerics, which absorb; the ratios of the first to the others; and the operations of attention of both forms by count. With ``--training`` it has
the seconds of forward and backward over one sequence of that length in both forms instead, and their ratio. Rounds are taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from bench.running import run_bench
from phalanx.hardware.portable import operations
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.numerics import Numerics
from phalanx_serve.traffic.events import Request, Sampling

MLA = MlaSpec(query_rank=0, kv_rank=256, nope_head_dim=64, rope_head_dim=32, value_head_dim=64)
SPEC = ModelSpec(layers=4, dim=512, heads=8, vocab_size=4096, mla=MLA)


def random_model(absorbed: bool) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(resolve(replace(SPEC, mla=replace(MLA, absorbed=absorbed))))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False).eval()


def step_s(model: Transformer, numerics: Numerics, length: int, steps: int = 12) -> float:
    """Return the median seconds of a step that decodes behind ``length`` tokens."""
    if numerics == "fast":
        operations.end()
    engine = Engine(model, model.spec, pages=length // 64 + 2, numerics=numerics, weights_id="bench")
    engine.submit(Request("a", tuple(n % 4096 for n in range(length)), steps + 2, Sampling(temperature=0)))
    while not engine.step():
        pass
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def learnt_s(model: Transformer, length: int) -> float:
    """Return the seconds of forward and backward over one sequence."""
    tokens = torch.randint(4096, (1, length), generator=torch.Generator().manual_seed(1))
    model.requires_grad_(True)
    begin = time.perf_counter()
    model(tokens).square().mean().backward()
    return time.perf_counter() - begin


def compare_training(length: int, rounds: int) -> None:
    models = [random_model(absorbed) for absorbed in (False, True)]
    taken = [[learnt_s(model, length) for model in models] for _ in range(rounds + 1)][1:]
    expanded, absorbed = (min(column) for column in zip(*taken, strict=True))
    print(
        f"{length} tokens learnt: expanded {expanded:.3f} s, absorbed {absorbed:.3f} s, ratio {absorbed / expanded:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many is taken")
    options = parser.parse_args()
    head = MLA.nope_head_dim + MLA.value_head_dim
    wide = MLA.kv_rank + MLA.rope_head_dim
    for length in map(int, options.lengths.split(",")):
        if options.training:
            compare_training(length, options.rounds)
            continue
        rounds = [
            (
                step_s(random_model(absorbed=False), "exact", length),
                step_s(random_model(absorbed=True), "exact", length),
                step_s(random_model(absorbed=False), "fast", length),
            )
            for _ in range(options.rounds)
        ]
        expanded, absorbed, fast = (min(column) for column in zip(*rounds, strict=True))
        counted = (
            length
            * (MLA.kv_rank * head + head + MLA.rope_head_dim)
            / (length * 2 * wide + MLA.kv_rank * head)
        )
        print(
            f"{length} tokens: exact, expanded {expanded * 1e3:.1f} ms, absorbed {absorbed * 1e3:.1f} ms (ratio {expanded / absorbed:.2f}), "
            f"fast {fast * 1e3:.1f} ms (ratio {expanded / fast:.2f}); "
            f"operations of attention {counted:.0f} times fewer",
            flush=True,
        )


if __name__ == "__main__":
    run_bench(main)
