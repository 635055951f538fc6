"""No field of the run file is ignored in silence: the planner's table is complete and true."""

from __future__ import annotations

import ast
import json
import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.hardware.catalog import cluster
from phalanx.run.spec import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    FleetSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    PromptSpec,
    RopeScalingSpec,
    RunSpec,
    RuntimeSpec,
    TrainSpec,
)
from phalanx_plan.api import plan_json
from phalanx_plan.run_fields import RUN_FIELDS, evaluation_share, notes_of
from phalanx_plan.search.plan import make_plan
from phalanx_plan.search.query import Aim

DENSE = RunSpec(
    model=ModelSpec(layers=8, dim=1024, heads=16, kv_heads=8),
    data=DataSpec(vocab_size=32_000),
    train=TrainSpec(steps=10_000, batch_size=64, seq_len=2048, slots=16, micro_batch_size=1),
    parallel=ParallelSpec(ranks=32, tensor=2, pipeline=2, pipeline_schedule="interleaved", pipeline_stages=2),
    checkpoint=CheckpointSpec(every_steps=2000),
    fleet=FleetSpec(nodes=4, spares=1, snapshot_every_steps=100),
)
LONG = replace(
    DENSE, train=replace(DENSE.train, micro_batch_size=2), parallel=ParallelSpec(ranks=16, context=4)
)
COMPILED = replace(
    DENSE,
    parallel=ParallelSpec(ranks=16, tensor=4),
    runtime=RuntimeSpec(device="cuda", compile=True),
    model=replace(DENSE.model, rope_scaling=RopeScalingSpec()),
)
MIXTURE = replace(
    DENSE,
    model=replace(DENSE.model, moe=MoeSpec(ffn_dim=512, shared=1, first_dense=1)),
    parallel=ParallelSpec(ranks=16, tensor=2, expert=4),
)
ON_CPUS = replace(
    DENSE, parallel=ParallelSpec(ranks=2), precision=PrecisionSpec(compute="fp32"), fleet=FleetSpec()
)
WINDOWED = replace(DENSE, model=replace(DENSE.model, attention_pattern=("window", "full"), window=256))
LATENT = replace(DENSE, model=replace(DENSE.model, kv_heads=0, mla=MlaSpec(query_rank=64)))
SHAMPOO = replace(DENSE, optimizer=OptimizerSpec(name="shampoo"), parallel=ParallelSpec(ranks=16))

