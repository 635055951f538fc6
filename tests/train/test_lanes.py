"""A run that cuts the model's width into lanes has one hash on every layout, whatever its tensor degree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from layouts import (
    DENSE,
    LATENT,
    MIXTURE,
    Whole,
    legal_layouts,
    merged,
    steps_on_this_rank,
    tiny,
    worst_error,
)
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
from phalanx.parallel.tensor.lanes.layers import LanedLayer
from phalanx.run.layout import layout_problems
from phalanx.run.spec import MemorySpec, ModelSpec, ParallelSpec, PrecisionSpec, RunSpec
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank

LANES = 4
MODELS = {
    "dense": dataclasses.replace(DENSE, layers=2, lanes=LANES),
    "shared key heads": ModelSpec(
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        ffn_dim=64,
        vocab_size=61,
        tie_embeddings=True,
        attention_bias=True,
        ffn_bias=True,
        norm_placement="both",
        lanes=LANES,
    ),
    "mixture": dataclasses.replace(MIXTURE, layers=2, lanes=LANES),
    # Whose heads multiply with their own rows of a matrix.
    "absorbed": dataclasses.replace(
        MIXTURE, layers=2, mla=dataclasses.replace(LATENT, absorbed=True), lanes=LANES
    ),
    "ahead": ModelSpec(
        layers=1,
        dim=32,
        heads=4,
        kv_heads=1,
        ffn_dim=64,
        vocab_size=61,
        mtp_depth=1,
        lanes=LANES,
    ),
}


def spec_of(model: ModelSpec, parallel: ParallelSpec, compute: str = "fp32") -> RunSpec:
    """Slots of a micro-batch of two sequences, in a chunk of the loss each and a half."""
    spec = tiny(model, parallel)
    train = dataclasses.replace(spec.train, batch_size=8, micro_batch_size=2, loss_chunk=40)
    return dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]


def divided(model: ModelSpec, tensor: int, **other: Any) -> ParallelSpec:
    return ParallelSpec(tensor=tensor, expert=tensor if model.moe else 1, **other)


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[[str, str], Whole]:
    """The result of a model of ``MODELS`` on one rank."""

    return on_one_rank(ranks, lambda model, compute: spec_of(MODELS[model], ParallelSpec(), compute))


@pytest.mark.parametrize(
    ("model", "compute"),
    [
        *quick(
            ((model, compute) for model in MODELS for compute in ("fp32", "bf16")),
            of_the_suite=[("shared key heads", "fp32"), ("ahead", "fp32"), ("mixture", "bf16")],
        )
    ],
)
def test_a_run_in_lanes_has_one_hash_whatever_its_tensor_degree(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], model: str, compute: str
) -> None:
    for count, tensor, sharding in ((2, 2, "zero3"), (4, 4, "none")):
        parallel = divided(MODELS[model], tensor, sharding=sharding)
        found = merged(ranks.run(count, steps_on_this_rank, spec_of(MODELS[model], parallel, compute), 1))
        assert same(found, one_rank(model, compute)), f"tensor {tensor}"


@pytest.mark.slow  # in lanes and tiles they do in the suite
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_experts_that_serve_several_slots_at_once_keep_that_hash(ranks: Ranks, compute: str) -> None:
    found = []
    for count, parallel in (
        (1, ParallelSpec()),
        (4, ParallelSpec(tensor=2, expert=4)),
        (4, ParallelSpec(expert=2, sharding="zero2")),
    ):
        spec = spec_of(MODELS["mixture"], parallel, compute)
        train = dataclasses.replace(spec.train, batch_size=16, expert_sums="slot")
        found.append(merged(ranks.run(count, steps_on_this_rank, dataclasses.replace(spec, train=train), 1)))
    assert all(same(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(
    "optimizer", quick(["adafactor", "muon", "shampoo", "soap"], of_the_suite=["muon", "shampoo"])
)
def test_no_optimizer_of_whole_matrices_sees_the_tensor_degree(ranks: Ranks, optimizer: str) -> None:
    found = []
    for count in (1, 2):
        spec = replace_at(
            spec_of(MODELS["mixture"], divided(MODELS["mixture"], count)), "optimizer.name", optimizer
        )
        found.append(merged(ranks.run(count, steps_on_this_rank, spec, 2)))
    assert same(*found)


@functools.cache
def layouts(model: str, most_ranks: int) -> list[tuple[int, ParallelSpec]]:
    return [
        (count, parallel)
        for count in (1, 2, 4, 8)
        if count <= most_ranks
        for parallel, _ in legal_layouts(MODELS[model], count)
    ]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, int, RunSpec]:
    model = draw(st.sampled_from(sorted(MODELS)))
    count, parallel = draw(st.sampled_from(layouts(model, 4)))
    if parallel.pipeline > 1:
        schedule = draw(st.sampled_from(("gpipe", "1f1b")))  # others want more layers: test_split_backward.py
        parallel = dataclasses.replace(parallel, pipeline_schedule=schedule)
    memory = MemorySpec(
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
        offload_optimizer=draw(st.sampled_from(("none", "host"))),
    )
    spec = spec_of(MODELS[model], parallel, draw(st.sampled_from(("fp32", "bf16"))))
    return model, count, dataclasses.replace(spec, memory=memory)


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
@given(drawn().filter(lambda case: not layout_problems(case[2], case[1])))
def test_so_it_has_on_any_layout(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], case: tuple[str, int, RunSpec]
) -> None:
    model, count, spec = case
    found = merged(ranks.run(count, steps_on_this_rank, spec, 1))
    assert same(found, one_rank(model, spec.precision.compute))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_legal_layout_of_up_to_eight_ranks_has_the_hash_of_one_rank(
    ranks: Ranks, one_rank: Callable[[str, str], Whole], model: str, compute: str
) -> None:
    others = []
    for count, parallel in layouts(model, 8):
        spec = spec_of(MODELS[model], parallel, compute)
        if layout_problems(spec, count):
            continue
        if not same(merged(ranks.run(count, steps_on_this_rank, spec, 1)), one_rank(model, compute)):
            others.append((count, parallel))
    assert others == []


@pytest.mark.parametrize("model", quick(MODELS, of_the_suite=["mixture"]))
def test_lanes_change_no_more_than_rounding(ranks: Ranks, model: str) -> None:
    whole = dataclasses.replace(MODELS[model], lanes=0, qkv_bias=False)
    cut = dataclasses.replace(
        MODELS[model], qkv_bias=False
    )  # whose gradients of keys cancel but for rounding
    without, within = (
        merged(ranks.run(1, steps_on_this_rank, spec_of(each, ParallelSpec()), 1)) for each in (whole, cut)
    )
    assert worst_error(within, without) <= ROUNDING


@pytest.mark.parametrize(
    "matmul", quick(["fp8-tensorwise", "fp8-rowwise", "mxfp8"], of_the_suite=["fp8-rowwise"])
)
def test_a_narrow_product_has_a_lanes_scales(ranks: Ranks, matmul: str) -> None:
    model = ModelSpec(layers=1, dim=128, heads=2, ffn_dim=128, vocab_size=61, lanes=2)
    results = []
    for tensor in (1, 2):
        spec = spec_of(model, ParallelSpec(tensor=tensor), "bf16")
        precision = dataclasses.replace(spec.precision, matmul=matmul)  # type: ignore[arg-type]
        spec = dataclasses.replace(spec, precision=precision)
        results.append(merged(ranks.run(tensor, steps_on_this_rank, spec, 1)))
    assert same(*results)


@pytest.mark.slow
def test_a_run_in_lanes_goes_on_under_another_tensor_degree_with_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    def spec(folder: str, tensor: int) -> RunSpec:
        run = replace_at(tiny_run(dataset, tmp_path / folder, steps=4), "model.lanes", 4)
        return dataclasses.replace(run, parallel=ParallelSpec(tensor=tensor))

    undisturbed = ranks.run(1, train_on_this_rank, spec("one", 1))[0]
    ranks.run(4, train_on_this_rank, spec("two", 4), 4)
    result = ranks.run(2, train_on_this_rank, spec("two", 2))[0]
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["held_out_loss"] == undisturbed["held_out_loss"]
    assert not result.get("layout_changes")


def under_one_name(x: Tensor, count: int) -> Iterator[Tensor]:
    return iter([x] * count)


def together(count: int, _: Any) -> list[range]:
    """``_parts`` of the loss: the rows of all lanes."""
    return [range(count)]


def lanes_at_once(self: LanedLayer, inputs: tuple[Tensor, ...], context: tuple[Any, ...]) -> Iterator[Tensor]:
    """``LanedLayer._results`` that computes the heads, or inner elements, of all lanes of a rank together."""
    owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
    whole = [
        parameter.owner.get_parameter(parameter.attribute)
        if parameter.shared is None
        else parameter.shared.now()[0]
        for parameter in self.parameters
    ]
    yield self.result(owners, [whole], inputs, *context)


def from_the_end(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
    """The embedding's backward pass, which adds the tokens of a row in the opposite order where a rank has a part of the rows."""
    (row,), gradient = ctx.saved_tensors, upstream[0].contiguous()
    if ctx.count < DENSE.vocab_size:
        row, gradient = row.flip(0, 1), gradient.flip(0, 1)
    rows = torch.ops.aten.embedding_dense_backward(gradient, row, ctx.count + 1, ctx.count, False)
    return rows[: ctx.count], None


