"""The rank of a fleet between its training loop and its agent: what it sends to others, and which results it rejects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.format.errors import StorageFullError
from phalanx.checkpoint.snapshot.segments import Segment, SnapshotMemory
from phalanx.fleet.control.fleet_file import ClaimRegister
from phalanx.fleet.core.messages import LEFT_AS_ASKED
from phalanx.fleet.health.audit import AuditVerdict
from phalanx.fleet.health.live_audit import CorruptionFoundError
from phalanx.fleet.node.rank.rank_guardian import (
    _TOLD_BY_ALL_BYTES,
    _TOLD_BYTES,
    NonFiniteStepError,
    RankGuardian,
    _not_too_long,
)
from phalanx.fleet.node.rank.worker import outcome_of
from phalanx.fleet.node.worker_link import Doubted, EpochBroken, LeaveEpoch, Orders, ParkedError
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.train.step.step import StepFlags, StepReport

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@given(st.integers(1, 100_000), st.integers(1, 40), st.integers(1, 24))
def test_records_are_sent_in_their_order_up_to_a_limit_for_all_ranks_together(
    ranks: int, records: int, mebibytes: int
) -> None:
    record = bytes(mebibytes << 20)
    kept = _not_too_long(dict.fromkeys(range(records), record), ranks)
    sent_bytes = len(kept) * len(record)
    assert list(kept) == list(range(len(kept)))
    assert sent_bytes <= _TOLD_BYTES
    assert sent_bytes * ranks <= _TOLD_BY_ALL_BYTES
    room = min(_TOLD_BYTES, _TOLD_BY_ALL_BYTES // ranks)
    assert len(kept) == records or sent_bytes + len(record) > room


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with closing(SnapshotMemory("run", 1)) as made:
        yield made


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_a_gpu_holds_after_its_epoch_was_broken_off_is_no_result(
    tmp_path: Path, memory: SnapshotMemory, device: torch.device
) -> None:
    """On gloo a broken collective raises; NCCL's kernel ends, and leaves whatever is in memory."""
    orders = Orders(StopRequest())
    guardian = RankGuardian(
        RunSpec(),
        memory.worker_segments(0),
        "",
        None,
        lambda _message: None,
        orders,
        device,
        ClaimRegister(RunDirectory(tmp_path), 0),
    )
    guardian.epoch = 7
    guardian.computed()
    orders.on_order(LeaveEpoch(7))
    if device == CPU:
        guardian.computed()
    else:
        with pytest.raises(ParkedError):
            guardian.computed()


def test_a_rank_that_computes_apart_from_the_run_hangs_only_if_one_of_its_steps_takes_too_long(
    tmp_path: Path, memory: SnapshotMemory
) -> None:
    usual = RunSpec()
    impatient = dataclasses.replace(usual, fleet=dataclasses.replace(usual.fleet, stall_s=1e-9))
    for spec, hangs in ((usual, False), (impatient, True)):
        guardian = RankGuardian(
            spec,
            memory.worker_segments(0),
            "",
            None,
            lambda _message: None,
            Orders(StopRequest()),
            CPU,
            ClaimRegister(RunDirectory(tmp_path), 0),
        )
        assert guardian.waiting_s() == 0
        with guardian.apart():
            guardian.computed()
            assert (guardian.waiting_s() == 0) is hangs
        assert guardian.waiting_s() == 0


def test_nobody_is_accused_by_what_a_gpu_holds_after_its_epoch_was_broken_off() -> None:
    report = StepReport(float("nan"), 1.0, 1, 0.1, False, StepFlags(), nonfinite_ranks=(3,))
    accusing = NonFiniteStepError(5, report), CorruptionFoundError(AuditVerdict((2,), True, 0))
    for error in accusing:
        for device in (CPU, GPU):
            assert isinstance(outcome_of(error, 7, over=False, device=device), Doubted)
        assert isinstance(outcome_of(error, 7, over=True, device=CPU), Doubted)
        assert outcome_of(error, 7, over=True, device=GPU) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("NCCL communicator was aborted"),
        ValueError("Default process group has not been initialized"),
        RuntimeError("Could not resolve the process group registered under the name 3"),
    ],
)
def test_each_error_that_an_aborted_collective_may_raise_on_a_gpu_breaks_the_epoch_or_nothing(
    error: Exception,
) -> None:
    assert isinstance(outcome_of(error, 7, over=False, device=GPU), EpochBroken)
    assert outcome_of(error, 7, over=True, device=GPU) is None


def test_a_snapshot_without_memory_breaks_its_epoch_and_the_remedy_is_in_what_a_fleet_keeps_of_it() -> None:
    with (
        closing(Segment(Segment.create("full").descriptor, lambda: 110 << 30)) as full,
        pytest.raises(StorageFullError) as refused,
    ):
        full.begin(480 << 30)
    outcome = outcome_of(refused.value, 7, over=False, device=CPU)
    assert isinstance(outcome, EpochBroken)
    assert "118,111,600,640 are free" in outcome.text[:200]
    assert "fleet.snapshot_every_steps = 0" in outcome.text[:200]


def test_a_rank_that_leaves_on_request_reports_it_unless_the_order_to_leave_has_come() -> None:
    assert outcome_of(ParkedError(), 7, over=False, device=CPU) == EpochBroken(7, LEFT_AS_ASKED)
    assert outcome_of(ParkedError(), 7, over=True, device=CPU) is None
