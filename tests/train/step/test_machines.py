"""Use of a run's machines: measured by one rank of each, exchanged with the ranks' numbers, and summarized in a bounded event."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.observe.events import MachineUsed
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh import RankMachines, build_mesh, find_machines
from phalanx.run.spec import RunSpec
from phalanx.train.compose import build_model
from phalanx.train.step.machines import FEW_MACHINES, MACHINE_FIGURES, MachineTable, machines_used
from phalanx.train.step.meters import RankTimes
from phalanx.train.step.step import Stepper
from ranks import Ranks
from tiny_runs import tiny_run

NEVER_KNOWN = ("gpu", "gpu_watts")


def rows_of(machines: int, seed: int = 0) -> NDArray[np.float64]:
    """Figures of so many machines without GPUs."""
    rows = np.random.default_rng(seed).random((machines, len(MACHINE_FIGURES)))
    rows[:, [MACHINE_FIGURES.index(name) for name in NEVER_KNOWN]] = np.nan
    return rows


def names_of(machines: int) -> tuple[str, ...]:
    return tuple(f"n{place}" for place in range(machines))


@given(st.integers(2, 40), st.integers(0, 99))
def test_an_event_has_the_median_and_the_extremes_of_each_figure_with_the_machines_that_have_them(
    machines: int, seed: int
) -> None:
    rows, names = rows_of(machines, seed), names_of(machines)
    event = machines_used(7, names, rows)
    assert event is not None
    assert (event.step, event.node, event.nodes) == (7, "n0", machines)
    assert event.figures.keys() == set(MACHINE_FIGURES) - set(NEVER_KNOWN)
    for name in event.figures:
        by_value = sorted(zip(rows[:, MACHINE_FIGURES.index(name)].tolist(), names, strict=True))
        assert (event.least[name], event.least_node[name]) == by_value[0]
        assert (event.most[name], event.most_node[name]) == by_value[-1]
        values = [value for value, _ in by_value]
        middle = values[(machines - 1) // 2], values[machines // 2]
        assert event.figures[name] == sum(middle) / 2


def test_the_event_of_many_machines_is_no_larger_than_that_of_a_few() -> None:
    few, many = (
        len(msgspec.json.encode(machines_used(1, names_of(count), rows_of(count))))
        for count in (FEW_MACHINES, 12_500)
    )
    assert many < few


def test_each_of_a_few_machines_has_its_figures() -> None:
    rows = rows_of(3)
    event = machines_used(1, names_of(3), rows)
    assert event is not None
    assert [event.by_node[name]["cpu"] for name in ("n0", "n1", "n2")] == rows[:, 0].tolist()


def test_a_machine_that_is_not_measured_yet_counts_for_nothing() -> None:
    rows = rows_of(3)
    rows[1:] = np.nan
    event = machines_used(1, names_of(3), rows)
    assert event == MachineUsed(
        1,
        "n0",
        {name: rows[0, MACHINE_FIGURES.index(name)] for name in set(MACHINE_FIGURES) - set(NEVER_KNOWN)},
    )
    rows[0] = np.nan
    assert machines_used(1, names_of(3), rows) is None


def test_a_machine_is_read_every_ten_seconds_and_less_often_in_a_long_start() -> None:
    now, reads = [0.0], list[float]()

    def measure() -> Mapping[str, float]:
        reads.append(now[0])
        return {"cpu": 0.5}

    table = MachineTable(RankMachines((0,), ("n0",)), 0, measure, lambda: now[0])
    for second in range(1, 20_001):
        now[0] = float(second)
        table.refresh()
    assert reads[:3] == [10.0, 20.0, 30.0]
    assert reads[-1] - reads[-2] == 40.0  # 20,000 s over 500
    assert table.readings == len(reads)


def machines_in_a_window(spec: RunSpec, folder: Path, machine_of: list[int]) -> tuple[list[str], int, object]:
    """The machines' names, this rank's readings, and on rank 0 the event after two windows."""
    rank, device = dist.get_rank(), torch.device("cpu")
    boot_id = folder / f"machine-{machine_of[rank]}"
    boot_id.write_text(f"machine {machine_of[rank]}")
    machines = find_machines(device, boot_id)
    built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
    stepper = Stepper(built, iter(()), Ledger(time.monotonic_ns()))
    hours = itertools.count(0.0, 3600.0)
    table = MachineTable(
        machines, rank, lambda: {"cpu": (rank + 1) / 8, "memory_bytes": 2.0**40}, lambda: next(hours)
    )
    times = RankTimes(stepper, 0, (1,), table)
    frames = [times.step_ended(1), times.step_ended(2)]
    assert all(frame is not None and frame.ranks == dist.get_world_size() for frame in frames)
    return list(machines.names), table.readings, table.event(2)


def test_the_first_rank_of_each_machine_measures_it_and_all_ranks_have_the_figures_of_all(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    names, readings, events = zip(
        *ranks.run(3, machines_in_a_window, tiny_run(dataset, tmp_path / "run"), tmp_path, [5, 5, 1]),
        strict=True,
    )
    assert readings == (2, 0, 2)
    assert events[0] == events[1] == events[2]
    assert isinstance(events[0], MachineUsed)
    first, other = names[0]
    # All processes of this test have one host name.
    assert first.endswith(" (rank 0)")
    assert other.endswith(" (rank 2)")
    assert {name: figures["cpu"] for name, figures in events[0].by_node.items()} == {
        first: 1 / 8,
        other: 3 / 8,
    }
    assert events[0].figures == {"cpu": 2 / 8, "memory_bytes": 2.0**40}
