"""``phalanx place``, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from click.testing import CliRunner, Result

from phalanx.cli.launch.joining_hosts import join_refusal
from phalanx.fleet.control.fleet_file import FleetFile, Member, write_fleet_file
from phalanx.fleet.core.state import FleetPhase
from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run, to_table
from phalanx_plan.cli.place_command import command

FABRIC = """
taken = "n[5]"
[[levels]]
name = "pod"
share = 0.25
[[levels]]
name = "leaf"
[nodes]
"n[1-4]" = "p1.l1"
"n[5-8]" = "p1.l2"
"n[9-12]" = "p2.l3"
"n[13-16]" = "p2.l4"
"""
RUN = """
name = "small"
[model]
layers = 4
dim = 128
heads = 8
[data]
path = "data"
vocab_size = 512
[train]
steps = 10
batch_size = 32
slots = 16
seq_len = 64
[parallel]
tensor = 8
pipeline = 2
[fleet]
nodes = 8
spares = 2
workers_per_node = 8
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "fabric.toml").write_text(FABRIC)
    return tmp_path


def place(files: Path, *words: str) -> Result:
    arguments = [str(files / "run.toml"), "--topology", str(files / "fabric.toml"), *words]
    return CliRunner().invoke(command, arguments)


def test_a_run_is_placed_and_every_choice_priced(files: Path) -> None:
    shown = json.loads(place(files, "--json").output)
    assert shown["topology"]["free"] == 15
    assert len(shown["seats"]) == 8
    assert len(shown["spares"]) == 2
    assert "n5" not in {*shown["seats"], *shown["spares"]}
    assert [choice["slowest_s"] for choice in shown["choices"]] == sorted(
        choice["slowest_s"] for choice in shown["choices"]
    )
    assert {choice["order"] for choice in shown["choices"]} == {"data", "pipeline"}


def test_the_table_names_units_levels_nodes_and_spares(files: Path) -> None:
    shown = place(files).output
    assert "64 ranks on 8 nodes of 8, 2 spares; 15 of 16 nodes free" in shown
    assert "pod ms" in shown
    assert "leaf ms" in shown
    assert "ranks, in order: n[" in shown
    assert "spares: n" in shown


def test_an_allocation_is_verified_with_its_cost(files: Path) -> None:
    near, far = (
        json.loads(place(files, "--share", "pod=0.001", "--allocation", hosts, "--json").output)
        for hosts in ("n[9-16]", "n[1-4,13-16]")
    )
    assert near["good"]
    assert near["lost_s"] == 0
    assert not far["good"]
    assert far["lost_s"] > 0
    assert "of a step are lost" in place(files, "--share", "pod=0.001", "--allocation", "n[1-4,13-16]").output


def test_an_allocation_of_a_run_that_names_no_number_of_nodes_is_used_whole_but_for_the_spares(
    files: Path,
) -> None:
    text = (files / "run.toml").read_text()
    (files / "run.toml").write_text(text.replace("nodes = 8\n", ""))
    placed = place(files, "--allocation", "n[1-4,6-11]")
    assert placed.exit_code == 0, placed.output
    (files / "run.toml").write_text(text)
    assert placed.output == place(files, "--allocation", "n[1-4,6-11]").output


def test_flows_of_one_axis_are_distinguished(files: Path) -> None:
    (line,) = [line for line in place(files).output.splitlines() if "sends in a step" in line]
    flows = line.partition(": ")[2].split(") ")
    assert len(flows) == len(set(flows)) > 2
    assert "(8, ring)" in line


