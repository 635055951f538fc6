"""Probes of matrix products: fewer rows than keep their bits are noticed, and few rows have the bits of many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.kernels.compiler import OPTIONS, NoHostKernelsError
from phalanx.hardware.kernels.rows.product import BF16_CHAINS, RowKernel, row_kernel
from phalanx.model.layers.experts.expert_groups import groups_of_one_slot
from phalanx.model.layers.linear import Linear
from phalanx.serve.numerics import facts as kept_facts
from phalanx.serve.numerics import products
from phalanx.serve.numerics.facts import Facts, facts_path, numbers_of_rows
from phalanx.serve.numerics.products import (
    RowProducts,
    Shape,
    fewest_rows,
    product_facts,
    use_fast_products,
)

FP32, BF16 = torch.float32, torch.bfloat16


needs_kernel = pytest.mark.skipif(
    (kernel := row_kernel()) is None or not kernel.fuses, reason="no C compiler, or no fused multiply-add"
)
IN_CHAINS = (
    kernel is not None and (facts := product_facts(Shape(64, 64, BF16))) is not None and facts.block > 0
)
"""Whether PyTorch's bf16 products on this processor are those that the kernel follows: AVX2, without instructions for them."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what another process found, nor keeps what a changed kernel gave."""
    monkeypatch.setattr(kept_facts, "facts_path", lambda: tmp_path / "facts.json")
    products._facts_of.cache_clear()


def kept_by(shape: Shape) -> Facts:
    """The facts of a shape; skips the test where no number of rows keeps its bits, for which exact serving refuses it."""
    facts = product_facts(shape)
    if facts is None:
        pytest.skip(f"on this processor no number of rows keeps the bits of a {shape}")
    return facts


def products_of(*shapes: Shape) -> RowProducts:
    return RowProducts({shape: kept_by(shape) for shape in shapes})


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(64, 96), (704, 250), (250, 40)]),
    st.sampled_from([FP32, BF16]),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 900),
)
def test_any_number_of_rows_has_the_bits_of_many(
    widths: tuple[int, int], dtype: torch.dtype, rows: int, bias: bool, seed: int
) -> None:
    inputs, outputs = widths
    generator = torch.Generator().manual_seed(seed)
    x, matrix, given_bias = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((512, inputs), (outputs, inputs), (outputs,))
    )
    added = given_bias if bias else None
    if product_facts(Shape(outputs, inputs, dtype, bias)) is None:
        return  # Some shapes of bf16 never keep their bits on some processors.
    product = products_of(Shape(outputs, inputs, dtype, bias))
    begin = seed % (512 - rows)
    part = x[begin : begin + rows]
    with torch.no_grad():
        found = product(part.view(1, rows, inputs), matrix, added)
    assert torch.equal(found[0], F.linear(x, matrix, added)[begin : begin + rows])


def test_each_experts_rows_have_the_bits_of_many() -> None:
    matrices, x = torch.randn(4, 48, 256), torch.randn(512, 256)
    counts = torch.tensor([1, 0, 5, 20])
    found = products_of(Shape(48, 256, FP32)).grouped(x[:26], matrices, groups_of_one_slot(counts))
    owners = [0] * 1 + [2] * 5 + [3] * 20
    whole = torch.stack([F.linear(x, matrix) for matrix in matrices])
    assert torch.equal(found, torch.stack([whole[owner, row] for row, owner in enumerate(owners)]))


def test_a_single_row_by_the_librarys_own_product_would_be_noticed() -> None:
    # fp32 kernels compute one row in another order: the rule is not for nothing.
    for inputs in (256, 700, 1024):
        facts = product_facts(Shape(40, inputs, FP32))
        x, matrix = torch.randn(512, inputs), torch.randn(40, inputs)
        if not torch.equal(F.linear(x[:1], matrix), F.linear(x, matrix)[:1]):
            assert facts is None or facts.fewest > 1


def test_the_fewest_rows_that_keep_their_bits_are_found_whatever_the_rule() -> None:
    for fewest, multiple in ((1, 1), (4, 4), (16, 4), (32, 32)):
        found = fewest_rows(lambda number, _, f=fewest, m=multiple: number >= f and number % m == 0, 1024)  # type: ignore[misc]
        assert found == Facts(fewest, multiple)
    assert fewest_rows(lambda number, begin: not (number == 64 and begin), 1024) is None


@given(st.integers(1, 40), st.sampled_from([1, 4, 16, 32]), st.integers(1, 200))
def test_padding_leads_to_a_number_that_the_rule_allows(fewest: int, multiple: int, rows: int) -> None:
    fewest += -fewest % multiple
    number = rows + Facts(fewest, multiple).padding(rows)
    assert number >= max(rows, fewest)
    assert number % multiple == 0
    assert number <= max(fewest, rows + multiple - 1)
    assert all(tried >= fewest and tried % multiple == 0 for tried in numbers_of_rows(fewest, multiple, 600))


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfused(
        rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, _block: int
    ) -> torch.Tensor:
        return (rows[:, None].double() * matrix.double()).sum(2).float() + (0 if bias is None else bias)

    monkeypatch.setattr(products, "row_kernel", lambda: unfused)
    facts = product_facts(Shape(40, 256, FP32))
    assert facts is None or facts.block == 0


