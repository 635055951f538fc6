"""Interface of all optimizers: a step, and a state dict that a checkpoint can name.

An optimizer on one rank knows the parameters that this rank holds a part of. What it keeps between steps is told as
``StatePart``s: rectangular boxes of named tensors whose shapes depend on the model alone, so that a state that was saved
by one fleet is found again by another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.mesh.torch_compat import local_slice_of
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.parts import Parameter
from phalanx.run.spec import OptimizerSpec


@dataclass(frozen=True)
class StatePart:
    """This rank's part of one named tensor of the optimizer's state."""

    tensor: Tensor
    """A plain tensor that shares memory with the optimizer's own."""
    whole: tuple[int, ...]
    """Shape of the named tensor."""
    offset: tuple[int, ...]
    """Where ``tensor`` begins in it."""
    like: str = ""
    """The parameter of which each rank holds the corresponding part; empty if nobody else in this replica holds it."""


class Optimizer(Protocol):
    """Turns gradients into changes of the weights, on every rank together."""

    @abstractmethod
    def step(self, number: int, lr: float, gradient_scale: float) -> None:
        """Applies update ``number`` (from 1) with the gradients that the parameters hold, times ``gradient_scale``.

        Raises ``RuntimeError`` if a parameter has no gradient.
        """

    @abstractmethod
    def state(self) -> dict[str, list[StatePart]]:
        """This rank's part of the state, by names such as ``exp_avg/blocks.0.ffn.up.weight``."""


@dataclass(frozen=True)
class Several(Optimizer):
    """Different optimizers for different parameters."""

    parts: Sequence[Optimizer]

    def step(self, number: int, lr: float, gradient_scale: float) -> None:
        for part in self.parts:
            part.step(number, lr, gradient_scale)

    def state(self) -> dict[str, list[StatePart]]:
        return {name: tensors for part in self.parts for name, tensors in part.state().items()}


def decays(parameter: Parameter, spec: OptimizerSpec) -> bool:
    """True if weight decay applies to the parameter."""
    if parameter.kind in ("norm", "bias"):
        return spec.decay_norms
    return spec.decay_embeddings if parameter.kind == "embedding" else True


def boxes_of(
    parameters: Mapping[str, nn.Parameter], boxes: Mapping[str, LocalSlice] | None
) -> dict[str, LocalSlice]:
    """Where what this rank holds of each parameter lies: as ``boxes`` says, else as a DTensor knows itself."""
    return {
        name: boxes[name] if boxes else local_slice_of(parameter) for name, parameter in parameters.items()
    }


def gradient_of(name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient. Raises ``RuntimeError`` if there is none."""
    if parameter.grad is None:
        raise RuntimeError(f"{name} has no gradient to step with")
    return local(parameter.grad)
