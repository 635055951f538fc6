"""Layouts in the words of ``--layout`` and ``--require``: one table of names for all that is read and printed."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.run.spec import MlaSpec, RunSpec
from phalanx_plan.search.layout_text import read_layout
from phalanx_plan.search.options import Options, requirement
from phalanx_plan.search.query import Aim, PlanRequestError, job_of, run_of_model, with_requested_modes
from phalanx_plan.search.search import search
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.workload.candidates import LAYOUT_FIELDS, Candidates, PlannedLayout, layout_field

SPEC = run_of_model("llama3-8b", 4096, 128)
JOB = job_of(SPEC, cluster("h100:64"), keep_slots=False)


def read(text: str, spec: RunSpec = SPEC) -> PlannedLayout:
    return read_layout(text, spec, JOB)


def test_parts_that_are_computed_again_are_named_in_a_layout_and_in_a_condition() -> None:
    """Parts have Megatron's names or the planner's; a name of Megatron's is as good as its parts."""
    named, conditions = "recompute=mlp+norm", ("recompute=core_attn+layernorm",)
    aim = Aim(layout=f"tp=4,{named}", require=conditions, stack="megatron")
    megatron_job = with_requested_modes(job_of(SPEC, cluster("h100:64"), stack="megatron"), aim)
    layout = read_layout("tp=4,recompute=mlp+norm", SPEC, megatron_job)
    again, none, full = (
        estimate(megatron_job, replace(layout, recompute=mode)) for mode in (layout.recompute, "none", "full")
    )
    assert none.memory["activations"] > again.memory["activations"] > full.memory["activations"]
    assert none.time["recompute"] == 0 < again.time["recompute"] < full.time["recompute"]
    assert requirement(conditions[0], megatron_job).value == len(megatron_job.modes) - 1
    assert megatron_job.modes[-1].parts == {"core", "norm"}


def test_parts_that_there_are_not_are_refused_by_name_and_the_trainer_s_own_modes_are_none_of_them() -> None:
    aim = Aim(layout="recompute=mlp+nrom")
    with pytest.raises(ValueError, match=r"'nrom' is no part of a layer: join some of .*norm"):
        with_requested_modes(
            job_of(SPEC, cluster("h100:64"), stack="megatron"), replace(aim, stack="megatron")
        )
    with pytest.raises(PlanRequestError, match="take one of none, selective, full"):
        read_layout("recompute=mlp+norm", SPEC, with_requested_modes(JOB, aim))


@pytest.mark.parametrize("parts", ["moe", "moe+norm", "norm+moe"])
def test_a_part_of_experts_is_refused_where_there_are_none_also_beside_parts_that_there_are(
    parts: str,
) -> None:
    job = job_of(SPEC, cluster("h100:64"), stack="megatron")
    with pytest.raises(
        PlanRequestError, match=f"recompute={re.escape(parts)}: the model has no experts, and so no 'moe'"
    ):
        with_requested_modes(job, Aim(require=(f"recompute={parts}",), stack="megatron"))


def test_latents_are_made_again_where_there_are_some_in_dense_models_as_well() -> None:
    aim = Aim(require=("recompute=mla_up_proj",), stack="megatron")
    with pytest.raises(PlanRequestError, match="recompute=mla_up_proj: the model has no latent attention"):
        with_requested_modes(job_of(SPEC, cluster("h100:64"), stack="megatron"), aim)
    dense = replace(SPEC, model=replace(SPEC.model, kv_heads=0, mla=MlaSpec(kv_rank=512)))
    job = with_requested_modes(job_of(dense, cluster("h100:64"), stack="megatron"), aim)
    options = Options(require=("recompute=mla_up_proj", "pp=1", "cp=1", "mbs=1"))
    assert {finalist.layout.recompute for finalist in search(job, options).best} == {"mla_up_proj"}