CHANGES: dict[str, tuple[RunSpec, Any]] = {
    "model.layers": (DENSE, 12),
    "model.dim": (DENSE, 2048),
    "model.heads": (DENSE, 8),
    "model.kv_heads": (DENSE, 4),
    "model.head_dim": (DENSE, 128),
    "model.ffn_dim": (DENSE, 4096),
    "model.ffn": (DENSE, "gelu"),
    "model.vocab_size": (DENSE, 64_000),
    "model.tie_embeddings": (COMPILED, True),
    "model.qk_norm": (DENSE, True),
    "model.attention_bias": (DENSE, True),
    "model.qkv_bias": (DENSE, True),
    "model.qk_norm_width": (replace(LONG, model=replace(DENSE.model, qk_norm=True)), "all"),
    "model.norm_placement": (DENSE, "both"),
    "model.score_cap": (DENSE, 50.0),
    "model.logit_cap": (DENSE, 30.0),
    "model.sinks": (DENSE, True),
    "model.rope_fraction": (DENSE, 0.5),
    "model.attention_pattern": (WINDOWED, ("window",)),
    "model.window": (WINDOWED, 512),
    "model.ffn_bias": (DENSE, True),
    "model.mtp_depth": (COMPILED, 1),
    "model.mla.query_rank": (LATENT, 128),
    "model.mla.kv_rank": (LATENT, 128),
    "model.mla.nope_head_dim": (LATENT, 64),
    "model.mla.rope_head_dim": (LATENT, 32),
    "model.mla.value_head_dim": (LATENT, 64),
    "model.mla.absorbed": (LATENT, True),
    "model.moe.experts": (MIXTURE, 16),
    "model.moe.per_token": (MIXTURE, 4),
    "model.moe.ffn_dim": (MIXTURE, 1024),
    "model.moe.shared": (MIXTURE, 2),
    "model.moe.shared_gate": (MIXTURE, True),
    "model.moe.first_dense": (MIXTURE, 2),
    "model.moe.every": (MIXTURE, 2),
    "model.moe.router_bias": (MIXTURE, True),
    "data.vocab_size": (DENSE, 64_000),
    "train.steps": (DENSE, 20_000),
    "train.batch_size": (DENSE, 128),
    "train.seq_len": (DENSE, 4096),
    "train.slots": (DENSE, 8),
    "train.micro_batch_size": (DENSE, 2),
    "train.reduction": (DENSE, "fast"),
    "train.loss_chunk": (replace(DENSE, parallel=ParallelSpec(ranks=16)), 64),
    "optimizer.name": (DENSE, "muon"),
    "optimizer.state": (DENSE, "bf16"),
    "optimizer.beta1": (replace(DENSE, optimizer=OptimizerSpec(name="adafactor")), 0.0),
    "optimizer.newton_schulz_steps": (replace(DENSE, optimizer=OptimizerSpec(name="muon")), 7),
    "optimizer.precondition_every": (SHAMPOO, 3),
    "optimizer.block_size": (SHAMPOO, 128),
    "precision.compute": (DENSE, "fp32"),
    "precision.matmul": (DENSE, "fp8-rowwise"),
    "memory.recompute": (DENSE, "full"),
    "memory.offload_activations": (DENSE, "host"),
    "memory.offload_optimizer": (DENSE, "host"),
    "runtime.compile": (replace(DENSE, runtime=RuntimeSpec(device="cuda")), True),
    "parallel.ranks": (DENSE, 16),
    "parallel.sharding": (DENSE, "zero2"),
    "parallel.shard_ranks": (DENSE, 2),
    "parallel.tensor": (DENSE, 4),
    "parallel.async_tensor": (COMPILED, True),
    "parallel.context": (DENSE, 2),
    "parallel.context_mode": (LONG, "allgather"),
    "parallel.pipeline": (DENSE, 4),
    "parallel.pipeline_schedule": (DENSE, "zbv"),
    "parallel.pipeline_stages": (DENSE, 4),
    "parallel.expert": (MIXTURE, 2),
    "parallel.expert_tensor": (MIXTURE, 2),
    "checkpoint.every_steps": (DENSE, 4000),
    "checkpoint.keep_last": (DENSE, 20),
    "checkpoint.keep_every": (DENSE, 100),
    "fleet.nodes": (DENSE, 0),
    "fleet.spares": (DENSE, 3),
    "fleet.snapshot_every_steps": (DENSE, 1000),
}
"""A value of every used field that changes the plan of a run."""

NOTED: dict[str, tuple[RunSpec, Any, str]] = {
    "data.tokenizer": (DENSE, "bytes", "h100:32"),
    "statistics.every_steps": (DENSE, 10, "h100:32"),
    "model.lanes": (DENSE, 4, "h100:32"),
    "model.context_tiles": (DENSE, 4, "h100:32"),
    "model.mla.absorbed": (LATENT, True, "h100:32"),
    "train.expert_sums": (MIXTURE, "slot", "h100:32"),
    "precision.rows": (MIXTURE, "independent", "h100:32"),
    "train.document_mask": (DENSE, True, "h100:32"),
    "optimizer.name": (DENSE, "soap", "h100:32"),
    "precision.matmul": (DENSE, "mxfp8", "h100:32"),
    "memory.recompute": (COMPILED, "budget", "h100:32"),
    "memory.recompute_budget": (
        replace(COMPILED, memory=replace(COMPILED.memory, recompute="budget")),
        0.3,
        "h100:32",
    ),
    "memory.offload_activations": (DENSE, "file", "h100:32"),
    "memory.offload_optimizer": (DENSE, "file", "h100:32"),
    "runtime.device": (DENSE, "cpu", "h100:32"),
    "runtime.threads": (DENSE, 4, "cpu:2"),
    "runtime.numerics": (DENSE, "portable", "h100:32"),
    "parallel.pipeline_split": (DENSE, (1, 3, 3, 1), "h100:32"),
    "evaluation.every_steps": (DENSE, 1, "h100:32"),
    "evaluation.sequences": (DENSE, 100_000, "h100:32"),
    "evaluation.final_sequences": (DENSE, 100_000, "h100:32"),
    "fleet.nodes": (DENSE, 0, "h100:32"),
    "fleet.least_tensor": (DENSE, 1, "h100:32"),
    "fleet.least_context": (DENSE, 1, "h100:32"),
    "fleet.min_nodes": (DENSE, 2, "h100:32"),
    "fleet.heartbeat_s": (DENSE, 1.0, "h100:32"),
    "fleet.lease_s": (DENSE, 60.0, "h100:32"),
    "fleet.worker_lease_s": (DENSE, 3.0, "h100:32"),
    "fleet.confirm_s": (DENSE, 3.0, "h100:32"),
    "fleet.coordinator_lease_s": (DENSE, 600.0, "h100:32"),
    "fleet.succession_s": (DENSE, 60.0, "h100:32"),
    "fleet.stall_s": (DENSE, 60.0, "h100:32"),
    "fleet.audit_every_steps": (DENSE, 5, "h100:32"),
}
"""A value of every field with a note for which the note is shown, on what cluster."""


