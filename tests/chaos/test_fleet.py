"""Whole fleets of real processes: whatever falls, the weights at the end are those of the undisturbed run."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import RunStarted
from phalanx.observe.goodput import goodput
from phalanx.observe.rank_stream import RankStream
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.layout import Layout
from phalanx_process import last_json, run, steps_done
from phalanx_watch.ranks import newest_windows, slowest, values_of
from tiny_runs import make_dataset

pytestmark = pytest.mark.timeout(0)
"""No limit but that of ``run``: a fleet is given up when its steps stand still."""


def fleet_run(run_file: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of a fleet of three nodes and a spare, which are not checked before they are offered: that takes as long as ten steps."""
    leases = ("fleet.heartbeat_s=1", "fleet.lease_s=4", "fleet.worker_lease_s=4")
    fields = (*leases, "fleet.health_checks=false")
    settings = [part for field in fields for part in ("--set", field)]
    command = [
        "train",
        str(run_file),
        "--nodes",
        "3",
        "--spares",
        "1",
        "--run-dir",
        str(folder / "run"),
        "--json",
    ]
    return last_json(
        run([*command, *settings, *arguments], folder, progress=lambda: steps_done(folder / "run"))
    )


def with_faults(*faults: str) -> list[str]:
    return [part for fault in faults for part in ("--fault", fault)]


def test_a_fleet_loses_a_node_a_worker_and_its_coordinator_and_keeps_the_bits(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    faults = (
        "kill node 1 at step 5",
        "kill rank 0 at step 9 in backward",
        "kill coordinator at step 13",
        "stop rank 0 at step 15",
    )
    result = fleet_run(run_file, tmp_path, "--set", "observe.ranks_every_steps=2", *with_faults(*faults))
    assert result["weights_sha256"] == undisturbed
    assert result["faults"] == list(faults)
    assert len(result["recoveries"]) >= 2, "faults that fall together are one recovery, but not all do"
    assert all(recovery["lost_steps"] <= 2 for recovery in result["recoveries"])
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    account = goodput(events)
    assert account.buckets_ns.get("unattributed", 0) < 0.001 * account.total_ns
    committed = {fault.name for fault in (tmp_path / "run" / "faults").iterdir()}
    assert committed == {"0", "1", "2", "3"}, "every fault was committed"
    with RankStream(tmp_path / "run" / "ranks.bin") as stream:
        attempts = {stream.head(number).attempt for number in range(len(stream))}
        assert len(attempts) >= 3, "each epoch goes on in the same file, whichever process is its rank 0"
        assert stream.steps[-1] == result["step"]


@pytest.mark.slow
def test_a_fleet_that_draws_from_several_sources_keeps_the_bits_through_faults_and_a_change_of_stage(
    run_file: Path, tmp_path: Path
) -> None:
    more = make_dataset(tmp_path / "names", "names")
    words = tomllib.loads(run_file.read_text())["data"]["path"]
    sources = "\n".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{path}"\nweights = {weights}\nepochs = 0'
        for name, path, weights in (("words", words, [0.9, 0.4]), ("names", more, [0.1, 0.6]))
    )
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(run_file.read_text().replace(f'path = "{words}"', f"stages = [0, 6]\n{sources}"))
    alone = last_json(run(["train", str(mixed), "--ranks", "1", "--json"], tmp_path))
    faults = ("kill node 1 at step 5", "kill rank 0 at step 9 in backward")
    result = fleet_run(mixed, tmp_path, *with_faults(*faults))
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["recoveries"]


