"""A run that cuts its sequences into context tiles has one hash, whatever its context degree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layouts import DENSE, MIXTURE, Whole, merged, steps_on_this_rank, tiny, worst_error
from one_hash import (
    ROUNDING,
    Flaw,
    at_once,
    by_sequence,
    flawed_step,
    on_one_rank,
    one_after_the_other,
    same,
    scores_at_once,
)
from phalanx.parallel.context.tiles import Tile
from phalanx.parallel.reduction.integer.bins import BinFormat
from phalanx.run.spec import MemorySpec, ModelSpec, ParallelSpec, PrecisionSpec, RunSpec
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank

TILES = 4
MODELS = {
    "plain": ModelSpec(
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        ffn_dim=64,
        vocab_size=61,
        tie_embeddings=True,
        context_tiles=TILES,
    ),
    "windows and sinks": dataclasses.replace(DENSE, context_tiles=TILES),
    "mixture": dataclasses.replace(MIXTURE, layers=2, context_tiles=TILES),
    "ahead": dataclasses.replace(DENSE, layers=1, mtp_depth=2, context_tiles=TILES),
}
LAYOUTS: dict[str, tuple[tuple[str, int, dict[str, Any]], ...]] = {
    "plain": (("fp32", 4, {}), ("bf16", 4, {"shard_ranks": 2, "sharding": "zero2"})),
    "windows and sinks": (("fp32", 4, {}), ("bf16", 4, {"pipeline": 2, "pipeline_schedule": "zbv"})),
    "mixture": (("fp32", 4, {}), ("bf16", 2, {"sharding": "none"})),
    "ahead": (("fp32", 4, {}), ("bf16", 2, {"sharding": "none"})),
}
"""By model: format, ranks, and how those that do not share a sequence are used. Four ranks alone share one."""


def spec_of(model: ModelSpec, parallel: ParallelSpec, compute: str = "fp32") -> RunSpec:
    """Two slots of two micro-batches, a tile's loss in a chunk and a half; documents end now and then."""
    spec = tiny(model, parallel)
    train = dataclasses.replace(
        spec.train, batch_size=4, slots=2, loss_chunk=5, document_mask=True, end_of_document=7
    )
    return dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]


def divided(model: ModelSpec, context: int, **other: Any) -> ParallelSpec:
    """Context ranks, and as many expert ranks where there are experts."""
    expert = context if model.moe else 1
    return ParallelSpec(context=context, context_mode="allgather", expert=expert, **other)


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[[str, str], Whole]:
    """The result of a model of ``MODELS`` on one rank."""

    return on_one_rank(ranks, lambda model, compute: spec_of(MODELS[model], ParallelSpec(), compute))


@pytest.mark.parametrize("model", quick(MODELS, of_the_suite=["windows and sinks"]))
def test_a_run_in_context_tiles_has_one_hash_whatever_its_context_degree(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], model: str
) -> None:
    for compute, count, other in LAYOUTS[model]:
        parallel = divided(MODELS[model], 2 if other else 4, **other)
        found = merged(ranks.run(count, steps_on_this_rank, spec_of(MODELS[model], parallel, compute), 1))
        assert same(found, one_rank(model, compute)), f"{compute}, {parallel}"


@pytest.mark.slow  # in lanes and tiles they do in the suite
def test_experts_that_serve_several_slots_at_once_keep_one_hash(ranks: Ranks) -> None:
    found = []
    for count, parallel in (
        (1, ParallelSpec()),
        (4, ParallelSpec(context=2, context_mode="allgather", expert=4)),
        (4, ParallelSpec(expert=2, sharding="zero2")),
    ):
        spec = spec_of(MODELS["mixture"], parallel)
        train = dataclasses.replace(spec.train, batch_size=8, slots=4, expert_sums="slot")
        found.append(merged(ranks.run(count, steps_on_this_rank, dataclasses.replace(spec, train=train), 1)))
    assert all(same(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_so_it_has_when_activations_are_computed_again(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], recompute: str
) -> None:
    spec = spec_of(MODELS["plain"], divided(MODELS["plain"], 2))
    again = dataclasses.replace(spec, memory=MemorySpec(recompute=recompute))  # type: ignore[arg-type]
    assert same(merged(ranks.run(2, steps_on_this_rank, again, 1)), one_rank("plain", "fp32"))


def test_so_it_has_when_gradients_are_added_in_integers(ranks: Ranks) -> None:
    results = []
    for context in (1, 2):
        spec = spec_of(MODELS["plain"], divided(MODELS["plain"], context))
        train = dataclasses.replace(spec.train, reduction="integer")
        results.append(
            merged(ranks.run(context, steps_on_this_rank, dataclasses.replace(spec, train=train), 1))
        )
    assert same(*results)


def widths_of_bins(spec: RunSpec) -> set[int]:
    import torch.distributed as dist

    from phalanx.parallel.mesh.mesh import build_mesh
    from phalanx.parallel.reduction.integer.summation import IntegerSummation
    from phalanx.train.assembly.compose import build_model

    summation = build_model(
        spec, build_mesh(spec, dist.get_world_size(), torch.device("cpu"))
    ).model.summation
    assert isinstance(summation, IntegerSummation)
    reducers = [*summation._reducers, *summation._whole.values()]
    return {BinFormat(reducer.summands).width for reducer in reducers}


@pytest.mark.parametrize("model", ["plain", "mixture"])
def test_bins_of_integers_are_as_wide_on_any_context_degree(ranks: Ranks, model: str) -> None:
    widths = []
    for context in (1, 2, 4):
        spec = spec_of(MODELS[model], divided(MODELS[model], context))
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, reduction="integer"))
        widths += ranks.run(context, widths_of_bins, spec)
    assert all(len(width) == 1 and width == widths[0] for width in widths)


