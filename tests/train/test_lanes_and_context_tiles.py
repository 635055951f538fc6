"""A run in lanes and in context tiles has one hash, whatever its tensor and its context degree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from layouts import DENSE, LATENT, MIXTURE, Whole, merged, steps_on_this_rank, tiny, worst_error
from one_hash import ROUNDING, Flaw, at_once, flawed_step, on_one_rank, one_after_the_other, same
from phalanx.parallel.tensor.lanes.layers import TileByTile
from phalanx.parallel.tensor.lanes.shares import Leaves, Owners, _added, in_place_of
from phalanx.run.spec import MemorySpec, ModelSpec, ParallelSpec, PrecisionSpec, RunSpec
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank

PIECES: dict[str, Any] = {"layers": 2, "lanes": 4, "context_tiles": 4}
MODELS = {
    "dense": dataclasses.replace(DENSE, **PIECES),
    "shared key heads": ModelSpec(
        dim=32,
        heads=4,
        kv_heads=2,
        ffn_dim=64,
        vocab_size=61,
        tie_embeddings=True,
        attention_bias=True,
        ffn_bias=True,
        norm_placement="both",
        qk_norm=True,
        **PIECES,
    ),
    "mixture": dataclasses.replace(MIXTURE, **PIECES),
    "absorbed": dataclasses.replace(MIXTURE, mla=dataclasses.replace(LATENT, absorbed=True), **PIECES),
    "ahead": dataclasses.replace(DENSE, **PIECES | {"layers": 1}, tie_embeddings=True, mtp_depth=1),
    # Whose lanes and pieces begin within cache lines, where a product may be rounded otherwise.
    "odd widths": ModelSpec(
        dim=33, heads=4, kv_heads=4, head_dim=6, ffn_dim=28, vocab_size=61, **PIECES | {"layers": 1}
    ),
}
DEGREES: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("dense", "fp32"): ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4)),
    ("dense", "bf16"): ((2, 2),),
    ("shared key heads", "fp32"): ((2, 2), (4, 1)),
    ("mixture", "fp32"): ((2, 2), (1, 4)),
    ("mixture", "bf16"): ((2, 2),),
    ("absorbed", "fp32"): ((2, 2), (4, 1), (1, 4)),
    ("absorbed", "bf16"): ((2, 2),),
    ("ahead", "fp32"): ((2, 2), (1, 4)),
    ("ahead", "bf16"): ((2, 2),),
    ("odd widths", "fp32"): ((4, 1), (1, 4)),
    ("odd widths", "bf16"): ((2, 2),),
}
"""Tensor and context degrees of up to four ranks, by model and format."""


def spec_of(model: ModelSpec, parallel: ParallelSpec, compute: str = "fp32") -> RunSpec:
    """Two slots of two micro-batches, a tile's loss in a chunk and a half; documents end now and then."""
    spec = tiny(model, parallel)
    train = dataclasses.replace(
        spec.train, batch_size=4, slots=2, loss_chunk=5, document_mask=True, end_of_document=7
    )
    return dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]


def divided(model: ModelSpec, tensor: int, context: int, **other: Any) -> ParallelSpec:
    """As many expert ranks as share a slot, where there are experts."""
    expert = tensor * context if model.moe else 1
    return ParallelSpec(tensor=tensor, context=context, context_mode="allgather", expert=expert, **other)


OFFLOADS_ALL: Flaw = ("phalanx.train.transforms.offload", "offload_activations.__defaults__", (1,))
"""No flaw: activations of any size are offloaded; else those of tiny models would all be too small."""


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[[str, str], Whole]:
    """The result of a model of ``MODELS`` on one rank."""
    return on_one_rank(ranks, lambda model, compute: spec_of(MODELS[model], ParallelSpec(), compute))


@pytest.mark.parametrize(
    ("model", "compute"),
    quick(DEGREES, of_the_suite=[("mixture", "fp32"), ("odd widths", "fp32")]),
)
def test_a_run_in_lanes_and_tiles_has_one_hash_whatever_its_tensor_and_context_degrees(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], model: str, compute: str
) -> None:
    for tensor, context in DEGREES[model, compute]:
        parallel = divided(MODELS[model], tensor, context)
        spec = spec_of(MODELS[model], parallel, compute)
        found = merged(ranks.run(tensor * context, steps_on_this_rank, spec, 1))
        assert same(found, one_rank(model, compute)), f"tensor {tensor}, context {context}"


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tensor", "context"), [(4, 2), (2, 4)])
def test_so_it_has_on_eight_ranks(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], model: str, compute: str, tensor: int, context: int
) -> None:
    spec = spec_of(MODELS[model], divided(MODELS[model], tensor, context), compute)
    assert same(merged(ranks.run(8, steps_on_this_rank, spec, 1)), one_rank(model, compute))


