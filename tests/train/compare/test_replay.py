"""A step that is computed again under a witness: what a run computed, and the module and rank of a planted culprit."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.reduction import reduce_scatter
from phalanx.parallel.reduction.data_parallel import local, named_parameters
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import MoeSpec, ParallelSpec, RunSpec
from phalanx.train.compare.observation import Parting, RankReplay, Replay, ReplayOrder, compare_replays
from phalanx.train.compare.replay import nothing, replay
from phalanx.train.step.state import Built
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank

Fault = Callable[[int, Built], None]
CPU = torch.device("cpu")
GRADIENTS = ("slot gradient", "gradient")


def replayed(spec: RunSpec, order: ReplayOrder, fault: Fault | None = None) -> RankReplay:
    """Replays on this rank of the current process group."""
    return replay(spec, order, RunDirectory(Path(spec.run_dir)), CPU, fault or nothing)


def together(seen: list[RankReplay]) -> Replay:
    return Replay(seen[0].layout, [rank_replay.observed for rank_replay in seen], seen[0].numbers)


def on(ranks: Ranks, count: int, spec: RunSpec, order: ReplayOrder, fault: Fault | None = None) -> Replay:
    return together(ranks.run(count, replayed, spec, order, fault))


@pytest.fixture(scope="module")
def spec(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run with two micro-batches to a slot, which a witness must distinguish."""
    return tiny_run(dataset, tmp_path_factory.mktemp("replay") / "run", micro_batch_size=1)


@pytest.fixture(scope="module")
def healthy(ranks: Ranks, spec: RunSpec) -> Replay:
    """The first two steps on one rank."""
    return on(ranks, 1, spec, ReplayOrder(to_step=2))


@pytest.mark.servers
@pytest.mark.parametrize(("count", "sharding"), [(2, "zero3"), (3, "none"), (2, "zero2")])
def test_layouts_that_only_hold_the_model_differently_agree_in_everything(
    count: int, sharding: str, ranks: Ranks, spec: RunSpec, healthy: Replay
) -> None:
    comparison = compare_replays(
        healthy, on(ranks, count, on_layout(spec, sharding, 0), ReplayOrder(to_step=2))
    )
    assert comparison.parting is None
    assert comparison.left_out == ()
    modules = {
        observation.name
        for seen in healthy.observed
        for observation in seen
        if observation.moment == "forward"
    }
    assert {"embedding", "blocks.1.attention", "blocks.1.ffn", "norm", "the loss"} <= modules
    assert {
        observation.micro_batch
        for seen in healthy.observed
        for observation in seen
        if observation.moment == "forward"
    } == {0, 1}
    assert comparison.observations == len(healthy.observed[0])
    weights = [
        {observation.name for observation in healthy.observed[0] if observation.moment == moment}
        for moment in GRADIENTS
    ]
    assert weights[0] == weights[1] != set()


def flip_a_bit_of_one_rank(step: int, built: Built) -> None:
    """Flips a bit of one element of rank 1's share of a weight, in memory, before step 2."""
    if step == 2 and dist.get_rank() == 1:
        weight = local(named_parameters(built.model.parts)["blocks.1.ffn.up.weight"].detach())
        weight.view(torch.int32).view(-1)[5] ^= 1


