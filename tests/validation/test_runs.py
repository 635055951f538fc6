"""Rows of published runs: parsing of cells, and the set-up that the planner estimates."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.catalog import accelerator
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from validation.compare import outcome_of
from validation.runs import (
    TABLE,
    Excluded,
    PublishedRun,
    PublishedRunError,
    flops_per_token,
    measured_step,
    parse_published,
    read_published,
)
from validation.setup import setup_of

GPT3 = {
    "id": "some-gpt3",
    "source": "someone/something@abc:README.md",
    "model": "GPT 175B",
    "params_total_b": "174.6",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "kv_heads": "96",
    "ffn": "49152",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "gpus": "768",
    "tp": "8",
    "pp": "12",
    "vpp": "1",
    "dp": "8",
    "zero": "1",
    "micro_batch": "1",
    "global_batch_seqs": "1536",
    "precision": "bf16",
    "recompute": "full",
    "tokens_per_s_per_gpu": "100",
    "software": "megatron-core",
    "flop_basis": "model",
    "notes": "transcribed by hand",
}
LLAMA_8B = GPT3 | {
    "id": "some-llama",
    "model": "Llama 3.1 8B",
    "params_total_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "global_batch_seqs": "128",
}


def columns() -> list[str]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file).fieldnames or ())


def table(*rows: dict[str, str]) -> io.StringIO:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns(), restval="")
    writer.writeheader()
    writer.writerows(rows)
    text.seek(0)
    return text


def row(values: dict[str, str], **changes: str) -> PublishedRun:
    return parse_published(table(values | changes))[0]


def step_s(run: PublishedRun) -> float:
    setup = setup_of(run)
    work = setup.job.workload
    machine = setup.job.cluster.accelerator
    return measured_step(run, work.model, work.counts, work.batch, work.seq_len, machine).step_s


def test_every_row_of_the_packages_table_is_used_or_has_a_reason() -> None:
    used, reasons = 0, []
    for run in read_published():
        try:
            setup = setup_of(run)
        except Excluded as reason:
            reasons.append(str(reason))
        else:
            used += 1
            assert setup.choices
            assert setup.job.workload.batch == run.global_batch_seqs
            for choice in setup.choices:
                assert choice.ranks == run.gpus
    assert used > 600
    assert all(reasons)


def test_ids_of_the_packages_table_are_unique() -> None:
    ids = [run.id for run in read_published()]
    assert len(ids) == len(set(ids))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(PublishedRunError, match=r"nowhere\.csv does not exist"):
        read_published(Path("nowhere.csv"))


def test_missing_columns_are_named() -> None:
    with pytest.raises(PublishedRunError, match=r"lacks the columns .*global_batch_seqs"):
        parse_published(io.StringIO("id,source,model\na,b,c\n"))


def test_a_column_that_may_be_empty_may_be_missing_and_others_may_be_there() -> None:
    optional = ("micro_batch", "vpp", "recompute", "hfu_pct", "schedule")
    header = [column for column in GPT3 if column not in optional] + ["color"]
    lines = io.StringIO()
    csv.writer(lines).writerows([header, [GPT3.get(column, "blue") for column in header]])
    (run,) = parse_published(io.StringIO(lines.getvalue()))
    assert run == row(GPT3 | dict.fromkeys(optional, ""))


@pytest.mark.parametrize("text", ["1,536", "1 536", "1'536", "1536 (stated)", "1.536e3"])
def test_a_number_may_be_written_with_its_thousands_parted(text: str) -> None:
    assert row(GPT3, global_batch_seqs=text).global_batch_seqs == 1536


@pytest.mark.parametrize("text", ["8k", "32K", "1/2", "8 16", "1,5", "-8", "128x", "1e400", "inf"])
def test_what_is_not_just_a_number_is_refused_rather_than_read_in_part(text: str) -> None:
    with pytest.raises(Excluded, match="write a number, or nothing"):
        setup_of(row(GPT3, global_batch_seqs=text))


@pytest.mark.parametrize(("column", "text"), [("layers", "1e5"), ("hidden", "1e30"), ("gpus", "9" * 20)])
def test_a_number_beyond_every_run_is_refused(column: str, text: str) -> None:
    with pytest.raises(Excluded, match=rf"{column} is .* that any run has: correct it"):
        setup_of(row(GPT3, **{column: text}))


@pytest.mark.parametrize("column", ["tp", "pp"])
def test_no_degree_is_zero(column: str) -> None:
    with pytest.raises(Excluded, match="does not state tensor and pipeline parallelism"):
        setup_of(row(GPT3, **{column: "0"}))


def test_one_expert_is_no_mixture() -> None:
    assert setup_of(row(GPT3, experts="1", ep="4")).job.workload.model.moe is None


def test_ranks_of_experts_that_do_not_divide_a_stage_are_named() -> None:
    mixture = {"experts": "8", "top_k": "2", "moe_ffn": "14336", "params_total_b": ""}
    with pytest.raises(Excluded, match="3 x 1 ranks of experts do not divide the 8 ranks of a stage"):
        setup_of(row(LLAMA_8B, ep="3", **mixture))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("FP8 (E4M3)", "fp8"),
        ("fp16 (bf16 not stated)", "fp16"),
    ],
)
def test_formats_have_several_names(text: str, name: str) -> None:
    chosen = setup_of(row(GPT3, gpu="H100-80GB", precision=text)).choices[0].precision
    assert chosen == name


def test_an_accelerator_whose_name_contains_anothers_is_not_taken_for_it() -> None:
    with pytest.raises(Excluded, match="no accelerator 'GH200-96GB'"):
        setup_of(row(GPT3, gpu="GH200-96GB"))
    assert setup_of(row(GPT3, gpu="TPU v5p")).job.cluster.accelerator.key == "tpu-v5p"


def test_sliding_windows_on_every_second_layer_leave_little_more_than_half_of_attention() -> None:
    assert setup_of(row(GPT3)).job.workload.attended == 1
    assert 0.5 < setup_of(row(GPT3, sliding_window="128")).job.workload.attended < 0.65


def test_a_row_with_a_word_in_place_of_a_number_is_left_out_with_the_column_and_the_remedy() -> None:
    with pytest.raises(Excluded, match="tp is 'eight': write a number, or nothing"):
        setup_of(row(GPT3, tp="eight"))


@pytest.mark.parametrize("text", ["", "-", "n/a", "Unknown", "?"])
def test_a_word_for_not_stated_is_as_good_as_nothing(text: str) -> None:
    assert row(GPT3, micro_batch=text) == row(GPT3, micro_batch="")


def test_a_row_that_its_source_calls_a_regression_is_left_out() -> None:
    with pytest.raises(Excluded, match="regression"):
        setup_of(row(GPT3, outcome="regression"))


def test_a_number_may_be_followed_by_an_explanation() -> None:
    assert row(GPT3, zero="3 (FSDP2)").zero == 3


@given(rate=st.floats(1, 1e5))
def test_step_time_follows_from_tokens_per_second(rate: float) -> None:
    run = row(GPT3, tokens_per_s_per_gpu=repr(rate))
    assert step_s(run) * rate * 768 == pytest.approx(1536 * 2048)


def test_a_rate_that_counts_recomputation_means_less_of_the_models_work() -> None:
    without = GPT3 | {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "140"}
    model_rate = step_s(row(without))
    hardware = step_s(row(without, flop_basis="hardware, full recomputation"))
    # Narayanan et al. 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    batch, seq, layers, dim, vocab = 1536, 2048, 96, 12288, 51200
    flops = 96 * batch * seq * layers * dim**2 * (1 + seq / (6 * dim) + vocab / (16 * layers * dim))
    assert hardware == pytest.approx(flops / (140e12 * 768), rel=1e-3)
    assert model_rate < hardware < model_rate * 4 / 3


def test_mfu_is_of_the_dense_bf16_peak() -> None:
    run = row(GPT3, tokens_per_s_per_gpu="", mfu_pct="50")
    model = setup_of(run).job.workload.model
    flops = count(model, 2048).flops_per_token * 1536 * 2048
    assert step_s(run) == pytest.approx(flops / (0.5 * 312e12 * 768))


def test_causal_convention_leaves_out_half_of_attention() -> None:
    model = resolve(PRESETS["llama3-8b"])
    counts = count(model, 8192)
    full, half = (
        flops_per_token(convention, model, counts)
        for convention in ("model", "model, causal")  # type: ignore[arg-type]
    )
    assert full - half == counts.attention_flops_per_token_causal


def test_a_step_shorter_than_a_kernel_is_refused() -> None:
    with pytest.raises(Excluded, match=r"no step takes 1e-07 s, as its step time says"):
        step_s(row(GPT3, tokens_per_s_per_gpu="", step_time_s="1e-7"))


def test_figures_that_contradict_each_other_exclude_a_row() -> None:
    with pytest.raises(Excluded, match="contradict each other"):
        step_s(row(GPT3, step_time_s="1"))


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("layers", "number of layers"),
        ("seq_len", "sequence length"),
        ("global_batch_seqs", "global batch"),
        ("gpus", "how many accelerators"),
        ("tp", "tensor and pipeline"),
    ],
)
def test_a_row_that_leaves_out_what_cannot_be_guessed_is_excluded(column: str, reason: str) -> None:
    with pytest.raises(Excluded, match=reason):
        setup_of(row(GPT3, **{column: ""}))


def test_an_unknown_accelerator_is_named() -> None:
    with pytest.raises(Excluded, match="no accelerator 'Abacus'"):
        setup_of(row(GPT3, gpu="Abacus"))


def test_degrees_that_do_not_multiply_to_the_accelerators_exclude_a_row() -> None:
    with pytest.raises(Excluded, match="do not multiply"):
        setup_of(row(GPT3, dp="9"))


def test_the_size_settles_what_the_shape_leaves_open() -> None:
    plain, gated = setup_of(row(GPT3)).job.workload.model, setup_of(row(LLAMA_8B)).job.workload.model
    assert (plain.ffn, gated.ffn, gated.tie_embeddings) == ("gelu", "swiglu", False)
    assert count(gated, 8192).parameters == count(resolve(PRESETS["llama3-8b"]), 8192).parameters


def test_a_shape_that_is_not_of_the_stated_size_excludes_a_row() -> None:
    with pytest.raises(Excluded, match=r"not the 100\.0B that it states"):
        setup_of(row(GPT3, params_total_b="100"))


def test_deepseek_v3_is_read_with_latent_attention_and_dense_layers() -> None:
    run = next(run for run in read_published() if run.id == "dgxc2505-dsv3-h100-bf16-512")
    model = setup_of(run).job.workload.model
    preset = resolve(PRESETS["deepseek-v3"])
    assert (model.mla, model.layers) == (preset.mla, preset.layers)
    assert model.moe is not None
    assert preset.moe is not None
    assert (model.moe.first_dense, model.moe.shared) == (preset.moe.first_dense, preset.moe.shared)


def test_what_is_not_stated_becomes_a_choice_and_an_assumption() -> None:
    stated, open_ = setup_of(row(LLAMA_8B)), setup_of(row(LLAMA_8B, micro_batch="", recompute=""))
    assert len(stated.choices) == 1
    assert not stated.assumptions
    assert len({choice.micro_batch for choice in open_.choices}) > 1
    assert len({choice.recompute for choice in open_.choices}) > 1
    assert len(open_.assumptions) == 2


def test_runs_of_one_model_on_one_accelerator_are_one_subject() -> None:
    first = row(GPT3, model="Qwen3-235B-A22B")
    second = row(GPT3, model="Qwen3_235B_a22B (tokendrop)")
    assert first.subject == second.subject


def test_a_run_that_ran_out_of_memory_has_no_figures() -> None:
    assert row(GPT3, tokens_per_s_per_gpu="", outcome="out of memory").ran_out_of_memory
    with pytest.raises(Excluded, match="leave out one of the two"):
        setup_of(row(GPT3, outcome="out of memory"))


@pytest.mark.parametrize(
    ("column", "text", "remedy"),
    [
        ("flop_basis", "harware", "write one of model, "),
        ("memory_unit", "MB", "write one of GiB, GB, 1000 MiB, or nothing"),
        ("learned_positions", "maybe", "write yes, or no, or nothing"),
        ("software", "megatron-2", "write one of llm-foundry, "),
    ],
)
def test_a_word_that_no_column_knows_is_answered_with_those_it_knows(
    column: str, text: str, remedy: str
) -> None:
    with pytest.raises(Excluded, match=remedy):
        setup_of(row(GPT3, **{column: text}))


@pytest.mark.parametrize("text", ["yes", "True", "1"])
def test_yes_has_several_spellings(text: str) -> None:
    assert row(GPT3, balanced_experts=text).balanced_experts
    assert not row(GPT3, balanced_experts="no").balanced_experts


def test_blank_cells_are_the_defaults_of_the_row() -> None:
    assert row({}) == PublishedRun()


def test_the_table_has_a_column_for_every_field_of_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(PublishedRun)} - {"unreadable"}
    assert set(columns()) - {"source_kind"} == fields


def test_the_text_of_the_notes_changes_nothing() -> None:
    words = "known regression; OOM; basis=hardware; ETP=8; first 3 layers dense; kv_lora 512 qk 128+64 v 128; compile; nvidia-smi"
    for run in read_published()[::20]:
        outcomes = [outcome_of(dataclasses.replace(run, notes=notes)) for notes in (run.notes, "", words)]
        blank = [dataclasses.replace(outcome, run=run, setup=None) for outcome in outcomes]
        assert blank[0] == blank[1] == blank[2]


def test_a_row_is_not_changed_by_reading_it_twice() -> None:
    run = row(GPT3)
    assert run == row(GPT3)
    assert dataclasses.replace(run, tp=4) != run
    assert accelerator("a100").flops["bf16"].value == 312e12
