"""Ranks that another launcher has started are told from processes that nobody did."""

from __future__ import annotations

import pytest

from phalanx.launch.engines.order import in_slurm_step, slurm_domains, started_as_rank


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


@pytest.mark.parametrize(
    ("address", "pattern", "domains"),
    [
        ("core.spine1.leaf1.n1", "switch.switch.switch.node", ("core", "spine1", "leaf1")),
        ("block3.n7", "block.node", ("block3",)),
        ("n7", "node", ()),
        ("core.leaf.1.n1", "switch.switch.node", ()),
        ("", "", ()),
    ],
)
def test_the_switches_above_a_node_are_those_that_slurm_names(
    address: str, pattern: str, domains: tuple[str, ...]
) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_domains(environ) == domains


def test_a_batch_script_is_no_step() -> None:
    assert not in_slurm_step({"SLURM_JOB_ID": "7"})
    assert in_slurm_step({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
