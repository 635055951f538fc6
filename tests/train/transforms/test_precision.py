"""Narrow matrix products: the numbers they are made of, their error, and that no fleet shows in them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.model.layers.dense import Linear
from phalanx.model.layers.expert_groups import groups_of_one_slot, groups_of_slots
from phalanx.model.layers.moe import Experts, MoE
from phalanx.model.narrow import Quantized, dequantize, quantize
from phalanx.run.spec import MemorySpec, PrecisionSpec, RunSpec
from phalanx.train.activations import apply_recompute
from phalanx.train.precision import (
    FORMATS,
    NarrowGroupedProduct,
    NarrowProduct,
    apply_precision,
    multiply_narrow,
    multiply_narrow_groups,
)
from ranks import Ranks
from train.blocks import DENSE, MIXTURE, MODELS, build, gradients_of, same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensor", "row", "block")
FINEST = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative rounding error of a normal number: half a unit of the last place of 3 and 2 bits."""
ERRORS = {"fp8-tensorwise": (0.045, 0.08), "fp8-rowwise": (0.045, 0.045), "mxfp8": (0.045, 0.045)}
"""Errors of a product, relative to its norm: forward, and in gradients. Each operand contributes its rounding error's root mean
square: about 2.6 % in e4m3 and twice that in e5m2, which add up as 3.7 % and 5.8 %."""


def narrow(name: Any) -> Any:
    return partial(apply_precision, spec=RunSpec(precision=PrecisionSpec(matmul=name)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).norm() / reference.norm())


# --- numbers --------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    exponent=st.integers(-30, 30),
    spread=st.integers(0, 3),
    scaling=st.sampled_from(SCALINGS),
    dtype=st.sampled_from([E4M3, E5M2]),
)
def test_a_number_is_off_by_half_its_last_place_at_most(
    rows: int, blocks: int, exponent: int, spread: int, scaling: Any, dtype: torch.dtype
) -> None:
    x = random(rows, 32 * blocks) * 2.0**exponent
    x *= 2.0 ** (spread * torch.arange(rows)[:, None])
    back = dequantize(quantize(x, dtype, scaling), torch.float32)
    # Below the smallest normal number of the name, under the largest scale that there can be, errors are absolute.
    floor = x.abs().max() / torch.finfo(dtype).max * 2 * torch.finfo(dtype).smallest_normal
    assert bool(((back - x).abs() <= FINEST[dtype] * x.abs().clamp(min=floor)).all())


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from(SCALINGS), st.sampled_from([E4M3, E5M2]))
def test_a_scale_is_the_least_power_of_two_that_fits(value: float, scaling: Any, dtype: torch.dtype) -> None:
    largest = float(torch.tensor(value, dtype=torch.float32))
    scale = float(quantize(torch.full((1, 32), largest), dtype, scaling).scale)
    assert math.frexp(scale)[0] == 0.5
    assert largest / scale <= torch.finfo(dtype).max < largest / (scale / 2)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_narrow_numbers_are_exact_in_bf16(scaling: Any) -> None:
    quantized = quantize(random(16, 64) * torch.logspace(-3, 3, 16)[:, None], E4M3, scaling)
    assert torch.equal(dequantize(quantized, torch.bfloat16).float(), dequantize(quantized, torch.float32))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros(scaling: Any) -> None:
    assert dequantize(quantize(torch.zeros(3, 32), E4M3, scaling), torch.float32).count_nonzero() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_shows_in_the_product(name: str, bad: float) -> None:
    x, weight = random(4, 64), random(8, 64)
    x[2, 5] = bad
    product = NarrowProduct(name)(x, weight)
    assert not product[2].isfinite().any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_makes_all_numbers_of_its_scale_so(scaling: Any, bad: float) -> None:
    x = random(1, 32)
    x[0, 5] = bad
    assert not dequantize(quantize(x, E4M3, scaling), torch.float32).isfinite().any()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_multiplying_in_the_wide_format_gives_what_the_kernel_gives(
    scaling: Any, left: torch.dtype, right: torch.dtype
) -> None:
    a, b = quantize(random(24, 96), left, scaling), quantize(random(32, 96, seed=1), right, scaling)
    try:
        kernel = multiply_narrow(a, b, scaling, torch.float32, fast=False)
    except RuntimeError:  # 2.11 has one for a scale of the whole operand only
        pytest.skip("this PyTorch has no such kernel for CPUs")
    reference = dequantize(a, torch.float32) @ dequantize(b, torch.float32).t()
    torch.testing.assert_close(kernel, reference, rtol=1e-6, atol=1e-5)