def test_an_allocation_that_loses_more_than_it_may_is_refused_by_its_exit_code(files: Path) -> None:
    words = ["--share", "pod=0.001", "--most-lost-ms", "0.001", "--allocation"]
    assert place(files, *words, "n[9-16]").exit_code == 0
    assert place(files, *words, "n[1-4,13-16]").exit_code == 3
    assert "--allocation HOSTS" in place(files, "--most-lost-ms", "1").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "16", "--spares", "0"], "need 16 nodes, and 15 of 16 are free"),
        (["--nodes", "3"], "cannot be laid out on 24 ranks"),
        (["--unit", "3"], "a unit of 3 nodes does not divide the run's 8"),
        (["--unit", "8", "--whole"], "would straddle domains of level leaf"),
        (["--share", "rail=0.5"], "there is no level 'rail'"),
        (["--share", "pod"], "is not LEVEL=FRACTION"),
        (["--share", "pod=2"], "above 0 and at most 1"),
        (["--allocation", "n[1-"], "is no list of hosts"),
        (["--allocation", "n[1-4]"], "4 nodes were allocated, and the run's ranks need 8"),
        (["--cluster", "h999"], "h999"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_to_change(
    files: Path, words: list[str], message: str
) -> None:
    ended = place(files, *words)
    assert ended.exit_code
    assert message in " ".join(ended.output.split())


def test_a_topology_that_cannot_be_read_is_named(files: Path) -> None:
    ended = CliRunner().invoke(command, [str(files / "run.toml"), "--topology", str(files / "nothing.toml")])
    assert ended.exit_code
    assert "cannot read the topology" in ended.output


def fleet_of(files: Path, nodes: list[str], pods: dict[str, str] | None = None) -> Path:
    """A run directory whose fleet has these members, and one that is lost. ``pods``: the pods that members report."""
    domains = {name: (pod,) for name, pod in (pods or {}).items()}
    living = (Member(name, "member", name, domain=domains.get(name, ())) for name in nodes)
    members = (*living, Member("n16", "lost", "n16"))
    content = FleetFile(
        run="small",
        coordinator="",
        leader="n1",
        reign=1,
        coordinator_pid=0,
        written_unix_s=0.0,
        phase=FleetPhase.RUNNING,
        reason="",
        epoch=1,
        ranks=64,
        expected_nodes=10,
        step=1,
        step_s=1.0,
        recoveries=0,
        regroups=0,
        restarts=0,
        stopping=False,
        durable_steps=(),
        unsaved_steps=0,
        result_json="",
        members=members,
        happenings=(),
        stale=0,
        refused={},
    )
    write_fleet_file(files, content)
    return files


def test_nodes_that_join_a_fleet_are_refused_only_if_they_make_it_lose_more_than_it_may(files: Path) -> None:
    near = [f"n{number}" for number in (1, 2, 3, 4, 6, 7, 8)]
    fleet = fleet_of(files, near)
    joining = [
        "--joining",
        str(fleet),
        "--set",
        "fleet.nodes=4",
        "--most-lost-ms",
        "0",
    ]
    joining += ["--share", "pod=0.00001"]
    far = place(files, "--allocation", "n9", *joining, "--set", "fleet.spares=0")
    assert far.exit_code == 3, far.output
    assert "pod p" in far.output
    # A fleet in two pods is not made slower by a spare in one of them.
    fleet_of(files, [*near[:4], "n9", "n10", "n11", "n12"])
    assert place(files, "--allocation", "n13", *joining, "--set", "fleet.spares=1").exit_code == 0
    assert "--allocation HOSTS" in place(files, *joining).output


def test_an_agent_started_by_hand_is_priced_beside_others_that_were_and_refused_where_it_is_too_far(
    files: Path,
) -> None:
    nodes = [f"n{number}" for number in (1, 2, 3, 4, 6, 7, 8)]
    limits = [
        "fleet.nodes=4",
        "fleet.spares=0",
        "launch.most_lost_ms=0.001",
        'launch.shares=["level 1=0.00001"]',
    ]
    spec = read_run(files / "run.toml", PRESETS, limits)
    (files / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    (files / "record.json").write_text('{"attempts": 1}')
    fleet_of(files, nodes, dict.fromkeys(nodes, "p1"))
    # With an eighth node the run has twice the ranks, and they exchange gradients.
    joiners = {"n9": ("p2",), "n5": ("p1",)}
    refusals = {name: join_refusal(files, name, domain) for name, domain in joiners.items()}
    assert "lose more" in refusals["n9"]
    assert refusals["n5"] == ""
    # The places of some are unknown, so there is no price.
    fleet_of(files, nodes, dict.fromkeys(nodes[:3], "p1"))
    assert join_refusal(files, "n9", ("p2",)) == ""