@pytest.mark.skipif(not IN_CHAINS, reason="PyTorch adds bf16 products in another order here")
@pytest.mark.parametrize("inputs", [16, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_another_order_of_additions_is_noticed_in_narrow_bf16_products(
    inputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of numbers that do not cancel, one in twenty thousand tells one order from another.
    def otherwise(
        rows: torch.Tensor, matrix: torch.Tensor, added: torch.Tensor | None, _block: int
    ) -> torch.Tensor:
        return F.linear(rows.double(), matrix.double(), None if added is None else added.double()).bfloat16()

    shape = Shape(24, inputs, BF16, bias)
    assert (found := product_facts(shape)) is not None
    assert found.block == BF16_CHAINS
    products._facts_of.cache_clear()
    kept_facts.facts_path().unlink()
    monkeypatch.setattr(products, "row_kernel", lambda: otherwise)
    assert (found := product_facts(shape)) is not None
    assert found.block == 0


def test_without_a_kernel_few_rows_are_padded_and_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "row_kernel", lambda: None)
    x, matrix = torch.randn(512, 256), torch.randn(40, 256)
    with torch.no_grad():
        assert torch.equal(products_of(Shape(40, 256, FP32))(x[:1], matrix), F.linear(x, matrix)[:1])


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
def test_the_kernel_of_bf16_has_64_chains_and_the_bits_of_pytorchs_products(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    assert kernel is not None
    x, matrix = magnitudes(rows, inputs, seed=seed), magnitudes(outputs, inputs, seed=seed + 1)
    added = magnitudes(outputs, seed=seed + 2) if bias else None
    found = kernel(x, matrix, added, BF16_CHAINS)
    assert torch.equal(found, in_64_chains(x, matrix, added))
    if IN_CHAINS:
        with torch.no_grad():
            assert torch.equal(found, F.linear(x, matrix, added))


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


@needs_kernel
def test_fast_numerics_multiply_bf16_by_the_kernel_where_pytorch_has_no_library_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = Linear(80, 40).to(BF16).requires_grad_(False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    found = use_fast_products(linear)
    assert found is not None
    assert linear.affine is found
    assert found.block(linear) == BF16_CHAINS
    x = magnitudes(70, 80, seed=0)
    with torch.no_grad():
        assert torch.equal(linear(x), in_64_chains(x, linear.weight, linear.bias))
    assert use_fast_products(Linear(80, 40)) is None


@needs_kernel
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_model_that_is_moved_to_another_device_leaves_the_kernel_which_reads_a_cpus_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("memory of another device")

    linear = Linear(80, 40).to(dtype).requires_grad_(False)
    linear.affine = RowProducts({}, {dtype: Facts(1, 1, 64)})
    monkeypatch.setattr(products, "row_kernel", lambda: refused)
    with torch.no_grad():
        found = linear.to("meta")(torch.ones(3, 80, dtype=dtype, device="meta"))
    assert found.shape == (3, 40)


def test_a_kernel_that_cannot_be_compiled_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoHostKernelsError, match="no C compiler"):
        RowKernel()
    assert "-ffp-contract=off" in OPTIONS


def test_what_was_found_is_kept_and_what_no_longer_holds_is_found_again(tmp_path: Path) -> None:
    shape, path = Shape(40, 256, FP32), tmp_path / "facts.json"
    found = kept_by(shape)
    (name,) = json.loads(path.read_text())
    products._facts_of.cache_clear()
    assert product_facts(shape) == found
    for wrong in ({"fewest": 1, "multiple": 1, "block": 7}, {"fewest": 0, "multiple": 0, "block": 0}, "?"):
        path.write_text(json.dumps({name: wrong}))
        products._facts_of.cache_clear()
        assert product_facts(shape) == found
    path.write_text("{")
    products._facts_of.cache_clear()
    assert product_facts(shape) == found


def test_facts_are_those_of_a_machine_its_libraries_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = facts_path()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    other = facts_path()
    assert other != before
    assert other.name.endswith(".json")


def test_a_bias_that_lies_apart_in_memory_is_added_whole() -> None:
    kernel = row_kernel()
    if kernel is None:
        pytest.skip("needs a C compiler")
    rows, matrix, bias = torch.ones(1, 64), torch.ones(16, 64), torch.arange(32.0)[::2]
    # A copy that nobody held was overwritten while it was read.
    assert torch.equal(kernel(rows, matrix, bias, 64), bias + 64 * torch.ones(1, 16))
