"""Ranks that wait for others: in a hang in which one computes, and in each step for those with more slots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phalanx.observe.events import RunStarted
from phalanx.run.spec import ParallelSpec, TrainSpec
from phalanx_watch.why.observed import ProcessSeen
from phalanx_watch.why.processes import with_processor_use
from watch.why.test_rules import NOTHING_DUE, only
from watch.why.watched import Watched, steps


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    """A run of 30 healthy steps."""
    watched = Watched(tmp_path / "run", NOTHING_DUE)
    watched.write(steps(1, 30))
    return watched


def ranks(*core_shares: float) -> tuple[ProcessSeen, ...]:
    """The launcher, which has no rank, and ranks that use these shares of a core."""
    shares = [(None, 0.0), *enumerate(core_shares)]
    return tuple(ProcessSeen(10 + n, "S", rank, core_share=share) for n, (rank, share) in enumerate(shares))


def test_a_hang_names_the_rank_that_computes_while_the_others_wait(run: Watched) -> None:
    reason = only(run.reasons(60, processes=ranks(0.0, 0.9)))
    assert (reason.code, reason.where) == ("stalled", "rank 1 (process 12)")
    assert "rank 1 (process 12) computes, while the other ranks wait for it" in reason.evidence[0]
    assert "py-spy dump --pid 12" in reason.next


@pytest.mark.parametrize(
    "shares", [(0.9, 0.9), (0.0, 0.01), (0.9,)], ids=["all compute", "all wait", "one rank"]
)
def test_a_hang_accuses_no_rank_if_all_do_the_same(run: Watched, shares: tuple[float, ...]) -> None:
    assert only(run.reasons(60, processes=ranks(*shares))).where == "the whole run"


@pytest.mark.parametrize("state", ["T", "Z"], ids=["stopped", "ended"])
def test_ranks_that_spin_while_they_wait_for_one_that_has_stopped_or_ended_are_not_accused(
    run: Watched, state: str
) -> None:
    processes = (ProcessSeen(11, "R", 0, core_share=1.0), ProcessSeen(12, state, 1, core_share=0.0))
    reason = only(run.reasons(60, processes=processes))
    assert not any("computes, while" in line for line in reason.evidence)


def test_an_idle_child_of_a_rank_is_no_rank_that_waits(run: Watched) -> None:
    processes = (ProcessSeen(11, "R", 0, core_share=1.0), ProcessSeen(12, "S", 0, core_share=0.0))
    assert only(run.reasons(60, processes=processes)).where == "the whole run"


def test_the_share_of_a_core_is_the_processor_time_between_two_readings(tmp_path: Path) -> None:
    def stat(pid: int, user_ticks: int, kernel_ticks: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = ["R", *["0"] * 10, str(user_ticks), str(kernel_ticks), "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) b) {' '.join(fields)}")

    def clock() -> float:
        return now_s[0]

    def pause(seconds: float) -> None:
        now_s[0] += 2 * seconds  # the machine is busy
        stat(11, 100 + round(100 * seconds), 200 + round(100 * seconds))

    now_s = [1000.0]
    stat(11, 100, 200)
    stat(12, 500, 0)
    ended = ProcessSeen(13, "S", 2)
    processes = with_processor_use(
        [ProcessSeen(11, "R", 0), ProcessSeen(12, "S", 1), ended], tmp_path, pause, clock
    )
    assert [process.core_share for process in processes] == [pytest.approx(1.0), 0.0, None]


@pytest.mark.parametrize(
    ("slots", "ranks", "share"),
    [(3, 2, "25%"), (4, 2, ""), (64, 7, ""), (8, 7, "43%"), (6, 12, ""), (6, 1, "")],
)
def test_unequal_numbers_of_slots_are_named_from_a_fifth_of_the_time_on(
    run: Watched, slots: int, ranks: int, share: str
) -> None:
    tensor_ranks = 2 if ranks in (1, 12) else 1  # one rank is less than a replica of two
    spec = dataclasses.replace(
        NOTHING_DUE,
        train=TrainSpec(slots=slots, batch_size=slots),
        parallel=ParallelSpec(tensor=tensor_ranks),
    )
    run.write([RunStarted("r", 100_000, ranks=ranks), *steps(31, 40)], attempt=1)
    reasons = [reason for reason in run.reasons(spec=spec) if reason.code == "uneven-slots"]
    assert [reason.where for reason in reasons] == ["train.slots"] * bool(share)
    assert all(share in reason.title for reason in reasons)
