"""Incidents, nodes and commands as a fleet prints them: with a level, and in words."""

from __future__ import annotations

from fleet.small_fleets import running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.progress import end
from phalanx.fleet.core.state import FleetPhase, node_called


def test_a_request_of_an_operator_is_no_warning() -> None:
    fleet = running()
    fleet.handle(m.Drain("1"))
    incident = next(
        incident for incident in fleet.state.incidents if incident.text == "drained by the operator"
    )
    assert incident.level == "info"


def test_what_befell_a_node_is_a_warning() -> None:
    fleet = running()
    fleet.handle(m.Suspect("1", "health", "GPU 3 fell off the bus"))
    assert {incident.level for incident in fleet.state.incidents} == {"warning"}


def test_the_end_of_a_run_is_no_warning_and_its_failure_an_error() -> None:
    for phase, level in ((FleetPhase.FINISHED, "info"), (FleetPhase.FAILED, "error")):
        fleet = running()
        end(fleet.state, [], phase, "all steps are done")
        assert [incident.level for incident in fleet.state.incidents] == [level]


def test_a_name_that_begins_with_node_gets_no_second_node_before_it() -> None:
    assert (node_called("node-1"), node_called("7")) == ("node-1", "node 7")


def test_a_command_is_printed_in_words_and_without_its_fields() -> None:
    assert c.in_words(c.Park(3, "node-1 fell silent")) == "leave epoch 3 (node-1 fell silent)"
    assert c.in_words(c.Park(3, planned=True)) == "leave epoch 3 after this step"
    assert c.in_words(c.Shutdown("over")) == "shutdown"
