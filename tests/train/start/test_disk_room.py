"""Room for a run's checkpoints, before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import CheckpointSpec, ModelSpec, RunSpec, TrainSpec
from phalanx.train.start.checks import disk_notes, lack_of_room, most_on_disk

TINY = RunSpec(model=ModelSpec(vocab_size=300), train=TrainSpec(steps=100))


@pytest.mark.parametrize(
    ("checkpoint", "count"),
    [
        (CheckpointSpec(every_steps=10, keep_last=2), 3),
        (CheckpointSpec(every_steps=100), 1),
        (CheckpointSpec(every_steps=60), 2),
        (CheckpointSpec(every_steps=10, keep_last=2, keep_every=50), 5),
        (CheckpointSpec(every_steps=0), 3),
    ],
)
def test_the_checkpoints_on_disk_are_those_kept_and_the_one_that_is_written(
    checkpoint: CheckpointSpec, count: int
) -> None:
    assert most_on_disk(RunSpec(train=TrainSpec(steps=100), checkpoint=checkpoint)) == count


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_warned(tmp_path: Path) -> None:
    assert not list(disk_notes(TINY, RunDirectory(tmp_path)))
    note = lack_of_room(tmp_path, 299, 3, 100)
    assert note.startswith(f"the disk of {tmp_path} has 299 bytes free, and 3 more checkpoints of 100 bytes")
    assert "checkpoint.keep_last" in note
    assert lack_of_room(tmp_path, 300, 3, 100) == ""
