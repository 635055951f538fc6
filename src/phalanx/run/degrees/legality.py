"""The arithmetic of legal layouts, for a single layout and for arrays of them.

The trainer explains each refusal of one layout (``phalanx.run.layout``); the planner's search filters millions (``phalanx_plan.search.space``).
Both use these functions, whose arguments are whole numbers or arrays of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

Degree = TypeVar("Degree", int, "Ints")

STAGES_PER_RANK = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, sys.maxsize),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}
"""The least and the most pipeline stages on each rank, by schedule."""


def rank_pieces(context: Degree, tensor: Degree) -> Degree:
    """The number of equal pieces into which ranks divide a sequence.

    In attention each of several context ranks takes one piece from the head and one from the tail.
    """
    return (1 + (context > 1)) * context * tensor


def fixed_pieces(lanes: int, context_tiles: int) -> int:
    """The number of equal pieces into which a run's lanes and context tiles divide a sequence on any ranks."""
    return max(1, 2 * context_tiles) * max(1, lanes)


def team_size(group: Degree, model_ranks: Degree) -> Degree:
    """Data-parallel ranks whose experts are shared, with experts on ``group`` ranks and ``model_ranks`` that share a slot."""
    return group // model_ranks + (group < model_ranks)


@overload
def folds(group: int, model_ranks: int) -> bool: ...
@overload
def folds(group: Ints, model_ranks: Ints) -> Bools: ...
def folds(group: int | Ints, model_ranks: int | Ints) -> bool | Bools:
    """Return True where one number divides the other and the team is a power of two, a node of the tree over slots."""
    teams = group // model_ranks
    return (model_ranks % group == 0) | ((group % model_ranks == 0) & (teams & (teams - 1) == 0))


def width_multiple(expert_tensor: Degree) -> Degree:
    """The number that divides an expert's inner width on so many ranks: a grouped product needs rows of whole 16 bytes."""
    return (1 + 7 * (expert_tensor > 1)) * expert_tensor