def leaves(section: type, prefix: str = "") -> Iterator[str]:
    """The dotted paths of all fields of a section that hold a value, not a section."""
    hints = typing.get_type_hints(section)
    for field in fields(section):
        parts = typing.get_args(hints[field.name]) or (hints[field.name],)
        inner = next((part for part in parts if is_dataclass(part) and isinstance(part, type)), None)
        yield from leaves(inner, f"{prefix}{field.name}.") if inner else [prefix + field.name]


def changed(spec: Any, path: str, value: Any) -> Any:
    """``spec`` with one field of it, or of a section in it, set."""
    name, _, rest = path.partition(".")
    return replace(spec, **{name: changed(getattr(spec, name), rest, value) if rest else value})


@cache
def figures(spec: RunSpec) -> str:
    """All facts of a plan of the layout in the run file, but for its name and notes."""
    aim = Aim(layout="file", assume=("draws=1",))
    facts = plan_json(make_plan(spec, cluster("h100:32"), aim, searching=False))
    return repr({name: value for name, value in facts.items() if name not in ("run", "notes")})


def test_every_field_of_the_run_file_has_its_treatment() -> None:
    assert sorted(RUN_FIELDS) == sorted(leaves(RunSpec))


def test_every_treatment_has_a_note_or_a_reason() -> None:
    for path, treatment in RUN_FIELDS.items():
        assert treatment.note if treatment.kind == "noted" else treatment.reason, path


def test_every_used_and_every_noted_field_is_tried() -> None:
    assert set(CHANGES) == {path for path, treatment in RUN_FIELDS.items() if treatment.kind == "used"}
    assert set(NOTED) == {path for path, treatment in RUN_FIELDS.items() if treatment.note}


@pytest.mark.parametrize("path", CHANGES)
def test_a_used_field_changes_the_plan(path: str) -> None:
    spec, value = CHANGES[path]
    assert figures(changed(spec, path, value)) != figures(spec)


@pytest.mark.parametrize("path", NOTED)
def test_a_field_with_a_note_shows_it(path: str) -> None:
    spec, value, where = NOTED[path]
    names = [
        note.partition(": ")[0].split(", ") for note in notes_of(changed(spec, path, value), cluster(where))
    ]
    assert any(path in together for together in names)


OF_OWN_STACK = [path for path, treatment in RUN_FIELDS.items() if treatment.of_own_stack]


@pytest.mark.parametrize("path", OF_OWN_STACK)
def test_a_field_that_other_software_replaces_changes_nothing_but_the_note(path: str) -> None:
    def by_megatron(spec: RunSpec) -> tuple[str, list[str]]:
        aim = Aim(layout="file", stack="megatron", assume=("draws=1",))
        facts = plan_json(make_plan(spec, cluster("h100:32"), aim, searching=False))
        return repr({name: facts[name] for name in facts if name != "notes"}), list(facts["notes"])

    spec, value = CHANGES[path]
    before, notes_before = by_megatron(spec)
    after, notes = by_megatron(changed(spec, path, value))
    assert after == before
    # One of the two values is not the default.
    replaced = [note for note in notes_before + notes if "replaced by what the stack 'megatron' does" in note]
    assert any(path in note.partition(": ")[0].split(", ") for note in replaced)
    assert len(replaced) <= 2, "one note for all fields"
    assert not any("QR" in note for note in notes)


