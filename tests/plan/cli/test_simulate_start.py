"""``phalanx simulate start``, as a user calls it."""

from __future__ import annotations

import json

from click.testing import CliRunner

from phalanx_plan.cli.simulate_command import start_command as command


def test_the_phases_of_a_start_are_printed_for_each_number_of_nodes_with_their_sources() -> None:
    words = ["--nodes", "100", "--nodes", "10000", "--checkpoint-gb", "4000", "--json"]
    few, many = json.loads(CliRunner().invoke(command, words).output)
    assert (few["nodes"], many["nodes"]) == (100, 10000)
    assert few["total_s"] < many["total_s"]
    each = {phase["phase"]: phase for phase in many["phases"]}
    assert each["checkpoint"]["s"] == 2.0
    assert sum(phase["hidden"] for phase in many["phases"]) == 1
    assert all(phase["source"] for phase in many["phases"])
    table = CliRunner().invoke(command, words[:-1]).output
    assert "ranks meet" in table
    assert "in all" in table


def test_a_slower_shared_file_system_makes_a_start_longer() -> None:
    words = ["--nodes", "1000", "--files", "shared", "--json"]
    (best,) = json.loads(CliRunner().invoke(command, words).output)
    (slow,) = json.loads(CliRunner().invoke(command, [*words, "--file-calls-per-s", "20000"]).output)
    assert slow["total_s"] > best["total_s"]