LANES_ROOM = "phalanx.parallel.tensor.lanes"
MUTANTS: dict[str, Flaw] = {
    "results of lanes": (f"{LANES_ROOM}.layers", "add_in_tree", one_after_the_other),
    "heads and inner elements": (f"{LANES_ROOM}.layers", "LanedLayer._results", lanes_at_once),
    "results of ranks": ("phalanx.parallel.tensor.sequence_comm", "sum_in_tree", one_after_the_other),
    "gradient of what lanes read": (f"{LANES_ROOM}.layers", "forked", under_one_name),
    "gradient of shared weights": (f"{LANES_ROOM}.shares", "add_in_tree", one_after_the_other),
    "pieces": (f"{LANES_ROOM}.pieces", "InPieces.__call__", at_once),
    "tokens of experts": (f"{LANES_ROOM}.mixture", "RoutedInPieces.__call__", by_sequence),
    "router": (f"{LANES_ROOM}.mixture", "ScoresInPieces.__call__", scores_at_once),
    "embedding": (f"{LANES_ROOM}.vocabulary", "_Rows.backward", from_the_end),
    "scores and loss": ("phalanx.train.step.loss", "_parts", together),
}


@pytest.mark.parametrize(
    "mutant",
    quick(MUTANTS, of_the_suite=["results of ranks", "gradient of shared weights", "tokens of experts"]),
)
def test_a_flaw_in_any_part_of_lanes_would_be_noticed(ranks: Ranks, mutant: str) -> None:
    model = MODELS["mixture" if mutant in ("tokens of experts", "router") else "dense"]
    one, four = (
        merged(ranks.run(tensor, flawed_step, spec_of(model, divided(model, tensor)), MUTANTS[mutant]))
        for tensor in (1, 4)
    )
    assert not same(one, four)
