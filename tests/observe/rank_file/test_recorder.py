"""The ranks' numbers are written beside training: no disk delays a step, and trouble is reported once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path, PosixPath

from observe.rank_frames import drawn_frame, read, same
from phalanx.observe.rank_writer import _QUEUE_FRAMES, RankRecorder

PATIENCE_S = 100.0


def test_all_that_was_recorded_is_in_the_file_once_it_is_closed(tmp_path: Path) -> None:
    frames = [drawn_frame(1, step, 3) for step in range(20)]
    recorder = RankRecorder(tmp_path / "ranks.bin")
    assert [recorder.record(frame) for frame in frames] == [""] * 20
    assert recorder.close(PATIENCE_S) == ""
    assert all(map(same, read(tmp_path / "ranks.bin"), frames))


def test_nothing_is_made_if_nothing_is_recorded(tmp_path: Path) -> None:
    assert RankRecorder(tmp_path / "ranks.bin").close() == ""
    assert list(tmp_path.iterdir()) == []


def test_trouble_is_reported_once_with_the_file(tmp_path: Path) -> None:
    recorder = RankRecorder(tmp_path / "no such folder" / "ranks.bin")
    warnings = [recorder.record(drawn_frame(1, step, 3)) for step in range(5)]
    warnings.append(recorder.close(PATIENCE_S))
    (warning,) = [text for text in warnings if text]
    assert "no such folder" in warning
    assert "training continues" in warning


def test_a_disk_that_hangs_delays_nobody_and_the_frames_that_do_not_fit_are_dropped(tmp_path: Path) -> None:
    recorder = RankRecorder(tmp_path / "ranks.bin")
    hanging = threading.Event()
    recorder._work = hanging.wait  # type: ignore[method-assign]  a write that does not come back
    warnings = [recorder.record(drawn_frame(1, step, 3)) for step in range(2 * _QUEUE_FRAMES)]
    assert [text for text in warnings if text] == [
        f"{tmp_path}/ranks.bin is written too slowly; training continues, and some of the ranks' numbers will be missing"
    ]
    assert recorder.close(timeout_s=0.05) == ""
    hanging.set()


class HangingPath(PosixPath):
    """A path on a disk that does not answer while ``answers`` is unset."""

    answers = threading.Event()

    def __fspath__(self) -> str:
        self.answers.wait()
        return str(self)


def test_frames_that_a_hanging_disk_has_not_taken_at_the_end_are_reported(tmp_path: Path) -> None:
    recorder = RankRecorder(HangingPath(tmp_path / "ranks.bin"))
    assert recorder.record(drawn_frame(1, 1, 3)) == ""
    assert "ranks.bin is written too slowly" in recorder.close(timeout_s=0.05)
    HangingPath.answers.set()


def test_frames_are_written_again_once_the_trouble_is_over(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ranks.bin"
    recorder = RankRecorder(path)
    warning = recorder.record(drawn_frame(1, 1, 3))
    while not warning:
        time.sleep(0.05)  # as steps do: the queue is not to fill up
        warning = recorder.record(drawn_frame(1, 1, 3))
    assert "No such file" in warning
    os.mkdir(path.parent)
    recorder.record(drawn_frame(1, 2, 3))
    recorder.close(PATIENCE_S)
    assert [frame.step for frame in read(path)][-1] == 2
