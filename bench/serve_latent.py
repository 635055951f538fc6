"""Decoding of latent attention behind long texts: the matrix absorbed (fast numerics) over keys and values expanded anew (exact).

    python -m bench.serve_latent [--lengths 256,1024,4096]

A line for each length of text has the median milliseconds of a step of one text in both forms, their ratio, and the operations of attention of both by count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec
from phalanx.serve.engine.engine import Engine
from phalanx.serve.numerics.identity import Numerics
from phalanx.traffic.requests import Request, Sampling

MLA = MlaSpec(query_rank=0, kv_rank=256, nope_head_dim=64, rope_head_dim=32, value_head_dim=64)
SPEC = ModelSpec(layers=4, dim=512, heads=8, vocab_size=4096, mla=MLA)


def random_model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(resolve(SPEC))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False).eval()


def step_s(model: Transformer, numerics: Numerics, length: int, steps: int = 12) -> float:
    """The median seconds of a step that decodes behind ``length`` tokens."""
    engine = Engine(
        model, model.spec, pages=length // 64 + 2, numerics=numerics, sequence=length, weights_id="bench"
    )
    engine.submit(Request("a", tuple(n % 4096 for n in range(length)), steps + 2, Sampling(temperature=0)))
    while not engine.step():
        pass
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,1024,4096")
    given = parser.parse_args()
    head = MLA.nope_head_dim + MLA.value_head_dim
    wide = MLA.kv_rank + MLA.rope_head_dim
    for length in map(int, given.lengths.split(",")):
        pairs = [
            (step_s(random_model(), "exact", length), step_s(random_model(), "fast", length))
            for _ in range(3)
        ]
        expanded, absorbed = (min(column) for column in zip(*pairs, strict=True))
        counted = (
            length
            * (MLA.kv_rank * head + head + MLA.rope_head_dim)
            / (length * 2 * wide + MLA.kv_rank * head)
        )
        print(
            f"{length} tokens: expanded {expanded * 1e3:.1f} ms, absorbed {absorbed * 1e3:.1f} ms, ratio {expanded / absorbed:.2f}; "
            f"operations of attention {counted:.0f} times fewer",
            flush=True,
        )


if __name__ == "__main__":
    main()
