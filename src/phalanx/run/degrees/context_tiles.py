"""The rules of ``model.context_tiles``: the tiles that the run cuts each sequence into, so that no context degree changes a bit.

What a tile is, and how it is computed: ``phalanx.parallel.context.apply``. What has no tiles yet is refused beside them, by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.degrees.legality import fixed_pieces
from phalanx.run.degrees.pieces import count_problems, expert_problems
from phalanx.run.kinds.whole_model import undivided
from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

_FIELD = "model.context_tiles"


def context_tile_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yields what is impossible about the context tiles of a run, and about its layout beside them; nothing without tiles."""
    tiles = spec.model.context_tiles
    if not tiles:
        return
    yield from count_problems(spec, "context_tiles") or [*_sequence(spec), *_axes(spec)]


def _sequence(spec: RunSpec) -> Iterator[Problem]:
    tiles, pieces = spec.model.context_tiles, fixed_pieces(0, spec.model.context_tiles)
    for axis, problem in undivided(spec.model):
        if axis == "context":
            yield Problem(_FIELD, problem.found, "set it to 0", problem.also)
    if not spec.model.lanes and spec.train.seq_len % pieces:
        yield Problem(
            "train.seq_len",
            f"{spec.train.seq_len} tokens cannot be cut into a piece of the head and one of the tail for each of {tiles} tiles",
            f"it must be a multiple of {pieces}",
            (_FIELD,),
        )


def _axes(spec: RunSpec) -> Iterator[Problem]:
    if not spec.model.lanes:  # whose rules ask the same
        yield from expert_problems(spec, "context_tiles")
    parallel, tiles = spec.parallel, spec.model.context_tiles
    if tiles % parallel.context:
        yield Problem(
            "parallel.context",
            f"{tiles} context tiles cannot be divided over {parallel.context} context ranks",
            f"it must be a power of two, at most {tiles}",
            (_FIELD,),
        )
    if parallel.context > 1 and parallel.context_mode == "ring":
        yield Problem(
            "parallel.context_mode",
            "a ring adds in the order in which ranks are passed, not in that of context tiles",
            'set it to "allgather", or model.context_tiles = 0',
            ("parallel.context", _FIELD),
        )
    if parallel.tensor > 1 and not spec.model.lanes:
        yield Problem(
            "parallel.tensor",
            "tensor ranks share a sequence in context tiles only where the model is in lanes too",
            f"set it to 1, or model.lanes = {parallel.tensor} or more",
            (_FIELD, "model.lanes"),
        )
    if spec.runtime.compile:
        yield Problem(
            "runtime.compile",
            "a block in context tiles is not compiled",
            "set it to false, or model.context_tiles = 0",
            (_FIELD,),
        )
