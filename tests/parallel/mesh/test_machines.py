"""Machines of the ranks of a group, against ranks listed one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.mesh import equal_runs, ranks_in_a_machine

few = st.integers(1, 6)


@given(few, few, few, st.integers(1, 24))
def test_a_group_has_two_levels_if_and_only_if_all_groups_fill_several_machines_equally(
    groups: int, ranks: int, stride: int, machine_ranks: int
) -> None:
    width = ranks_in_a_machine(ranks, stride, machine_ranks)
    ranks_by_machine = set()
    for group in range(groups):
        for offset in range(stride):
            places = [group * ranks * stride + i * stride + offset for i in range(ranks)]
            machines = [place // machine_ranks for place in places]
            ranks_by_machine.add(tuple(machines.count(machine) for machine in dict.fromkeys(machines)))
    if width > 1:
        assert ranks_by_machine == {(width,) * (ranks // width)}
        assert 1 < ranks // width < ranks


def test_a_group_of_whole_machines_has_as_many_ranks_in_each_as_other_axes_leave() -> None:
    assert ranks_in_a_machine(64, 1, 8) == 8
    assert ranks_in_a_machine(64, 2, 8) == 4
    assert ranks_in_a_machine(64, 8, 8) == 1, "tensor parallelism fills the machine"
    assert ranks_in_a_machine(8, 1, 8) == 1, "one machine"
    assert ranks_in_a_machine(64, 1, 0) == 1, "unknown"
    assert ranks_in_a_machine(63, 1, 8) == 1, "the last machine would have seven"


@given(few, few)
def test_machines_with_equally_many_ranks_are_found(machines: int, width: int) -> None:
    assert equal_runs([machine for machine in range(machines) for _ in range(width)]) == width


def test_uneven_or_mixed_machines_count_as_unknown() -> None:
    for machines in ([1, 1, 2], [1, 2, 2], [1, 2, 1, 2], [1, 1, 2, 2, 1, 1], [1, 1, 2, 3]):
        assert equal_runs(machines) == 0
