"""AdamW with moments in bf16 or in eight bits.

A few rows at a time, moments are widened to fp32, updated by the very operations of ``AdamW``, and rounded again. That
saves 4 (bf16) or nearly 6 (int8) of the 8 bytes per parameter that the moments take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.hardware.kernels.reference import REFERENCE
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.parts import Parameter
from phalanx.run.kinds.state_blocks import INT8_BLOCK
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.adamw import adamw_update
from phalanx.train.optimizers.moment_formats import Bf16Moments, Elements, Int8Moments, Moments
from phalanx.train.optimizers.optimizer import Optimizer, StatePart, boxes_of, decays, gradient_of


class NarrowStateError(ValueError):
    """Moments that cannot be kept in the format that was asked for."""


class NarrowAdamW(Optimizer):
    """AdamW for parameters of two or more dimensions, with moments in ``spec.state``.

    Raises ``NarrowStateError`` where eight-bit blocks would straddle what two tensor ranks hold of a row.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, Parameter],
        seed: int,
        boxes: Mapping[str, LocalSlice] | None = None,
    ) -> None:
        self.spec, self.parameters, self.kinds = spec, parameters, kinds
        self.boxes = boxes_of(parameters, boxes)
        self.moments = {name: self._moments(name, seed) for name in parameters}

    def _moments(self, name: str, seed: int) -> tuple[Moments, Moments]:
        share = _matrix(local(self.parameters[name].detach()))
        if self.spec.state == "bf16":
            elements = Elements(self.kinds[name].shape, self.boxes[name], share.device)
            return (
                Bf16Moments(share, elements, seed, f"exp_avg/{name}"),
                Bf16Moments(share, elements, seed, f"exp_avg_sq/{name}"),
            )
        (*_, begin), (*_, width) = self.boxes[name]
        if begin % INT8_BLOCK or (width % INT8_BLOCK and begin + width < self.kinds[name].shape[-1]):
            raise NarrowStateError(
                f"{name}: this rank holds {width} columns from column {begin}, which cuts through blocks of "
                f'{INT8_BLOCK}; set optimizer.state = "bf16", or a smaller parallel.tensor'
            )
        return Int8Moments(share, signed=True), Int8Moments(share, signed=False)

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float) -> None:
        for name, parameter in self.parameters.items():
            decay = decays(self.kinds[name], self.spec)
            factor = 1.0 - lr * self.spec.weight_decay if decay else 1.0
            weights, grads = _matrix(local(parameter.detach())), _matrix(gradient_of(name, parameter))
            at_once = max(1, REFERENCE.chunk_elements(weights.device) // max(1, weights.shape[1]))
            for first in range(0, weights.shape[0], at_once):
                rows = slice(first, first + at_once)
                wide = [moment.read(rows) for moment in self.moments[name]]
                pieces = ([weights[rows]], [grads[rows]], [wide[0]], [wide[1]])
                adamw_update(*pieces, self.spec, number, lr, gradient_scale, factor)
                for moment, values in zip(self.moments[name], wide, strict=True):
                    moment.write(rows, values, number)

    def state(self) -> dict[str, list[StatePart]]:
        parts = {}
        for name, moments in self.moments.items():
            whole, (offset, box) = self.kinds[name].shape, self.boxes[name]
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                for suffix, tensor, width in moment.tensors():
                    part = StatePart(
                        tensor.view(*box[:-1], tensor.shape[1]),
                        (*whole[:-1], math.ceil(whole[-1] / width)),
                        (*offset[:-1], offset[-1] // width),
                        name,
                    )
                    parts[f"{kind}{suffix}/{name}"] = [part]
        return parts


def _matrix(tensor: Tensor) -> Tensor:
    """``(rows, columns)``: a view in which all leading dimensions are rows."""
    return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
