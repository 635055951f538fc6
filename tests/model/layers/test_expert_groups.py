"""Rows of many slots go through the experts at once, and each slot has the bits that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.autograd import DispatchMode
from phalanx.model.layers.expert_groups import Groups, add_slots, groups_of_one_slot, groups_of_slots
from phalanx.model.layers.moe import Experts
from phalanx.parallel.reduction.tree import SlotTree
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec

DIM, INNER = 24, 32

tables = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda sizes: st.lists(
        st.lists(st.sampled_from([0, 1, 2, 5, 17, 40]), min_size=1 << sizes[1], max_size=1 << sizes[1]),
        min_size=sizes[0],
        max_size=sizes[0],
    )
)
"""Rows by expert and slot: empty groups and single rows among them."""


def make_experts(count: int, dtype: torch.dtype) -> Experts:
    spec = resolve(
        ModelSpec(
            dim=DIM,
            vocab_size=10,
            ffn="swiglu",
            ffn_bias=True,
            moe=MoeSpec(experts=count, per_token=1, ffn_dim=INNER),
        )
    )
    assert spec.moe is not None
    experts, generator = Experts(spec, spec.moe), torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)
    return experts


def through(
    experts: Experts, rows: Tensor, groups: Groups, slope: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The experts' result, and the gradients of rows and, as far as autograd gets them, of parameters."""
    experts.zero_grad(set_to_none=True)
    rows = rows.detach().requires_grad_()
    result = experts(rows, groups)
    result.backward(slope)
    assert rows.grad is not None
    gradients = {name: weight.grad for name, weight in experts.named_parameters() if weight.grad is not None}
    return result.detach(), rows.grad, gradients


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(integer), right.view(integer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1 << 26, 1], ids=["all leaves at once", "an expert's leaves at once"])
@given(table=tables)
def test_a_hand_computed_at_once_has_the_bits_of_its_slots_one_by_one(
    dtype: torch.dtype, most: int, table: list[list[int]]
) -> None:
    counts = torch.tensor(table)
    experts, slots = counts.shape
    module, generator = make_experts(experts, dtype), torch.Generator().manual_seed(int(counts.sum()))
    rows, slope = (torch.randn(int(counts.sum()), DIM, generator=generator).to(dtype) for _ in range(2))
    taken: dict[str, list[Tensor]] = {}
    module.take = lambda name, _, leaves: taken.setdefault(name, []).append(leaves)
    hand = replace(groups_of_slots(counts, counts.sum(1).tolist(), apart=True), max_leaf_elements=most)
    result, of_rows, left = through(module, rows, hand, slope)
    assert not left
    places = torch.split(torch.arange(len(rows)), counts.flatten().tolist())
    alone: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for slot in range(slots):
        mine = torch.cat(places[slot::slots])
        expected = through(module, rows[mine], groups_of_one_slot(counts[:, slot].contiguous()), slope[mine])
        assert same_bits(result[mine], expected[0])
        assert same_bits(of_rows[mine], expected[1])
        for name, gradient in expected[2].items():
            alone[name].append(gradient)
    assert taken.keys() == alone.keys()
    for name, leaves in taken.items():
        assert same_bits(torch.cat(leaves), torch.stack(alone[name], 1)), name


@given(table=tables)
def test_one_product_for_all_slots_of_an_expert_computes_the_same(table: list[list[int]]) -> None:
    counts = torch.tensor(table)
    module, generator = make_experts(len(counts), torch.float32), torch.Generator().manual_seed(1)
    rows, slope = (torch.randn(int(counts.sum()), DIM, generator=generator) for _ in range(2))
    joint, separate = (
        through(module, rows, groups_of_slots(counts, counts.sum(1).tolist(), apart=apart), slope)
        for apart in (False, True)
    )
    torch.testing.assert_close(joint, separate, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**32 - 1))
def test_slots_are_added_in_fp32_in_the_order_of_their_tree(
    level: int, dtype: torch.dtype, seed: int
) -> None:
    leaves = torch.randn(3, 1 << level, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = leaves.clone()
    tree: SlotTree[Tensor] = SlotTree(1 << level, lambda left, right: left + right)
    for slot, leaf in enumerate(leaves.float().unbind(1)):
        tree.push(slot, leaf)
    assert same_bits(add_slots(leaves), tree.take_root())
    assert same_bits(leaves, before)


class Launches(DispatchMode):
    """Counts operations that would be kernel launches on a GPU."""

    VIEWS = (
        "view",
        "split",
        "select",
        "slice",
        "alias",
        "detach",
        "t.",
        "transpose",
        "unsqueeze",
        "as_strided",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not operation.__name__.startswith(self.VIEWS)
        return operation(*args, **(kwargs or {}))


def launches(slots: int) -> int:
    module, counts = make_experts(4, torch.bfloat16), torch.full((4, slots), 3)
    groups = groups_of_slots(counts, counts.sum(1).tolist(), apart=False)
    rows = torch.randn(int(counts.sum()), DIM).bfloat16()
    with Launches() as launched:
        through(module, rows, groups, rows)
    return launched.count


def test_launches_for_a_team_grow_by_the_levels_of_its_tree_alone() -> None:
    # An addition for each level, of the two halves of what is left, for each of the three stacks of matrices and of biases.
    two, eight, sixty_four = launches(2), launches(8), launches(64)
    assert sixty_four - eight <= 3 * 6
    assert eight - two <= 3 * 6
