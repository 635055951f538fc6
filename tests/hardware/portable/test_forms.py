"""Every kernel computes what PyTorch's own does, within rounding, in each of its forms, dtypes and layouts of memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.hardware.portable.library import KERNELS, kernel_names, operations
from phalanx.hardware.portable.operations import unfit_processor

pytestmark = pytest.mark.skipif(bool(unfit_processor()), reason="portable numerics needs AVX2, or 64-bit Arm")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FUNCTIONS = sorted(
    name.removesuffix("_") for name in kernel_names() if name.endswith("_") and name != "gelu_"
)
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Within a few roundings of the dtype, relative to the largest number."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    largest = float(expected.double().abs().max()) if expected.numel() else 0.0
    allowed = 8 * scale * torch.finfo(expected.dtype).eps * max(largest, 1.0)
    assert bool(((actual.double() - expected.double()).abs() <= allowed).all())


def layouts(x: Tensor) -> dict[str, Tensor]:
    """``x`` of two dimensions, as it may lie in memory."""
    return {
        "in one piece": x,
        "turned": x.t().contiguous().t(),
        "every second number": torch.stack((x, x), -1)[..., 0],
        "a part": torch.cat((x, x), 1)[:, : x.shape[1]],
        "empty": x[:0],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elementary_function(name: str, dtype: torch.dtype) -> None:
    native: Callable[[Tensor], Tensor] = getattr(torch.ops.aten, name)
    ours = getattr(operations(), name)
    x = numbers(7, 37, dtype=dtype).clamp(-9, 9)
    if name in POSITIVE:
        x = x.abs() + 0.1
    if name == "log1p":
        x = x.abs() - 0.5
    for layout, lying in layouts(x).items():
        expected = native(lying)
        actual = ours(lying)
        assert actual.stride() == expected.stride() or layout == "every second number"
        assert_near(actual, expected)
        if layout in ("in one piece", "turned", "a part"):
            place = lying.clone() if layout != "a part" else torch.cat((x, x), 1)[:, : x.shape[1]]
            assert getattr(operations(), f"{name}_")(place) is not None
            assert torch.equal(place, actual)
        out = torch.empty(0, dtype=dtype)
        assert torch.equal(ours.out(lying, out=out), actual)
        assert torch.equal(out, actual)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "silu"])
def test_an_elementary_function_of_integers_is_of_fp32(name: str) -> None:
    x = torch.arange(1, 9)
    assert_near(getattr(operations(), name)(x), getattr(torch.ops.aten, name)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_its_slope(approximate: str, dtype: torch.dtype) -> None:
    x, slope = numbers(5, 40, dtype=dtype), numbers(5, 40, seed=1, dtype=dtype)
    aten, ours = torch.ops.aten, operations()
    assert_near(ours.gelu(x, approximate=approximate), aten.gelu(x, approximate=approximate))
    assert_near(
        ours.gelu_backward(slope, x, approximate=approximate),
        aten.gelu_backward(slope, x, approximate=approximate),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward", "silu_backward"])
def test_the_slope_of_a_functions_input(name: str, dtype: torch.dtype) -> None:
    at, slope = numbers(5, 40, dtype=dtype), numbers(5, 40, seed=1, dtype=dtype)
    if name != "silu_backward":  # these take the result
        at = at.sigmoid()
    native, ours = getattr(torch.ops.aten, name), getattr(operations(), name)
    for g, x in ((slope, at), (slope.t().contiguous().t(), at), (slope[:1, :1].expand(5, 40), at)):
        assert_near(ours(g, x), native(g, x))
        assert_near(ours.grad_input(g, x, grad_input=torch.empty(0, dtype=dtype)), native(g, x))


@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    data=st.data(),
    dtype=st.sampled_from([*DTYPES, torch.int64, torch.bool]),
    keep=st.booleans(),
)
def test_a_sum_over_any_dimensions(
    shape: list[int], data: st.DataObject, dtype: torch.dtype, keep: bool
) -> None:
    x = numbers(*shape).to(dtype)
    if len(shape) > 1:
        x = x.transpose(0, -1)
    axes = st.integers(-len(shape), len(shape) - 1)
    dims = data.draw(st.lists(axes, unique_by=lambda d: d % len(shape), max_size=3)) if shape else []
    actual = operations().sum.dim_IntList(x, dims, keep)
    assert_near(actual, x.sum(dims, keep), scale=64)
    assert_near(operations().sum(x), x.sum(), scale=64)


def test_a_sum_in_another_dtype_is_added_in_that() -> None:
    x = numbers(3, 500, dtype=torch.bfloat16)
    assert_near(operations().sum.dim_IntList(x, [1], dtype=torch.float32), x.float().sum(1))
    assert_near(operations().sum(x.int(), dtype=torch.float32), x.int().float().sum())
    out = torch.empty(0)
    operations().sum.IntList_out(x, [1], out=out)
    assert_near(out, x.float().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_and_its_slope_along_any_dimension(name: str, dim: int, dtype: torch.dtype) -> None:
    x, slope = numbers(6, 5, 70, dtype=dtype), numbers(6, 5, 70, seed=1, dtype=dtype)
    native, ours = getattr(torch.ops.aten, name), getattr(operations(), name)
    expected = native(x, dim, False)
    assert_near(ours(x, dim, False), expected)
    assert_near(ours.out(x, dim, False, out=torch.empty(0, dtype=dtype)), expected)
    backward = f"{name}_backward_data"
    assert_near(
        getattr(operations(), backward)(slope, expected, dim, dtype),
        getattr(torch.ops.aten, backward)(slope, expected, dim, dtype),
        scale=16,
    )


def test_softmax_of_what_is_not_finite_is_what_pytorch_makes_of_it() -> None:
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[1.0, -inf, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [nan, 1.0, 2.0]])
    for name in ("_softmax", "_log_softmax"):
        expected = getattr(torch.ops.aten, name)(rows, 1, False)
        actual = getattr(operations(), name)(rows, 1, False)
        assert torch.allclose(actual, expected, equal_nan=True)


X, Y, Z = numbers(4, 6), numbers(4, 6, seed=1), numbers(4, 6, seed=2).abs() + 0.5
WITH_SCALARS: dict[str, tuple[Callable[[torch.dtype], tuple[Tensor | float, ...]], dict[str, float]]] = {
    "addmm": (lambda d: (X.to(d)[:, :4], X.to(d), Y.t().to(d)), {"beta": 0.5, "alpha": 2}),
    "baddbmm": (
        lambda d: (X.to(d)[None, :, :4], X.to(d)[None], Y.t().to(d)[None]),
        {"beta": 2, "alpha": 0.5},
    ),
    "addmv": (lambda d: (X.to(d)[:, 0], X.to(d), Y.to(d)[0]), {"beta": 0.5, "alpha": 2}),
    "addcmul": (lambda d: (X.to(d), Y.to(d), Z.to(d)), {"value": 0.3}),
    "addcdiv": (lambda d: (X.to(d), Y.to(d), Z.to(d)), {"value": 0.3}),
    "lerp.Scalar": (lambda d: (X.to(d), Y.to(d), 0.3), {}),
    "lerp.Tensor": (lambda d: (X.to(d), Y.to(d), Z.to(d)), {}),
    "pow.Tensor_Scalar": (lambda d: (Z.to(d), 1.7), {}),
    "pow.Tensor_Tensor": (lambda d: (Z.to(d), Y.to(d)), {}),
    "pow.Scalar": (lambda d: (2.5, Y.to(d)), {}),
    "softplus": (lambda d: (X.to(d), 2.0, 5.0), {}),
    "softplus_backward": (lambda d: (X.to(d), Y.to(d), 2.0, 5.0), {}),
    "logaddexp": (lambda d: (X.to(d), Y.to(d)), {}),
    "linalg_vector_norm": (lambda d: (X.to(d), 2), {}),
}


def kernel_of_pytorch(name: str) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    kernel: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return kernel


@pytest.mark.parametrize("name", WITH_SCALARS)
def test_an_operation_with_a_scalar(name: str) -> None:
    operands, factors = WITH_SCALARS[name]
    products = name in ("addmm", "baddbmm", "addmv")
    for dtype in (torch.float32, torch.bfloat16) if products else DTYPES:
        if name == "logaddexp" and dtype == torch.float16:
            continue
        expected = kernel_of_pytorch(name)(*operands(dtype), **factors)
        assert_near(KERNELS[name](*operands(dtype), **factors), expected, scale=4)


@pytest.mark.parametrize("exponent", [-2, -1, -0.5, 0, 0.5, 1, 2, 3, 4])
def test_a_power_of_a_whole_or_half_exponent(exponent: float) -> None:
    assert_near(KERNELS["pow.Tensor_Scalar"](Z, exponent), Z.pow(exponent))


def test_a_power_of_integers_is_exact() -> None:
    exponents = torch.arange(20)
    assert KERNELS["pow.Scalar"](3, exponents).tolist() == [3**n for n in range(20)]
    assert KERNELS["pow.Tensor_Scalar"](exponents, 5).tolist() == [n**5 for n in range(20)]


@pytest.mark.parametrize("order", [0, 1, 2, 3, torch.inf, -torch.inf])
def test_a_norm_of_any_order(order: float) -> None:
    for dim, keep in ((None, False), ([1], True), ([0, 1], False)):
        actual = KERNELS["linalg_vector_norm"](X, order, dim, keep)
        assert_near(actual, torch.linalg.vector_norm(X, order, dim, keep))


def test_no_kernel_is_left_out_here() -> None:
    tested = {"mm", "bmm", "mv", "dot", "gelu", "sum", "_softmax", "_log_softmax", *FUNCTIONS}
    tested |= {f"{name}_backward" for name in ("sigmoid", "tanh", "silu", "gelu")}
    tested |= {f"{name}_backward_data" for name in ("_softmax", "_log_softmax")}
    tested |= {name for name in kernel_names() if name.startswith("_scaled_dot_product_flash")}
    assert {name.split(".")[0].removesuffix("_") for name in kernel_names()} == tested
    assert {name.split(".")[0].removesuffix("_") for name in KERNELS} == {
        name.split(".")[0] for name in WITH_SCALARS
    }


def test_products_into_a_given_tensor() -> None:
    left, right = numbers(3, 5), numbers(5, 4, seed=1)
    ours = operations()
    for name, operands in (
        ("mm", (left, right)), ("bmm", (left[None], right[None])), ("mv", (left, right[:, 0])), ("dot", (left[0], left[1])),
    ):  # fmt: skip
        out = torch.empty(0)
        getattr(ours, name).out(*operands, out=out)
        assert_near(out, getattr(torch, name)(*operands))
        assert torch.equal(out, getattr(ours, name)(*operands))


def test_complex_numbers_are_refused() -> None:
    x = torch.tensor([1 + 2j])
    ours = operations()
    for compute in (
        lambda: ours.exp(x),
        lambda: ours.sum(x),
        lambda: ours.sum(x.real, dtype=torch.complex64),
        lambda: KERNELS["pow.Tensor_Scalar"](x, 1.5),
        lambda: KERNELS["linalg_vector_norm"](x),
    ):
        with pytest.raises(RuntimeError, match="no complex numbers"):
            compute()


def test_a_sum_of_booleans_that_are_made_of_numbers_counts_them() -> None:
    assert bool(operations().sum(torch.tensor([1.0, -1.0]), dtype=torch.bool))


@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward", "silu_backward"])
def test_slopes_of_another_shape_are_refused(name: str) -> None:
    for slope in (torch.empty(0), torch.ones(3, 1), torch.ones(4, 3)):
        with pytest.raises(RuntimeError, match="other shapes than their results"):
            getattr(operations(), name)(slope, torch.ones(3, 4))


def test_slopes_of_a_softmax_of_another_shape_are_refused() -> None:
    with pytest.raises(RuntimeError, match="other shapes than their results"):
        operations()._softmax_backward_data(torch.ones(20, 20), torch.ones(2, 2), 1, torch.float32)


def test_calls_of_gelu_keep_no_memory() -> None:
    x = torch.ones(1)
    gelu = operations().gelu

    def resident_kib() -> int:
        for _ in range(200_000):
            gelu(x, approximate="tanh")
        return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    # The least growth of several rounds: other threads of this process use memory, too.
    growths_kib = [after - before for before, after in itertools.pairwise(resident_kib() for _ in range(4))]
    assert min(growths_kib) < 4_000  # a string for each call would be 9,000
