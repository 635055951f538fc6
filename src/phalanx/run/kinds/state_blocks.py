"""The blocks of the optimizer's 8-bit state, and the tensor degrees that cut through one.

An int8 moment has one scale for ``INT8_BLOCK`` elements of a row. Where tensor ranks divide the rows of a matrix, each must hold
whole blocks, or two ranks would need one scale. The layout's check, the planner's search and the optimizer ask this one rule.
"""

from __future__ import annotations

from phalanx.run.kinds import block
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.kinds.parts import Parameter
from phalanx.run.spec import ModelSpec, OptimizerSpec

INT8_BLOCK = 64
"""Elements with a common scale: few enough to divide what tensor ranks hold of a row."""


def cut_by_tensor_ranks(
    model: ModelSpec, optimizer: OptimizerSpec, tensor: int, *, stacked: bool = False
) -> Parameter | None:
    """The first parameter of a block of a resolved model of whose state ``tensor`` ranks would cut a block; ``None`` if there is none.

    With ``stacked``, of experts' matrices, which ``parallel.expert_tensor`` ranks divide; else of all others.
    """
    if optimizer.name != "adamw" or optimizer.state != "int8" or tensor == 1:
        return None
    kinds = sorted({is_mixture(model, layer) for layer in range(model.layers)})
    parts = (part for mixed in kinds for part in block.parts(model, mixed=mixed))
    cut = (part for part in parts if part.stacked == stacked and _is_cut(part, tensor))
    return next(cut, None)


def _is_cut(part: Parameter, tensor: int) -> bool:
    """True if ranks divide the parameter's last dimension, but not into whole blocks; vectors are kept in fp32."""
    last = len(part.shape) - 1
    return last > 0 and part.tensor_dim == last and part.shape[-1] // tensor % INT8_BLOCK != 0
