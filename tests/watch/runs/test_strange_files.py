"""A run directory may have anything under the name of a file: all runs are listed, at once and with the damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.observe.event_log import EventLogError, newest_event, read_events
from phalanx.run.directory.paths import DamagedRecordError, RunDirectory, RunDirectoryError, read_resolved
from phalanx_watch.page.http import json_bytes
from phalanx_watch.runs.index import RunIndex
from phalanx_watch.runs.probe import read_tail
from phalanx_watch.runs.row import read_labels
from recorded_runs import RecordedRun

_HUGE = 6 << 30
_NAMES = ("record.json", "fleet.json", "labels.json", "result.json", "run.toml", "lock", "events.jsonl")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_HUGE)


def _deep(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


def _long_numbers(path: Path) -> None:
    digits = "9" * 400
    path.write_text(
        f'{{"step": {digits}, "attempts": {digits}, "written_unix_s": {digits}, "weights_sha256": "a"}}\n'
    )


def _half_pairs(path: Path) -> None:
    path.write_text(
        '{"attempts": 1, "note": "\\ud800", "tags": ["\\udfff"], "data_fingerprint": "\\ud800"}\n'
    )


_KINDS = (_pipe, _folder, _endless, _deep, _long_numbers, _half_pairs)


@pytest.mark.parametrize("make", _KINDS)
@pytest.mark.parametrize("name", _NAMES)
def test_a_run_with_anything_under_the_name_of_a_file_is_listed(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    RecordedRun(tmp_path / "runs" / "whole", "whole", 10).train(3)
    strange = RecordedRun(tmp_path / "runs" / "strange", "strange", 10)
    strange.train(3)
    (strange.directory.path / "record.json").write_text('{"attempts": 1}')
    path = strange.directory.path / name
    path.unlink(missing_ok=True)
    make(path)
    index = RunIndex([tmp_path / "runs"], tmp_path / "cache")
    rows = index.rows()
    assert [Path(row.path).name for row in rows] == ["strange", "whole"]
    assert index.rows() == rows
    assert b"whole" in json_bytes(rows)


def test_no_reader_waits_for_a_pipe(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for name in _NAMES:
        os.mkfifo(tmp_path / name)
    with pytest.raises(DamagedRecordError, match="it is no file"):
        directory.read_record()
    with pytest.raises(RunDirectoryError, match="it is no file"):
        read_resolved(directory)
    with pytest.raises(FleetFileError, match="it is no file"):
        read_fleet_file(tmp_path)
    with pytest.raises(EventLogError, match="it is no file"):
        list(read_events(directory.events))
    assert directory.finished_result() is None
    assert not read_labels(tmp_path).tags


def test_a_line_without_end_is_passed_over_without_being_held(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "a", "a", 10)
    run.train(3)
    with run.directory.events.open("ab") as file:
        file.write(b"{" * (200 << 20))
    assert newest_event(run.directory.events, lambda _: True) is not None
    assert read_tail(run.directory.events).first is not None
    assert len(list(read_events(run.directory.events))) == 4


def test_a_run_whose_path_is_no_text_is_listed_with_the_others(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "runs" / "a", "named", 10).train(3)
    (tmp_path / "runs" / "a").rename(os.fsdecode(os.fsencode(tmp_path) + b"/runs/\xff\xfe"))
    rows = RunIndex([tmp_path / "runs"], tmp_path / "cache").rows()
    assert [row.name for row in rows] == ["named"]
    assert b"named" in json_bytes(rows)
