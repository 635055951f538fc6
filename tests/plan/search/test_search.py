"""The search against a look at every layout one by one, and its reasons for those that lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from phalanx.hardware.cluster import Fact
from phalanx.run.layout import layout_problems
from phalanx.run.spec import ParallelSpec, RunSpec, RuntimeSpec, TrainSpec
from phalanx_plan.search.options import Options, requirement
from phalanx_plan.search.search import NothingFitsError, SearchResult, search
from phalanx_plan.search.space import exclusions, space
from phalanx_plan.step_cost.estimate import estimate, estimates, prepare
from phalanx_plan.workload.candidates import candidates_of
from phalanx_plan.workload.stacks import TrainingJob
from plan.jobs import job

_SMALL = Options(micro_batches=(1, 2), stages_per_rank=(2,), offload=False, require=("tp<=4", "cp<=2"))


def with_memory(mine: TrainingJob, factor: float) -> TrainingJob:
    """The same job with so much more memory."""
    accelerator = mine.cluster.accelerator
    memory = Fact(accelerator.memory_bytes.value * factor, "test")
    cluster = dataclasses.replace(
        mine.cluster, accelerator=dataclasses.replace(accelerator, memory_bytes=memory)
    )
    return dataclasses.replace(mine, cluster=cluster)


def fields(result: SearchResult) -> list[float]:
    """Seconds of the best."""
    return [finalist.step_s for finalist in result.best]


@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "h100:16"), ("mixtral-8x7b", "h100:32")])
def test_the_search_finds_what_looking_at_every_layout_finds(model: str, cluster: str) -> None:
    mine = job(model, cluster, batch=32)
    result = search(mine, _SMALL)
    candidates = space(mine, _SMALL).candidates
    everything = [candidates.at(flat, mine.modes) for flat in range(int(np.prod(candidates.shape)))]
    # The same layout may not be counted twice: with nothing to share, every ZeRO stage is the same.
    met = [
        layout
        for layout in everything
        if layout.tensor <= 4
        and layout.context <= 2
        and not (layout.zero == 0 and layout.replicate > 1)
        and not (layout.shard * layout.context == 1 and layout.zero > 0)
    ]
    one_by_one = [estimated for estimated in estimates(mine, met, exact=False) if estimated.fits]
    assert result.valid == len(one_by_one)
    best = min(one_by_one, key=lambda estimated: estimated.step_s)
    assert min(estimated.closed_form_s for estimated in result.best) <= best.step_s * (1 + 1e-9)
    assert fields(result) == sorted(fields(result))


def test_every_layout_of_the_space_is_one_that_the_trainer_accepts() -> None:
    mine = job("mixtral-8x7b", "h100:64", batch=64, stack="phalanx")
    candidates = space(mine, Options(micro_batches=(1, 2))).candidates
    for row in np.random.default_rng(0).integers(0, candidates.shape[0], 200):
        layout = candidates.at(int(row) * int(np.prod(candidates.shape[1:])), mine.modes)
        spec = RunSpec(
            model=mine.workload.model,
            train=TrainSpec(
                batch_size=64, seq_len=4096, slots=layout.data, micro_batch_size=layout.micro_batch
            ),
            parallel=ParallelSpec(
                shard_ranks=layout.shard,
                tensor=layout.tensor,
                context=layout.context,
                pipeline=layout.pipeline,
                pipeline_schedule=layout.schedule,
                pipeline_stages=layout.stages_per_rank if layout.pipeline > 1 else 0,
                expert=layout.expert,
                expert_tensor=layout.expert_tensor,
            ),
            runtime=RuntimeSpec(device="cuda"),
        )
        assert layout_problems(spec, layout.ranks) == []


def test_more_memory_never_makes_a_layout_infeasible() -> None:
    mine = job("llama3-70b", "h100:64", batch=64)
    valid = [search(with_memory(mine, factor), _SMALL).valid for factor in (1, 1.5, 4)]
    assert valid == sorted(valid)
    for finalist in search(mine, _SMALL).best:
        assert estimate(with_memory(mine, 2), finalist.layout).fits


def test_nothing_on_the_front_is_beaten() -> None:
    front = search(job("llama3-8b", "h100:64"), Options(gpus=(32, 64))).front
    assert {point.ranks for point in front} >= {32, 64}
    for point in front:
        for other in front:
            better = (other.step_s, other.memory_bytes, other.ranks)
            assert other is point or not all(
                a <= b for a, b in zip(better, (point.step_s, point.memory_bytes, point.ranks), strict=True)
            )


@pytest.mark.parametrize(
    "text", ["tp<=2", "pp>=4", "schedule==1f1b", "zero=1", "recompute!=none", "gpus==64"]
)
def test_what_is_required_holds_for_all_that_is_found(text: str) -> None:
    mine = job("llama3-8b", "h100:64")
    result = search(mine, Options(require=(text,)))
    need = requirement(text, mine)
    for finalist in result.best:
        codes = candidates_of([finalist.layout], mine.modes)
        assert need.holds(codes).all()
    assert result.excluded[text] > 0 or text == "gpus==64"


def test_each_family_that_lost_is_listed_with_the_reason() -> None:
    result = search(job("llama3-70b", "h100:64", batch=128))
    by_family = {loser.family: loser for loser in result.runners_up}
    assert "GB >" in by_family["zero=0"].reason or by_family["zero=0"].slower >= 0
    winner = result.best[0]
    assert f"tensor={winner.layout.tensor}" not in by_family
    for loser in result.runners_up:
        name, value = loser.family.split("=")
        if value.isdigit():
            assert getattr(loser.layout, name) == int(value)
        assert loser.slower >= -1e-9 or not loser.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [("tp", "a field, a comparison"), ("size<=3", "can be required of"), ("schedule<=zbv", "with =")],
)
def test_a_condition_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(job(), Options(require=(text,)))


def test_if_nothing_fits_the_leanest_layout_is_named() -> None:
    mine = job("llama3-405b", "h100:8", batch=8)
    with pytest.raises(NothingFitsError, match="the leanest layout needs") as caught:
        search(mine)
    candidates = space(mine, Options()).candidates
    everything = prepare(mine, candidates).most_memory()
    legal = np.ones((1,), dtype=bool)
    for mask in exclusions(mine, candidates, Options()).values():
        legal = legal & ~mask
    assert caught.value.needed_bytes == pytest.approx(np.where(legal, everything, np.inf).min())
    assert caught.value.capacity_bytes == mine.cluster.accelerator.memory_bytes.value
    assert caught.value.needed_bytes > caught.value.capacity_bytes


def test_where_nothing_is_legal_the_error_is_not_that_nothing_fits() -> None:
    with pytest.raises(ValueError, match="relax") as caught:
        search(job(), Options(require=("tp=1", "tp=2")))
    assert not isinstance(caught.value, NothingFitsError)


@pytest.mark.parametrize(("model", "stack"), [("llama3-70b", "megatron"), ("deepseek-v3", "phalanx")])
def test_the_search_compares_the_figures_of_an_estimate(model: str, stack: str) -> None:
    mine = job(model, "h100:512", batch=512, stack=stack)
    prepared = prepare(mine, space(mine, Options(micro_batches=(1, 2))).candidates)
    geometries = np.random.default_rng(0).choice(prepared.candidates.shape[-1], 40, replace=False)
    some = prepared.rows(geometries)
    bytes_, seconds = (
        np.broadcast_to(each, some.candidates.shape).ravel() for each in (some.most_memory(), some.seconds())
    )
    # Some of all places and choices, each estimated as one layout among others.
    flat = np.arange(0, bytes_.size, 7)
    alone = estimates(mine, [some.candidates.at(int(number), mine.modes) for number in flat], exact=False)
    assert bytes_[flat] == pytest.approx(np.array([each.memory_bytes for each in alone]), rel=1e-12)
    assert seconds[flat] == pytest.approx(np.array([each.step_s for each in alone]), rel=1e-12)


def test_finalists_have_the_figures_of_an_estimate_of_each_alone() -> None:
    mine = job("mixtral-8x7b", "h100:64", stack="phalanx")
    for finalist in search(mine).best:
        alone = estimate(mine, finalist.layout)
        assert (alone.time, alone.memory, alone.worst_rank) == (
            finalist.time,
            finalist.memory,
            finalist.worst_rank,
        )


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "stack"),
    [("llama-100m", "h100:8", 3840, "phalanx"), ("llama3-8b", "h100:16", 480, "megatron")],
)
def test_micro_batches_and_stages_of_any_size_that_divides_are_found(
    model: str, cluster: str, batch: int, stack: str
) -> None:
    mine = job(model, cluster, batch=batch, seq_len=1024, stack=stack)
    layers = mine.workload.model.layers
    every = Options(
        micro_batches=tuple(size for size in range(1, batch + 1) if batch % size == 0),
        stages_per_rank=tuple(range(2, layers + 1)),
    )
    best = search(mine).best[0]
    assert best.step_s == pytest.approx(search(mine, every).best[0].step_s, rel=1e-3)
    if model == "llama-100m":
        assert best.layout.micro_batch not in (1, 2, 3, 4, 6, 8, 16)


def test_a_condition_on_a_size_that_is_tried_late_is_met() -> None:
    mine = job("llama-100m", "h100:8", batch=3840, seq_len=1024, stack="phalanx")
    assert {finalist.layout.micro_batch for finalist in search(mine, Options(require=("mbs=120",))).best} == {
        120
    }


@pytest.mark.parametrize(("model", "stack"), [("llama3-8b", "megatron"), ("mixtral-8x7b", "phalanx")])
def test_no_choice_needs_less_memory_than_the_last_of_each(model: str, stack: str) -> None:
    mine = job(model, "h100:16", batch=64, stack=stack)
    candidates = space(mine, Options(micro_batches=(1, 4), stages_per_rank=(2,))).candidates
    most = np.broadcast_to(prepare(mine, candidates).most_memory(), candidates.shape)
    legal = np.ones((1,), dtype=bool)
    for mask in exclusions(mine, candidates, Options()).values():
        legal = legal & ~mask
    least = np.where(legal, most, np.inf).min(axis=(0, 1, 2, 3))
    assert (most[-1, -1, -1, -1] <= least * (1 + 1e-9)).all()


def test_where_only_large_micro_batches_are_allowed_and_none_fits_the_leanest_is_named() -> None:
    with pytest.raises(NothingFitsError, match="the leanest layout needs"):
        search(job("llama3-70b", "h100:8", batch=512), Options(require=("mbs=64",)))


@pytest.mark.parametrize("stack", ["phalanx", "megatron"])
@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "h100:24"), ("deepseek-v3", "h100:256")])
def test_a_search_sees_the_bytes_and_seconds_that_each_layout_has_alone(
    model: str, cluster: str, stack: str
) -> None:
    mine = job(model, cluster, batch=768, stack=stack)
    candidates = space(mine, Options(micro_batches=(1, 2), require=("tp<=4",))).candidates
    rows = np.random.default_rng(0).integers(0, candidates.shape[-1], 6)
    some = prepare(mine, candidates).with_lasting().rows(rows)
    shape = some.candidates.shape
    layouts = [some.candidates.at(flat, mine.modes) for flat in range(int(np.prod(shape)))]
    alone = estimates(mine, layouts, exact=False)
    together = np.broadcast_to(some.most_memory(), shape)
    assert together.ravel() == pytest.approx([estimated.memory_bytes for estimated in alone])
    assert some.leanest().most_memory().ravel() == pytest.approx(together.reshape(-1, shape[-1])[-1])
    single = prepare(mine, candidates.rows(rows[:1])).with_lasting().most_memory()
    assert np.broadcast_to(single, (*shape[:-1], 1))[..., 0] == pytest.approx(together[..., 0])
    seconds = np.broadcast_to(some.seconds(), shape)
    assert seconds.ravel() == pytest.approx([estimated.step_s for estimated in alone])
