"""A run is made longer, or gets other values from a step on, as a child run that shares its parent's past."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.errors import DataError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.sources import open_places
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Restored, Step
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_small_json
from phalanx.run.fields import RunFileError
from phalanx.run.identity import read_lineage
from phalanx.run.spec import RunSpec
from phalanx.train.start.origins import changes_from_parent, child_run
from phalanx.train.start.prepare import prepare_run, resolve
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank


def constant(dataset: Path, run_dir: Path, steps: int) -> RunSpec:
    """A run whose learning rate does not depend on its length."""
    return replace_at(tiny_run(dataset, run_dir, steps=steps), "schedule.kind", "constant")


def child_of(parent: Path, run_dir: Path, *overrides: str, step: int | None = None) -> RunSpec:
    """The child run, resolved, that is to be trained in ``run_dir``."""
    spec = child_run(parent, step, [*overrides, f"run_dir={json.dumps(str(run_dir))}"])
    return resolve(spec, open_places(spec.data), Path("child.toml"))


def bodies(run_dir: Path, kind: type) -> list[Any]:
    return [event.body for event in read_events(run_dir / "events.jsonl") if isinstance(event.body, kind)]


def extra(run_dir: Path, step: int) -> dict[str, Any]:
    return DiskTier(run_dir / "checkpoints").extra(step)


@pytest.fixture(scope="module")
def parent(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of four steps, with checkpoints of steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("parent") / "run"
    ranks.run(2, train_on_this_rank, constant(dataset, run_dir, steps=4))
    return run_dir


def test_a_run_made_longer_has_the_weights_of_one_that_was_so_long_from_the_start(
    parent: Path, ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    undisturbed = ranks.run(1, train_on_this_rank, constant(dataset, tmp_path / "long", steps=8))[0]
    child = child_of(parent, tmp_path / "child", "train.steps=8")
    ranks.run(3, train_on_this_rank, child, 7)  # broken off in step 7, with step 6 saved
    result = ranks.run(2, train_on_this_rank, child)[0]
    for figure in ("weights_sha256", "held_out_loss", "tokens", "loss"):
        assert result[figure] == undisturbed[figure]
    sources = [(restored.step, Path(restored.source)) for restored in bodies(tmp_path / "child", Restored)]
    assert sources == [
        (4, parent / "checkpoints" / "step-00000004"),
        (6, tmp_path / "child" / "checkpoints"),
    ]
    # Nothing of the past was copied.
    assert DiskTier(tmp_path / "child" / "checkpoints").steps() == [6, 8]


def test_values_that_change_at_a_step_change_from_there_on_wherever_the_child_is_broken_off(
    parent: Path, ranks: Ranks, tmp_path: Path
) -> None:
    changes = ["train.steps=8", "train.batch_size=8", "train.micro_batch_size=1", "optimizer.lr=0.002"]
    unbroken = ranks.run(1, train_on_this_rank, child_of(parent, tmp_path / "a", *changes))[0]
    child = child_of(parent, tmp_path / "b", *changes)
    ranks.run(2, train_on_this_rank, child, 7)
    assert ranks.run(1, train_on_this_rank, child)[0]["weights_sha256"] == unbroken["weights_sha256"]
    # Four steps of the parent's 16 sequences, then of 8: none is left out, none is seen twice.
    assert [extra(tmp_path / "b", step)["next_sample"] for step in (6, 8)] == [80, 96]
    assert {step.lr for step in bodies(tmp_path / "a", Step)} == {0.002}


def test_a_childs_record_has_its_whole_lineage(parent: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train_on_this_rank, child_of(parent, tmp_path / "child", "train.steps=4", step=2))
    ranks.run(1, train_on_this_rank, child_of(tmp_path / "child", tmp_path / "grandchild", "train.steps=5"))
    record = read_small_json(RunDirectory(tmp_path / "grandchild").record)
    first, second = read_lineage(record)
    assert (first.run_dir, first.step, first.init_with) == (str(parent), 2, "training")
    assert first.identity == read_small_json(RunDirectory(parent).record)["identity"]
    assert (second.run_dir, second.step) == (str(tmp_path / "child"), 4)
    # With nothing changed it repeats what its parent did.
    assert second.weights_sha256 == read_small_json(RunDirectory(parent).result)["weights_sha256"]


def test_with_the_optimizers_state_alone_steps_and_data_begin_from_scratch(
    parent: Path, ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = constant(dataset, tmp_path / "anew", steps=2)
    spec = replace_at(spec, "checkpoint.init_from", str(parent / "checkpoints" / "step-00000004"))
    weights = ranks.run(1, train_on_this_rank, spec)[0]["weights_sha256"]
    spec = replace(spec, run_dir=str(tmp_path / "moments"))
    other = replace_at(spec, "checkpoint.init_with", "optimizer")
    assert ranks.run(1, train_on_this_rank, other)[0]["weights_sha256"] != weights
    parent_state, ended = extra(parent, 4), extra(tmp_path / "moments", 2)
    assert (ended["step"], ended["next_sample"]) == (2, 32)
    assert ended["updates"] == parent_state["updates"] + 2


def prepared(spec: RunSpec) -> RunSpec:
    """Does all that is done before the first rank starts; returns the run as its ranks will read it."""
    run = prepare_run(spec, Path("child.toml"), lambda _label, _done, _total: None)
    os.close(run.lock_fd)
    return run.spec


@pytest.mark.parametrize(
    ("override", "field", "reason"),
    [
        ("model.layers=3", "model.layers", "weights of the parent's model"),
        ("runtime.seed=4", "runtime.seed", "it orders the samples"),
        ("train.seq_len=12", "train.seq_len", "the place in the data"),
        ('optimizer.name="muon"', "optimizer.name", "state of the parent's optimizer"),
        ('optimizer.state="bf16"', "optimizer.state", "the parent's format"),
    ],
)
def test_what_the_parents_state_was_made_with_cannot_change(
    override: str, field: str, reason: str, parent: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFileError) as error:
        prepared(child_of(parent, tmp_path / "child", "train.steps=8", override))
    (problem, *_) = [problem for problem in error.value.problems if problem.path == field]
    assert reason in problem.finding
    assert "init_from" in problem.remedy


def test_other_data_than_the_parents_is_refused(parent: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    documents = [Document(f"{n}", f"{n} other words " * 40) for n in range(20)]
    prepare(documents, other, tokenizer="bytes", held_out_fraction=0.1)
    with pytest.raises(RunFileError, match=r"data\.path: .* holds other tokens"):
        prepared(child_of(parent, tmp_path / "child", "train.steps=8", f'data.path="{other}"'))


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(parent: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no checkpoint of step 3; there are 2, 4"):
        child_run(parent, 3, [])


def test_a_newest_checkpoint_that_has_lost_a_file_is_passed_over(parent: Path, tmp_path: Path) -> None:
    mine = tmp_path / "parent"
    shutil.copytree(parent, mine)
    (mine / "checkpoints" / "step-00000004" / "rank-00001.safetensors").unlink()
    assert child_run(mine, None, ["train.steps=8"]).checkpoint.init_from.endswith("step-00000002")
    (mine / "checkpoints" / "step-00000002" / "rank-00000.safetensors").write_bytes(b"cut")
    with pytest.raises(RunDirectoryError, match=r"no checkpoint in .* is whole"):
        child_run(mine, None, ["train.steps=8"])


def test_nothing_left_to_train_is_refused_with_the_field_that_makes_it_longer(parent: Path) -> None:
    with pytest.raises(RunFileError, match=r"train\.steps: 4 steps are done at step 4"):
        child_run(parent, None, [])


def test_a_child_without_its_parent_is_refused_until_it_has_saved(
    parent: Path, ranks: Ranks, tmp_path: Path
) -> None:
    mine = tmp_path / "parent"
    shutil.copytree(parent, mine)
    child = child_of(mine, tmp_path / "child", "train.steps=8")
    moved = mine.rename(tmp_path / "elsewhere")
    with pytest.raises(RunFileError) as error:
        prepared(child)
    assert str(mine) in str(error.value)
    assert "has saved none of its own" in str(error.value)
    moved.rename(mine)
    ranks.run(1, train_on_this_rank, child, 7)  # with step 6 saved
    shutil.rmtree(mine)
    prepared(child)
    assert ranks.run(1, train_on_this_rank, child)[0]["step"] == 8


def test_the_jump_of_the_learning_rate_is_reported(parent: Path, tmp_path: Path) -> None:
    spec = child_of(parent, tmp_path / "child", "train.steps=8", "optimizer.lr=0.002")
    unchanged = child_of(parent, tmp_path / "child", "train.steps=8")
    assert list(changes_from_parent(unchanged, spec, 4)) == [
        "optimizer.lr: 0.01 -> 0.002",
        "learning rate of step 5: 0.01 -> 0.002",
    ]


def test_a_rise_of_the_rate_after_a_finished_decay_starts_at_the_parents_last_rate_and_names_the_remedy(
    parent: Path, tmp_path: Path
) -> None:
    unchanged = child_of(parent, tmp_path / "child", "train.steps=8")
    for kind in ("wsd", "cosine"):
        decayed = replace_at(replace_at(unchanged, "train.steps", 4), "schedule.kind", kind)
        longer = replace_at(decayed, "train.steps", 800)
        *_, rise = changes_from_parent(decayed, longer, 4)
        last = decayed.optimizer.lr * decayed.schedule.floor
        assert f"learning rate of step 5: {last:.4g}, as in step 4 -> " in rise
        assert "times as high" in rise
        assert "--from a step before the parent's decay" in rise


def test_a_child_in_its_parents_directory_is_refused(parent: Path) -> None:
    with pytest.raises(RunFileError, match="is the parent's, which stays as it is"):
        child_run(parent, 2, ["train.steps=8", f"run_dir={json.dumps(str(parent))}"])


def test_a_run_and_its_child_find_data_at_a_relative_path_from_any_folder(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.parent)
    spec = replace_at(constant(dataset, tmp_path / "run", steps=4), "data.path", dataset.name)
    first = prepared(spec)
    monkeypatch.chdir(tmp_path)
    again = prepared(spec)
    assert (first.data.path, again.data.path) == (dataset.name, str(dataset))
    moved = replace_at(spec, "data.path", "elsewhere")
    with pytest.raises(DataError, match=r"data\.path = elsewhere"):
        prepared(moved)


def test_a_child_that_names_its_parents_directory_finds_the_parents_data(
    parent: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = replace_at(child_of(parent, tmp_path / "child", "train.steps=8"), "data.path", dataset.name)
    monkeypatch.chdir(tmp_path)
    assert prepared(replace_at(child, "checkpoint.init_from", str(parent))).data.path == str(dataset)


@pytest.mark.parametrize("override", ['checkpoint.init_from="elsewhere"', 'checkpoint.init_with="weights"'])
def test_another_start_beside_the_parents_step_is_refused(parent: Path, override: str) -> None:
    with pytest.raises(RunFileError, match="--from sets it"):
        child_run(parent, 2, ["train.steps=8", override])
