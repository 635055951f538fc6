"""``phalanx plan``, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from phalanx.cli.train.train_command import command as train_command
from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run
from phalanx_plan.cli.plan_command import command

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ["--model", "llama3-8b", "--cluster", "h100:64", "--batch", "128", "--seq-len", "4096"]


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, env={"COLUMNS": "160"})


def facts(*arguments: str) -> dict[str, Any]:
    """The plan as JSON; a layout that does not fit is an exit code of 1."""
    result = plan(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    plan_facts: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (not plan_facts["chosen"]["fits"])
    return plan_facts


def test_a_layout_that_does_not_fit_is_a_failure_without_days_or_dollars_and_with_what_would_fit() -> None:
    arguments = ["--model", "llama3-8b", "--cluster", "h100:8", "--batch", "64", "--layout"]
    shown = plan(*arguments, "dp=8,mbs=1,zero=3")
    assert shown.exit_code == 1
    assert "does not fit" in shown.output
    assert "$" not in shown.output
    words = re.search(r"with (\S+) this layout fits", shown.output)
    assert words is not None
    mended = plan(*arguments, f"dp=8,mbs=1,zero=3,{words[1]}")
    assert mended.exit_code == 0
    assert "$" in mended.output


@pytest.mark.parametrize(("stack", "recovery"), [("phalanx", "spare"), ("megatron-bridge", "restart")])
def test_only_software_that_recovers_in_memory_is_planned_so_unless_it_is_assumed(
    stack: str, recovery: str
) -> None:
    arguments = [*SMALL, "--stack", stack, "--layout", "tp=2,dp=32,mbs=1"]
    assert facts(*arguments)["whole_run"]["assumptions"]["recovery"] == recovery
    assumed = facts(*arguments, "--assume", "recovery=spare")
    assert assumed["whole_run"]["assumptions"]["recovery"] == "spare"


def test_the_best_layouts_are_ranked_by_time_and_fit() -> None:
    best = facts(*SMALL, "--top", "5")["best"]
    assert [layout["step_s"] for layout in best] == sorted(layout["step_s"] for layout in best)
    assert len(best) == 5
    assert all(layout["fits"] and layout["memory_bytes"] <= layout["capacity_bytes"] for layout in best)


def test_state_and_speed_of_a_layout_are_those_worked_out_by_hand() -> None:
    plan_facts = facts(*SMALL, "--layout", "tp=2,dp=32,zero=3")
    chosen, memory = plan_facts["chosen"], plan_facts["chosen"]["memory_by_kind_bytes"]
    # Master weights in fp32 and Adam's two moments, divided over all 64 ranks but for the norms.
    assert memory["master weights"] == pytest.approx(4 * plan_facts["parameters"] / 64, rel=0.01)
    assert memory["moments"] == pytest.approx(8 * plan_facts["parameters"] / 64, rel=0.01)
    assert chosen["tokens_per_s"] == pytest.approx(128 * 4096 / sum(chosen["time_s"].values()))


def test_the_best_layout_of_the_search_is_estimated_the_same_by_its_name() -> None:
    best = facts(*SMALL, "--top", "1")["best"][0]
    again = facts(*SMALL, "--layout", best["layout"])["chosen"]
    assert again["fields"] == best["fields"]
    assert again["step_s"] == pytest.approx(best["step_s"])
    assert again["memory_bytes"] == pytest.approx(best["memory_bytes"])


def test_requirements_hold_in_everything_that_is_listed() -> None:
    best = facts(*SMALL, "--require", "tp<=2", "--require", "pp>=2")["best"]
    assert all(layout["fields"]["tensor"] <= 2 and layout["fields"]["pipeline"] >= 2 for layout in best)


def test_tokens_set_the_length_of_the_run() -> None:
    short, long = (facts(*SMALL, "--tokens", tokens)["whole_run"] for tokens in ("100B", "0.2T"))
    assert long["failure_free_days"] == pytest.approx(2 * short["failure_free_days"], rel=1e-3)


def test_a_run_optimized_for_cost_costs_no_more_than_one_optimized_for_time() -> None:
    quick, cheap = (facts(*SMALL, "--optimize", aim)["best"][0] for aim in ("time", "cost"))
    assert cheap["failure_free_usd"] <= quick["failure_free_usd"] * (1 + 1e-9)
    assert quick["step_s"] <= cheap["step_s"]


def test_fewest_accelerators_are_found() -> None:
    assert facts(*SMALL, "--optimize", "gpus")["best"][0]["accelerators"] < 64


def test_explaining_shows_terms_of_both_layouts_and_the_winner() -> None:
    shown = plan(*SMALL, "--layout", "tp=8,pp=2", "--explain").output
    assert "gradient reduce" in shown
    assert "master weights" in shown
    assert "the other is the quicker" in shown


def test_a_price_set_by_the_user_is_what_money_is_counted_in() -> None:
    usual = facts(*SMALL, "--layout", "tp=2")["chosen"]
    free = facts(*SMALL, "--layout", "tp=2", "--set", "cluster.accelerator.price_per_hour=0")
    assert usual["failure_free_usd"] > 0
    assert free["chosen"]["failure_free_usd"] == 0
    assert free["overrides"] == {"accelerator.price_per_hour": 0.0}


def test_the_run_file_of_the_winner_is_complete_and_plans_to_the_same(tmp_path: Path) -> None:
    out = tmp_path / "winner.toml"
    best = facts(*SMALL, "--tokens", "1T", "--out", str(out))["best"][0]
    spec = read_run(out, PRESETS)
    assert spec.train.steps * spec.train.batch_size * spec.train.seq_len >= 1e12
    assert spec.parallel.ranks == best["accelerators"]
    again = facts(str(out), "--cluster", "h100:64", "--layout", "file")["chosen"]
    assert again["step_s"] == pytest.approx(best["step_s"])
    assert again["memory_bytes"] == pytest.approx(best["memory_bytes"])


def test_one_call_writes_report_trace_and_run_file(tmp_path: Path) -> None:
    report, trace, out = (tmp_path / name for name in ("a.html", "a.json", "a.toml"))
    result = plan(*SMALL, "--report", str(report), "--trace", str(trace), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert tomllib.loads(out.read_text())["parallel"]["ranks"] == 64


def test_the_published_layout_of_llama_is_planned_from_its_run_file() -> None:
    shown = facts(str(CONFIGS / "llama3-405b.toml"), "--cluster", "h100:16384", "--layout", "file")["chosen"]
    fields = shown["fields"]
    assert (fields["tensor"], fields["pipeline"], fields["replicate"] * fields["shard"]) == (8, 16, 128)
    # 430 TFLOP/s were published for 8,192 ranks, 400 for 16,384 (arXiv 2407.21783, table 4); another trainer's run.
    assert shown["flops_per_s_per_accelerator"] == pytest.approx(400e12, rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama9", "--cluster", "h100:8"], "llama3-8b"),
        (["--model", "llama3-8b", "--cluster", "h9:8"], "gb200-nvl72"),
        (["--model", "llama3-8b", "--cluster", "H100-SXM:8"], "(did you mean h100"),
        (["--model", "llama3-8b", "--cluster", "h100:8", "--tokens", "many"], "15T"),
        ([*SMALL, "--require", "color=red"], "tp"),
        ([*SMALL, "--layout", "tensor_parallel=8"], "tp"),
        ([*SMALL, "--layout", "tp=3"], "divide"),
        ([*SMALL, "--layout", "tp=8,dp=128"], "--cluster"),
        ([*SMALL, "--layout", "zero=7"], "has 2, 3"),
        ([*SMALL, "--stack", "mine"], "megatron"),
        ([*SMALL, "--stack", "Megatron-LM"], "did you mean megatron"),
        (["--model", "meta-llama/Llama-3-8B", "--cluster", "h100:8"], "(did you mean llama3-8b"),
        ([*SMALL, "--set", "cluster.accelerator.price_per_hour=2,50"], "write it with a point"),
        ([*SMALL, "--require", "tp<=8,pp=1"], "each has a --require of its own"),
        ([*SMALL, "--set", "cluster.color=1"], "color"),
        (["nowhere.toml", "--cluster", "h100:8"], "give the path"),
        ([], "--model"),
    ],
)
def test_mistakes_are_named_with_what_would_be_right(arguments: list[str], says: str) -> None:
    result = plan(*arguments)
    assert result.exit_code != 0
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_shell_completes_behind_an_option_that_is_given_twice() -> None:
    typed = ["--cluster", "h100:8", "--cluster", "h100:16"]
    completions = ShellComplete(command, {}, "phalanx", "_PHALANX_COMPLETE").get_completions(typed, "--repo")
    assert [item.value for item in completions] == ["--report"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "h100:8"], "--cluster is given more than once"),
        (
            ["--set", "model.layers=4", "--set", "model.layers =5"],
            "--set model.layers is given more than once",
        ),
        (["--out", "nowhere/run.toml"], "--out nowhere/run.toml: there is no folder nowhere"),
        (["--report", ""], "--report .: . is a folder"),
        (["--report", "a.html", "--out", "a.html"], "--report and --out both write a.html"),
        (["run.toml", "--report", "./run.toml"], "--report would write over the run file run.toml"),
        (["--step-error", "nan"], "nan is no finite number"),
        (["--assume", "price=2"], "--set cluster.accelerator.price_per_hour="),
        (["--assume", "repair_s"], "--assume repair_s: write a value, as in repair_s=..."),
        (["--require", "tp<=\u00b2"], "a whole number can be required"),
        (["--layout", "tp=\uff18"], "must be a whole number, at least 1"),
        (["--layout", "zero=abc"], "zero=abc: the stack 'phalanx' has 2, 3, 1"),
        (
            ["--stack", "megatron", "--layout", "recompute=experts"],
            "recompute=experts: take one of none, pointwise, attention, selective, full",
        ),
    ],
)
def test_what_would_be_ignored_misread_or_found_out_too_late_is_refused(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["--model", "llama3-8b", "--cluster", "h100:64", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize("option", ["--report", "--trace", "--out"])
@pytest.mark.parametrize(
    "described", [["--cluster", "mine.toml:8"], ["--cluster", "h100:8", "--topology", "mine.toml"]]
)
def test_a_description_of_the_cluster_is_not_written_over(
    option: str, described: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text('[system]\nlike = "h100"\n')
    result = CliRunner().invoke(command, ["--model", "toy-4m", *described, option, "./mine.toml"])
    assert result.exit_code == 2
    assert f"{option} would write over mine.toml, which describes the cluster" in " ".join(
        result.output.split()
    )
    assert file.read_text().startswith("[system]")


def test_where_nothing_fits_the_missing_memory_and_a_remedy_are_printed() -> None:
    result = plan("--model", "dense-1t", "--cluster", "h100:8", "--batch", "8", "--seq-len", "2048")
    assert result.exit_code != 0
    assert "GB" in result.output
    assert "accelerators of the same kind would do" in result.output


def test_where_only_more_memory_helps_the_advice_is_a_sentence_of_its_own() -> None:
    large = ("--model", "llama3-405b", "--cluster", "h100:8", "--batch", "8", "--seq-len", "2048")
    memory = "680 GB of memory in each accelerator (8 times as much)"
    assert f"\n64 accelerators of the same kind would do; so would {memory}\n" in plan(*large).output
    assert f"\n{memory} would do\n" in plan(*large, "--require", "gpus=8").output


def test_a_plan_for_a_machine_that_was_not_calibrated_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_THIS_MACHINE", str(tmp_path / "this.toml"))
    assert "phalanx calibrate" in plan("--model", "toy-4m").output


@pytest.mark.parametrize("name", ["llama3-405b", "405b-llama3"])
def test_the_words_of_a_models_name_may_be_in_any_order(name: str) -> None:
    arguments = ["--cluster", "h100:1024", "--stack", "megatron", "--layout", "tp=8,pp=16,zero=1"]
    assert facts("--model", name, *arguments)["run"] == "llama3-405b"


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from phalanx_plan.cli.plan_command import command; from phalanx_plan.cli.calibrate_command import command;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_planning_never_imports_torch() -> None:
    code = (
        "import sys; from phalanx_plan.cli.plan_command import command;"
        f"command({[*SMALL, '--json']!r}, standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout", "tp=0"),
        ("--layout", "tq=4"),
        ("--require", "tp<=many"),
        ("--tokens", "1e400"),
        ("--set", "cluster.accelerator.memory_bytes=-1"),
        ("--cluster", "h101:8"),
        ("--stack", "none-such"),
        ("--report", "/no/such/folder/page.html"),
    ],
)
def test_a_mistake_ends_in_one_line_with_exit_code_two(arguments: tuple[str, str]) -> None:
    result = plan(*SMALL, *arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output


def test_what_goes_with_a_model_is_refused_with_a_run_file() -> None:
    result = plan(str(CONFIGS / "quickstart.toml"), "--cluster", "h100:8", "--batch", "3")
    assert result.exit_code == 2
    assert "--batch and --seq-len go with --model" in result.output


def test_fields_set_beside_a_model_change_its_plan() -> None:
    small = ["--model", "llama3-8b", "--cluster", "h100:64", "--seq-len", "4096", "--layout", "tp=2"]
    plan_facts = facts(
        *small,
        "--set",
        "train.batch_size=64",
        "--set",
        "precision.matmul=fp8-rowwise",
        "--set",
        "model.layers=16",
    )
    assert plan_facts["batch"] == 64
    assert plan_facts["chosen"]["fields"]["precision"] == "fp8"
    assert plan_facts["parameters"] < 5e9
    assert facts(*small, "--set", "fleet.nodes=8", "--set", "fleet.spares=3")["whole_run"]["spare_nodes"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "nonsense.foo=bar"], "nonsense: there is no such field"),
        (["--set", "clustre.accelerator.price_per_hour=1"], "clustre: there is no such field"),
        (["--set", "parallel.tensor=8"], "--require 'tp=...'"),
        (["--set", "memory.recompute=full"], "--require 'recompute=...'"),
        (["--set", "train.batch_size=8"], "--set train.batch_size and --batch set the same field"),
        (["--set", "train.steps=8", "--tokens", "1B"], "give one of the two"),
        (["--set", "cluster.accelerator.memory_bytes_per_s=3350"], "plausible is 3.35e+10 to 3.35e+14"),
        (["--layout", "tp=8,tp=4"], "tp is given twice"),
        (["--layout", "tp=8,tensor=8"], "tp is given twice"),
        (["--set", "train.seq_len=1000000000"], "--set train.seq_len and --seq-len set the same field"),
        (["--assume", "draws=1000000000000"], "draws must be 1 to 100,000"),
    ],
)
def test_what_a_plan_would_not_use_is_refused_by_name(arguments: list[str], says: str) -> None:
    refused = plan(*SMALL, *arguments)
    assert refused.exit_code == 2
    assert says in " ".join(refused.output.split())


def test_a_field_that_keeps_pipelines_away_is_among_the_exclusions_with_its_cure() -> None:
    tied = facts("--model", "gpt3-175b", "--cluster", "h100:1024", "--batch", "512", "--seq-len", "2048")
    assert any("set model.tie_embeddings = false" in rule for rule in tied["excluded"])
    result = plan("--model", "gpt3-175b", "--cluster", "v100:10000", "--batch", "1536", "--seq-len", "2048")
    assert result.exit_code == 2
    assert "set model.tie_embeddings = false" in result.output


def test_a_batch_beyond_anybodys_is_refused_with_plausible_ones() -> None:
    arguments = ["--model", "llama3-8b", "--cluster", "h100:64"]
    for more in (["--batch", str(10**18)], ["--batch", "64", "--seq-len", str(10**10)]):
        refused = plan(*arguments, *more)
        assert refused.exit_code == 2
        assert "plausible" in refused.output


def test_no_printed_mfu_exceeds_the_peak_where_sequences_are_long() -> None:
    long = ["--model", "llama3-8b", "--cluster", "h100:64", "--batch", "64", "--seq-len", str(10**7)]
    assert facts(*long)["chosen"]["mfu_causal"] < 1
    figures = re.findall(r"([\d.]+)% c", plan(*long).output)
    assert figures
    assert all(float(figure) < 100 for figure in figures)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "tpu7x:64"], "no device for Google TPU7x"),
        (["--cluster", "mi355x:64"], "no device for AMD Instinct MI355X"),
        (["--cluster", "tpu-v5p:64", "--stack", "megatron-bridge"], "on accelerators of NVIDIA"),
        (["--cluster", "cpu:64"], "no published run is on CPUs"),
        (["--cluster", "cpu:64", "--stack", "fsdp"], "no run of it on CPUs is known"),
        (["--cluster", "tpu-v4:64", "--stack", "megatron"], "no run of it on TPUs is known"),
        (["--cluster", "h100:8", "--tokens", "15T"], "years"),
        (["--cluster", "h100:64", "--tokens", "100"], "less than one step"),
    ],
)
def test_an_answer_that_nobody_can_act_upon_is_marked_in_the_first_lines(
    arguments: list[str], says: str
) -> None:
    shown = plan(
        "--model", "llama3-8b", "--batch", "128", "--seq-len", "4096", "--layout", "tp=2", *arguments
    )
    assert shown.exit_code == ("does not fit" in shown.output), shown.output
    assert says in " ".join(shown.output.split()[:120])


def test_other_software_is_planned_on_other_accelerators_without_that_mark() -> None:
    arguments = ["--model", "llama3-8b", "--batch", "128", "--seq-len", "4096", "--cluster", "mi300x:64"]
    assert facts(*arguments, "--stack", "megatron", "--layout", "tp=2,zero=1")["caveats"] == []
    assert facts(*arguments, "--stack", "phalanx", "--layout", "tp=2,zero=3")["caveats"]


def test_a_cluster_without_a_number_is_reported_as_one_domain() -> None:
    shown = plan("--model", "llama3-8b", "--cluster", "h200", "--batch", "64", "--seq-len", "4096")
    assert "--cluster h200: one domain, h200:8" in shown.output


def test_processes_of_one_machine_are_planned_to_the_end() -> None:
    """Their network is the machine's memory, with no rate of its own."""
    whole_run = facts(str(CONFIGS / "quickstart.toml"), "--cluster", "cpu:2", "--layout", "dp=2")["whole_run"]
    assert 0 < whole_run["days"] < 1


