"""A run under topology/block, by a Slurm that has it: units in one block, the same bits after a node is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.engines.slurm_cluster import SlurmCluster, missing, slurm_cluster, slurm_version
from launch.engines.slurm_runs import (
    Phalanx,
    domains,
    fleet_of,
    hash_without_slurm,
    members,
    trains,
    wait_until,
    weights,
    whole_pairs,
    write_run_file,
)

_why_not = missing() or (
    ""
    if slurm_version() >= (23, 11)
    else "topology/block needs Slurm 23.11: tests/launch/engines/with_newer_slurm.sh"
)
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(_why_not), reason=f"no Slurm with blocks: {_why_not}"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two blocks of four nodes."""
    with slurm_cluster(tmp_path_factory.mktemp("blocks"), topology="block") as running:
        yield running


def test_units_lie_in_one_block_and_the_bits_stay_when_a_node_is_lost(
    blocks: SlurmCluster, tmp_path: Path
) -> None:
    write_run_file(tmp_path)
    phalanx = Phalanx(blocks, tmp_path)
    place = phalanx("place", "tiny.toml", "--topology", "slurm", "--nodes", "4", "--json")
    assert json.loads(place.splitlines()[-1])["topology"]["levels"] == ["block"]
    # More than one block has: two units of two nodes, and a spare.
    wanted = ["--nodes", "4", "--spares", "1", "--set", "launch.unit=2", "--set", "fleet.min_nodes=4"]
    run_dir = phalanx.submit("blocks", *wanted)
    wait_until(trains(run_dir), "the run does not begin", run_dir / "launch")
    wait_until(lambda: len(members(run_dir, "spare")) == 1, "there is no spare", run_dir / "launch")
    assert all(
        domain == (f"block{1 if int(name[1:]) <= 4 else 2}",) for name, domain in domains(run_dir).items()
    )
    # Which nodes Slurm gave and which were ready first is not ours: of those that are seated, as many units are whole as can be.
    whole, most = whole_pairs(run_dir)
    assert whole == most
    victim = next(name for name in members(run_dir, "member") if name != fleet_of(run_dir)["leader"])
    blocks.kill_node(victim)
    wait_until(lambda: victim in members(run_dir, "lost"), "it is not missed", run_dir / "launch")
    assert weights(run_dir) == hash_without_slurm(tmp_path)
