"""The kernels of few rows add in the order that their sources state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.kernels.rows.product import BF16_CHAINS, row_kernel

FP32, BF16 = torch.float32, torch.bfloat16


needs_kernel = pytest.mark.skipif(
    (kernel := row_kernel()) is None or not kernel.fuses, reason="no C compiler, or no fused multiply-add"
)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "block"),
    [(3, 21, 37, 10), (13, 41, 37, 10), (50, 16, 37, 37), (5, 35, 300, 290)],
    ids=["few rows", "rows of a panel", "rows of two batches", "a block of two panels"],
)
def test_the_kernel_chains_fused_multiply_adds_within_blocks(
    rows: int, outputs: int, inputs: int, block: int
) -> None:
    kernel = row_kernel()
    if kernel is None:
        pytest.skip("there is no C compiler, or no fused multiply-add")
    x, matrix, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    # A product of two fp32 numbers and a sum with a third are exact enough in fp64 to be rounded once.
    expected = bias.expand(rows, outputs)
    for begin in range(0, inputs, block):
        chain = torch.zeros(rows, outputs)
        for inner in range(begin, min(inputs, begin + block)):
            products = x[:, inner, None].double() * matrix[:, inner].double()
            chain = (products + chain.double()).float()
        expected = expected + chain
    assert torch.equal(kernel(x, matrix, bias, block), expected)


def in_64_chains(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A bf16 product ``(m, i)`` by ``(o, i)`` as ``bf16.c`` says it: ``(m, o)``."""
    terms = x.float()[:, None] * matrix.float()  # (m, o, i), exact
    whole, vectors, inputs = len(x[0]) // 64 * 64, len(x[0]) // 16 * 16, len(x[0])
    chains = torch.zeros(*terms.shape[:2], 8, 8)
    for begin in range(0, whole, 64):
        chains = chains + terms[:, :, begin : begin + 64].reshape(*terms.shape[:2], 8, 8)

    def added(vectors: torch.Tensor) -> torch.Tensor:
        """The first half of the last dimension but one onto the second, and so on; then lanes alike."""
        for dim in (2, 3):
            while vectors.shape[dim] > 1:
                first, second = vectors.chunk(2, dim)
                vectors = first + second
        return vectors[:, :, 0, 0]

    rest = torch.zeros(*terms.shape[:2], 1, 8)
    for begin in range(whole, vectors, 8):
        rest = rest + terms[:, :, None, begin : begin + 8]
    result = added(chains) + added(rest)
    for last in range(vectors, inputs):
        result = result + terms[:, :, last]
    return (result if bias is None else bias.float() + result).bfloat16()


def magnitudes(*size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-9, 10, size, generator=generator).float().exp2()
    return (torch.randn(size, generator=generator) * scales).bfloat16()


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 55), st.integers(1, 330), st.integers(1, 60), st.booleans(), st.integers(0, 99))
def test_the_kernel_of_bf16_has_64_chains(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    assert kernel is not None
    x, matrix = magnitudes(rows, inputs, seed=seed), magnitudes(outputs, inputs, seed=seed + 1)
    added = magnitudes(outputs, seed=seed + 2) if bias else None
    found = kernel(x, matrix, added, BF16_CHAINS)
    assert torch.equal(found, in_64_chains(x, matrix, added))


@needs_kernel
@pytest.mark.parametrize("rows", [1, 3, 17, 100])
def test_bf16_matrices_that_lie_apart_in_memory_are_multiplied_whole(rows: int) -> None:
    assert kernel is not None
    x, matrix = magnitudes(100, 2 * rows, seed=3).t()[::2], magnitudes(100, 41, seed=4).t()
    added = magnitudes(82, seed=5)[::2]
    expected = in_64_chains(x.contiguous(), matrix.contiguous(), added.contiguous())
    assert torch.equal(kernel(x, matrix, added, BF16_CHAINS), expected)


@needs_kernel
def test_bf16_numbers_that_are_none_or_too_large_stay_so() -> None:
    assert kernel is not None
    for odd in (float("nan"), float("inf"), -float("inf"), 3e38):
        x, matrix = torch.ones(5, 80, dtype=BF16), torch.ones(7, 80, dtype=BF16)
        x[3, 70] = odd
        matrix[2, 5] = 2 * odd
        found = kernel(x, matrix, None, BF16_CHAINS)
        assert torch.equal(found.isnan(), in_64_chains(x, matrix, None).isnan())
        assert torch.equal(found.nan_to_num(), in_64_chains(x, matrix, None).nan_to_num())


@needs_kernel
def test_a_kernel_reads_numbers_of_one_format_alone() -> None:
    # PyTorch's product refuses others too; here they would be read beyond their end.
    assert kernel is not None
    for x, matrix, added in ((BF16, FP32, FP32), (FP32, BF16, BF16), (FP32, FP32, BF16)):
        with pytest.raises(TypeError, match="numbers of one format"):
            kernel(
                torch.ones(2, 64, dtype=x), torch.ones(8, 64, dtype=matrix), torch.ones(8, dtype=added), 64
            )


def test_a_bias_that_lies_apart_in_memory_is_added_whole() -> None:
    kernel = row_kernel()
    if kernel is None:
        pytest.skip("needs a C compiler")
    rows, matrix, bias = torch.ones(1, 64), torch.ones(16, 64), torch.arange(32.0)[::2]
    # A copy that nobody held was overwritten while it was read.
    assert torch.equal(kernel(rows, matrix, bias, 64), bias + 64 * torch.ones(1, 16))
