"""The metrics of a fleet, from what its coordinator publishes."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.fleet.control.fleet_file import FleetFile, FleetIncident, Member
from phalanx.fleet.control.publisher import FleetSampler
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.events import IncidentKind

FLEET = FleetFile(
    run="r", coordinator="h:1", coordinator_pid=1, leader="", reign=2, written_unix_s=1000.0,
    phase=FleetPhase.RUNNING, reason="", epoch=3, ranks=4, expected_nodes=3, step=17, step_s=0.5, recoveries=2,
    regroups=1, restarts=1, stopping=False, durable_steps=(10, 15), unsaved_steps=2, result_json="", stale=5,
    refused={"a": 1, "b": 2}, happenings=(), members=(
        Member("a", "member", "h", (0, 1), True, 0.1), Member("b", "spare", "h", (), True, 0.2),
        Member("c", "quarantined", "h", (), False, 9.0, "slow", fault=IncidentKind.STRAGGLER),
        Member("d", "given back", "h"),
    ),
)  # fmt: skip


def values(fleet: FleetFile) -> dict[str, float]:
    samples = FleetSampler(lambda: fleet, "r").samples()
    return {
        ",".join([sample.metric.name[14:], *list(sample.labels.pairs.values())[1:]]): sample.value
        for sample in samples
    }


def test_what_the_coordinator_publishes_is_there_as_numbers() -> None:
    metrics = values(FLEET)
    assert (metrics["nodes,member"], metrics["nodes,spare"], metrics["nodes,lost"]) == (1, 1, 0)
    assert (metrics["phase,running"], metrics["phase,waiting"]) == (1, 0)
    assert (metrics["durable_step"], metrics["unsaved_steps"], metrics["refused_total"]) == (15, 2, 3)
    assert (metrics["coordinator_reign"], metrics["recoveries_total"], metrics["expected_nodes"]) == (2, 2, 3)


def test_each_node_that_was_not_given_back_has_its_own() -> None:
    metrics = values(FLEET)
    assert {name.partition(",")[2] for name in metrics if name.startswith("node_")} == {"a", "b", "c"}
    assert (metrics["node_ranks,a"], metrics["node_attached,c"], metrics["node_quarantined,c"]) == (2, 0, 1)


def test_stragglers_are_those_that_were_taken_out_for_it_and_those_that_were_kept_for_want_of_a_spare() -> (
    None
):
    kind = IncidentKind.SLOW_WITHOUT_SPARE
    slow = (FleetIncident(900.0, 3, "a", "any words", kind), FleetIncident(10.0, 3, "b", "any words", kind))
    metrics = values(replace(FLEET, happenings=slow))
    assert [metrics[f"node_straggler,{name}"] for name in "abc"] == [1, 0, 1]


def test_before_the_first_state_there_is_nothing() -> None:
    assert FleetSampler(lambda: None, "r").samples() == []
