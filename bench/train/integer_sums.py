"""Error, bytes and time of sums of slots' gradients that do not depend on the fleet: the tree's, and two kinds of integers.

Gradients are bf16 numbers whose scales are log-normal over elements: within a span of 128 they differ by about a factor e, or, in the second
kind, by e^4. Errors are relative to the exact sum, as norms over all elements, and of the small half of each span's elements.
"One word" is a single int32 an element, with an exponent that all slots agree upon: it takes half the bytes, but all slots at once.

    python -m bench.train.integer_sums
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from bench.running import run_bench
from phalanx.parallel.divisions import share_layout
from phalanx.parallel.reduction.reproducible_sums import BinFormat, Bins

SPAN = 128


def tree(gradients: Tensor) -> Tensor:
    """Return the sum in fp32, in the order of a binary tree; the number of slots is a power of two."""
    while len(gradients) > 1:
        gradients = gradients[0::2] + gradients[1::2]
    return gradients[0]


def one_word(gradients: Tensor) -> Tensor:
    """Return the sum in one int32, whose unit follows from the largest element of a span in all slots."""
    count = len(gradients)
    spans = gradients.view(count, -1, SPAN).double()
    exponent = torch.frexp(spans.abs().amax((0, 2))).exponent
    unit = torch.ldexp(
        torch.ones_like(exponent, dtype=torch.float64), exponent - (30 - (count - 1).bit_length())
    )
    words = torch.round(spans / unit[:, None]).long().sum(0)
    assert words.abs().max() < 2**31
    return (words.double() * unit[:, None]).float().view(-1)


def two_words(gradients: Tensor) -> Tensor:
    """Return the sum in bins."""
    bins = Bins.empty(
        1, share_layout([(gradients.shape[1] // SPAN, SPAN)], 1), BinFormat(len(gradients)), gradients.device
    )
    for gradient in gradients:
        bins.add_gradient(gradient.view(1, -1))
    out = torch.empty(1, gradients.shape[1])
    bins.total(out)
    return out[0]


def errors(summed: Tensor, exact: Tensor, small: Tensor) -> str:
    """Return the relative error of all elements, and of the elements that are small in their span."""
    wrong = summed.double() - exact
    return f"{wrong.norm() / exact.norm():.1e}, {wrong[small].norm() / exact[small].norm():.1e}"


def main() -> None:
    """Print a line for each number of slots and spread of scales, and the time to add a slot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="spans of a gradient")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--timed", type=int, default=1 << 23, help="elements whose addition is timed")
    arguments = parser.parse_args()
    rows = arguments.rows
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("slots, spread | fp32 tree | one word | two words (all, small half)")
    for slots in arguments.slots:
        for spread in (1.0, 4.0):
            scale = torch.exp(spread * torch.randn(rows, SPAN)) * 1e-4
            small = (scale < scale.median(1, keepdim=True).values).view(-1)
            gradients = (scale.view(-1) * (torch.randn(slots, rows * SPAN) + 0.05)).bfloat16().float()
            exact = gradients.double().sum(0)
            sums = (add(gradients.clone()) for add in (tree, one_word, two_words))
            print(f"{slots}, {spread} |", " | ".join(errors(summed, exact, small) for summed in sums))
    gradient = torch.randn(1, arguments.timed)
    bins = Bins.empty(1, share_layout([(arguments.timed >> 12, 1 << 12)], 1), BinFormat(8), gradient.device)
    total, other = gradient.clone(), gradient.clone()
    seconds: dict[str, list[float]] = {"integers": [], "fp32": []}
    for _ in range(7):
        for name in seconds:
            begin = time.process_time()
            bins.add_gradient(gradient) if name == "integers" else total.add_(other)
            seconds[name].append((time.process_time() - begin) / gradient.numel())
    best = {name: f"{min(times) * 1e9:.2f} ns" for name, times in seconds.items()}
    print("CPU time to add an element of a slot, one thread, least of seven:", best)


if __name__ == "__main__":
    run_bench(main)
