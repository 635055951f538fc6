"""Rules between fields: each is broken by itself, names its fields and offers a way out that works."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import Problem
from phalanx.run.layout import layout_problems
from phalanx.run.rules import check
from phalanx.run.spec import (
    MlaSpec,
    ModelSpec,
    MoeSpec,
    ObserveSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeScalingSpec,
    RunSpec,
    TrainSpec,
)


def only_problem(**sections: Any) -> Problem:
    (problem,) = check(replace(RunSpec(), **sections))
    return problem


def test_the_default_run_and_every_preset_are_possible() -> None:
    assert check(RunSpec()) == []
    for preset in PRESETS.values():
        assert check(RunSpec(model=preset)) == []


def test_heads_divide_the_width_unless_their_width_is_given() -> None:
    problem = only_problem(model=ModelSpec(dim=256, heads=5))
    assert problem.path == "model.heads"
    assert "2, 4, 8" in problem.remedy
    assert check(RunSpec(model=ModelSpec(dim=256, heads=5, head_dim=64))) == []


def test_a_head_is_rotated_in_pairs() -> None:
    assert only_problem(model=ModelSpec(head_dim=7)).path == "model.head_dim"
    assert only_problem(model=ModelSpec(dim=12, heads=4)).path == "model.head_dim"


@pytest.mark.parametrize("fraction", [0.01, 0.55])
def test_the_part_of_a_head_that_is_rotated_is_rotated_in_pairs(fraction: float) -> None:
    assert only_problem(model=ModelSpec(head_dim=20, rope_fraction=fraction)).path == "model.rope_fraction"
    assert check(RunSpec(model=ModelSpec(head_dim=20, rope_fraction=0.5))) == []


def test_biases_of_queries_keys_and_values_are_set_once() -> None:
    assert only_problem(model=ModelSpec(attention_bias=True, qkv_bias=True)).path == "model.qkv_bias"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("model.window", {"attention_pattern": ("full", "window")}),
        ("model.window", {"window": 100}),
        ("model.window_rope_theta", {"window_rope_theta": 100.0}),
        (
            "model.window_rope_theta",
            {"attention_pattern": ("window",), "window": 9, "window_rope_theta": 0.5},
        ),
    ],
)
def test_layers_with_a_window_and_the_window_come_together(path: str, fields: dict[str, Any]) -> None:
    assert only_problem(model=ModelSpec(**fields)).path == path
    complete = ModelSpec(attention_pattern=("window",), window=9, window_rope_theta=9.0)
    assert check(RunSpec(model=complete)) == []


def test_norms_over_all_heads_need_normalized_heads_and_one_tensor_rank() -> None:
    model = ModelSpec(qk_norm_width="all")
    assert only_problem(model=model).path == "model.qk_norm_width"
    model = replace(model, qk_norm=True)
    assert check(RunSpec(model=model)) == []
    assert only_problem(model=model, parallel=ParallelSpec(tensor=2)).path == "parallel.tensor"


def test_only_shared_experts_are_weighed_by_a_gate() -> None:
    problem = only_problem(model=ModelSpec(moe=MoeSpec(shared_gate=True)))
    assert problem.path == "model.moe.shared_gate"
    assert check(RunSpec(model=ModelSpec(moe=MoeSpec(shared=1, shared_gate=True)))) == []


def test_a_group_judged_by_its_best_may_have_one_expert() -> None:
    moe = MoeSpec(experts=4, groups=4, groups_per_token=3, group_score="best")
    assert check(RunSpec(model=ModelSpec(moe=moe))) == []


def test_key_heads_divide_query_heads() -> None:
    problem = only_problem(model=ModelSpec(heads=4, kv_heads=3))
    assert problem.path == "model.kv_heads"
    assert problem.remedy == "1, 2, 4 divide 4"


def test_the_band_of_blended_frequencies_does_not_end_before_it_begins() -> None:
    scaling = RopeScalingSpec(low_freq_factor=2.0, high_freq_factor=1.0)
    assert only_problem(model=ModelSpec(rope_scaling=scaling)).path == "model.rope_scaling.high_freq_factor"
    assert check(RunSpec(model=ModelSpec(rope_scaling=replace(scaling, high_freq_factor=2.0)))) == []


def test_yarn_blends_from_fast_to_slow() -> None:
    yarn = RopeScalingSpec(kind="yarn", beta_fast=1.0, beta_slow=2.0)
    assert only_problem(model=ModelSpec(rope_scaling=yarn)).path == "model.rope_scaling.beta_fast"
    # Kimi K2's: the band is what rounding makes of one point.
    assert check(RunSpec(model=ModelSpec(rope_scaling=replace(yarn, beta_slow=1.0)))) == []


def test_only_latent_attention_has_a_temperature_in_its_softmax() -> None:
    model = ModelSpec(rope_scaling=RopeScalingSpec(kind="yarn", mscale_all_dim=1.0))
    assert only_problem(model=model).path == "model.rope_scaling.mscale_all_dim"
    assert check(RunSpec(model=replace(model, mla=MlaSpec()))) == []


@pytest.mark.parametrize(
    ("path", "model"),
    {
        "model.mla.rope_head_dim": ModelSpec(mla=MlaSpec(rope_head_dim=15)),
        "model.head_dim": ModelSpec(mla=MlaSpec(), head_dim=32),
        "model.kv_heads": ModelSpec(mla=MlaSpec(), kv_heads=2),
        "model.qk_norm": ModelSpec(mla=MlaSpec(), qk_norm=True),
        "model.attention_bias": ModelSpec(mla=MlaSpec(), attention_bias=True),
        "model.qkv_bias": ModelSpec(mla=MlaSpec(), qkv_bias=True),
        "model.rope_fraction": ModelSpec(mla=MlaSpec(), rope_fraction=0.5),
        "model.attention_pattern": ModelSpec(mla=MlaSpec(), attention_pattern=("full",)),
    }.items(),
)
def test_latent_attention_has_widths_of_its_own(path: str, model: ModelSpec) -> None:
    assert only_problem(model=model).path == path
    # Its heads need not divide the model's width.
    assert check(RunSpec(model=ModelSpec(mla=MlaSpec(), heads=5))) == []


def test_what_is_absorbed_is_multiplied_in_the_format_of_activations() -> None:
    model = ModelSpec(mla=MlaSpec(absorbed=True))
    assert check(RunSpec(model=model)) == []
    problem = only_problem(model=model, precision=PrecisionSpec(matmul="fp8-rowwise"))
    assert problem.path == "model.mla.absorbed"
    assert "precision.matmul" in problem.remedy
    expanded = replace(model, mla=MlaSpec())
    assert check(RunSpec(model=expanded, precision=PrecisionSpec(matmul="fp8-rowwise"))) == []


@pytest.mark.parametrize(
    ("path", "moe"),
    {
        "model.moe.per_token": MoeSpec(experts=4, per_token=5),
        "model.moe.groups": MoeSpec(experts=8, groups=3),
        "model.moe.groups_per_token": MoeSpec(experts=8, groups=2, groups_per_token=3),
        "model.moe.first_dense": MoeSpec(first_dense=4),
        "model.moe.normalize": MoeSpec(per_token=1),
        "model.moe.ffn_dim": MoeSpec(ffn_dim=100),
    }.items(),
)
def test_experts_can_be_chosen_and_computed(path: str, moe: MoeSpec) -> None:
    assert only_problem(model=ModelSpec(moe=moe)).path == path


def test_a_token_has_enough_experts_in_its_groups() -> None:
    moe = MoeSpec(experts=8, per_token=3, groups=4, groups_per_token=1)
    assert "more groups_per_token" in only_problem(model=ModelSpec(moe=moe)).remedy
    assert check(RunSpec(model=ModelSpec(moe=replace(moe, groups_per_token=2)))) == []


def test_groups_have_two_best() -> None:
    moe = MoeSpec(experts=8, groups=8, groups_per_token=2)
    assert only_problem(model=ModelSpec(moe=moe)).path == "model.moe.groups"


def test_longrope_has_a_factor_for_each_frequency_and_no_other_method_has_any() -> None:
    fitting = RopeScalingSpec(kind="longrope", short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    model = ModelSpec(dim=32, heads=4, rope_scaling=fitting)
    assert check(RunSpec(model=model)) == []
    for wrong in (
        replace(fitting, short_factors=(1.0,) * 3),
        replace(fitting, short_factors=(1.0, 1.0, 0.0, 1.0)),
    ):
        assert (
            only_problem(model=replace(model, rope_scaling=wrong)).path == "model.rope_scaling.short_factors"
        )
    yarn = RopeScalingSpec(kind="yarn", long_factors=(2.0,))
    assert only_problem(model=replace(model, rope_scaling=yarn)).path == "model.rope_scaling.long_factors"
    short = replace(fitting, original_max_seq_len=1)
    assert only_problem(model=replace(model, rope_scaling=short)).path.endswith("original_max_seq_len")


def test_one_expert_per_token_needs_its_score() -> None:
    assert check(RunSpec(model=ModelSpec(moe=MoeSpec(per_token=1, normalize=False)))) == []


def test_slots_divide_the_batch() -> None:
    problem = only_problem(train=TrainSpec(batch_size=32, slots=7))
    assert problem.path == "train.slots"
    assert "8" in problem.remedy


def test_micro_batches_divide_a_slot() -> None:
    problem = only_problem(train=TrainSpec(batch_size=32, slots=4, micro_batch_size=3))
    assert problem.path == "train.micro_batch_size"
    assert "a slot of 8 sequences" in problem.finding


def test_a_replicated_model_is_not_shared() -> None:
    problem = only_problem(parallel=ParallelSpec(sharding="none", shard_ranks=2))
    assert problem.path == "parallel.shard_ranks"
    assert "zero3" in problem.remedy


def test_groups_that_share_a_model_divide_the_ranks() -> None:
    problem = only_problem(parallel=ParallelSpec(ranks=6, shard_ranks=4))
    assert problem.path == "parallel.shard_ranks"
    assert "2, 3, 6" in problem.remedy


def test_no_rank_is_without_a_slot() -> None:
    problem = only_problem(parallel=ParallelSpec(ranks=9))
    assert problem.path == "parallel.ranks"
    assert "at most 8 ranks with train.slots = 8" in problem.remedy
    assert layout_problems(RunSpec(), 8) == []
    assert [problem.path for problem in layout_problems(RunSpec(), 9)] == ["parallel.ranks"]


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_the_slots_that_are_offered_do_divide_the_batch(batch_size: int, slots: int) -> None:
    for problem in check(RunSpec(train=TrainSpec(batch_size=batch_size, slots=slots))):
        offered = [int(number) for number in re.findall(r"\d+", problem.remedy.split(" divide ")[0])]
        assert offered
        assert all(batch_size % number == 0 for number in offered)


def test_the_host_of_the_metrics_is_written_without_a_port() -> None:
    assert only_problem(observe=ObserveSpec(metrics_host="10.0.0.5:9400")).path == "observe.metrics_host"
    for host in ("::1", "[::1]", "", "0.0.0.0"):
        assert check(RunSpec(observe=ObserveSpec(metrics_host=host))) == []


def test_problems_name_fields_that_exist() -> None:
    broken = RunSpec(
        model=ModelSpec(
            dim=30,
            heads=4,
            kv_heads=3,
            rope_scaling=RopeScalingSpec(high_freq_factor=0.5),
            moe=MoeSpec(experts=9, groups=2, per_token=1, first_dense=9, ffn_dim=30),
            mtp_depth=1,
        ),
        train=TrainSpec(steps=1, slots=7),
        parallel=ParallelSpec(ranks=9, shard_ranks=2, sharding="none", pipeline=2),
    )
    latent = replace(
        broken,
        model=replace(
            broken.model,
            mla=MlaSpec(rope_head_dim=5),
            head_dim=3,
            qk_norm=True,
            sinks=True,
            moe=MoeSpec(experts=8, groups=8, groups_per_token=9),
        ),
    )
    problems = [*check(broken), *check(latent)]
    assert len({problem.path for problem in problems}) >= 15
    for path in {path for problem in problems for path in (problem.path, *problem.also)}:
        section: Any = latent
        for name in path.split("."):
            assert name in {item.name for item in fields(section)}
            section = getattr(section, name)


OWN = ModelSpec(factory="models:make")


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"model": replace(OWN, factory="models.make")}, "model.factory"),
        ({"model": OWN, "parallel": ParallelSpec(tensor=2)}, "parallel.tensor"),
        ({"model": OWN, "parallel": ParallelSpec(context=2)}, "parallel.context"),
        ({"model": replace(OWN, moe=MoeSpec())}, "model.moe"),
        ({"model": replace(OWN, mla=MlaSpec())}, "model.mla"),
        ({"model": replace(OWN, mtp_depth=1)}, "model.mtp_depth"),
        ({"model": OWN, "train": TrainSpec(document_mask=True)}, "train.document_mask"),
        ({"model": OWN, "precision": PrecisionSpec(matmul="mxfp8")}, "precision.matmul"),
    ],
)
def test_fields_that_a_model_of_ones_own_does_not_state_are_refused(
    sections: dict[str, Any], path: str
) -> None:
    problem = only_problem(**sections)
    assert problem.path == path
    assert path == "model.factory" or "models:make" in problem.finding


def test_a_model_of_ones_own_may_be_divided_over_shards_and_a_pipeline_and_have_any_heads() -> None:
    own = replace(OWN, heads=3, layers=4)
    assert check(RunSpec(model=own, parallel=ParallelSpec(pipeline=2))) == []


def test_a_url_is_no_run_directory() -> None:
    (problem,) = check(replace(RunSpec(), run_dir="s3://bucket/run"))
    assert (problem.path, problem.also) == ("run_dir", ("checkpoint.store",))