@pytest.mark.parametrize("model", MODELS)
def test_tiles_change_no_more_than_rounding(ranks: Ranks, model: str) -> None:
    cut = dataclasses.replace(
        MODELS[model], qkv_bias=False
    )  # whose gradients of keys cancel but for rounding
    without, within = (
        merged(ranks.run(1, steps_on_this_rank, spec_of(each, ParallelSpec()), 1))
        for each in (dataclasses.replace(cut, context_tiles=0), cut)
    )
    assert worst_error(within, without) <= ROUNDING


@pytest.mark.slow
def test_a_run_in_context_tiles_goes_on_under_another_context_degree_with_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    def spec(folder: str, context: int) -> RunSpec:
        run = replace_at(tiny_run(dataset, tmp_path / folder, steps=3), "model.context_tiles", 4)
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=4, slots=2))
        return dataclasses.replace(run, parallel=ParallelSpec(context=context, context_mode="allgather"))

    undisturbed = ranks.run(1, train_on_this_rank, spec("one", 1))[0]
    ranks.run(2, train_on_this_rank, spec("two", 2), 3)
    result = ranks.run(1, train_on_this_rank, spec("two", 1))[0]
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["held_out_loss"] == undisturbed["held_out_loss"]
    assert not result.get("layout_changes")


def keys_in_two_blocks(tile: int, count: int, seq: int, window: int) -> Iterator[Tile]:
    """The blocks of scores as they are when a half of the keys arrives after the other."""
    from phalanx.parallel.context.gather import tiles

    for block in tiles(tile, count, seq, window):
        begin, end = block.columns.start, block.columns.stop
        middle = (begin + end) // 2
        halves = (slice(begin, middle), slice(middle, end))
        yield from [block] if block.causal else [Tile(block.rows, half) for half in halves]


TILED = "phalanx.parallel.context.fixed"
LANED = "phalanx.parallel.tensor.lanes"
MUTANTS: dict[str, tuple[int, Flaw]] = {
    "gradient of weights, on a rank": (1, (f"{LANED}.shares", "add_in_tree", one_after_the_other)),
    "gradient of weights, over ranks": (4, (f"{TILED}.ranks", "sum_in_tree", one_after_the_other)),
    "gradient of keys, on a rank": (1, (f"{TILED}.core", "add_in_tree", one_after_the_other)),
    "gradient of keys, over ranks": (4, (f"{TILED}.core", "sum_in_tree", one_after_the_other)),
    "results of attention": (1, (f"{TILED}.core", "tiles", keys_in_two_blocks)),
    "layers of tokens": (1, (f"{LANED}.pieces", "InPieces.__call__", at_once)),
    "loss": (1, ("phalanx.train.step.loss", "add_in_tree", one_after_the_other)),
}
"""Flaws, and the number of context ranks on which they are computed."""


@pytest.mark.parametrize(
    "mutant",
    quick(MUTANTS, of_the_suite=[each for each in MUTANTS if each not in ("layers of tokens", "loss")]),
)
def test_a_flaw_in_any_part_of_context_tiles_would_be_noticed(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], mutant: str
) -> None:
    (count, flaw), model = MUTANTS[mutant], MODELS["plain"]
    flawed = merged(ranks.run(count, flawed_step, spec_of(model, divided(model, count)), flaw))
    assert not same(flawed, one_rank("plain", "fp32"))


OF_EXPERTS: dict[str, Flaw] = {
    "tokens": (f"{LANED}.mixture", "RoutedInPieces.__call__", by_sequence),
    "router": (f"{LANED}.mixture", "ScoresInPieces.__call__", scores_at_once),
}


@pytest.mark.parametrize("mutant", quick(OF_EXPERTS, of_the_suite=["tokens"]))
def test_so_would_be_one_in_how_tiles_come_to_experts(ranks: Ranks, mutant: str) -> None:
    found = []
    for count in (1, 4):
        spec = spec_of(MODELS["mixture"], divided(MODELS["mixture"], count))
        # Of two sequences, whose tokens lie by tile first.
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, micro_batch_size=2))
        found.append(merged(ranks.run(count, flawed_step, spec, OF_EXPERTS[mutant])))
    assert not same(*found)