@pytest.mark.parametrize("switch", ["sequence_parallel", "offload_optimizer", "offload_activations"])
def test_a_switch_is_on_or_off(switch: str) -> None:
    with pytest.raises(PlanRequestError, match=f"{switch}=2: write 1 for yes or 0 for no"):
        read(f"dp=64,{switch}=2")


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        (("zero=9",), r"condition zero=9 leaves no layout: .* have 2, 3$"),
        (("tp=3",), r"condition tp=3 leaves no layout: .* 1, 2, 4, 8"),
        (("tp<2", "tp>2"), r"condition tp>2, together with tp<2, leaves no layout: .* have 1$"),
        (
            ("schedule=zbv", "pp=1"),
            r"condition pp=1, together with schedule=zbv, leaves no layout: .* have 2, ",
        ),
    ],
)
def test_a_condition_that_nothing_meets_is_refused_with_what_could_be_met(
    conditions: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        search(JOB, Options(require=conditions))


def test_the_parts_that_a_software_computes_again_by_itself_are_a_mode_of_its_search() -> None:
    spec = run_of_model("deepseek-v3", 4096, 1024)
    modes = job_of(spec, cluster("h800:256"), stack="deepseek").modes
    assert modes[-1].parts == {"norm", "latent_up", "activation", "expert_activation"}
    bridge = job_of(spec, cluster("gb200-nvl72:72"), stack="megatron-bridge").modes
    assert bridge[-1].name == "mla_up_proj"


def test_every_field_of_a_layout_has_a_name() -> None:
    derived = {"data", "ranks"}
    names = [field.name for field in LAYOUT_FIELDS]
    assert sorted(names) == sorted({field.name for field in fields(PlannedLayout)} | derived)
    assert {field.name for field in fields(PlannedLayout)} == {field.name for field in fields(Candidates)}
    words = [word for field in LAYOUT_FIELDS for word in {field.name, field.shown}]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("word", sorted({word for each in LAYOUT_FIELDS for word in (each.name, each.shown)}))
def test_every_name_is_read_in_a_layout_and_in_a_condition_or_refused_with_the_reason(word: str) -> None:
    field = layout_field(word)
    assert field is not None
    value = {"schedule": "1f1b", "recompute": "full", "precision": "bf16", "zero": "3"}.get(field.name, "1")
    if field.not_in_layout:
        with pytest.raises(PlanRequestError, match="dp / fsdp"):
            read(f"{word}={value}")
    else:
        expected = value if value.isalnum() and not value.isdigit() else int(value)
        assert getattr(read(f"{word}={value}"), field.name) == expected
    if field.not_in_require:
        with pytest.raises(ValueError, match=field.not_in_require[:20]):
            requirement(f"{word}={value}", JOB)
    else:
        assert requirement(f"{word}={value}", JOB).name == field.name


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,dp=32,mbs=1,zero=3",
        "tp=8,cp=2,pp=2,dp=2,mbs=1,zero=2,schedule=1f1b,recompute=selective,precision=fp8",
        "pp=4,vpp=2,dp=16,mbs=2,zero=3,schedule=interleaved,recompute=full,offload_optimizer=1",
        "dp=64,fsdp=8,mbs=1,zero=3,offload_activations=1,sequence_parallel=0",
    ],
)
def test_what_is_printed_is_read_back(text: str) -> None:
    assert str(read(text)) == text


def test_a_number_of_accelerators_gives_the_data_parallel_ranks() -> None:
    assert read("tp=2,pp=2,gpus=32") == read("tp=2,pp=2,dp=8")
    with pytest.raises(PlanRequestError, match="no multiple of tp x cp x pp = 4"):
        read("tp=2,pp=2,gpus=30")
    with pytest.raises(PlanRequestError, match="leave one of them out"):
        read("tp=2,gpus=32,dp=8")


def test_the_size_of_a_copy_can_be_required() -> None:
    result = search(JOB, Options(require=("fsdp=8",), micro_batches=(1,)))
    assert {each.layout.shard for each in result.best} == {8}
