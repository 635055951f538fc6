"""AdamW with narrow moments: rounding that is right on average, or by blocks, and the same in any shard."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.model.facts.optimizer_state import INT8_BLOCK
from phalanx.model.init import random_words, stream_key
from phalanx.parallel.divisions import LocalSlice
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.compose import make_optimizer
from phalanx.train.optimizers.adamw import (
    AdamW,
    Int8Moments,
    NarrowAdamW,
    NarrowStateError,
    dynamic_codes,
    stochastic_bf16,
)

SHAPE = (23, 150)
KIND = Parameter("w", SHAPE, "matrix")


def gradients(steps: int) -> list[Tensor]:
    """Each row and each column of another size, as real gradients are."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-3, 0, SHAPE[0])[:, None] * torch.logspace(-1, 0, SHAPE[1])[None, :]
    return [torch.randn(SHAPE, generator=generator) * scale for _ in range(steps)]


def stepped(spec: OptimizerSpec, steps: int, box: LocalSlice = ((0, 0), SHAPE)) -> Tensor:
    """A box of the weights after some steps, computed by a rank that holds just that box."""
    where = tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))
    parameter = nn.Parameter(torch.zeros(SHAPE)[where].clone())
    optimizer = make_optimizer(spec, {"w": parameter}, {"w": KIND}, boxes={"w": box})
    for number, gradient in enumerate(gradients(steps), 1):
        parameter.grad = gradient[where].clone()
        optimizer.step(number, 1e-2, 1.0)
    return parameter.detach()


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 2**32))
def test_stochastic_rounding_gives_one_of_the_two_neighbors(value: float, seed: int) -> None:
    exact = torch.tensor([value])
    words = random_words(seed, torch.arange(1))
    rounded = stochastic_bf16(exact, words).float()
    below = (exact.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert rounded == exact if below == exact else rounded in (below, above)


def test_stochastic_rounding_is_right_on_average() -> None:
    values = torch.full((200_000,), 1.0 + 0.3 / 128)  # bf16 has steps of 1/128 there
    rounded = stochastic_bf16(values, random_words(stream_key(0, "w"), torch.arange(200_000)))
    assert rounded.double().mean().item() == pytest.approx(1.0 + 0.3 / 128, abs=4 / 128 * 200_000**-0.5)


def test_the_codes_are_256_different_numbers_that_reach_from_end_to_end() -> None:
    for signed, lowest in ((True, -1.0), (False, 0.0)):
        codes = dynamic_codes(signed)
        assert len(set(codes)) == 256
        assert codes[-1] == 1.0
        assert codes[0] == pytest.approx(lowest, abs=0.01)
        assert 0.0 in codes


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_keep_numbers_to_a_few_percent_over_decades(signed: bool) -> None:
    values = torch.logspace(-2.9, 0, 640).view(10, INT8_BLOCK).flip(0)
    values = values * torch.tensor([1.0, -1.0 if signed else 1.0]).repeat(INT8_BLOCK // 2)
    moments = Int8Moments(values, signed=signed)
    moments.write(slice(0, 10), values, 1)
    restored = moments.read(slice(0, 10))
    assert ((restored - values).abs() / values.abs()).max() < 0.08
    largest = values.amax(1, keepdim=True)
    if not signed:
        assert torch.equal(restored[values == largest], largest.flatten())


def test_a_second_moment_that_is_not_zero_is_not_rounded_to_zero() -> None:
    values = torch.full((1, INT8_BLOCK), 1e-20)
    values[0, :2] = torch.tensor([1.0, 0.0])
    moments = Int8Moments(values, signed=False)
    moments.write(slice(0, 1), values, 1)
    assert (moments.read(slice(0, 1)) > 0).tolist()[0] == [True, False] + [True] * (INT8_BLOCK - 2)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_the_weights_stay_near_those_of_wide_moments(state: str) -> None:
    wide, narrow = (stepped(OptimizerSpec(state=s), 40) for s in ("fp32", state))  # type: ignore[arg-type]
    assert (narrow - wide).norm() < 0.05 * wide.norm()
    assert (narrow - wide).norm() > 0


@pytest.mark.parametrize("state", ["bf16", "int8"])
@given(cuts=st.lists(st.integers(0, SHAPE[0]), max_size=4))
def test_an_element_gets_the_same_bits_in_any_shard(state: str, cuts: list[int]) -> None:
    spec = OptimizerSpec(state=state)  # type: ignore[arg-type]
    bounds = sorted({0, SHAPE[0], *cuts})
    parts = [stepped(spec, 3, ((a, 0), (b - a, SHAPE[1]))) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(parts), stepped(spec, 3))


def test_tensor_ranks_that_hold_whole_blocks_of_a_row_get_the_same_bits() -> None:
    spec = OptimizerSpec(state="int8")
    parts = [stepped(spec, 3, ((0, a), (SHAPE[0], b - a))) for a, b in ((0, 64), (64, 150))]
    assert torch.equal(torch.cat(parts, 1), stepped(spec, 3))


def test_a_tensor_rank_that_cuts_through_a_block_is_refused() -> None:
    with pytest.raises(NarrowStateError, match="cuts through blocks of 64"):
        stepped(OptimizerSpec(state="int8"), 1, ((0, 0), (SHAPE[0], 75)))


def test_narrow_moments_take_a_half_and_about_a_quarter_of_the_memory() -> None:
    parameter = nn.Parameter(torch.zeros(64, 1024))
    kinds = {"w": Parameter("w", (64, 1024), "matrix")}
    nbytes = {}
    for state in ("fp32", "bf16", "int8"):
        optimizer = make_optimizer(OptimizerSpec(state=state), {"w": parameter}, kinds)  # type: ignore[arg-type]
        parts = [part.tensor for state_parts in optimizer.state().values() for part in state_parts]
        nbytes[state] = sum(tensor.numel() * tensor.element_size() for tensor in parts) / parameter.numel()
    assert nbytes == {"fp32": 8.0, "bf16": 4.0, "int8": 2.125}


def test_vectors_keep_wide_moments() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(3, 4)), "b": nn.Parameter(torch.zeros(4))}
    kinds = {"w": Parameter("w", (3, 4), "matrix"), "b": Parameter("b", (4,), "bias")}
    narrow, wide = make_optimizer(OptimizerSpec(state="int8"), parameters, kinds).parts  # type: ignore[attr-defined]
    assert isinstance(narrow, NarrowAdamW)
    assert isinstance(wide, AdamW)
    assert (list(narrow.parameters), list(wide.parameters)) == (["w"], ["b"])