def test_a_run_file_that_sets_nothing_odd_gives_no_notes() -> None:
    assert notes_of(DENSE, cluster("h100:32")) == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.norm_eps", 1e-6),
        ("model.moe.groups", 2),
        ("model.moe.score", "sigmoid"),
        ("optimizer.lr", 3e-4),
        ("optimizer.clip_norm", 0.0),
        ("data.path", "/elsewhere"),
        ("data.cache_gib", 1.0),
        ("checkpoint.timeout_s", 5.0),
        ("checkpoint.store", "s3://bucket/run"),
        ("fleet.port", 4000),
        ("launch.unit", 2),
        ("observe.log_every_steps", 10),
    ],
)
def test_an_irrelevant_field_changes_nothing(path: str, value: Any) -> None:
    assert figures(changed(MIXTURE, path, value)) == figures(MIXTURE)


@pytest.mark.parametrize(
    ("stack", "layout", "sharding", "note"),
    [
        ("megatron", "file", "zero3", "no ZeRO-3; the layout is planned with ZeRO-1"),
        ("megatron", "tp=4", "zero2", "no ZeRO-2; the layout is planned with ZeRO-1"),
        ("megatron", "zero=0", "zero3", ""),
        ("megatron", "file", "none", ""),
        ("fsdp", "file", "zero3", ""),
        ("phalanx", "file", "zero3", ""),
    ],
)
def test_a_zero_stage_that_other_software_lacks_is_replaced_with_a_note(
    stack: str, layout: str, sharding: str, note: str
) -> None:
    spec = changed(DENSE, "parallel.sharding", sharding)
    plan = make_plan(
        spec, cluster("h100:32"), Aim(layout=layout, stack=stack, assume=("draws=1",)), searching=False
    )
    notes_of_sharding = [line for line in plan.notes if line.startswith("parallel.sharding: the stack")]
    assert len(notes_of_sharding) == bool(note)
    assert all(note in line for line in notes_of_sharding)


@pytest.mark.parametrize("final", [0, 4096])
def test_the_last_evaluation_is_noted_where_it_is_long_or_of_unknown_length(final: int) -> None:
    spec = changed(DENSE, "evaluation.final_sequences", final)
    noted = [note for note in notes_of(spec, cluster("h100:32")) if "after the last step" in note]
    assert len(noted) == (final == 0)


def test_muon_takes_as_long_on_a_gpu_in_any_format_of_computing() -> None:
    muon = changed(DENSE, "optimizer.name", "muon")
    seconds = [
        make_plan(spec, cluster("h100:32"), Aim(layout="file"), searching=False).chosen.time["optimizer"]
        for spec in (muon, changed(muon, "precision.compute", "fp32"))
    ]
    assert seconds[0] == seconds[1]


def test_a_plan_in_json_has_no_number_that_json_has_not() -> None:
    plan = make_plan(DENSE, cluster("h100:32"), Aim(layout="file", assume=("draws=1",)), searching=False)
    endless = plan_json(replace(plan, tokens=math.inf))
    assert endless["tokens"] is None
    assert json.loads(json.dumps(endless, allow_nan=False))["chosen"]["failure_free_days"] is None


def test_what_the_user_assumes_wins_over_the_run_file() -> None:
    def plan(*assume: str) -> Any:
        return make_plan(
            DENSE, cluster("h100:32"), Aim(layout="file", assume=("draws=1", *assume)), searching=False
        )

    by_file, by_user = plan(), plan("recovery=restart", "checkpoint_interval_s=7200", "spare_nodes=2")
    step_s = by_file.chosen.step_s
    assert by_file.assumptions.recovery == "spare"
    assert by_file.assumptions.spare_nodes == 1
    assert by_file.assumptions.checkpoint_interval_s == pytest.approx(100 * step_s)
    assert by_file.assumptions.durable_interval_s == pytest.approx(2000 * step_s)
    assert by_user.assumptions.recovery == "restart"
    assert by_user.assumptions.spare_nodes == 2
    assert by_user.assumptions.checkpoint_interval_s == 7200
    assert plan("recovery=restart").assumptions.checkpoint_interval_s == pytest.approx(2000 * step_s)


