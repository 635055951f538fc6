"""The rules of ``model.lanes``: the pieces that the run cuts the model's width into, so that no tensor degree changes a bit.

Every width that tensor ranks divide is cut into so many lanes, and the sequence into so many pieces
(``phalanx.parallel.tensor.lanes.apply``). What has no lanes yet is refused beside them, by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.degrees.legality import fixed_pieces
from phalanx.run.degrees.pieces import count_problems, expert_problems
from phalanx.run.kinds.whole_model import shares_key_heads, tensor_sizes, undivided
from phalanx.run.problems import Problem, divisors_near
from phalanx.run.spec import RunSpec


def lane_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yields what is impossible about the lanes of a run, and about its layout beside them; nothing without lanes."""
    lanes = spec.model.lanes
    if not lanes:
        return
    yield from count_problems(spec, "lanes") or [*_widths(spec), *_axes(spec)]


def _widths(spec: RunSpec) -> Iterator[Problem]:
    model, lanes = spec.model, spec.model.lanes
    for axis, problem in undivided(model):
        if axis == "tensor":
            yield Problem("model.lanes", problem.found, "set it to 0", problem.also)
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


def _axes(spec: RunSpec) -> Iterator[Problem]:
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
            "a sequence that context ranks share is cut into the pieces that lanes ask for only where it is in context tiles",
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
