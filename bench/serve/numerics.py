"""Cost of independent rows to a mixture of experts: training and scoring over the same with rows as they come.

    python -m bench.serve.numerics [--dim 256 --layers 4 --experts 16] [--rounds 5] [--format float32]

Both run in turns in one process; a line for each format has the medians of the paired ratios of tokens/s (goal 0.99) and their range.
Training is a micro-batch's forward, loss and backward; scoring is the forward and the loss of each token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.running import run_bench
from phalanx.model.layers.moe import make_rows_independent
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx.train.step.loss import summed_cross_entropy, token_scores

CHUNK = 1024


def mixture(dim: int, layers: int, experts: int, dtype: torch.dtype) -> Transformer:
    moe = MoeSpec(experts=experts, per_token=2, ffn_dim=dim)
    spec = resolve(ModelSpec(layers=layers, dim=dim, heads=dim // 64, vocab_size=4096, moe=moe))
    torch.manual_seed(0)
    model = Transformer(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


def train(model: Transformer, tokens: Tensor) -> None:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return summed_cross_entropy(hidden, weight, tokens, CHUNK)

    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(tokens, loss))


@torch.no_grad()
def score(model: Transformer, tokens: Tensor) -> None:
    model(tokens, lambda hidden, weight: token_scores(hidden, weight, tokens, CHUNK))


def seconds(work: Callable[[Transformer, Tensor], None], model: Transformer, tokens: Tensor) -> float:
    begin = time.perf_counter()
    work(model, tokens)
    return time.perf_counter() - begin


def main() -> None:
    """Print two lines for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=["float32", "bfloat16"], help="this one alone")
    options = parser.parse_args()
    tokens = torch.randint(0, 4096, (4, 512), generator=torch.Generator().manual_seed(0))
    formats = (options.format,) if options.format else ("float32", "bfloat16")
    for dtype in (getattr(torch, name) for name in formats):
        free, apart = (mixture(options.dim, options.layers, options.experts, dtype) for _ in range(2))
        make_rows_independent(apart)
        for work in (train, score):
            pairs = []
            for _ in range(options.rounds + 1):
                pairs.append((seconds(work, free, tokens), seconds(work, apart, tokens)))
            ratios = sorted(before / after for before, after in pairs[1:])
            rate = tokens.numel() / statistics.median(after for _, after in pairs[1:])
            print(
                f"{dtype} {work.__name__}: independent over any {statistics.median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f}); {rate:,.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    run_bench(main)
