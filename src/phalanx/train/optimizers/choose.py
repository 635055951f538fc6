"""Builds the optimizer that a run file asks for, and assigns parameters to it or to AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn

from phalanx.model.facts.optimizer_state import takes_matrix
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.adamw import AdamW, NarrowAdamW
from phalanx.train.optimizers.matrix.matrix_optimizer import MatrixOptimizer, MatrixRule
from phalanx.train.optimizers.matrix.rules import Adafactor, Muon, Shampoo, Soap
from phalanx.train.optimizers.optimizer import MomentStore, Optimizer, Several

_RULES: dict[str, Callable[[OptimizerSpec], MatrixRule]] = {
    "adafactor": Adafactor,
    "muon": Muon,
    "shampoo": Shampoo,
    "soap": Soap,
}


def make_optimizer(
    spec: OptimizerSpec,
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, Parameter],
    *,
    seed: int = 0,
    boxes: Mapping[str, LocalSlice] | None = None,
    group: dist.ProcessGroup | None = None,
    store: MomentStore | None = None,
) -> Optimizer:
    """The optimizer of ``parameters``, on every rank together.

    Args:
        kinds: What each parameter is, with the shape of the whole.
        seed: Seeds stochastic rounding.
        boxes: This rank's part of each parameter, by name; ``None`` if parameters are whole
            or DTensors that know.
        group: The ranks that hold each of ``parameters`` between them (``Mesh.stage_group``). A larger group divides the work
            further. ``None`` if this rank holds everything.
        store: Where AdamW's fp32 moments live; ``None`` is the device.
    """

    def part(names: list[str]) -> dict[str, nn.Parameter]:
        return {name: parameters[name] for name in names}

    if spec.name == "adamw":
        narrow = [n for n in parameters if spec.state != "fp32" and len(kinds[n].shape) > 1]
        plain = [n for n in parameters if n not in narrow]
        wide = AdamW(spec, part(plain), kinds, boxes, store)
        return Several([NarrowAdamW(spec, part(narrow), kinds, seed, boxes), wide]) if narrow else wide
    rule = _RULES[spec.name](spec)
    matrices = [n for n in parameters if takes_matrix(spec, kinds[n])]
    rest = [n for n in parameters if n not in matrices]
    optimizers: list[Optimizer] = [AdamW(dataclasses.replace(spec, name="adamw"), part(rest), kinds, boxes)]
    if matrices:
        optimizers.insert(0, MatrixOptimizer(spec, rule, part(matrices), kinds, boxes, group))
    return Several(optimizers)
