"""Every operation of PyTorch that a step rounds with has bits that are stated: those of a portable kernel, or of IEEE 754."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from layouts import DENSE, LATENT, MIXTURE, steps_on_this_rank, tiny
from phalanx.hardware.portable.operations import begin, unfit_processor
from phalanx.run.spec import ModelSpec, OptimizerSpec, ParallelSpec, PrecisionSpec, RopeScalingSpec, RunSpec
from ranks import Ranks
from stated_operations import Recorder, not_stated
from tiny_runs import tiny_run, train_on_this_rank
from train.pieces import model_in, run_in_pieces

pytestmark = pytest.mark.skipif(bool(unfit_processor()), reason="portable numerics needs AVX2, or 64-bit Arm")
SMALL = ModelSpec(layers=1, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=61)


def with_training(spec: RunSpec, **fields: object) -> RunSpec:
    return dataclasses.replace(spec, train=dataclasses.replace(spec.train, **fields))  # type: ignore[arg-type]


RUNS: dict[str, RunSpec] = {
    "dense, with windows, sinks and capped scores": tiny(DENSE, ParallelSpec()),
    "packed documents, with windows, sinks and capped scores": with_training(
        tiny(DENSE, ParallelSpec()), document_mask=True, targets_within_documents=True, end_of_document=7
    ),
    "packed documents of latent attention": with_training(
        tiny(dataclasses.replace(MIXTURE, mla=LATENT), ParallelSpec()),
        document_mask=True,
        targets_within_documents=True,
        end_of_document=7,
    ),
    "integer sums": with_training(tiny(SMALL, ParallelSpec()), reduction="integer"),
    **{
        f"positions scaled by {scaling.kind}": tiny(
            dataclasses.replace(SMALL, rope_scaling=scaling), ParallelSpec()
        )
        for scaling in (
            RopeScalingSpec("llama3", factor=2, original_max_seq_len=16),
            RopeScalingSpec("yarn", factor=2, original_max_seq_len=16),
            RopeScalingSpec("linear", factor=2, original_max_seq_len=16),
            RopeScalingSpec(
                "longrope",
                factor=2,
                original_max_seq_len=16,
                short_factors=(1.0, 1.5, 2.0, 3.0),
                long_factors=(1.0, 2.0, 3.0, 4.0),
            ),
        )
    },
    "gelu": tiny(dataclasses.replace(DENSE, ffn="gelu"), ParallelSpec()),
    "a mixture": tiny(MIXTURE, ParallelSpec()),
    "latent attention": tiny(dataclasses.replace(MIXTURE, mla=LATENT), ParallelSpec()),
    **{
        f"{name}, operands in {matmul}": dataclasses.replace(
            tiny(model, ParallelSpec()),
            precision=PrecisionSpec(matmul=matmul),  # type: ignore[arg-type]
        )
        for name, model, matmul in (("dense", DENSE, "fp8-tensorwise"), ("a mixture", MIXTURE, "mxfp8"))
    },
    "lanes": run_in_pieces(model_in("lanes", "mixture")),
    "tiles": run_in_pieces(model_in("tiles", "shared key heads")),
    "tiles of absorbed latent attention": run_in_pieces(model_in("tiles", "absorbed")),
    "several tokens ahead, in bf16": run_in_pieces(model_in("whole", "ahead"), compute="bf16"),
    **{
        f"{name} with {state} moments": dataclasses.replace(
            tiny(SMALL, ParallelSpec()),
            optimizer=OptimizerSpec(name=name, state=state, lr=1e-2, clip_norm=0.5),  # type: ignore[arg-type]
        )
        for name, state in (("adamw", "bf16"), ("adamw", "int8"), ("adafactor", "fp32"), ("muon", "fp32"))
    },
}


def names_of_steps(spec: RunSpec) -> set[str]:
    begin()
    with Recorder() as recorder:
        steps_on_this_rank(spec)
    return recorder.names


def names_of_run(spec: RunSpec) -> set[str]:
    begin()
    with Recorder() as recorder:
        train_on_this_rank(spec)
    return recorder.names


@pytest.mark.parametrize("run", RUNS)
def test_a_step_of_training_rounds_with_stated_operations_alone(run: str, ranks: Ranks) -> None:
    (names,) = ranks.run(1, names_of_steps, RUNS[run])
    assert " ".join(not_stated(names)) == ""


def test_so_does_a_run_that_evaluates_and_saves(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    (names,) = ranks.run(1, names_of_run, tiny_run(dataset, tmp_path))
    assert " ".join(not_stated(names)) == ""


def test_an_operation_that_nobody_stated_is_found() -> None:
    with Recorder() as recorder:
        x = torch.ones(3)
        torch.add(x.atan(), x, alpha=2)
        x.exp()
    assert not_stated(recorder.names) == ["atan", "aten.add.Tensor with a factor"]
