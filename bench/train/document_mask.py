"""The price of keeping attention to documents: forward and backward of attention alone, by document, with a mask, and plainly causal.

    python -m bench.train.document_mask                    # one sequence of 2,048 tokens, 12 heads, documents of about 340 tokens
    python -m bench.train.document_mask --seq-len 8192 --documents 20
    python -m bench.train.document_mask --step             # a full step of a small model, with the mask and without

Processor time of one thread, the least of paired rounds, over that of plain causal attention, which sees across documents. ``--step`` is forward, loss,
backward and AdamW of a model of 6 layers of width 384 (12 heads) on one sequence: with the mask, counting its documents included, over without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.running import run_bench
from phalanx.model.layers.attention.attention import CausalCore, Documents, document_ids
from phalanx.model.transformer import Transformer
from phalanx.run.kinds import whole_model
from phalanx.run.spec import ModelSpec
from phalanx.train.step.loss import IGNORE, summed_cross_entropy

HEADS, WIDTH = 12, 64


def documents_of(seq_len: int, count: int) -> Documents:
    """Return ``count`` documents of random lengths."""
    ends = torch.randperm(seq_len - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    first = torch.zeros(1, seq_len, dtype=torch.int64)
    first[0, ends] = 1
    return Documents.numbered(first.cumsum(1))


def with_mask(documents: Documents) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention with a dense mask, which each call makes again, as each layer would."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seq_len, ids = query.shape[2], documents.ids
        seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril() & (
            ids[:, None, :, None] == ids[:, None, None]
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    return attend


def time_steps(seq_len: int, count: int, rounds: int) -> None:
    """Print the rate of full steps with the mask over that without: least processor times, and the median of paired rounds."""
    end, spec = 256, ModelSpec(vocab_size=4096, layers=6, dim=384, heads=12, kv_heads=12, ffn_dim=1024)
    model = Transformer(whole_model.resolve(spec))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ends = torch.randperm(seq_len - 1, generator=torch.Generator().manual_seed(0))[: count - 1]
    tokens = torch.randint(257, 4096, (1, seq_len), generator=torch.Generator().manual_seed(1))
    tokens[0, ends] = end
    targets = tokens.roll(-1, dims=1).masked_fill(tokens == end, IGNORE)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return summed_cross_entropy(hidden, weight, targets, 2048)

    def step(*, masked: bool) -> float:
        began_s = time.process_time()
        documents = Documents.numbered(document_ids(tokens, end)) if masked else None
        (model(tokens, loss, positions=torch.arange(seq_len), documents=documents) / seq_len).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began_s

    step(masked=True)
    step(masked=False)
    pairs = [(step(masked=True), step(masked=False)) for _ in range(rounds)]
    masked_s, plain_s = (min(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(plain / masked for masked, plain in pairs)
    print(
        f"with the mask {1000 * masked_s:.0f} ms, without {1000 * plain_s:.0f} ms: {plain_s / masked_s:.2f} times the rate"
    )
    print(f"median of {rounds} pairs: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--step", action="store_true", help="time full steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.step:
        time_steps(options.seq_len, options.documents, options.rounds)
        return
    documents, core = documents_of(options.seq_len, options.documents), CausalCore()
    leaves = [torch.randn(1, HEADS, options.seq_len, WIDTH, requires_grad=True) for _ in range(3)]
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "plain causal": core,
        "by document": lambda query, key, value: core(query, key, value, documents),
        "with a mask": with_mask(documents),
    }
    least_s = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, attend in ways.items():
            began_s = time.process_time()
            attend(*leaves).sum().backward()
            least_s[name] = min(least_s[name], time.process_time() - began_s)
    for name, spent_s in least_s.items():
        print(f"{name:14} {1000 * spent_s:8.1f} ms  {spent_s / least_s['plain causal']:.2f}")


if __name__ == "__main__":
    run_bench(main)
