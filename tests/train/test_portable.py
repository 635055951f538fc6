"""With portable numerics the bits belong to the run alone: not to the number of ranks, nor to the kind of processor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import phalanx
from phalanx.run.spec import ParallelSpec, PrecisionSpec
from tiny_runs import tiny_run

pytestmark = pytest.mark.slow

WEIGHTS = {"fp32": "fe96bf4150f3391c", "bf16": "08a39e96c3830e75"}
"""The first digits of the weights' hashes with PyTorch 2.13: of an AMD EPYC."""


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


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_number_of_ranks_has_the_weights_that_are_written_down(
    dataset: Path, tmp_path: Path, compute: str
) -> None:
    found = {weights(dataset, tmp_path / f"{ranks}", ranks, compute=compute) for ranks in (1, 2)}
    assert {digest[:16] for digest in found} == {WEIGHTS[compute]}


def test_other_weights_come_of_native_numerics(dataset: Path, tmp_path: Path) -> None:
    # Else nothing would show that the kernels were exchanged.
    assert weights(dataset, tmp_path / "native", 1, numerics="native")[:16] != WEIGHTS["fp32"]