def test_software_that_was_never_measured_is_marked_in_the_first_line_and_its_bias_is_in_every_figure() -> (
    None
):
    arguments = [
        "--model",
        "llama3-8b",
        "--cluster",
        "h100:8",
        "--batch",
        "64",
        "--layout",
        "dp=8,mbs=1,zero=3",
    ]
    plan_facts = facts(*arguments)
    assert "phalanx on h100 was never measured" in plan_facts["evidence"]["says"]
    assert plan_facts["chosen"]["time_s"]["stack_scalar"] > 0
    assert plan_facts["step_s_p5"] < plan_facts["chosen"]["step_s"] < plan_facts["step_s_p95"]
    assert plan_facts["step_s_p5"] < plan_facts["step_s_p50"] < plan_facts["step_s_p95"]
    assert plan_facts["whole_run"]["usd"]["p5"] < plan_facts["whole_run"]["usd"]["p95"]


def test_published_software_is_planned_with_what_its_runs_were_judged_with() -> None:
    arguments = ["--model", "llama3-8b", "--cluster", "h100:64", "--batch", "256", "--stack", "nemo"]
    plan_facts = facts(*arguments, "--layout", "tp=2,dp=32,mbs=1,zero=1", "--step-error", "0.12")
    assert (plan_facts["stack"], plan_facts["evidence"]["kind"]) == ("nemo", "here")
    assert plan_facts["evidence"]["runs"] > 0
    assert plan_facts["step_error"] == pytest.approx(0.12, rel=0.01)


