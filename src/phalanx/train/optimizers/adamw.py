"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) whose result for an element depends on nothing but that element.

Kernels that compute several operations at once may fuse a multiply and an add into one rounding in their vector loop
and not in the scalar loop that handles the tail, or the other way round. Which elements are in the tail depends on
where a shard ends, and so on the number of ranks. Here every operation is a single one, in one pass over memory where
``phalanx.hardware.kernels`` has such a kernel for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.hardware.kernels.choose import kernels_for
from phalanx.hardware.kernels.reference import UpdateFactors
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.parts import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.offload_moments import MomentStore
from phalanx.train.optimizers.optimizer import Optimizer, StatePart, boxes_of, decays, gradient_of


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
            size = kernels_for(flat[0].device, flat).chunk_elements(flat[0].device)
            for piece in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
                launch.append(piece)
                if sum(weights.numel() for weights, *_ in launch) >= size:
                    yield _columns(launch)
                    launch = []
        if launch:
            yield _columns(launch)


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
    """One AdamW update of weights and moments, in place, with a single rounding for each operation on each element."""
    factors = UpdateFactors(
        gradient_scale=gradient_scale,
        keep_mean=spec.beta1,
        new_mean=1.0 - spec.beta1,
        keep_square=spec.beta2,
        new_square=1.0 - spec.beta2,
        root_divisor=math.sqrt(1.0 - spec.beta2**number),
        eps=spec.eps,
        rate=lr / (1.0 - spec.beta1**number),
        decay=decay_factor,
    )
    if weights:
        kernels = kernels_for(weights[0].device, (*weights, *grads, *means, *squares))
        kernels.adamw(weights, grads, means, squares, factors)
