"""A flaw in any part of lanes or context tiles changes the bits of some layout; without a flaw, pieces change no more than rounding.

Without these tests, the table of same bits would also pass if it compared nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from layouts import DENSE, Whole, merged, steps_on_this_rank, worst_error
from one_hash import (
    ROUNDING,
    Flaw,
    at_once,
    by_sequence,
    flawed_step,
    one_after_the_other,
    same,
    scores_at_once,
)
from phalanx.parallel.context.tiles import Tile
from phalanx.parallel.tensor.lanes.layers import LanedLayer, TileByTile
from phalanx.parallel.tensor.lanes.shares import LaneLeaves, Owners, _added, in_place_of
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from quick_cases import quick
from ranks import Ranks
from train.pieces import MODELS, divided, model_in, run_in_pieces


@pytest.mark.parametrize(
    ("pieces", "model"),
    quick(
        [(pieces, model) for pieces in ("lanes", "tiles", "lanes and tiles") for model in MODELS],
        of_the_suite=[("lanes", "mixture"), ("tiles", "dense"), ("lanes and tiles", "odd widths")],
    ),
)
def test_pieces_change_no_more_than_rounding(ranks: Ranks, pieces: str, model: str) -> None:
    # Without biases of keys, whose gradients cancel but for rounding.
    without_biases = {"qkv_bias": False, "attention_bias": False}
    spec = run_in_pieces(model_in(pieces, model, **without_biases))
    uncut_spec = dataclasses.replace(spec, model=resolve(model_in("whole", model, **without_biases)))
    cut, uncut = (merged(ranks.run(1, steps_on_this_rank, each, 1)) for each in (spec, uncut_spec))
    assert worst_error(cut, uncut) <= ROUNDING


def under_one_name(x: Tensor, count: int) -> Iterator[Tensor]:
    return iter([x] * count)


def together(count: int, _: Any) -> list[range]:
    """``_parts`` of the loss: the rows of all lanes."""
    return [range(count)]


def lanes_at_once(self: LanedLayer, inputs: tuple[Tensor, ...], context: tuple[Any, ...]) -> Iterator[Tensor]:
    """``LanedLayer._results`` that computes the heads, or inner elements, of all lanes of a rank together."""
    owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
    full_weights = [
        parameter.owner.get_parameter(parameter.attribute)
        if parameter.shared is None
        else parameter.shared.now()[0]
        for parameter in self.parameters
    ]
    yield self.result(owners, [full_weights], inputs, *context)


def from_the_end(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
    """The embedding's backward pass, which adds the tokens of a row in the opposite order where a rank has a part of the rows."""
    (row,), gradient = ctx.saved_tensors, upstream[0].contiguous()
    if ctx.count < DENSE.vocab_size:
        row, gradient = row.flip(0, 1), gradient.flip(0, 1)
    rows = torch.ops.aten.embedding_dense_backward(gradient, row, ctx.count + 1, ctx.count, False)
    return rows[: ctx.count], None


def keys_in_two_blocks(tile: int, count: int, seq: int, window: int) -> Iterator[Tile]:
    """The blocks of scores as they are when a half of the keys arrives after the other."""
    from phalanx.parallel.context.exchange import tiles

    for block in tiles(tile, count, seq, window):
        begin, end = block.columns.start, block.columns.stop
        middle = (begin + end) // 2
        halves = (slice(begin, middle), slice(middle, end))
        yield from [block] if block.causal else [Tile(block.rows, half) for half in halves]


def without_runs(leaves: Sequence[LaneLeaves], upstream: Sequence[Tensor]) -> list[Tensor]:
    """``_added`` that adds a rank's tiles before it exchanges lanes with its neighbors."""
    return _added([dataclasses.replace(part, runs=1) for part in leaves], upstream)


def tiles_at_once(self: TileByTile, owners: Owners, tensors: Any, inputs: Any) -> Tensor:
    """``TileByTile`` that computes all tiles together."""
    with in_place_of(owners, tensors[0]):
        return self.by_heads(inputs)


LANED = "phalanx.parallel.tensor.lanes"
SHARES = f"{LANED}.shares"
TILED = "phalanx.parallel.context"
OF_LANES: dict[str, Flaw] = {
    "results of lanes": (f"{LANED}.layers", "add_in_tree", one_after_the_other),
    "heads and inner elements": (f"{LANED}.layers", "LanedLayer._results", lanes_at_once),
    "results of ranks": ("phalanx.parallel.tensor.sequence_comm", "sum_in_tree", one_after_the_other),
    "gradient of what lanes read": (f"{LANED}.layers", "forked", under_one_name),
    "gradient of shared weights": (f"{LANED}.shares", "add_in_tree", one_after_the_other),
    "pieces": (f"{LANED}.shares", "InPieces.__call__", at_once),
    "tokens of experts": (f"{LANED}.shares", "RoutedInPieces.__call__", by_sequence),
    "router": (f"{LANED}.shares", "ScoresInPieces.__call__", scores_at_once),
    "embedding": (f"{LANED}.apply", "_Rows.backward", from_the_end),
    "scores and loss": ("phalanx.train.step.loss", "_parts", together),
}


