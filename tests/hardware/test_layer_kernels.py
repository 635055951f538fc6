"""Operations around a layer's products in one pass over memory have the bits of PyTorch's, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.hardware.kernels import layer_kernel
from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.kernels.layer_kernel import REFERENCE, HostLayerKernels, Team, layer_kernels, same_bits
from phalanx.model.layers.attention.rotary import rotate
from phalanx.model.layers.dense import RMSNorm

SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3e38)


@pytest.fixture(scope="module")
def host() -> HostLayerKernels:
    return HostLayerKernels()


def drawn(seed: int, *shape: int) -> Tensor:
    """Numbers of all sizes, with some special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randint(-60, 60, shape, generator=generator).exp2()
    where = torch.rand(shape, generator=generator) < 0.02
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
    return torch.where(where, special, x)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch was built without OpenMP")
def test_kernels_find_the_threads_of_pytorch() -> None:
    team = Team()
    assert None not in (team.parallel, team.barrier, team.number, team.members)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 70), st.integers(1, 5), st.integers(1, 70))
def test_compiled_kernels_have_the_bits_of_pytorchs_operations_on_any_shape(
    host: HostLayerKernels, seed: int, batch: int, length: int, heads: int, pairs: int
) -> None:
    tables = drawn(seed + 1, length, 2 * pairs), drawn(seed + 2, length, 2 * pairs)
    assert same_bits(host, drawn(seed, batch, length, heads, 2 * pairs), *tables)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(host: HostLayerKernels, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert same_bits(host, drawn(0, 2, 300, 4, 64), drawn(1, 300, 64), drawn(2, 300, 64))
    finally:
        torch.set_num_threads(before)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize("layout", ["heads behind tokens", "tokens behind heads", "a part of each head"])
def test_a_rotation_has_the_bits_of_its_formula_and_so_has_its_gradient(layout: str) -> None:
    cos, sin = (drawn(seed, 33, 32).nan_to_num(1.0, 1.0, 1.0).cos() for seed in (1, 2))
    results = []
    for function in (turned, rotate):
        leaf = drawn(3, 2, 33, 4, 40).nan_to_num(1.0, 1.0, 1.0).requires_grad_()
        x = leaf[..., 4:36] if layout == "a part of each head" else leaf[..., :32].contiguous()
        x = x.transpose(1, 2)
        x = x.contiguous() if layout == "tokens behind heads" else x
        result = function(x, cos, sin)
        (gradient,) = torch.autograd.grad(result, leaf, drawn(4, *result.shape).nan_to_num(1.0, 1.0, 1.0))
        results.append((result, gradient, result.stride()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]  # the next operation gets the same layout


def test_a_norm_and_its_gradient_have_the_bits_of_single_operations() -> None:
    norm, x = RMSNorm(96, 1e-6), torch.randn(5, 7, 96, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    slope = torch.randn(5, 7, 96)
    result = norm(x)
    gradients = torch.autograd.grad(result, (x, norm.weight), slope)
    with torch.no_grad():
        inverse = x.square().mean(-1, keepdim=True).add_(1e-6).rsqrt_()
        unit = x * inverse
        rows = (slope * unit).view(-1, 96)
        along = torch.mv(rows, norm.weight).div_(96).view_as(inverse)
        expected = ((slope * norm.weight) - unit * along) * inverse
    assert torch.equal(result, F.rms_norm(x, (96,), norm.weight, 1e-6))
    assert torch.equal(gradients[0], expected)
    assert torch.equal(gradients[1], rows.sum(0))


def test_other_formats_and_tensors_that_are_not_there_are_left_to_the_reference() -> None:
    assert layer_kernels(torch.ones(2, dtype=torch.bfloat16)) is REFERENCE
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(1, 2, 3, 4, requires_grad=True)
        rotate(x, x[0, 0], x[0, 0]).sum().backward()


def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise NoHostKernelsError("there is no C compiler")

    monkeypatch.setattr(layer_kernel, "compiled", refuses)
    assert layer_kernel._tried.__wrapped__() is REFERENCE
