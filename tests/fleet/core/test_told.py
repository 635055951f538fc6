"""What a fleet tells people: how grave it is, and in which words."""

from __future__ import annotations

from fleet.small_fleets import running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.progress import end
from phalanx.fleet.core.state import FleetPhase, node_called


def test_what_an_operator_asked_for_is_no_warning() -> None:
    fleet = running()
    fleet.hear(m.Drain("1"))
    told = next(one for one in fleet.state.incidents if one.text == "drained by the operator")
    assert told.level == "info"


def test_what_befell_a_node_is_a_warning() -> None:
    fleet = running()
    fleet.hear(m.Suspect("1", "health", "GPU 3 fell off the bus"))
    assert {one.level for one in fleet.state.incidents} == {"warning"}


def test_the_end_of_a_run_is_no_warning_and_its_failure_an_error() -> None:
    for phase, level in ((FleetPhase.FINISHED, "info"), (FleetPhase.FAILED, "error")):
        fleet = running()
        end(fleet.state, [], phase, "all steps are done")
        assert [one.level for one in fleet.state.incidents] == [level]


def test_a_name_that_says_that_it_is_a_node_is_not_told_so_again() -> None:
    assert (node_called("node-1"), node_called("7")) == ("node-1", "node 7")


def test_a_command_is_told_in_words_and_without_its_fields() -> None:
    assert c.in_words(c.Park(3, "node-1 fell silent")) == "leave epoch 3 (node-1 fell silent)"
    assert c.in_words(c.Park(3, planned=True)) == "leave epoch 3 after this step"
    assert c.in_words(c.Shutdown("over")) == "shutdown"