OF_TILES: dict[str, tuple[int, Flaw]] = {
    "gradient of weights, on a rank": (1, (f"{LANED}.shares", "add_in_tree", one_after_the_other)),
    "gradient of weights, over ranks": (4, (f"{TILED}.fixed_tiles", "sum_in_tree", one_after_the_other)),
    "gradient of keys, on a rank": (1, (f"{TILED}.fixed_tiles", "add_in_tree", one_after_the_other)),
    "gradient of keys, over ranks": (4, (f"{TILED}.fixed_tiles", "sum_in_tree", one_after_the_other)),
    "results of attention": (1, (f"{TILED}.fixed_tiles", "tiles", keys_in_two_blocks)),
    "layers of tokens": (1, (f"{LANED}.shares", "InPieces.__call__", at_once)),
    "loss": (1, ("phalanx.train.step.loss", "add_in_tree", one_after_the_other)),
}
"""Flaws, and the number of context ranks on which they are computed."""

OF_EXPERTS: dict[str, Flaw] = {
    "tokens": (f"{LANED}.shares", "RoutedInPieces.__call__", by_sequence),
    "router": (f"{LANED}.shares", "ScoresInPieces.__call__", scores_at_once),
}

OF_BOTH: dict[str, tuple[int, int, Flaw]] = {
    "gradient of weights that lanes share": (2, 1, (SHARES, "_added", without_runs)),
    "gradient of weights, on a rank": (1, 1, (SHARES, "add_in_tree", one_after_the_other)),
    "gradient of weights, over tiles": (1, 4, (f"{TILED}.fixed_tiles", "sum_in_tree", one_after_the_other)),
    "gradient of keys": (1, 1, (f"{TILED}.fixed_tiles", "add_in_tree", one_after_the_other)),
    "results of lanes": (1, 1, (f"{LANED}.layers", "add_in_tree", one_after_the_other)),
    "results of inner elements": (1, 1, (f"{LANED}.layers", "TileByTile.__call__", tiles_at_once)),
    "pieces of tiles": (1, 1, (f"{LANED}.shares", "InPieces.__call__", at_once)),
    "loss": (1, 1, ("phalanx.train.step.loss", "add_in_tree", one_after_the_other)),
}
"""Flaws, and the tensor and context degrees with which they are computed."""


@pytest.mark.parametrize(
    "flaw",
    quick(OF_LANES, of_the_suite=["results of ranks", "gradient of shared weights", "tokens of experts"]),
)
def test_a_flaw_in_any_part_of_lanes_changes_the_bits(ranks: Ranks, flaw: str) -> None:
    model = model_in("lanes", "mixture" if flaw in ("tokens of experts", "router") else "dense")
    on_one_rank, on_four_ranks = (
        merged(ranks.run(tensor, flawed_step, run_in_pieces(model, divided(model, tensor)), OF_LANES[flaw]))
        for tensor in (1, 4)
    )
    assert not same(on_one_rank, on_four_ranks)


@pytest.fixture(scope="module")
def flawless(ranks: Ranks) -> Callable[[ModelSpec], Whole]:
    """The result of a run in pieces on one rank, without a flaw."""

    @functools.cache
    def computed(model: ModelSpec) -> Whole:
        return merged(ranks.run(1, steps_on_this_rank, run_in_pieces(model), 1))

    return computed


@pytest.mark.parametrize(
    "flaw",
    quick(OF_TILES, of_the_suite=[each for each in OF_TILES if each not in ("layers of tokens", "loss")]),
)
def test_a_flaw_in_any_part_of_context_tiles_changes_the_bits(
    ranks: Ranks, flawless: Callable[[ModelSpec], Whole], flaw: str
) -> None:
    count, planted = OF_TILES[flaw]
    model = model_in("tiles", "shared key heads")
    spec = run_in_pieces(model, divided(model, context=count))
    assert not same(merged(ranks.run(count, flawed_step, spec, planted)), flawless(model))


@pytest.mark.parametrize("flaw", quick(OF_EXPERTS, of_the_suite=["tokens"]))
def test_a_flaw_in_how_tiles_come_to_experts_changes_the_bits(ranks: Ranks, flaw: str) -> None:
    model = model_in("tiles", "mixture")
    wholes = []
    for count in (1, 4):
        spec = run_in_pieces(model, divided(model, context=count))
        # Micro-batches of two sequences, whose tokens are ordered by tile first.
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, micro_batch_size=2))
        wholes.append(merged(ranks.run(count, flawed_step, spec, OF_EXPERTS[flaw])))
    assert not same(*wholes)


@pytest.mark.parametrize(
    "flaw", quick(OF_BOTH, of_the_suite=["gradient of weights, over tiles", "results of lanes"])
)
def test_a_flaw_in_how_lanes_and_tiles_go_together_changes_the_bits(
    ranks: Ranks, flawless: Callable[[ModelSpec], Whole], flaw: str
) -> None:
    tensor, context, planted = OF_BOTH[flaw]
    model = model_in("lanes and tiles", "dense")
    spec = run_in_pieces(model, divided(model, tensor, context))
    assert not same(merged(ranks.run(tensor * context, flawed_step, spec, planted)), flawless(model))