def multiply_in_another_order(step: int, built: Built) -> None:
    """Gives rank 1 another kernel for one product: halves of the inner dimension, added."""

    def by_halves(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return F.linear(x[..., :half], weight[:, :half]) + F.linear(x[..., half:], weight[:, half:])

    if step == 1 and dist.get_rank() == 1:
        built.model.parts[0].get_submodule("blocks.0.attention.value").product = by_halves


def replayed_with_a_wrong_gather(spec: RunSpec, order: ReplayOrder) -> RankReplay:
    """Replays with an all-gather of weights that gives rank 1 the shares in another order, once in step 2."""
    right, calls = reduce_scatter.all_gather_single, [0]
    step_now = [0]

    def gather(output: Tensor, piece: Tensor, group: Any) -> None:
        right(output, piece, group)
        if step_now[0] == 2 and dist.get_rank() == 1:
            calls[0] += 1
            if calls[0] == 2:  # the first block's; the root's comes before
                output.copy_(output.view(group.size(), -1).flip(0).reshape(-1))

    def note(step: int, _built: Built) -> None:
        step_now[0] = step

    reduce_scatter.all_gather_single = gather
    try:
        return replayed(spec, order, note)
    finally:
        reduce_scatter.all_gather_single = right


def parting_of(healthy: Replay, other: Replay) -> Parting:
    parting = compare_replays(healthy, other).parting
    assert parting is not None
    return parting


def test_a_flipped_bit_is_named_by_weight_and_rank(ranks: Ranks, spec: RunSpec, healthy: Replay) -> None:
    sick = on(ranks, 2, spec, ReplayOrder(to_step=2), flip_a_bit_of_one_rank)
    parting = parting_of(healthy, sick)
    assert (parting.step, parting.moment, parting.name) == (2, "weight", "blocks.1.ffn.up.weight")
    same_cut = parting_of(on(ranks, 2, spec, ReplayOrder(to_step=2)), sick)
    assert str(same_cut) == "step 2, before the step, weight blocks.1.ffn.up.weight: rank 1 of A, rank 1 of B"


def test_a_flipped_bit_in_one_of_several_copies_is_named_without_an_equal_layout(
    ranks: Ranks, spec: RunSpec, healthy: Replay
) -> None:
    copies = on_layout(spec, "none", 0)
    parting = parting_of(healthy, on(ranks, 2, copies, ReplayOrder(to_step=2), flip_a_bit_of_one_rank))
    assert (
        str(parting)
        == "step 2, before the step, weight blocks.1.ffn.up.weight: rank 1 of B not as its other ranks"
    )


def test_another_kernel_is_named_by_module_and_rank(ranks: Ranks, spec: RunSpec, healthy: Replay) -> None:
    sick = on(ranks, 2, spec, ReplayOrder(to_step=1), multiply_in_another_order)
    parting = parting_of(healthy, sick)
    assert (parting.step, parting.moment, parting.name) == (1, "forward", "blocks.0.attention.value")
    assert (parting.slot, parting.ranks) == (1, ((0,), (1,)))  # slots are dealt in turn


def test_a_wrong_collective_is_named_by_module_and_rank(ranks: Ranks, spec: RunSpec, healthy: Replay) -> None:
    sick = together(ranks.run(2, replayed_with_a_wrong_gather, spec, ReplayOrder(to_step=2)))
    parting = parting_of(healthy, sick)
    assert (parting.step, parting.moment) == (2, "forward")
    assert parting.name.startswith("blocks.0.")
    assert (parting.slot, parting.ranks) == (1, ((0,), (1,)))


class _GradientInAnotherOrder(torch.autograd.Function):
    """A linear product whose weight's gradient is added up from its last row to its first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        pairs = zip(upstream[0].flatten(0, 1), x.flatten(0, 1), strict=True)
        rows = [slope[:, None] * row for slope, row in pairs]
        return upstream[0] @ weight, functools.reduce(torch.add, reversed(rows))


def differentiate_in_another_order(step: int, built: Built) -> None:
    """Gives rank 1 another kernel for the gradient of one weight."""
    if step == 1 and dist.get_rank() == 1:
        module = built.model.parts[0].get_submodule("blocks.1.ffn.down")
        vars(module)["product"] = _GradientInAnotherOrder.apply


def test_another_kernel_for_a_weights_gradient_is_named_by_the_rank_that_computed_it(
    ranks: Ranks, spec: RunSpec, healthy: Replay
) -> None:
    sick = on(ranks, 2, spec, ReplayOrder(to_step=1), differentiate_in_another_order)
    parting = parting_of(healthy, sick)
    assert (parting.step, parting.moment, parting.name) == (1, "slot gradient", "blocks.1.ffn.down.weight")
    assert (parting.slot, parting.ranks) == (1, ((0,), (1,)))  # not the rank that holds the sum


def replayed_with_a_wrong_exchange(spec: RunSpec, order: ReplayOrder) -> RankReplay:
    """Replays with a reduce-scatter that gives rank 1 one group's slots in the other order: the right sum of the wrong shares."""
    right = TreeReduceScatter._exchanged

    def exchanged(self: TreeReduceScatter, gradient: Tensor, group: Any) -> Tensor:
        received = right(self, gradient, group)
        if dist.get_rank() == 1 and self.reducer.name == "1":  # the first block
            received = received.roll(1)
        return received

    TreeReduceScatter._exchanged = exchanged  # type: ignore[method-assign]
    try:
        return replayed(spec, order)
    finally:
        TreeReduceScatter._exchanged = right  # type: ignore[method-assign]


def test_a_wrong_exchange_of_gradients_is_distinguished_from_wrong_gradients(
    ranks: Ranks, spec: RunSpec, healthy: Replay
) -> None:
    order = ReplayOrder(to_step=1)
    sick = together(ranks.run(2, replayed_with_a_wrong_exchange, spec, order))
    parting = parting_of(on(ranks, 2, spec, order), sick)
    assert parting.moment == "gradient"
    assert parting.name.startswith("blocks.0.")
    assert parting.ranks == ((1,), (1,))
    assert parting_of(healthy, sick).moment == "gradient"


def divided(spec: RunSpec, **parallel: int) -> RunSpec:
    return dataclasses.replace(spec, parallel=dataclasses.replace(ParallelSpec(), **parallel))


def test_stages_of_a_pipeline_agree_with_the_whole_model(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    untied = tiny_run(dataset, tmp_path / "run", micro_batch_size=1)
    untied = replace_at(untied, "model.tie_embeddings", False)
    order = ReplayOrder(to_step=1)
    undivided = on(ranks, 1, untied, order)
    comparison = compare_replays(undivided, on(ranks, 2, divided(untied, pipeline=2), order))
    assert comparison.parting is None
    assert comparison.left_out == ()
    assert {"head.weight", "embedding.weight"} <= {
        observation.name for observation in undivided.observed[0] if observation.moment == "slot gradient"
    }


@pytest.mark.servers
@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"context": 2}])
def test_layouts_that_divide_the_model_are_compared_by_their_undivided_tensors(
    degrees: dict[str, int], ranks: Ranks, spec: RunSpec, healthy: Replay
) -> None:
    comparison = compare_replays(healthy, on(ranks, 2, divided(spec, **degrees), ReplayOrder(to_step=2)))
    # Sums over tensor ranks and over a ring's pieces are made in another order than on one rank.
    assert comparison.parting is not None
    assert comparison.parting.name == "blocks.0.attention"
    assert comparison.parting.moment == "forward"
    assert "blocks.0.attention.query" in comparison.left_out