def on_meta(*shape: int, scaling: Any) -> Quantized:
    """Numbers without memory: the compiler traces a kernel that the CPU does not have."""
    return Quantized(*(part.to("meta") for part in quantize(random(*shape), E4M3, scaling)))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiled_product_by_a_kernel_is_one_graph(scaling: Any) -> None:
    a, b = on_meta(24, 96, scaling=scaling), on_meta(32, 96, scaling=scaling)
    multiply = partial(multiply_narrow, scaling=scaling, dtype=torch.bfloat16, fast=True)
    traced = torch.compile(multiply, fullgraph=True, backend="eager")
    assert traced(a, b).shape == (24, 32)


def test_a_compiled_grouped_product_by_a_kernel_is_one_graph() -> None:
    a, b = on_meta(24, 96, scaling="row"), on_meta(3, 32, 96, scaling="row")
    multiply = partial(multiply_narrow_groups, dtype=torch.bfloat16, fast=True)
    traced = torch.compile(multiply, fullgraph=True, backend="eager")
    assert traced(a, b, torch.empty(3, dtype=torch.int32, device="meta")).shape == (24, 32)


# --- against torchao ------------------------------------------------------------------------------


def test_mx_numbers_and_scales_are_those_of_torchao() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = random(64, 128) * torch.logspace(-6, 6, 64)[:, None]
    scale, values = mx.to_mx(x, E4M3, 32, mx.ScaleCalculationMode.RCEIL)
    ours = quantize(x, E4M3, "block")
    assert torch.equal(ours.values.float(), values.float())
    assert torch.equal(ours.scale, scale.float())


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_numbers_and_scales_are_those_of_torchao(scaling: Any) -> None:
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    x = random(64, 128) * torch.logspace(-3, 3, 64)[:, None]
    granularity = (
        config.ScalingGranularity.TENSORWISE if scaling == "tensor" else config.ScalingGranularity.AXISWISE
    )
    axis = None if scaling == "tensor" else -1
    factor = utils.tensor_to_scale(
        x, E4M3, scaling_granularity=granularity, axiswise_dim=axis, round_scales_to_power_of_2=True
    )
    ours = quantize(x, E4M3, scaling)
    assert torch.equal(ours.scale, (1 / factor).expand_as(ours.scale))
    assert torch.equal(ours.values.float(), (x * factor).to(E4M3).float())


# --- products -------------------------------------------------------------------------------------


