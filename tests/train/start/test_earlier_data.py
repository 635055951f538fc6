"""A run file whose dataset was prepared again begins another run, with a note on how to resume the old one."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from phalanx.data.stored.index import read_index
from phalanx.run.directory.paths import CHECKPOINT_INDEX, step_folder
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import OpenRun, open_run
from phalanx.train.start.origins import notes_of_earlier_data
from run.specs import replace_at
from tiny_runs import make_dataset, tiny_run


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run that names no directory, on a dataset of its own."""
    monkeypatch.chdir(tmp_path)
    return dataclasses.replace(tiny_run(make_dataset(tmp_path / "words"), tmp_path), run_dir="")


def opened(spec: RunSpec) -> OpenRun:
    run = open_run(spec, read_index(Path(spec.data.path)).fingerprint, Path(spec.data.path))
    os.close(run.lock_fd)
    return run


def saved(run: OpenRun) -> None:
    folder = step_folder(run.directory.checkpoints, 4)
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_INDEX).touch()


def prepared_again(spec: RunSpec) -> None:
    shutil.rmtree(spec.data.path)
    make_dataset(Path(spec.data.path), salt="other words")


def test_the_run_before_is_named_if_its_dataset_was_prepared_again(spec: RunSpec) -> None:
    before = opened(spec)
    saved(before)
    prepared_again(spec)
    run = opened(spec)
    assert run.directory.path != before.directory.path
    (note,) = notes_of_earlier_data(run)
    assert f"{before.directory.path}, at step 4, is of this run file" in note
    assert "begins at step 0" in note
    assert "put its dataset back" in note
    saved(run)
    assert notes_of_earlier_data(opened(spec)) == [], "it is noted once: a run that has saved resumes"


def test_a_field_that_a_dataset_packed_again_sets_is_named_with_the_way_to_resume_without_it(
    spec: RunSpec,
) -> None:
    before = opened(replace_at(spec, "train.document_mask", False))
    saved(before)
    (note,) = notes_of_earlier_data(opened(replace_at(spec, "train.document_mask", True)))
    assert str(before.directory.path) in note
    assert "--set train.document_mask=false resumes that one" in note


@pytest.mark.parametrize("other", ["train.steps", "run_dir", "unsaved"])
def test_other_runs_and_runs_that_never_saved_are_not_named(
    spec: RunSpec, other: str, tmp_path: Path
) -> None:
    before = opened(replace_at(spec, "train.steps", 9) if other == "train.steps" else spec)
    if other != "unsaved":
        saved(before)
    prepared_again(spec)
    run = opened(dataclasses.replace(spec, run_dir=str(tmp_path / "mine")) if other == "run_dir" else spec)
    assert notes_of_earlier_data(run) == []


def test_a_folder_of_such_a_name_that_cannot_be_looked_into_hinders_no_start(spec: RunSpec) -> None:
    before = opened(spec)
    saved(before)
    strange = before.directory.path.with_name(f"{spec.name}-0000")
    strange.mkdir()
    (strange / "checkpoints").symlink_to("x" * 300)  # even root cannot follow it
    prepared_again(spec)
    (note,) = notes_of_earlier_data(opened(spec))
    assert str(before.directory.path) in note
