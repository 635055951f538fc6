"""Pieces of a model whose bits do not depend on degrees: ``model.lanes`` of its width and ``model.context_tiles`` of its sequences.

First come rules common to both: the number of pieces, and the placement of experts. Then come the rules of each, and the arithmetic of legal layouts,
which the planner's search uses too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from phalanx.run.fields import Problem, divisors_near
from phalanx.run.kinds.whole_model import shares_key_heads, tensor_sizes, undivided
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]


_REGISTER_BYTES = 64
"""Size of the longest vector register, AVX-512's. Other instructions compute the remainder of a loop over such registers."""

Pieces = Literal["lanes", "context_tiles"]
"""Field of ``model`` with the number of pieces."""


def count_problems(spec: RunSpec, pieces: Pieces) -> list[Problem]:
    """Return the problem, if any, of a number of a run's ``pieces`` that is no power of two: sums over them are
    computed in a binary tree.
    """
    count, noun = getattr(spec.model, pieces), pieces.removeprefix("context_")
    if not count & (count - 1):
        return []
    return [
        Problem(
            f"model.{pieces}",
            f"{count} {noun} cannot be the leaves of a binary tree",
            f"take a power of two: {1 << (count.bit_length() - 1)} or {1 << count.bit_length()}",
        )
    ]


def _rounding_problems(spec: RunSpec, pieces: Pieces) -> Iterator[Problem]:
    """Yield settings with which an activation's bits would depend on a rank's rows, because other instructions compute the end of a loop.

    Portable kernels compute all elements in the same way.
    """
    assert spec.model.moe is not None, "only mixtures have experts"
    numerics = spec.runtime.numerics
    if numerics == "portable" or (numerics == "auto" and spec.runtime.device == "cpu"):
        return
    width = spec.model.moe.ffn_dim or spec.model.ffn_dim
    register = _REGISTER_BYTES // (4 if spec.precision.compute in ("auto", "fp32") else 2)
    if width % register:
        yield Problem(
            "model.moe.ffn_dim",
            f"{width} elements do not fill a processor's registers, so an activation's rounding would depend on how many experts a rank has",
            f"it must be a multiple of {register}; or model.{pieces} = 0",
            (f"model.{pieces}", "model.ffn_dim", "precision.compute"),
        )
    if spec.runtime.threads > 1 and spec.runtime.device == "cpu":
        yield Problem(
            "runtime.threads",
            f"{spec.runtime.threads} threads divide the rows of a rank's experts anywhere, so an activation's rounding would depend on how many it has",
            f"set it to 1, and take more ranks; or model.{pieces} = 0",
            (f"model.{pieces}",),
        )


def expert_problems(spec: RunSpec, pieces: Pieces) -> Iterator[Problem]:
    """Yield the problems of experts with ``pieces``, which make the tensor and context degrees the fleet's; none
    without experts.

    They are rounding; expert ranks that are no multiple of the product of both degrees, which ends the check; and sums
    over several slots that meet at an expert.
    """
    parallel, train = spec.parallel, spec.train
    degree = parallel.tensor * parallel.context
    axes = [axis for axis in ("tensor", "context") if getattr(parallel, axis) > 1]
    fields = (*(f"parallel.{axis}" for axis in axes), f"model.{pieces}")
    if spec.model.moe is None:
        return
    yield from _rounding_problems(spec, pieces)
    if parallel.expert % degree:
        yield Problem(
            "parallel.expert",
            f"with model.{pieces} all of a slot's tokens come to an expert together, and {degree} ranks share a slot",
            f"take a multiple of {degree}, or model.{pieces} = 0",
            fields,
        )
        return
    # The degree is the fleet's, so slots that are computed together must be added as if computed separately.
    together, sequences = parallel.expert > degree, train.batch_size // train.slots
    several = sequences > (train.micro_batch_size or sequences)
    if together and train.reduction == "integer":
        yield Problem(
            "parallel.expert",
            "slots whose tokens meet at an expert are rounded to integers together, so the bits would depend on it",
            f'set it to {degree}, or train.reduction = "reproducible"',
            (*fields, "train.reduction"),
        )
    elif together and several and train.expert_sums != "slot":
        yield Problem(
            "train.expert_sums",
            "experts' gradients of several slots' micro-batches are added across slots first, so the bits would depend on parallel.expert",
            f'set it to "slot", or parallel.expert = {degree}',
            ("parallel.expert", *fields),
        )


# Rules of ``model.lanes``: the model's width is cut into pieces, so that the tensor degree does not change any bits.
#
# Every width that tensor ranks divide is cut into lanes, and the sequence into as many pieces
# (``phalanx.parallel.tensor.lanes.apply``). Features without support for lanes are refused.


def lane_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a run's lanes, and of its layout with them; empty without lanes."""
    lanes = spec.model.lanes
    if not lanes:
        return
    yield from count_problems(spec, "lanes") or [*_widths(spec), *_lane_axes(spec)]


