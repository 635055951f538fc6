"""The sentences of ``--fault``: read, refused with the column, drawn at random."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.fleet.fault import (
    PHASES,
    Corrupt,
    CutLink,
    DelayLink,
    Fault,
    FaultError,
    FillDisk,
    FleetShape,
    Freeze,
    Kill,
    Slow,
    When,
    parse_fault,
    random_faults,
    read_faults,
)

FLEET = FleetShape(nodes=5, workers_per_node=2, ranks=8, steps=40, losable_nodes=2)

numbers = st.integers(0, 999_999)
amounts = st.floats(0.001, 1e6).map(lambda value: round(value, 6)) | st.integers(1, 100).map(float)
links = st.tuples(numbers, numbers).filter(lambda nodes: nodes[0] != nodes[1])
actions = st.one_of(
    st.builds(Kill, st.sampled_from(("worker", "node", "rank")), numbers),
    st.just(Kill("coordinator")),
    st.builds(Freeze, numbers),
    st.builds(Slow, numbers, amounts.map(lambda value: value + 1)),
    st.builds(CutLink, links),
    st.builds(DelayLink, links, amounts),
    st.builds(Corrupt, st.sampled_from(("gradient", "parameter", "snapshot")), numbers),
    st.just(FillDisk()),
)
phases = st.none() | st.sampled_from(PHASES)
moments = st.builds(When, st.integers(1, 10**6), st.none(), phases) | st.builds(
    When, st.none(), amounts, phases
)


@given(st.builds(Fault, actions, moments, st.none() | amounts))
def test_a_printed_fault_reads_back_as_itself(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill worker 2 at step 30", Fault(Kill("worker", 2), When(30))),
        ("kill coordinator at 12 s", Fault(Kill("coordinator"), When(time_s=12.0))),
        ("stop rank 1 at step 9 for 5 s", Fault(Freeze(1), When(9), 5.0)),
        ("slow rank 3 by 2x from step 5", Fault(Slow(3, 2.0), When(5))),
        ("cut link node 1 node 2 at step 8 for 3 s", Fault(CutLink((1, 2)), When(8), 3.0)),
        ("corrupt gradient rank 1 at step 7", Fault(Corrupt("gradient", 1), When(7))),
        ("corrupt parameter rank 1 at step 7", Fault(Corrupt("parameter", 1), When(7))),
        ("fill disk at step 5", Fault(FillDisk(), When(5))),
        ("kill node 2 in backward at step 3", Fault(Kill("node", 2), When(3, None, "backward"))),
        ("kill rank 0 at step 3 in recovery", Fault(Kill("rank", 0), When(3, None, "recovery"))),
    ],
)
def test_faults_are_read_as_they_are_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 2, "kill, stop"),
        ("kil node 2 at step 3", 1, "kill, stop"),
        ("kill wrker 2 at step 3", 6, "worker, node, rank or coordinator"),
        ("kill node two at step 3", 11, "the number of a node"),
        ("kill node 2", 13, "when"),
        ("kill node 2 at step 0", 21, "a step, from 1"),
        ("kill node 2 at noon", 16, "number of seconds"),
        ("kill node 2 at 12 h", 19, "s"),
        ("slow rank 1 by 0.5x from step 2", 16, "a factor above 1"),
        ("cut link node 1 node 1 at step 2", 22, "a node other than 1"),
        ("kill node 2 at step 3 in lunch", 26, "forward, backward"),
        ("kill node 2 at step 3 at step 4", 23, "in or for"),
        ("kill node 2 at step 3 in commit for 1 s now", 41, "the end"),
        ("random:seven:3", 8, "SEED:COUNT"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_with_column_and_remedy(
    text: str, column: int, expected: str
) -> None:
    with pytest.raises(FaultError) as refused:
        read_faults([text], FLEET)
    assert refused.value.column == column
    assert expected in refused.value.expected
    message, shown, pointer = str(refused.value).split("\n")
    assert f"column {column}: expected" in message
    assert shown == f"  {text}"
    assert pointer.index("^") == 2 + column - 1


SENTENCE = (
    "kill stop slow cut corrupt link node rank coordinator 1 2x 3 by at from step s in backward for disk"
)


@given(st.text(max_size=60) | st.lists(st.sampled_from(SENTENCE.split()), max_size=12).map(" ".join))
def test_any_text_is_read_or_refused_with_a_column_in_it(text: str) -> None:
    try:
        fault = parse_fault(text)
    except FaultError as error:
        refused = error
    else:
        assert parse_fault(str(fault)) == fault
        return
    assert 1 <= refused.column <= len(text) + 2


@pytest.mark.parametrize(
    "text", ["kill node 5 at step 3", "stop rank 8 at step 3", "kill worker 10 at step 3"]
)
def test_a_fault_of_what_the_fleet_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="there is no"):
        read_faults([text], FLEET)


def test_a_file_holds_one_fault_a_line_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text("# two\nkill node 1 at step 3\n\n  stop rank 2 at step 4 # hangs\n")
    assert read_faults([str(path), "fill disk at step 9"], FLEET) == (
        Fault(Kill("node", 1), When(3)),
        Fault(Freeze(2), When(4)),
        Fault(FillDisk(), When(9)),
    )


def test_a_mistake_in_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text("kill node 1 at step 3\nkill nobody at step 3\n")
    with pytest.raises(FaultError, match=r"faults\.txt, line 2, column 6"):
        read_faults([str(path)], FLEET)


fleets = st.builds(
    FleetShape,
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 24),
    st.integers(3, 100),
    st.integers(0, 3),
)


@given(st.integers(0, 2**60), st.integers(0, 40), fleets)
def test_random_faults_are_a_function_of_the_seed_and_can_happen_in_the_fleet(
    seed: int, count: int, fleet: FleetShape
) -> None:
    faults = random_faults(seed, count, fleet)
    assert faults == random_faults(seed, count, fleet) == read_faults([f"random:{seed}:{count}"], fleet)
    assert len(faults) == count
    steps = [fault.when.step or 0 for fault in faults]
    assert steps == sorted(steps)
    assert all(1 < step < fleet.steps for step in steps)
    assert read_faults(map(str, faults), fleet) == faults
    lost = [f for f in faults if isinstance(f.action, Kill) and f.action.target == "node"]
    assert len(lost) <= fleet.losable_nodes


def test_random_faults_come_in_every_kind_and_phase_and_several_at_once() -> None:
    faults = [fault for seed in range(30) for fault in random_faults(seed, 10, FLEET)]
    kinds = {f.action.target if isinstance(f.action, Kill) else type(f.action) for f in faults}
    assert kinds == {"worker", "node", "rank", "coordinator", Freeze, CutLink}
    assert {f.when.phase for f in faults} == {None, *PHASES}
    at_once = sum(len({f.when.step for f in random_faults(seed, 3, FLEET)}) < 3 for seed in range(100))
    assert at_once > 25
