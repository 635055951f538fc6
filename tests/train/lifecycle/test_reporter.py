"""Records of a start beside its run, and its reports on machines that differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from phalanx.checkpoint.format.errors import CheckpointError, SavesHeldError
from phalanx.checkpoint.save.saver import SaveOutcome
from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import CheckpointFailed, Message
from phalanx.observe.record.notes import leave_machine, read_machines
from phalanx.run.directory.paths import RunDirectory
from phalanx.train.lifecycle.reporter import Reporter, leave_own_machine, report_differences, watch_machines


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run directory in which three nodes have left what they are."""
    directory = RunDirectory(tmp_path)
    for name in ("node-0", "node-1", "node-2"):
        leave_machine(directory, name, 0)
    return directory


def change(directory: RunDirectory, node: str, **changes: object) -> None:
    (machine,) = (candidate for candidate in read_machines(directory) if candidate.node == node)
    changed = dataclasses.replace(machine, **changes)  # type: ignore[arg-type]
    (directory.machines / f"{node}.json").write_bytes(msgspec.json.encode(changed))


class Warnings(list[str]):
    """Warnings that have been recorded."""

    def warn(self, text: str) -> bool:
        self.append(text)
        return True


def test_equal_machines_give_no_warning(directory: RunDirectory) -> None:
    warnings = Warnings()
    report_differences(directory, warnings.warn)
    assert warnings == []


def test_a_node_with_another_driver_is_reported_by_name_once(directory: RunDirectory) -> None:
    warnings = Warnings()
    change(directory, "node-1", driver="560.1")
    for _ in range(3):  # as at every epoch of a fleet
        report_differences(directory, warnings.warn)
    (text,) = warnings
    assert "driver: node-1 with 560.1; the others with none" in text


def test_only_new_differences_are_reported_later(directory: RunDirectory) -> None:
    warnings = Warnings()
    change(directory, "node-1", driver="560.1")
    report_differences(directory, warnings.warn)
    change(directory, "node-2", cores=1)
    report_differences(directory, warnings.warn)
    assert "node-2 with 1" in warnings[1]
    assert "node-1" not in warnings[1]


@pytest.mark.parametrize("content", ["7", "null", '"560.1"', "[[]]", "[", "[" * 5000])
def test_a_damaged_list_of_reported_differences_is_made_again(directory: RunDirectory, content: str) -> None:
    warnings = Warnings()
    change(directory, "node-1", driver="560.1")
    (directory.machines / "differences").write_text(content)
    for _ in range(2):
        report_differences(directory, warnings.warn)
    (text,) = warnings
    assert "driver: node-1 with 560.1" in text


def test_a_difference_that_shows_after_an_epoch_is_left_to_the_next_one_to_report(
    directory: RunDirectory,
) -> None:
    change(directory, "node-1", driver="560.1")
    reporter = Reporter(EventLog(directory.events, 0))
    reporter.close()
    watch_machines(directory, reporter, late_s=0.0).join()
    warnings = Warnings()
    report_differences(directory, warnings.warn)
    assert len(warnings) == 1


def test_an_epoch_that_ends_while_machines_are_compared_leaves_the_report_to_the_next_one(
    directory: RunDirectory,
) -> None:
    change(directory, "node-1", driver="560.1")
    reporter = Reporter(EventLog(directory.events, 0))

    def close_and_warn(text: str) -> bool:
        reporter.close()
        return reporter.record(Message("warning", text))

    report_differences(directory, close_and_warn)
    warnings = Warnings()
    report_differences(directory, warnings.warn)
    assert len(warnings) == 1


@pytest.mark.parametrize("error", [SavesHeldError("no coordinator"), CheckpointError("Input/output error")])
def test_a_save_that_waits_for_a_coordinator_is_recorded_as_no_fault_of_the_disk(
    directory: RunDirectory, error: CheckpointError
) -> None:
    with EventLog(directory.events, 0) as log:
        Reporter(log).saved([SaveOutcome(40, "failed", 0, 1.0, error)], {}, "run/checkpoints")
    (event,) = read_events(directory.events)
    assert event.body == CheckpointFailed(
        40, "run/checkpoints", str(error), is_held=isinstance(error, SavesHeldError)
    )


def test_a_record_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_own_machine(RunDirectory(tmp_path / "nowhere"))
    assert "this machine is not recorded" in capsys.readouterr().err