@pytest.mark.parametrize(
    "changed",
    quick(
        ["selective recomputation", "integer sums", "shards", "offload to files"],
        of_the_suite=["shards"],
    ),
)
def test_nothing_else_that_is_the_fleets_parts_such_runs(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], changed: str, tmp_path: Path
) -> None:
    model = MODELS["dense"]
    spec, ranks_used = spec_of(model, divided(model, 2, 2)), 4
    reference = one_rank("dense", "fp32")
    if changed == "selective recomputation":
        spec = dataclasses.replace(spec, memory=MemorySpec(recompute="selective"))
    elif changed == "shards":
        parallel, ranks_used = divided(model, 2, 1, sharding="zero2"), 4
        spec = dataclasses.replace(spec, parallel=parallel)
    elif changed == "offload to files":
        memory = MemorySpec(
            offload_activations="file", offload_optimizer="file", offload_path=str(tmp_path / "offload")
        )
        spec = dataclasses.replace(spec, memory=memory)
        found = merged(ranks.run(ranks_used, flawed_step, spec, OFFLOADS_ALL))
        assert same(found, reference)
        return
    else:
        alone = spec_of(model, ParallelSpec())
        spec, alone = (replace_at(each, "train.reduction", "integer") for each in (spec, alone))
        reference = merged(ranks.run(1, steps_on_this_rank, alone, 1))
    assert same(merged(ranks.run(ranks_used, steps_on_this_rank, spec, 1)), reference)


def test_experts_that_serve_several_slots_at_once_keep_that_hash(ranks: Ranks) -> None:
    found = []
    for count, parallel in ((1, ParallelSpec()), (4, divided(MODELS["mixture"], 2, 1))):
        parallel = dataclasses.replace(parallel, expert=count)
        spec = spec_of(MODELS["mixture"], parallel)
        train = dataclasses.replace(spec.train, batch_size=8, slots=4, expert_sums="slot")
        spec = dataclasses.replace(spec, train=train)
        found.append(merged(ranks.run(count, steps_on_this_rank, spec, 1)))
    assert same(*found)


@pytest.mark.parametrize("model", MODELS)
def test_lanes_and_tiles_change_no_more_than_rounding(ranks: Ranks, model: str) -> None:
    cut = dataclasses.replace(MODELS[model], qkv_bias=False, attention_bias=False)  # whose gradients cancel
    whole = dataclasses.replace(cut, lanes=0, context_tiles=0)
    within, without = (
        merged(ranks.run(1, steps_on_this_rank, spec_of(each, ParallelSpec()), 1)) for each in (cut, whole)
    )
    assert worst_error(within, without) <= ROUNDING


@pytest.mark.slow
def test_such_a_run_goes_on_under_other_degrees_with_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    def spec(folder: str, tensor: int, context: int) -> RunSpec:
        run = tiny_run(dataset, tmp_path / folder, steps=4)
        run = replace_at(replace_at(run, "model.lanes", 2), "model.context_tiles", 2)
        return dataclasses.replace(run, parallel=divided(run.model, tensor, context))

    undisturbed = ranks.run(1, train_on_this_rank, spec("one", 1, 1))[0]
    ranks.run(4, train_on_this_rank, spec("two", 2, 2), 2)
    ranks.run(2, train_on_this_rank, spec("two", 1, 2), 3)
    result = ranks.run(2, train_on_this_rank, spec("two", 2, 1))[0]
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["held_out_loss"] == undisturbed["held_out_loss"]
    assert not result.get("layout_changes")


def without_runs(leaves: Sequence[Leaves], upstream: Sequence[Tensor]) -> list[Tensor]:
    """``_added`` that adds a rank's tiles before it asks its neighbors for their lanes."""
    return _added([dataclasses.replace(part, runs=1) for part in leaves], upstream)


def tiles_at_once(self: TileByTile, owners: Owners, tensors: Any, inputs: Any) -> Tensor:
    """``TileByTile`` that computes all tiles together."""
    with in_place_of(owners, tensors[0]):
        return self.by_heads(inputs)


SHARES = "phalanx.parallel.tensor.lanes.shares"
LANED, TILED = "phalanx.parallel.tensor.lanes", "phalanx.parallel.context.fixed"
MUTANTS: dict[str, tuple[int, int, Flaw]] = {
    "gradient of weights that lanes share": (2, 1, (SHARES, "_added", without_runs)),
    "gradient of weights, on a rank": (1, 1, (SHARES, "add_in_tree", one_after_the_other)),
    "gradient of weights, over tiles": (1, 4, (f"{TILED}.ranks", "sum_in_tree", one_after_the_other)),
    "gradient of keys": (1, 1, (f"{TILED}.core", "add_in_tree", one_after_the_other)),
    "results of lanes": (1, 1, (f"{LANED}.layers", "add_in_tree", one_after_the_other)),
    "results of inner elements": (1, 1, (f"{LANED}.layers", "TileByTile.__call__", tiles_at_once)),
    "pieces of tiles": (1, 1, (f"{LANED}.pieces", "InPieces.__call__", at_once)),
    "loss": (1, 1, ("phalanx.train.step.loss", "add_in_tree", one_after_the_other)),
}
"""Flaws, and the tensor and context degrees with which they are computed."""


@pytest.mark.parametrize(
    "mutant", quick(MUTANTS, of_the_suite=["gradient of weights, over tiles", "results of lanes"])
)
def test_a_flaw_in_how_lanes_and_tiles_go_together_would_be_noticed(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], mutant: str
) -> None:
    (tensor, context, flaw), model = MUTANTS[mutant], MODELS["dense"]
    spec = spec_of(model, divided(model, tensor, context))
    assert not same(merged(ranks.run(tensor * context, flawed_step, spec, flaw)), one_rank("dense", "fp32"))