@pytest.mark.servers
def test_nodes_with_a_nan_and_with_a_corrupted_gradient_are_found_and_quarantined_and_the_bits_kept(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    audits = ["--set", "fleet.audit_every_steps=1"]
    faults = with_faults("nan rank 2 at step 3", "corrupt gradient rank 1 at step 6")
    result = fleet_run(run_file, tmp_path, *audits, *faults)
    assert result["weights_sha256"] == undisturbed
    fleet = json.loads((tmp_path / "run" / "fleet.json").read_text())
    roles = [member["role"] for member in fleet["members"]]
    assert roles.count("quarantined") == 2
    assert any(
        "step 3 is finite where other nodes compute it" in happening["what"]
        for happening in fleet["happenings"]
    )
    assert any("computed wrongly by rank 1" in happening["what"] for happening in fleet["happenings"])


@pytest.mark.slow
def test_a_flipped_parameter_of_a_replica_is_found_and_the_bits_kept(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    settings = ("fleet.audit_every_steps=3", 'parallel.sharding="none"')
    sets = [part for setting in settings for part in ("--set", setting)]
    result = fleet_run(run_file, tmp_path, *sets, *with_faults("corrupt parameter rank 1 at step 8"))
    assert result["weights_sha256"] == undisturbed
    (recovery,) = result["recoveries"]
    fleet = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert any(
        "replicas' parameters to differ, the wrong ones on rank 1; all is good up to step 6"
        in happening["what"]
        for happening in fleet["happenings"]
    ), "step 7 began with equal parameters, step 9 did not"
    assert recovery["lost_steps"] == 2


@pytest.mark.servers
def test_who_a_hanging_fleet_waits_for_is_named_with_the_collective_and_replaced(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    # Its main thread sleeps, its pulse goes on: only the collectives of the others show it.
    result = fleet_run(
        run_file,
        tmp_path,
        *("--set", "fleet.stall_s=4"),
        *with_faults("delay link node 1 node 3 by 600 s at step 6"),
    )
    assert result["weights_sha256"] == undisturbed
    assert len(result["recoveries"]) == 1
    fleet = json.loads((tmp_path / "run" / "fleet.json").read_text())
    (finding,) = (
        happening["what"]
        for happening in fleet["happenings"]
        if happening["what"].startswith("epoch 0 hangs")
    )
    assert re.search(r"rank 1: gloo:\w+ number \d+ of group \w+: ranks 0, 2 wait for rank 1", finding)
    ended = next(
        happening["what"]
        for happening in fleet["happenings"]
        if happening["what"].startswith("leave epoch 0")
    )
    assert "node-1: hangs" in ended


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_faults_change_no_bit(seed: int, run_file: Path, undisturbed: str, tmp_path: Path) -> None:
    result = fleet_run(run_file, tmp_path, *with_faults(f"random:{seed}:4"))
    assert result["weights_sha256"] == undisturbed


LANES = ("model.lanes=2",)
TILES = ("model.context_tiles=2",)
EXPERTS = ("model.moe.experts=4", "model.moe.ffn_dim=32")
OVER_TENSOR = ("parallel.tensor=2", "fleet.least_tensor=1")
OVER_CONTEXT = ("parallel.context=2", 'parallel.context_mode="allgather"', "fleet.least_context=1")
AXES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], set[tuple[int, int]]]] = {
    "tensor": (2, LANES, OVER_TENSOR, {(2, 1), (1, 1)}),
    "tensor and experts": (
        2,
        LANES + EXPERTS,
        (*OVER_TENSOR, "parallel.expert=2"),
        {(2, 1), (1, 1)},
    ),
    "context": (2, TILES, OVER_CONTEXT, {(1, 2), (1, 1)}),
    "context and experts": (
        2,
        TILES + EXPERTS,
        (*OVER_CONTEXT, "parallel.expert=2"),
        {(1, 2), (1, 1)},
    ),
    "all, over four nodes": (
        4,
        LANES + TILES + EXPERTS,
        (*OVER_TENSOR, *OVER_CONTEXT, "parallel.expert=4"),
        {(2, 2)},
    ),
}
"""Nodes of a fleet, what the run fixes, how the fleet divides it, and the degrees of tensor and context before and after a node is lost; of
two that may fall, the planner has chosen the first."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axis", AXES)
def test_random_faults_that_change_the_degree_of_any_axis_change_no_bit(
    axis: str, seed: int, run_file: Path, tmp_path: Path
) -> None:
    nodes, fixed, divided, degrees = AXES[axis]
    pieces, division = ([part for field in sets for part in ("--set", field)] for sets in (fixed, divided))
    one_rank = ["--ranks", "1", "--run-dir", str(tmp_path / "alone")]
    alone = last_json(run(["train", str(run_file), "--json", *one_rank, *pieces], tmp_path))
    draw = Random(seed)
    lost = f"kill node {draw.randrange(nodes)} at step {draw.randrange(4, 10)}"
    fleet = ["--nodes", str(nodes), "--spares", "0", *with_faults(f"random:{seed}:3", lost)]
    result = fleet_run(run_file, tmp_path, *pieces, *division, *fleet)
    assert result["weights_sha256"] == alone["weights_sha256"]
    events = read_events(tmp_path / "run" / "events.jsonl")
    layouts = [event.body.layout for event in events if isinstance(event.body, RunStarted)]
    taken = [(layout.get("tensor", 1), layout.get("context", 1)) for layout in layouts]
    # A busy machine may let a fleet begin before its last node has come, which then takes the smaller degree first.
    if taken[0] == max(degrees):
        if degrees == {(2, 2)}:
            first = read_resolved(RunDirectory(tmp_path / "run")).fleet.halve_first
            degrees = degrees | {{"tensor": (1, 2), "context": (2, 1)}[first]}
        assert degrees <= set(taken), "a node was lost for good"
        last = result["layout"]
        assert EXPERTS[0] not in fixed or last["expert"] == last["tensor"] * last["context"] < math.prod(
            taken[0]
        )


def test_a_fault_that_cannot_be_read_is_refused_with_the_column(run_file: Path, tmp_path: Path) -> None:
    done = run(["train", str(run_file), "--nodes", "2", "--fault", "kill nodes 1 at step 3"], tmp_path)
    assert done.returncode == 2
    assert "column 6" in done.stderr


def test_a_fault_without_a_fleet_is_refused(run_file: Path, tmp_path: Path) -> None:
    done = run(["train", str(run_file), "--fault", "kill rank 1 at step 3"], tmp_path)
    assert done.returncode == 2
    assert "--nodes" in done.stderr


@pytest.mark.slow
def test_a_slow_rank_is_replaced_by_a_spare_and_no_step_is_lost(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    windows = ["--set", "fleet.straggler_window_steps=2"]
    result = fleet_run(run_file, tmp_path, *windows, *with_faults("slow rank 1 by 6x from step 2"))
    assert result["weights_sha256"] == undisturbed
    assert any(recovery["lost_steps"] == 0 for recovery in result["recoveries"])
    fleet = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert any(member["role"] == "quarantined" for member in fleet["members"])
    with RankStream(tmp_path / "run" / "ranks.bin") as stream:
        first = newest_windows(stream, 100, attempt=0)
        ranking = slowest("compute_s", values_of(stream, "compute_s", first), Layout(replicate=3), 1)
    assert ranking[0].rank == 1


@pytest.mark.slow
def test_a_fleet_that_goes_on_from_another_runs_checkpoint_keeps_the_bits_through_a_fault(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    parent = str(tmp_path / "parent")
    keeping = ["--set", "checkpoint.keep_last=9", "--ranks", "1"]
    assert run(["train", str(run_file), "--run-dir", parent, *keeping], tmp_path).returncode == 0
    fault = "kill rank 1 at step 11"
    fleet = ["--nodes", "2", "--fault", fault, "--json"]
    result = last_json(run(["train", parent, "--from", "6", *fleet], tmp_path))
    assert result["weights_sha256"] == undisturbed
    assert result["faults"] == [fault]
