"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) whose result for an element depends on nothing but that element.

Kernels that compute several operations at once may fuse a multiply and an add into one rounding in their vector loop
and not in the scalar loop that handles the tail, or the other way round. Which elements are in the tail depends on
where a shard ends, and so on the number of ranks. Here every operation is a single one (a product, a sum, a root, a
quotient), which IEEE 754 rounds in one way only. To make up for the passes over memory, a CPU works on pieces that stay
in its cache; a GPU takes many tensors in one launch per operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.parts import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.offload_moments import MomentStore
from phalanx.train.optimizers.optimizer import Optimizer, StatePart, boxes_of, decays, gradient_of

# Elements updated at once. On a CPU, per thread: six fp32 arrays of them fit into a core's second-level cache. On a GPU:
# enough to fill it, few enough that the temporaries (three arrays) stay small beside the model.
_CPU_CHUNK = 1 << 15
_GPU_CHUNK = 1 << 26


@dataclass
class AdamW(Optimizer):
    """The moments of every parameter, and the update.

    ``exp_avg`` and ``exp_avg_sq`` map parameter names to fp32 tensors laid out as the parameters are (a DTensor's
    moments are DTensors, unless they live in a ``store`` away from the device). ``boxes`` gives this rank's part of each
    parameter, where the tensor or expert axis divides it, which a DTensor does not know.
    """

    spec: OptimizerSpec
    parameters: Mapping[str, nn.Parameter]
    kinds: Mapping[str, Parameter]
    boxes: Mapping[str, LocalSlice] | None = None
    store: MomentStore | None = None
    exp_avg: dict[str, Tensor] = field(init=False)
    exp_avg_sq: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avg = {name: self._zeros(parameter) for name, parameter in self.parameters.items()}
        self.exp_avg_sq = {name: self._zeros(parameter) for name, parameter in self.parameters.items()}

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        if self.store is None:
            return torch.zeros_like(parameter, requires_grad=False)
        return self.store.zeros(tuple(local(parameter.detach()).shape), parameter.dtype)

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float) -> None:
        for decay in (True, False):
            names = [name for name in self.parameters if decays(self.kinds[name], self.spec) == decay]
            factor = 1.0 - lr * self.spec.weight_decay if decay else 1.0
            pieces = self._pieces(names)
            if self.store is not None:
                pieces = self.store.visiting(pieces)
            for weights, grads, means, squares in pieces:
                adamw_update(weights, grads, means, squares, self.spec, number, lr, gradient_scale, factor)

    def state(self) -> dict[str, list[StatePart]]:
        boxes = boxes_of(self.parameters, self.boxes)
        return {
            f"{moment}/{name}": [StatePart(local(tensor), self.kinds[name].shape, boxes[name][0], name)]
            for moment, tensors in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))
            for name, tensor in tensors.items()
        }

    def _pieces(self, names: list[str]) -> Iterator[tuple[list[Tensor], ...]]:
        """Weights, gradients and both moments, in pieces of a size that suits the device."""
        launch: list[tuple[Tensor, ...]] = []
        for name in names:
            parameter = self.parameters[name]
            tensors = (
                parameter.detach(),
                gradient_of(name, parameter),
                self.exp_avg[name],
                self.exp_avg_sq[name],
            )
            flat = [local(tensor).reshape(-1) for tensor in tensors]
            size = chunk_elements(flat[0].device)
            for piece in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
                launch.append(piece)
                if sum(weights.numel() for weights, *_ in launch) >= size:
                    yield _columns(launch)
                    launch = []
        if launch:
            yield _columns(launch)


def chunk_elements(device: torch.device) -> int:
    """Number of elements of one update, by device."""
    return _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _GPU_CHUNK


def _columns(rows: list[tuple[Tensor, ...]]) -> tuple[list[Tensor], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def adamw_update(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    spec: OptimizerSpec,
    number: int,
    lr: float,
    gradient_scale: float,
    decay_factor: float,
) -> None:
    """One AdamW update of weights and moments, in place, each line a single rounding of every element."""
    grads = list(torch._foreach_mul(grads, gradient_scale))
    torch._foreach_mul_(means, spec.beta1)
    torch._foreach_add_(means, torch._foreach_mul(grads, 1.0 - spec.beta1))
    torch._foreach_mul_(squares, spec.beta2)
    torch._foreach_mul_(grads, grads)
    torch._foreach_mul_(grads, 1.0 - spec.beta2)
    torch._foreach_add_(squares, grads)
    # m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), with the two corrections applied as scalars.
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, math.sqrt(1.0 - spec.beta2**number))
    torch._foreach_add_(roots, spec.eps)
    change = list(torch._foreach_div(means, roots))
    torch._foreach_mul_(change, lr / (1.0 - spec.beta1**number))
    if decay_factor != 1.0:
        torch._foreach_mul_(weights, decay_factor)
    torch._foreach_sub_(weights, change)