def _widths(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a run with lanes: norms over all heads, dimensions and key heads that do not divide, and a
    sequence length that does not divide into lanes' pieces and context tiles.

    Only for ``model.lanes`` above 0.
    """
    model, lanes = spec.model, spec.model.lanes
    for axis, problem in undivided(model):
        if axis == "tensor":
            yield Problem("model.lanes", problem.finding, "set it to 0", problem.also)
    for path, size in tensor_sizes(model):
        if size % lanes:
            yield Problem(
                "model.lanes",
                f"{path} = {size} cannot be divided into {lanes} lanes",
                f"{divisors_near(size, lanes)} divide it; or set model.lanes = 0",
                (path,),
            )
    if not shares_key_heads(model, lanes):
        yield Problem(
            "model.lanes",
            f"model.kv_heads = {model.kv_heads} cannot be shared by {lanes} lanes",
            f"{divisors_near(model.kv_heads, lanes)} divide it; or take a multiple of {model.kv_heads}",
            ("model.kv_heads",),
        )
    tiles, pieces = model.context_tiles, fixed_pieces(lanes, model.context_tiles)
    if not tiles and spec.train.seq_len % pieces:
        yield Problem(
            "train.seq_len",
            f"{spec.train.seq_len} tokens cannot be cut into as many pieces as there are lanes, {lanes}",
            f"it must be a multiple of {pieces}",
            ("model.lanes",),
        )
    if tiles and spec.train.seq_len % pieces:
        yield Problem(
            "train.seq_len",
            f"{spec.train.seq_len} tokens cannot be cut into {tiles} context tiles of two halves with {lanes} pieces each",
            f"it must be a multiple of {pieces}",
            ("model.lanes", "model.context_tiles"),
        )


def _lane_axes(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a tensor degree that does not divide the lanes, of context ranks without tiles, of
    divided expert matrices, of experts, and of compilation.
    """
    parallel, lanes = spec.parallel, spec.model.lanes
    if lanes % parallel.tensor:
        yield Problem(
            "parallel.tensor",
            f"{lanes} lanes cannot be divided over {parallel.tensor} tensor ranks",
            f"it must be a power of two, at most {lanes}",
            ("model.lanes",),
        )
    if parallel.context > 1 and not spec.model.context_tiles:
        yield Problem(
            "parallel.context",
            "a sequence that context ranks share is cut into the pieces that lanes need only where it is in context tiles",
            f"set it to 1, or model.context_tiles = {parallel.context} or more",
            ("model.lanes", "model.context_tiles"),
        )
    if parallel.expert_tensor > 1:
        yield Problem(
            "parallel.expert_tensor",
            "experts' matrices are not cut into lanes",
            "set it to 1, so that they stay whole; or model.lanes = 0",
            ("model.lanes",),
        )
    yield from expert_problems(spec, "lanes")
    if spec.runtime.compile:
        yield Problem(
            "runtime.compile",
            "a block in lanes is not compiled",
            "set it to false, or model.lanes = 0",
            ("model.lanes",),
        )


# Rules of ``model.context_tiles``: each sequence is cut into tiles, so that the context degree does not change any bits.
#
# ``phalanx.parallel.context.fixed_tiles`` defines and computes tiles. Features without support for tiles are refused.


_TILES = "model.context_tiles"


def context_tile_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a run's context tiles, and of its layout with them; empty without tiles."""
    tiles = spec.model.context_tiles
    if not tiles:
        return
    yield from count_problems(spec, "context_tiles") or [*_sequence(spec), *_tile_axes(spec)]


def _sequence(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a model or sequence length that cannot be cut into context tiles."""
    tiles, pieces = spec.model.context_tiles, fixed_pieces(0, spec.model.context_tiles)
    for axis, problem in undivided(spec.model):
        if axis == "context":
            yield Problem(_TILES, problem.finding, "set it to 0", problem.also)
    if not spec.model.lanes and spec.train.seq_len % pieces:
        yield Problem(
            "train.seq_len",
            f"{spec.train.seq_len} tokens cannot be cut into a piece of the head and one of the tail for each of {tiles} tiles",
            f"it must be a multiple of {pieces}",
            (_TILES,),
        )


def _tile_axes(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of experts, of a context degree that does not divide the tiles, of the ring mode, of tensor
    ranks without lanes, and of compilation.
    """
    if not spec.model.lanes:  # the rules of lanes include this check
        yield from expert_problems(spec, "context_tiles")
    parallel, tiles = spec.parallel, spec.model.context_tiles
    if tiles % parallel.context:
        yield Problem(
            "parallel.context",
            f"{tiles} context tiles cannot be divided over {parallel.context} context ranks",
            f"it must be a power of two, at most {tiles}",
            (_TILES,),
        )
    if parallel.context > 1 and parallel.context_mode == "ring":
        yield Problem(
            "parallel.context_mode",
            "a ring adds in the order in which ranks are passed, not in that of context tiles",
            'set it to "allgather", or model.context_tiles = 0',
            ("parallel.context", _TILES),
        )
    if parallel.tensor > 1 and not spec.model.lanes:
        yield Problem(
            "parallel.tensor",
            "tensor ranks share a sequence in context tiles only where the model is in lanes too",
            f"set it to 1, or model.lanes = {parallel.tensor} or more",
            (_TILES, "model.lanes"),
        )
    if spec.runtime.compile:
        yield Problem(
            "runtime.compile",
            "a block in context tiles is not compiled",
            "set it to false, or model.context_tiles = 0",
            (_TILES,),
        )


# The arithmetic of legal layouts, for a single layout and for arrays of them.
#
# The trainer explains each refusal of one layout (``phalanx.run.layout``); the planner's search filters millions
# (``phalanx_plan.search.space``). Both use these functions, whose arguments are whole numbers or arrays of them.


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
    """Return the number of equal pieces into which ranks divide a sequence: ``tensor``, times twice ``context`` if
    that is above 1.

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
