"""Names in a run directory: steps, committed or not, and what a path stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from phalanx.run.directory.paths import (
    CHECKPOINT_INDEX,
    RunDirectory,
    RunDirectoryError,
    committed_steps,
    is_committed,
    locate_checkpoints,
    read_resolved,
    step_folder,
    step_of,
)
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec, MoeSpec, RunSpec


def committed(root: Path, step: int) -> Path:
    """The folder of a step, as a finished save leaves it."""
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_INDEX).touch()
    return folder


@pytest.mark.parametrize("step", [0, 7, 12345678, 123456789])
def test_a_steps_folder_is_named_after_it(tmp_path: Path, step: int) -> None:
    assert step_of(step_folder(tmp_path, step)) == step


@pytest.mark.parametrize("name", ["step-7", "step-0000000x", ".partial-step-00000007-1", "step-00000007.bak"])
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of(Path(name)) is None


def test_steps_are_committed_by_their_index_and_listed_by_number(tmp_path: Path) -> None:
    for step in (99_999_999, 3, 100_000_000):
        committed(tmp_path, step)
    step_folder(tmp_path, 5).mkdir()
    assert not is_committed(step_folder(tmp_path, 5))
    assert committed_steps(tmp_path) == [3, 99_999_999, 100_000_000]


def test_a_run_that_saved_nothing_has_no_steps(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).committed_steps() == []


def test_a_path_stands_for_a_run_a_folder_of_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    root = RunDirectory(tmp_path).checkpoints
    folder = committed(root, 4)
    assert locate_checkpoints(tmp_path) == (root, None)
    assert locate_checkpoints(root) == (root, None)
    assert locate_checkpoints(folder) == (root, 4)
    assert locate_checkpoints(root, 3) == (root, 3)


def test_a_checkpoint_of_one_step_is_not_taken_for_another(tmp_path: Path) -> None:
    folder = committed(tmp_path, 4)
    assert locate_checkpoints(folder, 4) == (tmp_path, 4)
    with pytest.raises(RunDirectoryError, match="checkpoint of step 4, not 3; leave the step out"):
        locate_checkpoints(folder, 3)


def test_a_run_file_of_an_earlier_version_is_explained_with_the_fields_new_name(tmp_path: Path) -> None:
    table = to_table(RunSpec(model=ModelSpec(moe=MoeSpec())))
    table["model"]["moe"]["normalise"] = table["model"]["moe"].pop("normalize")
    RunDirectory(tmp_path).run_file.write_text(tomli_w.dumps(table))
    with pytest.raises(RunDirectoryError) as caught:
        read_resolved(RunDirectory(tmp_path))
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'run.toml'} is damaged or was written by another version of Phalanx; correct it: 1 problem",
        "  model.moe.normalise: there is no such field (did you mean normalize?)",
    ]
