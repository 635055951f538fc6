"""A step of an optimizer that looks at whole matrices: what is common to Adafactor, Muon, Shampoo and SOAP.

Each of them is a ``MatrixRule``: how a gradient becomes a change. Here gradients are
brought to the owners of the matrices, who follow the rule, and the changes are brought back (``matrices``). The weights
then move as in AdamW: ``w = (1 - lr * decay) w - lr * change``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.facts.optimizer_state import matrix_state, matrix_work
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.parts import Parameter
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.matrix.holders import Matrix, gather_holders
from phalanx.train.optimizers.matrix.matrices import MatrixExchange
from phalanx.train.optimizers.optimizer import Optimizer, StatePart, boxes_of, decays, gradient_of


class MatrixRule(ABC):
    """The update rule of one whole matrix.

    What it keeps between steps, and what a step costs, is listed in ``phalanx.model.facts.optimizer_state``.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """The change per unit of learning rate, ``(rows, columns)``, after taking ``gradient`` of step ``number`` in.

        ``gradient`` is fp32 and may be overwritten. ``state`` has what ``matrix_state`` lists, zero before step 1.
        """


class MatrixOptimizer(Optimizer):
    """Follows a rule for each matrix of ``parameters``, which have two dimensions, or three if they are stacks."""

    def __init__(
        self,
        spec: OptimizerSpec,
        rule: MatrixRule,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, Parameter],
        boxes: Mapping[str, LocalSlice] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.spec, self.rule, self.parameters, self.kinds = spec, rule, parameters, kinds
        shapes = {name: kinds[name].shape for name in parameters}
        held = boxes_of(parameters, boxes)
        self.exchange = MatrixExchange(shapes, held, gather_holders(shapes, held, group), self._cost, group)
        self._parts: dict[str, list[StatePart]] = {}
        self._state: dict[Matrix, dict[str, Tensor]] = {}
        for run in _runs(self.exchange.owned):
            self._allocate(run)

    def _cost(self, rows: int, columns: int) -> float:
        return matrix_work(self.spec, rows, columns).flops

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float) -> None:
        weights = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        gradients = {name: gradient_of(name, parameter) for name, parameter in self.parameters.items()}
        for batch in self.exchange.batches:
            whole = self.exchange.collect(batch, gradients)
            changes = {
                matrix: self.rule.change(gradient.mul_(gradient_scale), self._state[matrix], number)
                for matrix, gradient in whole.items()
            }
            for matrix, weight, change in self.exchange.hand_back(batch, changes, weights):
                # Each operation a single rounding, as in AdamW: shares of any shape get the same bits.
                if decays(self.kinds[matrix.parameter], self.spec):
                    weight.mul_(1.0 - lr * self.spec.weight_decay)
                weight.sub_(change.mul_(lr))

    def state(self) -> dict[str, list[StatePart]]:
        return self._parts

    def _allocate(self, run: list[Matrix]) -> None:
        """The state of matrices that stand side by side in a stack is one box of a stack of states."""
        first = run[0]
        device = local(self.parameters[first.parameter].detach()).device
        for kept in matrix_state(self.spec, first.rows, first.columns):
            name, shape = kept.name, kept.shape
            tensor = torch.zeros((len(run), *shape), device=device)
            for matrix, state in zip(run, tensor, strict=True):
                self._state.setdefault(matrix, {})[name] = state
            if first.index is None:
                part = StatePart(tensor[0], shape, (0,) * len(shape))
            else:
                whole = (self.kinds[first.parameter].shape[0], *shape)
                part = StatePart(tensor, whole, (first.index, *(0,) * len(shape)))
            self._parts.setdefault(f"{name}/{first.parameter}", []).append(part)


def _runs(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """Matrices that are neighbors in one stack, together."""
    run: list[Matrix] = []
    for matrix in matrices:
        follows = run and matrix.index is not None and run[-1].index is not None
        if follows and (run[-1].parameter, run[-1].index) == (matrix.parameter, (matrix.index or 0) - 1):
            run.append(matrix)
            continue
        if run:
            yield run
        run = [matrix]
    if run:
        yield run
