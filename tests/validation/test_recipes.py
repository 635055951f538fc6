"""Performance recipes: found by model, machine, format and release, and only for rows that ran one."""

from __future__ import annotations

import pytest

from phalanx_plan.workload.candidates import PARTS
from phalanx_plan.workload.recipes import RECIPES, recipe_of, with_recipe
from phalanx_plan.workload.software import MEGATRON
from phalanx_plan.workload.stacks import Stack
from validation.runs import read_published
from validation.setup import setup_of
from validation.software import circumstances_of

from .test_runs import GPT3, row


def qwen(release: str, gpu: str = "GB200", precision: str = "mxfp8", **other: str) -> dict[str, str]:
    named = {"model": "Qwen3_30B_a3B", "gpu": gpu, "precision": precision, "software": "megatron-bridge"}
    return GPT3 | named | {"recipe_release": release} | other


def trained(values: dict[str, str], **changes: str) -> Stack:
    """Megatron's stack as the recipe or the columns of a row set it."""
    run = circumstances_of(row(values, **changes))
    return with_recipe(MEGATRON, run, recipe_of(run))


def test_a_row_of_another_source_has_no_recipe() -> None:
    assert recipe_of(circumstances_of(row(GPT3))) is None
    assert trained(GPT3) == MEGATRON


def test_a_release_changes_what_the_host_launches() -> None:
    before, after = (trained(qwen(release)) for release in ("26.04", "26.06"))
    assert before.kernels.graphed
    assert before.kernels.launch_s > 0
    assert after.kernels.launch_s == 0
    assert before.overlap.expert == 0 < after.overlap.expert


def test_the_formats_two_names_are_one() -> None:
    recipes = {
        recipe_of(circumstances_of(row(qwen("26.06", precision=name)))) for name in ("fp8-mx", "mxfp8")
    }
    assert len(recipes) == 1


@pytest.mark.parametrize(
    ("library", "dispatch"),
    [("hybridep", "hybrid"), ("deepep", "once per node"), ("", "every copy")],
)
def test_a_row_without_recipe_names_the_library_that_carries_tokens(library: str, dispatch: str) -> None:
    assert trained(GPT3, dispatcher=library).experts.dispatch == dispatch


def test_a_recipe_prevails_over_the_columns_of_its_row() -> None:
    stated = {"dispatcher": "deepep", "cuda_graphs": "step", "expert_overlap": "yes"}
    assert trained(qwen("26.04") | stated) == trained(qwen("26.04"))


def test_every_recipe_graphs_parts_that_there_are() -> None:
    assert frozenset().union(*(recipe.graphed for recipe in RECIPES)) <= frozenset(PARTS)


def test_every_recipe_is_of_some_published_row_and_its_recomputation_is_understood() -> None:
    recipes = {run: recipe_of(circumstances_of(run)) for run in read_published()}
    rows = [run for run, recipe in recipes.items() if recipe]
    assert len(set(recipes.values())) > 20
    for run in rows[::7]:
        if run.architecture == "transformer" and run.outcome == "ran":
            assert "recomputation" not in " ".join(setup_of(run).assumptions)


def test_experts_are_padded_by_copies_unless_what_brings_their_rows_pads_them() -> None:
    copied, by_hybridep, graphed, wide = (
        trained(qwen(release, **other)).experts.pads_apart
        for release, other in (
            ("26.02", {"gpu": "H100-80GB", "precision": "fp8"}),
            ("26.02", {}),
            ("26.06", {}),
            ("26.02", {"gpu": "H100-80GB", "precision": "bf16"}),
        )
    )
    assert copied
    assert not by_hybridep
    assert not graphed
    assert not wide


def test_gpt_oss_clamps_and_turns_by_kernels_of_their_own() -> None:
    oss = qwen("26.04", precision="bf16", model="GPT OSS 120B")
    stack = trained(oss)
    assert stack.experts.weighs_biases
    assert stack.experts.clamps_apart
    assert stack.attention.turns_apart
    fused = trained(oss | {"precision": "mxfp8", "recipe_release": "26.06"})
    assert not fused.experts.clamps_apart
    assert fused.attention.turns_apart


@pytest.mark.parametrize(
    ("precision", "kernels", "reads"), [("fp8", 4, 2), ("fp8-cs", 4, 2), ("mxfp8", 1, 1), ("bf16", 0, 1)]
)
def test_casts_are_those_of_the_rows_recipe_for_eight_bits(precision: str, kernels: int, reads: int) -> None:
    stack = setup_of(row(qwen("26.02", precision=precision))).job.stack
    assert (stack.kernels.cast_kernels, stack.kernels.cast_reads) == (kernels, reads)
