"""Weight gradients that are put off come out as if they had not been."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.model.layers.dense import Linear
from phalanx.model.layers.expert_groups import groups_of_slots
from phalanx.model.layers.moe import Experts, MoE
from phalanx.parallel.pipeline import postpone_weight_gradients
from phalanx.parallel.tensor.lanes.layers import LaneParameter
from phalanx.parallel.tensor.lanes.shares import in_place_of
from phalanx.run.spec import ModelSpec, MoeSpec

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])]
DTYPES = [torch.float32, torch.bfloat16]


class Doubled(nn.Module):
    """Uses one matrix twice, the second time through a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        store = self.linear.product
        other = self.linear.weight * 2
        return self.linear(x) + (x @ other.t() if store is None else store(x, other))  # type: ignore[no-any-return]


class OfTwoLanes(nn.Module):
    """Multiplies with the rows of one matrix that two lanes have, as cut out of it while the module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for own in LaneParameter(self.linear, "weight", parts=2).of_lanes():
            with in_place_of([(self.linear, "weight")], own):
                outputs.append(self.linear(x))
        return torch.cat(outputs, -1)


def undivided(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of input and weights by one backward pass."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y))
    return gradients(module, x)


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """All that there are."""
    every = {"x": x, **dict(module.named_parameters())}
    return {name: tensor.grad.clone() for name, tensor in every.items() if tensor.grad is not None}


def divided(module: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same by two: what there is after the first, and after the second."""
    store = postpone_weight_gradients(module)
    store.micro_batch = 3
    first = undivided(module, x)
    store.micro_batch = None
    store.add(3)
    return first, gradients(module, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(2, 5), (7,)], ids=str)
def test_a_linear_layers_gradient_waits_and_keeps_its_bits(
    rows: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    module = Linear(32, 48, bias=False, device=device, dtype=dtype)
    x = torch.randn(*rows, 32, device=device, dtype=dtype, requires_grad=True)
    expected = undivided(module, x)
    first, both = divided(module, x)
    assert first.keys() == {"x"}
    assert all(torch.equal(both[name], expected[name]) for name in expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_experts_gradients_wait_and_keep_their_bits(dtype: torch.dtype, device: str) -> None:
    module = MoE(ModelSpec(dim=16), MoeSpec(experts=4, per_token=2, ffn_dim=32)).to(device, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 6, 16, device=device, dtype=dtype, requires_grad=True)
    expected = undivided(module, x)
    first, both = divided(module, x)
    assert first.keys() == {"x", "router.weight"}
    assert both.keys() == {"x", "router.weight", "experts.gate", "experts.up", "experts.down"}
    assert all(torch.equal(both[name], expected[name]) for name in expected)


def test_a_weight_that_derives_from_a_parameter_does_not_wait() -> None:
    module, x = Doubled(), torch.randn(5, 8, requires_grad=True)
    expected = undivided(module, x)
    first, both = divided(module, x)
    assert first.keys() == {"x", "linear.weight"}
    assert not torch.allclose(first["linear.weight"], expected["linear.weight"])
    torch.testing.assert_close(both, expected)


def test_lanes_rows_of_a_weight_do_not_wait_though_it_is_not_marked_as_derived() -> None:
    module, x = OfTwoLanes(), torch.randn(5, 8, requires_grad=True)
    expected = undivided(module, x)
    first, both = divided(module, x)
    assert not module.linear.weight_is_derived
    assert module.linear.product is not None
    assert torch.equal(first["linear.weight"], expected["linear.weight"])
    assert all(torch.equal(both[name], expected[name]) for name in expected)


class TwoSlots(nn.Module):
    """Experts that compute two slots' rows, whose weight gradients are added left plus right."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(ModelSpec(dim=16), MoeSpec(experts=2, ffn_dim=32))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.tensor([[5, 1], [2, 4]])
        return self.experts(x, groups_of_slots(counts, (6, 6), apart=True))  # type: ignore[no-any-return]


def test_experts_of_several_slots_add_their_gradients_in_the_same_tree() -> None:
    module, x = TwoSlots(), torch.randn(12, 16, requires_grad=True)
    expected = undivided(module, x)
    first, both = divided(module, x)
    assert first.keys() == {"x"}
    assert all(torch.equal(both[name], expected[name]) for name in expected)


def test_a_backward_pass_that_is_not_divided_puts_nothing_off() -> None:
    module, x = Linear(8, 8, bias=False), torch.randn(5, 8, requires_grad=True)
    postpone_weight_gradients(module)
    assert undivided(module, x).keys() == {"x", "weight"}


def test_products_with_formats_of_their_own_are_left_alone() -> None:
    module = Linear(8, 8, bias=False)
    module.product = narrow = lambda x, weight: x.bfloat16().float() @ weight.t()
    postpone_weight_gradients(module)
    assert module.product is narrow