def test_use_of_an_accelerator_beyond_any_published_is_marked() -> None:
    arguments = [
        "--model",
        "llama3-8b",
        "--cluster",
        "gb200-nvl72:8",
        "--batch",
        "64",
        "--stack",
        "megatron-bridge",
    ]
    plan_facts = facts(*arguments, "--layout", "dp=8,mbs=1,zero=1")
    (caveat,) = [text for text in plan_facts["caveats"] if "more than any published run" in text]
    assert "NVIDIA GB200" in caveat


def test_software_is_listed_with_the_runs_that_are_known_of_it() -> None:
    result = plan("--stacks")
    assert result.exit_code == 0
    assert "llm-foundry" in result.output
    facts = json.loads(plan("--stacks", "--json").output)
    assert {run["software"] for run in facts["stacks"]["llm-foundry"]} == {"llm-foundry"}
    assert facts["stacks"]["phalanx"] == []
    assert {software["kind"] for software in facts["without_runs"]} == {"never"}
    assert plan("--stacks", "--model", "llama3-8b").exit_code == 2
    assert "--set cannot be given with" in plan("--stacks", "--set", "train.steps=1").output


def test_the_table_has_one_line_for_each_plan_within_100_columns() -> None:
    shown = (
        CliRunner()
        .invoke(
            command,
            ["--model", "llama3-405b", "--cluster", "h100:4096", "--batch", "1024", "--seq-len", "8192"],
            env={"COLUMNS": "100"},
        )
        .output
    )
    lines = shown.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("layout"))
    rows = lines[first + 1 : first + 9]
    assert all(re.search(r"mbs\d+ z\d.*%.*4,096", row) for row in rows)
    assert max(map(len, lines[first : first + 9])) <= 100


