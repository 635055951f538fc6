"""The port of a coordinator: outside those of outgoing connections, the run's own, and the same in a batch script's shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.launch.engines.hosts import coordinator_port
from phalanx.launch.engines.order import (
    USUAL_RANGE,
    port_in_shell,
    port_of,
    range_of_connections,
)
from phalanx.launch.engines.slurm_script import batch_script
from phalanx.launch.engines.submission import order_of
from phalanx.run.spec import FleetSpec, RunSpec

PORTS = range(20_000, 40_000)
ranges = st.tuples(st.integers(1, 65_535), st.integers(1, 65_535)).map(lambda two: (min(two), max(two)))


@given(number=st.integers(0, 2**32), connections=ranges)
def test_the_port_is_one_that_no_outgoing_connection_gets_while_a_thousand_such_are_left(
    number: int, connections: tuple[int, int]
) -> None:
    first, last = connections
    left = [port for port in PORTS if not first <= port <= last]
    port = port_of(number, connections)
    assert port in (left if len(left) >= 1_000 else PORTS)


@settings(max_examples=8)  # each takes every port
@given(number=st.integers(0, 2**32), connections=ranges)
def test_runs_with_numbers_that_follow_each_other_share_no_port_before_all_have_been_taken(
    number: int, connections: tuple[int, int]
) -> None:
    first, last = connections
    left = sum(not first <= port <= last for port in PORTS)
    count = left if left >= 1_000 else len(PORTS)
    taken = {port_of(other, connections) for other in range(number, number + count)}
    assert len(taken) == count
    assert port_of(number + count, connections) == port_of(number, connections)


def test_the_shell_of_a_job_chooses_the_same_port(tmp_path: Path) -> None:
    edges = (1, 19_000, 19_999, 20_000, 20_001, 21_500, 32_768, 38_999, 39_000, 39_999, 40_000, 65_535)
    cases = [(first, last) for first in edges for last in edges if first <= last]
    lines = ["set -eu"]
    for place, connections in enumerate(cases):
        path = tmp_path / str(place)
        path.write_text("{}\t{}\n".format(*connections))
        lines += [*port_in_shell(str(4_000_000_007 + place), path), 'echo "$port"']
    lines += [*port_in_shell("7", tmp_path / "missing"), 'echo "$port"']
    completed = subprocess.run(
        ["bash", "-s"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    expected = [port_of(4_000_000_007 + place, connections) for place, connections in enumerate(cases)]
    assert list(map(int, completed.stdout.split())) == [*expected, port_of(7, USUAL_RANGE)]


def test_a_machine_whose_range_cannot_be_read_is_taken_to_have_the_usual_one(tmp_path: Path) -> None:
    assert range_of_connections(tmp_path / "missing") == USUAL_RANGE
    (tmp_path / "strange").write_text("any\n")
    assert range_of_connections(tmp_path / "strange") == USUAL_RANGE


def test_a_run_that_names_its_port_has_it_and_any_other_one_outside_the_connections_of_this_machine(
    tmp_path: Path,
) -> None:
    spec = RunSpec(run_dir=str(tmp_path / "run"), fleet=FleetSpec(nodes=2))
    first, last = range_of_connections()
    port = coordinator_port(order_of(spec, tmp_path))
    assert port == port_of(port, (first, last)) or not first <= port <= last
    by_job = batch_script(order_of(spec, tmp_path)).split("\nhead=")[1].split("\nnonce=")[0]
    output = subprocess.run(
        ["bash", "-eu"],
        input=f"SLURM_JOB_ID=7\nhead={by_job}\necho $head",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(output.rpartition(":")[2]) == port_of(7, (first, last))
    named = RunSpec(run_dir=str(tmp_path / "run"), fleet=FleetSpec(nodes=2, port=33_333))
    assert coordinator_port(order_of(named, tmp_path)) == 33_333
    assert 'head="$(hostname):33333"' in batch_script(order_of(named, tmp_path))
