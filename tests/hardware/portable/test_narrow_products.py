"""Products of 8-bit operands have stated bits: conversions round to the nearest number, ties to even, and products are portable ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phalanx.model.layers.expert_groups import groups_of_one_slot
from phalanx.train.precision import FORMATS, NarrowGroupedProduct, NarrowProduct

pytestmark = pytest.mark.usefixtures("portable_kernels")
DIGESTS = {
    ("fp8-tensorwise", torch.float32): "8ac0ba4e333448",
    ("fp8-tensorwise", torch.bfloat16): "31d0bad98abbd2",
    ("fp8-rowwise", torch.float32): "f24ba431a49e39",
    ("fp8-rowwise", torch.bfloat16): "9be26e98c26a89",
    ("mxfp8", torch.float32): "785bbde374abf9",
    ("mxfp8", torch.bfloat16): "70f0cd850f87e0",
}
"""First digits of the SHA-256 of products and their gradients, by format and type of the operands."""


@pytest.fixture(params=[1, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def patterns() -> Tensor:
    """Positive fp32 numbers: each exponent, with each value of the eight highest bits of the mantissa and the ends and the middle of the rest."""
    rest = torch.tensor([0, 1, 2, 0x3FFF, 0x4000, 0x4001, 0x7FFE, 0x7FFF])
    parts = torch.arange(255)[:, None, None] << 23 | torch.arange(256)[:, None] << 15 | rest
    return parts.to(torch.int32).flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_conversion_rounds_to_the_nearest_number_and_ties_to_even(dtype: torch.dtype) -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    numbers = numbers[numbers.isfinite()]  # ascending: the code of a number is its index
    x = patterns()
    x = x[x <= torch.finfo(dtype).max]  # scales leave no larger ones
    above = torch.searchsorted(numbers, x.double())  # the least number that is not below
    below = (above - 1).clamp(min=0)
    down, up = x.double() - numbers[below], numbers[above] - x.double()  # exact
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    assert torch.equal(x.to(dtype).view(torch.uint8).long(), nearest)
    assert torch.equal((-x).to(dtype).view(torch.uint8).long(), nearest + 128)
    narrow = x[x.bfloat16().float() == x]
    assert torch.equal(narrow.bfloat16().to(dtype).view(torch.uint8), narrow.to(dtype).view(torch.uint8))


def integers(*shape: int, seed: int) -> Tensor:
    """Numbers of about six binary orders of magnitude, the same on every processor."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(2**20), 2**20, shape, generator=generator) >> torch.randint(
        0, 7, shape, generator=generator
    )
    return numbers.float() / 2**18


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("name", "dtype"), DIGESTS)
def test_products_and_gradients_have_the_stored_bits(name: str, dtype: torch.dtype) -> None:
    assert name in FORMATS
    rows, weight = (
        integers(*shape, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate(((130, 160), (70, 160)))
    )
    chosen, experts = (
        integers(*shape, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate(((80, 64), (4, 48, 64)), 2)
    )
    groups = groups_of_one_slot(torch.tensor([40, 0, 33, 7]))
    results = NarrowProduct(name)(rows, weight), NarrowGroupedProduct(name)(chosen, experts, groups)
    slopes = [integers(*result.shape, seed=seed).to(dtype) for seed, result in enumerate(results, 4)]
    gradients = torch.autograd.grad(results, (rows, weight, chosen, experts), slopes)
    digest = hashlib.sha256()
    for tensor in (*results, *gradients):
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:14] == DIGESTS[name, dtype]