def products(multiply: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A product and its gradients with respect to both operands."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = multiply(x, weight)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), gradient))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 96, 128), (33, 20, 7), (1, 31, 1)])
def test_a_product_and_its_gradients_are_within_the_formats_error(
    name: str, shape: tuple[int, int, int]
) -> None:
    tokens, inputs, outputs = shape
    operands = random(2, tokens, inputs), random(outputs, inputs, seed=1), random(2, tokens, outputs, seed=2)
    exact = products(F.linear, *operands)
    got = products(NarrowProduct(name), *operands)
    forward, backward = ERRORS[name]
    slack = 1.0 if tokens > 32 and outputs > 32 else 2.0  # few terms average little
    for bound, ours, reference in zip((forward, backward, backward), got, exact, strict=True):
        assert ours.shape == reference.shape
        assert relative(ours, reference) <= bound * slack
        assert relative(ours, reference) > 0


@pytest.mark.parametrize("name", ["fp8-rowwise", "mxfp8"])
def test_finer_scales_keep_small_rows_beside_large_ones(name: str) -> None:
    x = random(32, 64) * torch.cat((torch.full((16, 1), 1e-6), torch.full((16, 1), 1e3)))
    weight = random(16, 64, seed=1)
    small = F.linear(x, weight)[:16]
    assert relative(NarrowProduct(name)(x, weight)[:16], small) < 0.045
    assert relative(NarrowProduct("fp8-tensorwise")(x, weight)[:16], small) > 0.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_within_the_formats_error(name: str, dtype: torch.dtype) -> None:
    groups = groups_of_one_slot(torch.tensor([40, 0, 33, 7]))
    rows, matrices = random(80, 64).to(dtype), random(4, 48, 64, seed=1).to(dtype)
    gradient = random(80, 48, seed=2).to(dtype)
    exact = products(
        lambda r, m: F.grouped_mm(r, m.transpose(1, 2), offs=groups.ends), rows, matrices, gradient
    )
    got = products(lambda r, m: NarrowGroupedProduct(name)(r, m, groups), rows, matrices, gradient)
    for ours, reference in zip(got[:2], exact[:2], strict=True):
        assert 0 < relative(ours.float(), reference.float()) <= 0.045
        assert ours.dtype == dtype
    assert torch.equal(got[2], exact[2])  # the weights' gradient is computed wide


@pytest.mark.parametrize("name", FORMATS)
def test_an_experts_result_does_not_depend_on_the_experts_beside_it(name: str) -> None:
    counts = torch.tensor([32, 16])
    rows, matrices = random(48, 64), random(2, 32, 64, seed=1)
    rows[:32] *= 1e4
    product = NarrowGroupedProduct(name)
    together = product(rows, matrices, groups_of_one_slot(counts))
    alone = product(rows[32:], matrices[1:], groups_of_one_slot(counts[1:]))
    assert torch.equal(together[32:], alone)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slots", [1, 2])
def test_experts_that_no_token_chose_have_no_results_and_a_gradient_of_zeros(name: str, slots: int) -> None:
    # As those of a rank may be, which has few of them: all ranks must come to the exchange that follows.
    counts = torch.zeros(2, slots, dtype=torch.int64)
    groups = groups_of_slots(counts, (0, 0), apart=True)
    rows, matrices = torch.zeros(0, 64), random(2, 48, 64)
    result, *gradients = products(
        lambda r, m: NarrowGroupedProduct(name)(r, m, groups), rows, matrices, torch.zeros(0, 48)
    )
    assert (result.shape, gradients[0].shape) == ((0, 48), (0, 64))
    assert torch.equal(gradients[1], torch.zeros_like(matrices))


# --- models ---------------------------------------------------------------------------------------


def test_it_reaches_the_blocks_linear_layers_and_experts_and_nothing_else() -> None:
    model = build(MIXTURE, narrow("mxfp8"))
    narrow_ones = {name for name, part in model.named_modules() if getattr(part, "product", None) is not None}
    in_blocks = {
        name
        for name, part in model.named_modules()
        if name.startswith("blocks.") and isinstance(part, (Linear, Experts))
    }
    assert narrow_ones == in_blocks
    assert any(name.endswith("shared.up") for name in narrow_ones)
    assert model.head is not None
    assert model.head.product is None
    assert any(isinstance(part, MoE) for part in model.modules())


def test_the_compute_format_leaves_the_model_alone() -> None:
    assert same_bits(gradients_of(build(DENSE, narrow("compute"))), gradients_of(build(DENSE)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_recomputation_changes_no_bit_of_it(model: str, kind: Any, name: str) -> None:
    again = partial(apply_recompute, spec=RunSpec(memory=MemorySpec(recompute=kind)))
    plain = gradients_of(build(MODELS[model], narrow(name)))
    assert same_bits(gradients_of(build(MODELS[model], narrow(name), again)), plain)


def trained(change: Any) -> list[float]:
    """Losses of a tiny model that learns one batch by heart."""
    model = build(DENSE, change)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 97, (4, 33), generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.servers
def test_training_goes_nearly_as_in_fp32() -> None:
    wide = trained(narrow("compute"))
    assert wide[-1] < wide[0] / 3
    for name in FORMATS:
        losses = trained(narrow(name))
        assert losses != wide
        assert losses[-1] == pytest.approx(wide[-1], rel=0.1)


def sharded_gradients(names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Whole gradients of models whose weights are shared out over all ranks, which compute the same micro-batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    results = []
    for name in names:
        model = build(DENSE, narrow(name))
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        gradients = gradients_of(model)
        results.append(
            {key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in gradients.items()}
        )
    return results


def test_how_many_ranks_share_the_weights_shows_in_no_bit(ranks: Ranks) -> None:
    # The mean of two equal gradients is that gradient, to the bit.
    names = tuple(FORMATS)
    for results in ranks.run(2, sharded_gradients, names):
        for name, gradients in zip(names, results, strict=True):
            assert same_bits(gradients, gradients_of(build(DENSE, narrow(name))))
