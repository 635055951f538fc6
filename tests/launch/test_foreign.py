"""Ranks that another launcher has started are told from processes that nobody did."""

from __future__ import annotations

import pytest

from phalanx.launch.foreign import started_as_rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),
    ],
    ids=["nobody", "torchrun", "a step of tasks", "an interactive shell", "a batch script before srun"],
)
def test_only_a_process_that_was_started_as_one_of_many_is_a_rank(
    environ: dict[str, str], expected: bool
) -> None:
    assert started_as_rank(environ) == expected
