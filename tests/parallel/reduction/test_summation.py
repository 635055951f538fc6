"""The sum over a step's slots where a rank holds the whole model: the tree's additions, in memory that is used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.reduction.thread_groups import in_one_place
from phalanx.hardware.local.device import CommClock
from phalanx.parallel.divisions import Deal, rounds_of
from phalanx.parallel.reduction.data_parallel import Unsharded
from phalanx.parallel.reduction.summation import TreeSummation


class Squares(nn.Module):
    """A parameter whose gradient is other numbers for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        self.seldom = nn.Parameter(torch.ones(3))

    def forward(self, sample: Tensor, *, everything: bool = True) -> Tensor:
        loss = ((self.weight * sample) ** 2).sum() + (self.weight * sample).sum().sin()
        return loss + self.seldom.sum() * sample[0] if everything else loss


def whole(slots: int, pipeline: int = 1) -> Unsharded:
    mesh: Any = SimpleNamespace(replicas=1, replica=0, layout=SimpleNamespace(pipeline=pipeline))
    return Unsharded([Squares()], TreeSummation(mesh, CommClock(blocking=True), Deal(slots, 1, 1)))


def samples_of(slots: int, micro_batches: int, seed: int) -> Tensor:
    return torch.randn((slots, micro_batches, 7), generator=torch.Generator().manual_seed(seed))


def run_slots(model: Unsharded, samples: Tensor, only: int | None = None) -> None:
    """Forward and backward of the slots of ``samples`` ``(slots, micro-batches, 7)``, or of the first ``only``."""
    (module,) = model.parts
    for current in rounds_of(Deal(len(samples), 1, 1), 0, 0)[:only]:
        model.begin(current)
        batches = samples[current.slot]
        for number, batch in enumerate(batches):
            loss = module(batch)
            with model.computing(0, current, last=number == len(batches) - 1):
                loss.backward()
        model.end(current)


def gradient(model: Unsharded) -> Tensor:
    weight = model.parts[0].get_parameter("weight")
    assert weight.grad is not None
    return weight.grad


def expected(samples: Tensor) -> Tensor:
    """The same sum of gradients that were each computed apart."""
    leaves = []
    for batches in samples:
        alone = Squares()
        for batch in batches:
            alone(batch).backward()
        assert alone.weight.grad is not None
        leaves.append(alone.weight.grad)
    return in_one_place(torch.stack(leaves))


@examples(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 2), st.integers(1, 2), st.integers(0, 9), st.integers(0, 99))
def test_every_step_s_gradient_is_the_tree_s_also_after_a_step_that_was_broken_off(
    slots: int, micro_batches: int, pipeline: int, broken_off_after: int, seed: int
) -> None:
    model = whole(slots, pipeline)
    for step in range(3):
        samples = samples_of(slots, micro_batches, 3 * seed + step)
        if step == 1:
            run_slots(model, samples, only=broken_off_after)
            model.abandon()
        run_slots(model, samples)
        assert torch.equal(gradient(model), expected(samples))
        model.abandon()


@pytest.mark.parametrize(("slots", "most_at_once"), [(1, 1), (2, 1), (3, 2), (5, 2), (8, 3)])
def test_steps_after_the_first_hold_their_sums_in_the_memory_of_the_first(
    slots: int, most_at_once: int
) -> None:
    model = whole(slots)
    summation = model.summation
    assert isinstance(summation, TreeSummation)
    weight = model.parts[0].get_parameter("weight")
    places = []
    for step in range(3):
        run_slots(model, samples_of(slots, 1, step))
        model.abandon()
        places.append({value.data_ptr() for value in summation.spare[weight]})
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == most_at_once


def test_a_witness_sees_every_slot_s_gradient_alone() -> None:
    seen: list[Tensor] = []

    def see(name: str, gradient: Tensor) -> bool:
        if name == "weight":
            seen.append(gradient.clone())
        return True

    model, samples = whole(5), samples_of(5, 1, 0)
    model.summation.intake.admit = see
    run_slots(model, samples)
    assert all(torch.equal(mine, expected(sample[None])) for mine, sample in zip(seen, samples, strict=True))
    assert torch.equal(gradient(model), expected(samples))


def test_a_parameter_that_a_slot_did_not_use_is_not_taken_for_summed() -> None:
    model = whole(2)
    (module,) = model.parts
    for current in rounds_of(Deal(2, 1, 1), 0, 0):
        model.begin(current)
        loss = module(torch.ones(7), everything=current.slot == 0)
        with model.computing(0, current, last=True):
            loss.backward()
        if current.slot == 0:
            model.end(current)
    with pytest.raises(ValueError, match="slots are missing"):
        model.end(current)
