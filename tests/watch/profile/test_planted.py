"""Profiles of real runs on gloo name what was planted in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.profile.read import make_summary, profiles, read_summary, trace_path
from profiled_runs import NAME, ask, profiled_run, record
from ranks import Ranks

pytestmark = pytest.mark.servers

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "slow_rank": (3, {"sharding": "none"}),
    "slow_link": (4, {"sharding": "zero2", "shard_ranks": 2}),
    "host_gap": (2, {"sharding": "none"}),
}


@pytest.fixture(scope="module")
def planted(
    ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[RunDirectory, dict[str, Any]]]:
    """The directory and summary of each planted run."""
    summaries = {}
    for plant, (count, layout) in LAYOUTS.items():
        run_dir = tmp_path_factory.mktemp(plant) / "run"
        ask(run_dir)
        record(ranks, count, profiled_run(dataset, run_dir, **layout), plant)
        directory = RunDirectory(run_dir)
        summaries[plant] = directory, make_summary(directory, NAME)
    return summaries


def costliest(summary: dict[str, Any], code: str) -> dict[str, Any]:
    """The finding of a kind that costs most; on a busy machine there may be others that cost more."""
    return next(finding for finding in summary["findings"] if finding["code"] == code)


def test_a_rank_that_computes_more_is_named_with_what_its_peers_wait(planted: Any) -> None:
    summary = planted["slow_rank"][1]
    late = costliest(summary, "late rank")
    assert list(late["ranks"]) == [1]
    assert late["text"].startswith("rank 1 computes ")
    assert "the others wait" in late["text"]
    assert summary["waits"][0]["late"] == 1


def test_a_slow_link_is_distinguished_from_a_late_rank_and_from_the_links_of_other_groups(
    planted: Any,
) -> None:
    link = costliest(planted["slow_link"][1], "slow link")
    assert (link["axis"], sorted(link["ranks"])) == ("shard", [2, 3])
    assert "as long a call as in the other groups" in link["text"]


def test_time_in_which_no_rank_computes_between_steps_is_named(planted: Any) -> None:
    gaps = [
        finding["text"] for finding in planted["host_gap"][1]["findings"] if finding["code"] == "host gap"
    ]
    assert any(text.startswith("between steps no rank computes") for text in gaps)


@pytest.mark.parametrize("plant", LAYOUTS)
def test_where_a_step_went_sums_to_its_wall_time_on_each_rank(planted: Any, plant: str) -> None:
    summary = planted[plant][1]
    assert [row["rank"] for row in summary["table"]["rows"]] == list(range(LAYOUTS[plant][0]))
    for row in summary["table"]["rows"]:
        assert sum(row["seconds"]) == pytest.approx(row["step_s"], rel=1e-9)
        assert 0 <= row["waited_s"] <= row["step_s"]


@pytest.mark.parametrize("plant", LAYOUTS)
def test_what_the_plan_is_compared_with_sums_to_the_step_and_so_does_the_critical_path(
    planted: Any, plant: str
) -> None:
    summary = planted[plant][1]
    measured = sum(row["measured_s"] for row in summary["plan"]["terms"])
    assert measured == pytest.approx(summary["step_s"], rel=1e-6)
    path = sum(seconds for words in summary["critical_path"].values() for seconds in words.values())
    assert path == pytest.approx(summary["step_s"], rel=0.15)  # it begins where its first rank does


@pytest.mark.parametrize("plant", LAYOUTS)
def test_the_merged_trace_is_in_chromes_format_with_a_process_for_each_rank(planted: Any, plant: str) -> None:
    directory, summary = planted[plant]
    trace = json.loads(gzip.decompress(trace_path(directory, NAME).read_bytes()))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "f"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    assert {event["pid"] for event in events} == set(summary["ranks"])
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in summary["ranks"]}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[flow]["pid"] != ends[flow]["pid"] for flow in starts)


@pytest.mark.parametrize("plant", LAYOUTS)
def test_ranges_of_a_track_lie_within_each_other_or_apart(planted: Any, plant: str) -> None:
    directory, _ = planted[plant]
    trace = json.loads(gzip.decompress(trace_path(directory, NAME).read_bytes()))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") != "operation":
            begin = event["ts"]
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, begin + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


def test_layers_operations_and_memory_are_there(planted: Any) -> None:
    summary = planted["slow_rank"][1]
    layers = {row["layer"] for row in summary["layers"]}
    assert {"layer 0 attention", "layer 1 ffn"} <= layers
    backward = {row["layer"]: row["backward_s"] for row in summary["layers"]}
    assert backward["layer 1 ffn"] > 0
    kinds = {row["kind"] for row in summary["operations"]}
    assert {"matrix products", "attention", "elementwise and sums"} <= kinds
    memory = summary["memory"][0]
    assert memory["bytes"]["activations"]
    assert memory["peak_bytes"] > sum(memory["held_bytes"].values()) > 0


def test_clocks_of_one_machine_are_found_to_agree_within_the_stated_error(planted: Any) -> None:
    for _, summary in planted.values():
        assert summary["clock_error_s"] is not None


def test_profiles_are_listed_with_what_the_page_shows(planted: Any) -> None:
    directory, summary = planted["host_gap"]
    (listed,) = profiles(directory)
    assert (listed.name, listed.verdict, listed.ranks) == (NAME, summary["verdict"], (0, 1))
    assert listed.table == read_summary(directory, NAME)["table"]
    assert listed.trace_bytes > 0