def test_the_run_file_of_a_model_by_its_name_is_not_trained_until_what_it_names_is_filled_in(
    tmp_path: Path,
) -> None:
    out = tmp_path / "winner.toml"
    shown = plan(*SMALL, "--layout", "tp=2", "--set", "optimizer.lr=3e-4", "--out", str(out))
    assert "fill in data.path, data.corpus, data.tokenizer, schedule.warmup_steps before" in shown.output
    assert "optimizer.lr" not in read_run(out, PRESETS).unfilled
    refused = CliRunner().invoke(train_command, [str(out), "--ranks", "2"])
    assert refused.exit_code != 0
    assert "data.tokenizer: holds a default that nobody chose" in refused.output
    chosen = ("data.path=text", "data.tokenizer=bytes", "schedule.warmup_steps=100")
    assert read_run(out, PRESETS, chosen).unfilled == ()


FABRIC = '[[levels]]\nname = "pod"\n[nodes]\n"n[1-4]" = "pod-1"\n"n[5-8]" = "pod-2"\n'


def test_layouts_are_ranked_and_printed_with_the_time_that_a_network_adds(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text(FABRIC)
    network = ("--topology", str(tmp_path / "fabric.toml"), "--share", "pod=0.01")
    for layout in facts(*SMALL, *network, "--top", "3")["best"]:
        assert layout["placement"]["added_s"] == pytest.approx(layout["time_s"]["uplinks"])
    shown = plan(*SMALL, *network, "--report", str(tmp_path / "report.html"))
    assert re.search(r"placed in \d+ units of .* pod pod-\d adds up to [\d.e+]+ ms to a step", shown.output)
    assert "uplinks" in (tmp_path / "report.html").read_text()
    assert "placement" not in facts(*SMALL, "--top", "1")["best"][0]


def test_a_wrong_description_of_a_network_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text(FABRIC)
    fabric = str(tmp_path / "fabric.toml")
    for arguments, words in (
        (("--share", "pod=0.5"), "--share is about a network: --topology"),
        (("--topology", fabric, "--share", "rack=0.5"), "there is no level 'rack'; there are pod"),
        (("--topology", str(tmp_path / "none.toml")), "cannot read the topology"),
        (("--topology", fabric, "--cluster", "h100:128"), "are 16 nodes of 8, and 8 of the 8 nodes of"),
    ):
        small = [
            word for word in SMALL if "--cluster" not in arguments or word not in ("--cluster", "h100:64")
        ]
        result = plan(*small, *arguments)
        assert result.exit_code == 2
        assert words in result.output.replace("\n", " ")