def test_a_replay_from_a_checkpoint_computes_what_the_run_logged_and_leaves_the_run_alone(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    run = tiny_run(dataset, tmp_path / "run")
    ranks.run(2, train_on_this_rank, run)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    order = ReplayOrder(6, 4, str(tmp_path / "run" / "checkpoints"))
    seen = on(ranks, 2, run, order)
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    logged = {
        line["step"]: {name: line[name] for name in ("loss", "grad_norm")}
        for line in lines
        if line["kind"] == "Step"
    }
    assert seen.numbers == {step: logged[step] for step in (5, 6)}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.slow
def test_mixtures_recomputed_layers_and_narrow_formats_can_be_witnessed(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run")
    model = dataclasses.replace(
        spec.model, moe=MoeSpec(experts=4, per_token=2, ffn_dim=32, balance_bias=True)
    )
    spec = replace_at(replace_at(spec, "memory.recompute", "full"), "precision.compute", "bf16")
    spec = dataclasses.replace(spec, model=model)
    order = ReplayOrder(to_step=2)
    comparison = compare_replays(on(ranks, 1, spec, order), on(ranks, 3, spec, order))
    assert (comparison.parting, comparison.left_out) == (None, ())


@pytest.mark.parametrize(("count", "sharding"), [(2, "zero3"), (3, "none")])
def test_measures_of_a_step_have_the_same_bits_on_other_ranks_and_add_up(
    count: int, sharding: str, ranks: Ranks, spec: RunSpec
) -> None:
    order = ReplayOrder(to_step=3, is_measured=True)
    alone, other = (
        ranks.run(1, replayed, spec, order)[0],
        ranks.run(count, replayed, on_layout(spec, sharding, 0), order),
    )
    assert all((seen.measures, seen.scores) == (alone.measures, alone.scores) for seen in other)
    measures, numbers = alone.measures[3], alone.numbers[3]
    norm = math.sqrt(math.fsum(value**2 for value in measures.layer_norms.values()))
    assert norm == pytest.approx(numbers["grad_norm"])
    assert math.fsum(measures.slot_losses) / len(measures.slot_losses) == pytest.approx(numbers["loss"])
    assert alone.scores is not None
    assert math.fsum(alone.scores.sequences) / len(alone.scores.sequences) == pytest.approx(numbers["loss"])
    assert set(measures.layer_norms) == {"embedding", "blocks.0", "blocks.1", "norm"}
