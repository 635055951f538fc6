"""With portable numerics the bits belong to the run alone: not to the number of ranks, nor to the kind of processor."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

import phalanx
from forked_python import Popen
from phalanx.data.stored.index import read_index
from phalanx.run.spec import ParallelSpec, PrecisionSpec, RunSpec
from phalanx.train.start.open_run import open_run
from tiny_runs import tiny_run

WEIGHTS = {"fp32": "c88891a5e66f6a4a", "bf16": "76f98acedcdab347"}
"""The first digits of the weights' hashes."""


def portable(dataset: Path, run_dir: Path) -> RunSpec:
    spec = tiny_run(dataset, run_dir, micro_batch_size=1)
    return dataclasses.replace(spec, runtime=dataclasses.replace(spec.runtime, numerics="portable"))


def weights(
    dataset: Path, run_dir: Path, ranks: int, *, compute: str = "fp32", numerics: str = "portable"
) -> str:
    spec = tiny_run(dataset, run_dir, micro_batch_size=1)
    spec = dataclasses.replace(
        spec,
        runtime=dataclasses.replace(spec.runtime, numerics=numerics),
        precision=PrecisionSpec(compute=compute),  # type: ignore[arg-type]
        parallel=ParallelSpec(ranks=ranks),
    )
    return phalanx.train_run(spec).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_number_of_ranks_has_the_weights_that_are_written_down(
    dataset: Path, tmp_path: Path, compute: str
) -> None:
    hashes = {weights(dataset, tmp_path / f"{ranks}", ranks, compute=compute) for ranks in (1, 2)}
    assert {digest[:16] for digest in hashes} == {WEIGHTS[compute]}


@pytest.mark.slow
def test_other_weights_come_of_native_numerics(dataset: Path, tmp_path: Path) -> None:
    # Else nothing would show that the kernels were exchanged.
    assert weights(dataset, tmp_path / "native", 1, numerics="native")[:16] != WEIGHTS["fp32"]


def test_ranks_on_different_machines_train_one_run_with_these_weights(dataset: Path, tmp_path: Path) -> None:
    spec = portable(dataset, tmp_path / "run")
    run = open_run(spec, read_index(dataset).fingerprint, dataset)
    os.close(run.lock_fd)
    command = [sys.executable, "-m", "phalanx.train.lifecycle.worker", spec.run_dir, "--attempt", "0"]
    place = {
        **os.environ,
        "PHALANX_RANKS": "2",
        "PHALANX_LAUNCHER": str(os.getpid()),
        "PHALANX_MEETING_POINT": (tmp_path / "store").as_uri(),
    }
    # PyTorch's own kernels, which only move and compare numbers here, are those of another kind of processor.
    of_rank = [{"PHALANX_RANK": "0"}, {"PHALANX_RANK": "1", "ATEN_CPU_CAPABILITY": "default"}]
    processes = [Popen(command, env=place | own) for own in of_rank]
    assert [process.wait(240) for process in processes] == [0, 0]
    result = run.directory.finished_result()
    assert result is not None
    assert result.weights_sha256[:16] == WEIGHTS["fp32"]
