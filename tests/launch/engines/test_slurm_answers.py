"""What Slurm says is read: its queue, its nodes and partitions, and times as people and Slurm write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.engines.slurm_orders import order
from phalanx.launch.engines.order import EngineError, run_tool, seconds_of, slurm_time
from phalanx.launch.engines.slurm import (
    NodeFacts,
    SlurmPartition,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    problems,
)
from phalanx.launch.engines.slurm_script import batch_script


@pytest.mark.parametrize("text", ["9" * 400, f"{'9' * 400}d", "\u0663", "1d \u0663h", "-1", "1-"])
def test_a_time_that_no_clock_shows_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="is no time"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2d", 172_800),
        ("1h30m", 5_400),
        ("90m", 5_400),
        ("90", 5_400),
        ("10:30", 630),
        ("1:00:00", 3_600),
        ("7-00:00:00", 604_800),
        ("1-12", 129_600),
        ("1.5h", 5_400),
    ],
)
def test_times_are_those_of_people_and_of_slurm(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@given(st.integers(0, 10**7))
def test_a_time_is_read_back_as_it_is_written(seconds: int) -> None:
    assert seconds_of(slurm_time(seconds)) == seconds


def test_jobs_that_phalanx_did_not_submit_are_left_out() -> None:
    table = (
        "7|PENDING|Priority|18||2026-11-24T10:00:00|2-00:00:00|phalanx-big|main|phalanx:/runs/a|b\n"
        "8|RUNNING|None|2|n[1-2]|x|1:00|other|main|(null)\n"
        "9|RUNNING|None|2|n[3-4]|2026-11-24T09:00:00|59:00|phalanx-small|main|phalanx:/runs/c\n"
    )
    waiting, running = parse_jobs(table)
    assert (waiting.run_dir, running.run_dir) == ("/runs/a|b", "/runs/c")
    assert waiting.sentence == (
        "waits for 18 nodes: Priority (jobs before it in the queue are served first); expected to start 2026-11-24T10:00:00"
    )
    assert running.sentence == "running on 2 nodes (n[3-4]), 59:00 left"


def test_a_name_with_a_bar_is_not_taken_for_columns_of_the_queue() -> None:
    named = replace(order(), name="a|b", run_dir=Path("/runs/a|b"))
    (script,) = (line for line in batch_script(named).splitlines() if "--job-name" in line)
    assert script.endswith("--job-name=phalanx-a_b")


def test_nodes_are_usable_unless_they_are_down_drained_or_silent() -> None:
    table = "a|idle|gpu:8\nb|mixed|gpu:h100:4(S:0-1),gpu:a100:4\nc|drained|gpu:8\nd|idle*|gpu:8\ne|down$|(null)\nf|allocated|(null)\na|idle|gpu:8\n"
    found = {node.name: node for node in parse_nodes(table)}
    assert {name for name, node in found.items() if node.usable} == {"a", "b", "f"}
    assert {name for name, node in found.items() if node.free} == {"a"}
    assert (found["a"].gpus, found["b"].gpus, found["f"].gpus) == (8, 8, 0)


def test_partitions_are_read_with_their_limits() -> None:
    text = (
        "PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=7-00:00:00 State=UP TotalNodes=8\n"
        "PartitionName=small Default=NO MaxNodes=1 MaxTime=UNLIMITED State=DOWN\n"
    )
    assert parse_partitions(text) == [
        SlurmPartition("main", up=True, most_nodes=None, longest_s=604_800, default=True),
        SlurmPartition("small", up=False, most_nodes=1, longest_s=None, default=False),
    ]


MAIN = SlurmPartition("main", up=True, most_nodes=None, longest_s=86_400, default=True)


def test_every_reason_why_a_job_would_wait_for_ever_is_told_at_once() -> None:
    nodes = [NodeFacts(f"n{k}", usable=k != 3, free=True, gpus=4) for k in range(20)]
    told = problems(order(time_limit="2d", exclude="n[4-5]"), [MAIN], {"": nodes})
    assert len(told) == 2
    assert "launch.time_limit: 2d is more than main allows" in told[0]
    assert "main has 20 nodes, 17 of them usable" in told[1]
    told = problems(order(time_limit="3m"), [MAIN], {"": [replace(node, usable=True) for node in nodes]})
    assert "leaves no time beside launch.grace_s" in told[0]
    assert "18 nodes with 8 GPUs are requested, and 0 have so many (at most 4)" in told[1]


@pytest.mark.parametrize("exclude", ["n[", "n[1-x]", "n[0-99999999]"])
def test_nodes_to_exclude_that_are_no_list_are_refused_by_their_field(exclude: str) -> None:
    with pytest.raises(EngineError, match=r"^launch\.exclude: "):
        problems(order(exclude=exclude), [MAIN], {"": []})


def test_of_several_partitions_one_that_can_start_the_job_is_enough_and_all_must_be_there() -> None:
    small = SlurmPartition("small", up=True, most_nodes=4, longest_s=86_400, default=False)
    nodes = [NodeFacts(f"n{k}", usable=True, free=True, gpus=8) for k in range(20)]
    facts = {"main": nodes, "small": nodes[:4]}
    assert problems(order(partition="small,main"), [MAIN, small], facts) == []
    told = problems(order(partition="small,large,main"), [MAIN, small], facts)
    assert "there is no partition 'large': --partition with one of main, small" in told[-1]
    told = problems(order(partition="small,main"), [MAIN, small], {**facts, "main": nodes[:10]})
    assert [line.split(":")[1].split(" ")[1] for line in told] == ["a", "small", "main"]
    assert "a job of small may have 4 nodes" in told[0]
    assert "main has 10 nodes, 10 of them usable" in told[2]


def test_a_cluster_without_a_default_partition_asks_for_one() -> None:
    told = problems(order(), [replace(MAIN, default=False)], {})
    assert told == ["launch.partition: the cluster has no default partition: --partition with one of main"]


def test_a_missing_or_failing_tool_is_told_with_its_own_words() -> None:
    with pytest.raises(EngineError, match="there is no no-such-tool on this machine"):
        run_tool(["no-such-tool"])
    with pytest.raises(EngineError, match="bash: bad luck"):
        run_tool(["bash", "-c", "echo bad luck >&2; exit 3"])
    with pytest.raises(EngineError, match="sleep has not answered for 0 s"):
        run_tool(["sleep", "5"], timeout_s=0.1)
