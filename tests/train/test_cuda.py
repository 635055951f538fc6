"""The promise on a GPU: two equal runs, one hash. The CPU's case shows that the test itself works on machines without one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

import pytest
import torch

from tiny_runs import tiny_run

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])])
def test_two_equal_runs_on_a_device_have_one_hash(
    dataset: Path, tmp_path: Path, kind: Literal["cpu", "cuda"]
) -> None:
    from phalanx.data.stored.index import read_index
    from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
    from phalanx.process.this_process import StopRequest
    from phalanx.train.lifecycle.worker import run_rank
    from phalanx.train.start.open_run import open_run
    from run.specs import replace_at

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    hashes = set()
    for number in range(2):
        spec = replace_at(tiny_run(dataset, tmp_path / f"run-{number}"), "runtime.device", kind)
        spec = dataclasses.replace(spec, precision=dataclasses.replace(spec.precision, compute="bf16"))
        run = open_run(spec, read_index(dataset).fingerprint, dataset)
        join(
            RankEnvironment(0, 1, 0, (tmp_path / f"store-{number}").as_uri(), "phalanx"),
            torch.device(kind, 0),
            60.0,
        )
        result = run_rank(run.directory.path, run.attempt, StopRequest())
        leave()
        os.close(run.lock_fd)
        assert result is not None
        hashes.add(result.weights_sha256)
    assert len(hashes) == 1
