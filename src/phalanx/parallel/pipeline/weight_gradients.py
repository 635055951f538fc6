"""Postponed weight gradients of a stage, so that a pipeline can pass on its input's gradient first.

The zero-bubble schedules (arXiv 2401.10241) divide a backward pass in two: I, the gradient of the stage's input, for which
the stage before is waiting, and W, those of the weights, for which nobody is. Nearly all weights are used in matrix products,
and of these the layers allow the product to be exchanged (``Linear.product``, ``Experts.product``). The one put there
computes the input's gradient in the backward pass and notes the two factors of the weight's; ``add`` multiplies them later.
What is not such a product (norms, router, embedding, the loss) is small, and is computed with I.

PyTorch's own way (``torch.distributed.pipelining``) runs the same graph twice, once for inputs and once for weights. That
calls functions that allow it once, such as the chunked loss, a second time, computes checkpointed layers a third time, and
adds bf16 gradients in bf16. Here every operation is that of an undivided backward pass, and so are the bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.experts.expert_groups import Groups, grouped_product
from phalanx.model.layers.experts.moe import Experts
from phalanx.model.layers.linear import Linear


class WeightGradients:
    """The postponed weight gradients of one stage, by micro-batch."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        """The micro-batch that passes forward or back, if its weight gradients are to be put off; else ``None``."""
        self._put_off: dict[int, list[tuple[Tensor, Callable[[], Tensor | None]]]] = defaultdict(list)

    def note(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Remembers how a gradient of ``weight`` will be computed; ``None`` if it goes elsewhere."""
        assert self.micro_batch is not None, "this backward pass was to be undivided"
        self._put_off[self.micro_batch].append((weight, gradient))

    def add(self, micro_batch: int) -> None:
        """Computes the postponed gradients of ``micro_batch``, and adds them as a backward pass would, hooks included."""
        derived = []
        for weight, gradient in self._put_off.pop(micro_batch, ()):
            value = gradient()
            if value is None:
                continue
            if weight.is_leaf:
                torch.autograd.backward((weight,), (value,))
            else:
                derived.append((weight, value))
        if derived:  # what they derive from may be waiting for the gradients of all of them
            weights, gradients = zip(*derived, strict=True)
            torch.autograd.backward(weights, gradients)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of ``Linear``."""
        # Lanes of this rank with rows of their own cut them out of a parameter while the layer runs, and nothing marks it as derived:
        # computed again it sees the same. Their gradient goes to the parameter together with those of the other lanes' rows.
        if not self._puts_off(x) or not weight.is_leaf:
            return F.linear(x, weight)
        return apply_function(_LinearProduct, x, weight.detach(), (self, weight))

    def grouped(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """The product of ``Experts``."""
        if not self._puts_off(rows):
            return grouped_product(rows, matrices, groups)
        return apply_function(_GroupedProduct, rows, matrices.detach(), groups, (self, matrices))

    def _puts_off(self, x: Tensor) -> bool:
        return self.micro_batch is not None and torch.is_grad_enabled() and x.requires_grad


_Owner = tuple[WeightGradients, Tensor]
# In a tuple, autograd does not see the weight: an edge to it would have to deliver a gradient in the pass itself.


def put_off_weight_gradients(part: nn.Module) -> WeightGradients:
    """Lets the products of a stage postpone their weight gradients; those with a format of their own, biases or derived weights do not."""
    store = WeightGradients()
    for module in part.modules():
        if isinstance(module, Linear):
            # What derives from a weight is summed on its way to it, over ranks too: that should run once, with all that it sums.
            if module.product is None and module.bias is None and not module.weight_is_derived:
                module.product = store.linear
        elif isinstance(module, Experts) and module.product is None:
            module.product = store.grouped
    return store


class _DelayedContext(FunctionContext, Protocol):
    owner: _Owner


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _DelayedContext, x: Tensor, weight: Tensor, owner: _Owner) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: _DelayedContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        slope = upstream[0].reshape(-1, weight.shape[0])
        store, owner = ctx.owner
        store.note(owner, partial(_linear_gradient, slope, x.reshape(-1, weight.shape[1])))
        return slope.mm(weight).view_as(x), None, None


def _linear_gradient(slope: Tensor, rows: Tensor) -> Tensor:
    return slope.t().mm(rows)


class _GroupedContext(_DelayedContext, Protocol):
    groups: Groups


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GroupedContext, rows: Tensor, matrices: Tensor, groups: Groups, owner: _Owner
    ) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups, ctx.owner = groups, owner
        return groups.multiply(rows, matrices.transpose(1, 2))

    @staticmethod
    def backward(ctx: _GroupedContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        rows, matrices = ctx.saved_tensors
        slope = upstream[0].contiguous()
        store, owner = ctx.owner
        store.note(owner, partial(ctx.groups.gradient, slope, rows))
        return ctx.groups.multiply(slope, matrices), None, None, None
