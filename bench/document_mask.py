"""The price of keeping attention to documents: forward and backward of attention alone, by document, with a mask, and plainly causal.

    python bench/document_mask.py                    # one sequence of 2,048 tokens, 12 heads, documents of about 340 tokens
    python bench/document_mask.py --seq-len 8192 --documents 20

Processor time of one thread, the least of paired rounds, over that of plain causal attention, which sees across documents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.attention import CausalCore
from phalanx.model.layers.documents import Documents

HEADS, WIDTH = 12, 64


def documents_of(seq_len: int, count: int) -> Documents:
    """``count`` documents of random lengths."""
    ends = torch.randperm(seq_len - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    first = torch.zeros(1, seq_len, dtype=torch.int64)
    first[0, ends] = 1
    return Documents.numbered(first.cumsum(1))


def with_mask(documents: Documents) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention with a dense mask, made anew at each call as in each layer."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seq_len, ids = query.shape[2], documents.ids
        seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril() & (
            ids[:, None, :, None] == ids[:, None, None]
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    documents, core = documents_of(options.seq_len, options.documents), CausalCore()
    leaves = [torch.randn(1, HEADS, options.seq_len, WIDTH, requires_grad=True) for _ in range(3)]
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "plain causal": core,
        "by document": lambda *x: core(*x, documents),
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
    main()