def test_where_a_run_chooses_when_to_save_the_plan_takes_the_best_interval() -> None:
    def plan(spec: RunSpec) -> Any:
        aim = Aim(layout="file", assume=("draws=1", "recovery=restart"))
        return make_plan(spec, cluster("h100:32"), aim, searching=False)

    fixed, left_open = plan(DENSE), plan(changed(DENSE, "checkpoint.every_steps", 0))
    assert left_open.assumptions.checkpoint_interval_s is None
    assert left_open.run.goodput > fixed.run.goodput


def test_kept_checkpoints_are_counted_from_the_steps_that_are_planned() -> None:
    spec = changed(DENSE, "checkpoint.keep_every", 1000)
    kept = []
    for steps in (10_000, 100_000):
        tokens = str(steps * spec.train.batch_size * spec.train.seq_len)
        aim = Aim(layout="file", tokens=tokens, assume=("draws=1",))
        kept.append(make_plan(spec, cluster("h100:32"), aim, searching=False).assumptions.checkpoints_kept)
    # On average, half of the checkpoints that are never deleted exist.
    assert kept == [spec.checkpoint.keep_last + 5, spec.checkpoint.keep_last + 50]


def test_the_fast_reduction_holds_no_open_sums() -> None:
    # 16 slots on 4 data-parallel ranks: 4 rounds, of whose sums a tree holds 2 at once.
    spec = replace(DENSE, parallel=ParallelSpec(ranks=8, tensor=2))
    memory = [
        make_plan(run, cluster("h100:32"), Aim(layout="file"), searching=False).chosen.memory
        for run in (spec, changed(spec, "train.reduction", "fast"))
    ]
    assert memory[0]["open sums"] > 0
    assert "open sums" not in memory[1]
    assert memory[1]["gradients"] == memory[0]["gradients"]


@pytest.mark.parametrize(("sharding", "holds"), [("zero2", 4), ("zero3", 1)])
def test_integer_sums_take_eight_bytes_of_all_that_a_rank_keeps_between_rounds(
    sharding: str, holds: int
) -> None:
    spec = replace(DENSE, parallel=ParallelSpec(ranks=4, sharding=sharding))  # type: ignore[arg-type]
    tree, integer, fast = (
        make_plan(run, cluster("h100:32"), Aim(layout="file"), searching=False).chosen
        for run in (spec, *(changed(spec, "train.reduction", value) for value in ("integer", "fast")))
    )
    # A gradient is four bytes of a share of a quarter.
    assert integer.memory["integer sums"] == pytest.approx(2 * holds * tree.memory["gradients"], rel=0.01)
    assert "open sums" not in integer.memory
    assert integer.time["gradient_reduce"] > fast.time["gradient_reduce"]  # as often, with twice the bytes


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_fast_reduction_reduces_no_more_often(sharding: str) -> None:
    spec = replace(DENSE, parallel=ParallelSpec(ranks=8, shard_ranks=4, sharding=sharding))  # type: ignore[arg-type]
    seconds = [
        make_plan(run, cluster("h100:32"), Aim(layout="file"), searching=False).chosen.time["gradient_reduce"]
        for run in (spec, changed(spec, "train.reduction", "fast"))
    ]
    assert seconds[1] < seconds[0]


def test_the_trainer_reads_every_field() -> None:
    """Search for the name of each attribute: no proof, but it finds a field that is read nowhere."""
    root = Path(phalanx.__file__).parents[1]
    estimates = [
        root / "phalanx_plan" / room for room in ("search", "step_cost", "whole_run", "workload", "simulate")
    ]
    files = [path for path in root.rglob("*.py") if not {*estimates} & {*path.parents}]
    unread = {path.rpartition(".")[2] for path in leaves(RunSpec)}
    for path in files:
        text = path.read_text()
        # Parsing takes long, and most files name no field that another did not read before.
        if not any(f".{name}" in text for name in unread):
            continue
        unread -= {
            node.attr
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    assert not unread


def test_the_note_on_evaluations_counts_the_forward_passes_of_samples() -> None:
    spec = RunSpec(
        train=TrainSpec(steps=100, batch_size=32, slots=8),
        evaluation=EvalSpec(every_steps=10, sequences=1, samples=(PromptSpec("a", tokens=50),)),
    )
    # 50 passes of a micro-batch of four sequences, and one sequence of held-out text
    assert evaluation_share(spec) == pytest.approx((1 + 50 * 4) / 3 / (10 * 32))
