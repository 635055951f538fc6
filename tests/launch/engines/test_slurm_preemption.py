"""A run that cannot wait takes half of the nodes of one that can, under a real Slurm of sixteen virtual nodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.engines.slurm_cluster import SlurmCluster, missing, slurm_cluster
from launch.engines.slurm_runs import (
    ENDLESS,
    Phalanx,
    domains,
    fleet_of,
    members,
    saved_hash,
    trains,
    undisturbed_until,
    wait_until,
    weights,
    write_run_file,
)

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm cluster can be started: {missing()}"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]
NODES, LENT = 12, 6


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four leaves of four nodes."""
    with slurm_cluster(tmp_path_factory.mktemp("sixteen"), nodes=16) as running:
        yield running


def test_twelve_nodes_lend_six_to_a_run_that_cannot_wait_and_take_them_again_without_a_step_twice(
    sixteen: SlurmCluster, tmp_path: Path
) -> None:
    write_run_file(tmp_path)
    phalanx = Phalanx(sixteen, tmp_path)
    slots = ["--set", "train.batch_size=24", "--set", "train.slots=12"]
    lender = phalanx.submit("low", "--nodes", str(NODES), *slots, *ENDLESS)
    sixteen.tool(
        "sbatch", "-N", "4", "--exclusive", "-J", "others", "-o", "/dev/null", "--wrap", "sleep infinity"
    )
    wait_until(trains(lender), "the lender does not begin", lender / "launch")
    assert ranks_follow_the_tree(lender)
    began_s = time.monotonic()
    words = ["--nodes", str(LENT), "--take-from", str(lender), "--partition", "high"]
    urgent = phalanx.submit("urgent", *words, "--set", "train.steps=20")
    print(f"six nodes are given back after {time.monotonic() - began_s:.1f} s")
    wait_until(trains(urgent, after=0), "the urgent run does not begin", urgent / "launch")
    print(f"the urgent run trains after {time.monotonic() - began_s:.1f} s")
    assert len(members(lender, "member")) == NODES - LENT
    assert ranks_follow_the_tree(lender)
    weights(urgent)
    ended_s = time.monotonic()
    wait_until(lambda: len(members(lender, "member")) == NODES, "it has not grown", lender / "launch")
    wait_until(trains(lender), "the lender does not train on", lender / "launch")
    print(f"the lender has its nodes again {time.monotonic() - ended_s:.1f} s after the urgent run's end")
    assert ranks_follow_the_tree(lender)
    phalanx("cancel", str(lender))
    assert fleet_of(lender)["recoveries"] == 0
    assert not sixteen.tool("squeue", "-h", "-n", "phalanx-tiny,phalanx-tiny-joining").strip()
    sixteen.end_jobs()
    wait_until(
        lambda: not any(sixteen.processes_of(f"n{number}") for number in range(1, 17)), "processes are left"
    )
    step, saved = saved_hash(lender)
    assert saved == undisturbed_until(tmp_path, step, *slots)


def ranks_follow_the_tree(run_dir: Path) -> bool:
    """Whether the ranks of a leaf's nodes are neighbors, in every leaf."""
    found, domain = fleet_of(run_dir)["members"], domains(run_dir)
    assert isinstance(found, list)
    seated = sorted((one for one in found if one["role"] == "member"), key=lambda one: one["ranks"])
    leaves = [domain[one["name"]] for one in seated]
    changes = sum(before != after for before, after in itertools.pairwise(leaves))
    return changes == len(set(leaves)) - 1
