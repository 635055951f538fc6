"""Numbers of rows from which a device's own kernels give a row the bits that it has among many. Exact numerics of serving would rely on them.

On a CPU exact numerics have kernels of their own (``phalanx.hardware.portable``). For a GPU there is no such rule: its library picks kernels by shape. Each finding has the numbers of rows whose bits are those among ``most`` rows, and the least number from which this is true of all that were tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.setting import Report, attempt
from phalanx.hardware.local.device import on_gpu

_NUMBERS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Shapes:
    """Sizes of the kernels under test; on a GPU those of ``llama3-8b``."""

    products: dict[str, tuple[int, int]]
    """Inner and outer width of each product."""
    experts: tuple[int, int, int]
    """Experts, and the inner and outer width of each."""
    heads: tuple[int, int, int]
    """Heads of queries, heads of keys, and their width."""
    keys: int
    vocab: int
    most: int
    """Rows of which all others are a part."""


LLAMA3_8B = Shapes(
    products={
        "query, output": (4096, 4096),
        "key, value": (4096, 1024),
        "gate, up": (4096, 14_336),
        "down": (14_336, 4096),
        "output projection": (4096, 128_256),
    },
    experts=(8, 4096, 1024),
    heads=(32, 8, 128),
    keys=2048,
    vocab=128_256,
    most=8192,
)
SMALL = Shapes(
    products={"query": (64, 64), "down": (160, 64)},
    experts=(4, 64, 32),
    heads=(4, 2, 16),
    keys=96,
    vocab=512,
    most=64,
)


def rows(device: torch.device, report: Report) -> None:
    """Report the numbers of rows that keep their bits, for each kind of kernel and format."""
    shapes = LLAMA3_8B if on_gpu(device) else SMALL
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for name, (inner, outer) in shapes.products.items():
            attempt(
                report,
                f"rows, {name}, {kind}",
                device,
                partial(_product, inner, outer, shapes, dtype, device),
            )
        attempt(report, f"rows, grouped product, {kind}", device, partial(_grouped, shapes, dtype, device))
        for name, masked in (("without a mask", False), ("with a mask", True)):
            find = partial(_attention, shapes, dtype, device, masked=masked)
            attempt(report, f"rows, attention {name}, {kind}", device, find)
        attempt(report, f"rows, rms_norm, {kind}", device, partial(_norm, shapes, dtype, device))
    attempt(report, "rows, log_softmax, float32", device, partial(_log_softmax, shapes, device))


def _kept(compute: Callable[[Tensor], Tensor], inputs: Tensor) -> dict[str, object]:
    """Return the numbers of ``inputs``' rows to which ``compute`` gives the bits that they have among all, at the start and at the end."""
    outputs, most = compute(inputs), len(inputs)
    same = []
    numbers = [number for number in _NUMBERS if number < most]
    for number in numbers:
        places = (slice(0, number), slice(most - number, most))
        if all(torch.equal(compute(inputs[place]), outputs[place]) for place in places):
            same.append(number)
    return _finding(numbers, same)


def _finding(numbers: list[int], same: list[int]) -> dict[str, object]:
    apart = [number for number in numbers if number not in same]
    after = [number for number in numbers if number > max(apart, default=0)]
    return {
        "from": after[0] if after else "none that was tried",
        "same": ", ".join(map(str, same)) or "none",
        "other": ", ".join(map(str, apart)) or "none",
    }


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)


def _product(
    inner: int, outer: int, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    weight = _random(outer, inner, dtype=dtype, device=device)
    inputs = _random(shapes.most, inner, dtype=dtype, device=device)
    if outer > 1 << 16:  # the result of all rows would take gigabytes
        inputs = inputs[: shapes.most // 8]
    return _kept(lambda rows: F.linear(rows, weight), inputs)


def _grouped(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Compare an expert's rows in products in which each expert has as many rows."""
    experts, inner, outer = shapes.experts
    matrices = _random(experts, inner, outer, dtype=dtype, device=device)
    inputs = _random(shapes.most // experts, inner, dtype=dtype, device=device)

    def compute(rows: Tensor) -> Tensor:
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * len(rows)
        return F.grouped_mm(rows.repeat(experts, 1), matrices, offs=ends)[-len(rows) :]

    return _kept(compute, inputs)


def _attention(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, *, masked: bool
) -> dict[str, object]:
    """Compare the last queries of a text computed within the full causal sequence, and alone with all keys up to the end."""
    heads, grouped, width = shapes.heads
    count = shapes.keys
    query = _random(1, heads, count, width, dtype=dtype, device=device)
    key, value = (_random(1, grouped, count, width, dtype=dtype, device=device) for _ in range(2))
    seen = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    full_sequence = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen if masked else None, is_causal=not masked, enable_gqa=True
    )
    same = []
    numbers = [number for number in _NUMBERS if number < count] if masked else [1]
    for number in numbers:
        last = slice(count - number, count)
        # One query alone sees all keys: no mask is needed, and some kernels accept none.
        last_queries = F.scaled_dot_product_attention(
            query[:, :, last], key, value, attn_mask=seen[last] if masked else None, enable_gqa=True
        )
        if torch.equal(last_queries, full_sequence[:, :, last]):
            same.append(number)
    return _finding(numbers, same)


def _norm(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    width = next(iter(shapes.products.values()))[0]
    weight = _random(width, dtype=dtype, device=device)
    inputs = _random(shapes.most, width, dtype=dtype, device=device)
    return _kept(lambda rows: F.rms_norm(rows, (width,), weight, 1e-6), inputs)


def _log_softmax(shapes: Shapes, device: torch.device) -> dict[str, object]:
    inputs = _random(max(64, shapes.most // 8), shapes.vocab, dtype=torch.float32, device=device)
    return _kept(lambda rows: F.log_softmax(rows, -1), inputs)
