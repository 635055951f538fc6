"""Whose a run directory is, and what a start in it may do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.checkpoint.pack.writer import pack
from phalanx.data.errors import TokenizerError
from phalanx.data.stored.index import read_index
from phalanx.data.tokenizers.tokenizer import load_own_tokenizer, train_bpe
from phalanx.run.directory.paths import (
    CHECKPOINT_INDEX,
    DamagedRecordError,
    RunDirectory,
    RunDirectoryError,
    RunResult,
    read_resolved,
    step_folder,
)
from phalanx.run.identity import read_unchanged
from phalanx.run.spec import RunSpec
from phalanx.train.score import restored_model
from phalanx.train.start.open_run import OpenRun, choose, open_run, run_key
from phalanx.train.start.origins import child_run
from run.specs import replace_at
from tiny_runs import tiny_run


@pytest.fixture
def spec(dataset: Path, tmp_path: Path) -> RunSpec:
    return tiny_run(dataset, tmp_path / "run")


def with_checkpoint(spec: RunSpec) -> None:
    """As if the run had saved once: from then on the directory is its own."""
    opened(spec)
    folder = step_folder(RunDirectory(Path(spec.run_dir)).checkpoints, 1)
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_INDEX).touch()


def opened(spec: RunSpec) -> OpenRun:
    """Opens and closes the run's directory, as a start that ends at once."""
    run = open_run(spec, read_index(Path(spec.data.path)).fingerprint, Path(spec.data.path))
    os.close(run.lock_fd)
    return run


def test_the_resolved_run_file_reads_back_as_the_run(spec: RunSpec) -> None:
    assert read_resolved(opened(spec).directory) == spec


def test_events_that_cannot_be_read_are_named_with_the_remedy(spec: RunSpec) -> None:
    events = opened(spec).directory.events
    events.mkdir()
    with pytest.raises(RunDirectoryError, match=r"cannot read .*events\.jsonl.*move it away"):
        opened(spec)
    events.rmdir()
    assert opened(spec).attempt == 1


def test_the_tokenizer_is_copied_so_that_the_folder_stands_alone(spec: RunSpec) -> None:
    assert (opened(spec).directory.tokenizer / "tokenizer.json").exists()


def test_a_run_takes_over_the_published_files_of_the_model_that_it_starts_from(
    spec: RunSpec, tmp_path: Path
) -> None:
    imported = RunDirectory(tmp_path / "imported")
    (imported.published / "additional_chat_templates").mkdir(parents=True)
    for name in ("LICENSE", "additional_chat_templates/rag.jinja"):
        (imported.published / name).write_text(name)
    start = str(step_folder(imported.checkpoints, 0))
    directory = opened(replace_at(spec, "checkpoint.init_from", start)).directory
    for name in ("LICENSE", "additional_chat_templates/rag.jinja"):
        assert (directory.published / name).read_text() == name
    assert not opened(
        spec
    ).directory.published.exists()  # another run, in a directory where nothing was saved


def test_a_run_may_continue_in_its_directory_on_another_fleet(spec: RunSpec) -> None:
    with_checkpoint(spec)
    opened(replace_at(replace_at(spec, "parallel.ranks", 5), "checkpoint.every_steps", 7))


def test_a_run_may_go_on_on_another_layout_and_its_history_is_kept(spec: RunSpec) -> None:
    with_checkpoint(spec)
    assert opened(replace_at(spec, "parallel.tensor", 2)).layout_changes == ("parallel.tensor: 1 != 2",)
    other = opened(replace_at(spec, "parallel.context", 3))
    assert other.layout_changes == ("parallel.context: 1 != 3", "parallel.tensor: 2 != 1")
    kept = json.loads(other.directory.record.read_text())["layout_changes"]
    assert kept == ["parallel.tensor: 1 != 2", "parallel.context: 1 != 3", "parallel.tensor: 2 != 1"]


def test_a_directory_of_another_run_is_refused_with_what_differs(spec: RunSpec) -> None:
    with_checkpoint(spec)
    with pytest.raises(
        RunDirectoryError, match=r"belongs to another run(.|\n)*optimizer\.lr: 0\.01 != 0\.02"
    ):
        opened(replace_at(spec, "optimizer.lr", 0.02))


def test_a_run_made_longer_in_its_directory_is_shown_the_way_from_a_step_that_leaves_some_to_train(
    spec: RunSpec,
) -> None:
    with_checkpoint(spec)
    with pytest.raises(RunDirectoryError, match=r"--from 1 --set train\.steps=9"):
        opened(replace_at(spec, "train.steps", 9))
    with pytest.raises(RunDirectoryError) as refused:
        opened(replace_at(spec, "train.steps", 1))
    assert "--from" not in str(refused.value)


def test_a_directory_of_a_run_on_other_data_is_refused(spec: RunSpec) -> None:
    with_checkpoint(spec)
    with pytest.raises(RunDirectoryError, match="trained on other data"):
        open_run(spec, "0" * 64, Path(spec.data.path))


def test_a_directory_with_a_strangers_files_is_refused_and_left_alone(spec: RunSpec) -> None:
    folder = Path(spec.run_dir)
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"not a run directory but holds thesis\.tex"):
        opened(spec)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_two_starts_never_train_in_one_directory_at_once(spec: RunSpec) -> None:
    fingerprint = read_index(Path(spec.data.path)).fingerprint
    first = open_run(spec, fingerprint, Path(spec.data.path))
    with pytest.raises(RunDirectoryError, match=rf"is being trained by process {os.getpid()}"):
        open_run(spec, fingerprint, Path(spec.data.path))
    os.close(first.lock_fd)
    opened(spec)


def test_an_unfinished_run_goes_on_in_its_folder_and_a_finished_one_is_left_alone(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nameless = dataclasses.replace(spec, run_dir="")
    first = choose(nameless, "f")
    assert first.path == Path("runs") / f"tiny-{run_key(nameless, 'f')[:8]}"
    first.path.mkdir(parents=True)
    assert choose(nameless, "f") == first
    first.write_result(RunResult(step=6, weights_sha256="0"))
    second = choose(nameless, "f")
    assert second.path.name == f"{first.path.name}-2"


def test_runs_that_differ_in_any_bit_never_share_a_default_folder(spec: RunSpec) -> None:
    nameless = dataclasses.replace(spec, run_dir="")
    other = replace_at(nameless, "runtime.seed", 4)
    assert choose(nameless, "f") != choose(other, "f")
    assert choose(nameless, "f") != choose(nameless, "g")
    assert choose(nameless, "f") == choose(replace_at(nameless, "parallel.sharding", "none"), "f")


def test_a_damaged_run_file_is_named(spec: RunSpec) -> None:
    directory = opened(spec).directory
    for damage in (b"", b"[model\n", b"\xff\xfe", b"[model]\nlayers = 'many'\n"):
        directory.run_file.write_bytes(damage)
        with pytest.raises(
            RunDirectoryError, match=r"has a damaged run\.toml.*put a copy back|run\.toml is damaged"
        ):
            read_resolved(directory)


def test_a_directory_in_which_nothing_was_saved_may_be_taken_over(spec: RunSpec) -> None:
    opened(spec)
    opened(replace_at(spec, "optimizer.lr", 0.02))


@pytest.mark.parametrize("kept", [["logs"], ["run.toml"], ["logs", "run.toml", ".run.toml.123"]])
def test_a_start_that_was_killed_half_way_does_not_lock_the_run_out(spec: RunSpec, kept: list[str]) -> None:
    folder = Path(spec.run_dir)
    folder.mkdir()
    for name in kept:
        (folder / name).mkdir() if name == "logs" else (folder / name).write_text("")
    opened(spec)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"[1]", b"\xff\xfe"])
def test_a_damaged_result_is_made_again_and_a_damaged_record_refused_by_name(
    spec: RunSpec, damage: bytes
) -> None:
    directory = opened(spec).directory
    directory.result.write_bytes(damage)
    assert directory.finished_result() is None
    opened(spec)
    directory.record.write_bytes(damage)
    with pytest.raises(RunDirectoryError, match=r"record\.json is damaged .*put a copy back, or remove it"):
        opened(spec)
    assert directory.record.read_bytes() == damage
    directory.record.unlink()
    opened(spec)


def test_no_attempt_gets_the_journal_of_an_earlier_one_though_all_else_that_counts_them_is_lost(
    spec: RunSpec,
) -> None:
    directory = opened(spec).directory
    directory.fleet.mkdir()
    directory.journal(4).touch()
    (directory.fleet / "contradiction-17.jsonl").touch()
    directory.record.unlink()
    assert opened(spec).attempt == 5


def test_every_start_is_an_attempt_of_its_own(spec: RunSpec) -> None:
    assert [opened(spec).attempt for _ in range(3)] == [0, 1, 2]


def test_a_place_where_no_directory_can_be_is_named(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"file/run: Not a directory, .*give another run_dir"):
        opened(dataclasses.replace(spec, run_dir=str(tmp_path / "file" / "run")))


def test_a_path_through_a_file_has_no_damaged_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert RunDirectory(tmp_path / "file").read_record() == {}


def test_a_result_survives_being_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.finished_result() is None
    result = RunResult(step=3, loss=0.1, tokens_per_s=7.0, layout={"tensor": 2}, weights_sha256="0")
    directory.write_result(result)
    assert directory.finished_result() == result


def test_a_result_of_another_version_still_marks_its_run_complete(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.result.write_text('{"step": 3, "weights_sha256": "0", "of_another_version": 1}')
    assert directory.finished_result() == RunResult(step=3, weights_sha256="0")


def test_a_step_that_has_lost_its_index_still_keeps_another_run_out(spec: RunSpec) -> None:
    directory = opened(spec).directory
    step_folder(directory.checkpoints, 1).mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="belongs to another run"):
        opened(replace_at(spec, "optimizer.lr", 0.02))


def test_a_start_removes_what_killed_writers_left_behind(spec: RunSpec) -> None:
    directory = opened(spec).directory
    directory.fleet.mkdir()
    left = [folder / ".file.4711.tmp" for folder in (directory.path, directory.logs, directory.fleet)]
    for path in left:
        path.touch()
    opened(spec)
    assert [path for path in left if path.exists()] == []


def test_a_start_that_is_refused_removes_nothing(spec: RunSpec) -> None:
    folder = Path(spec.run_dir)
    folder.mkdir()
    for name in ("thesis.tex", ".thesis.tex.1.tmp"):
        (folder / name).touch()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        opened(spec)
    assert (folder / ".thesis.tex.1.tmp").exists()


def test_agents_which_open_no_run_import_no_template_language_with_what_opens_runs() -> None:
    code = "import sys, phalanx.fleet.node.agent; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A run file or a tokenizer that was changed behind the run's back.


def edited(spec: RunSpec, before: str, after: str) -> RunDirectory:
    """The run of ``spec``, which has saved, with a changed line in the run file of its directory."""
    with_checkpoint(spec)
    directory = RunDirectory(Path(spec.run_dir))
    text = directory.run_file.read_text()
    assert f"\n{before}\n" in text
    directory.run_file.write_text(text.replace(f"\n{before}\n", f"\n{after}\n"))
    return directory


def test_a_start_in_a_directory_whose_run_file_was_changed_names_the_fields_and_leaves_the_record_alone(
    spec: RunSpec,
) -> None:
    directory = edited(spec, "rope_theta = 10000.0", "rope_theta = 3.0")
    record = directory.record.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"was changed(.|\n)*model\.rope_theta: 10000\.0 -> 3\.0"):
        opened(read_resolved(directory))
    assert directory.record.read_bytes() == record


def test_neither_weights_are_read_nor_a_child_is_trained_by_a_changed_run_file(spec: RunSpec) -> None:
    directory = edited(spec, "rope_theta = 10000.0", "rope_theta = 3.0")
    for use in (
        lambda: restored_model(directory.path, None),
        lambda: pack(directory.path),
        lambda: child_run(directory.path, 1, ["train.steps=9"]),
    ):
        with pytest.raises(RunDirectoryError, match=r"was changed(.|\n)*model\.rope_theta"):
            use()


def test_a_changed_run_file_of_a_version_that_recorded_the_identity_alone_is_refused(spec: RunSpec) -> None:
    directory = edited(spec, "rope_theta = 10000.0", "rope_theta = 3.0")
    record = json.loads(directory.record.read_text())
    del record["fields"]
    directory.record.write_text(json.dumps(record))
    with pytest.raises(RunDirectoryError, match=r"was changed(.|\n)*identity"):
        read_unchanged(directory)


def test_a_run_without_a_recorded_identity_is_read_as_it_is(spec: RunSpec) -> None:
    directory = edited(spec, "rope_theta = 10000.0", "rope_theta = 3.0")
    directory.record.write_text(json.dumps({"attempts": 1}))
    assert read_unchanged(directory).model.rope_theta == 3.0


@pytest.mark.parametrize("content", ["", "{}", '{"attempts": 1'])
def test_a_run_with_a_damaged_record_is_not_taken_for_an_unchanged_one(spec: RunSpec, content: str) -> None:
    directory = edited(spec, "rope_theta = 10000.0", "rope_theta = 3.0")
    directory.record.write_text(content)
    with pytest.raises(DamagedRecordError):
        read_unchanged(directory)


def test_fields_of_the_fleet_and_the_layout_may_be_changed_in_the_run_file_of_the_directory(
    spec: RunSpec,
) -> None:
    directory = edited(spec, "tensor = 1", "tensor = 2")
    changed = opened(replace_at(read_unchanged(directory), "checkpoint.every_steps", 7))
    assert changed.layout_changes == ("parallel.tensor: 1 != 2",)
    assert opened(read_unchanged(directory)).layout_changes == ()


def test_a_tokenizer_of_other_tokens_in_the_directory_is_refused(spec: RunSpec) -> None:
    directory = opened(spec).directory
    own = load_own_tokenizer(directory)
    train_bpe(["some other text entirely, of other letters"] * 9, vocab_size=300).save(directory.tokenizer)
    with pytest.raises(TokenizerError, match="not the tokenizer that the run was started with"):
        load_own_tokenizer(directory)
    opened(spec)  # copies that of its dataset again
    assert load_own_tokenizer(directory).fingerprint == own.fingerprint


def test_a_tokenizer_is_refused_if_the_record_of_its_run_is_damaged(spec: RunSpec) -> None:
    directory = opened(spec).directory
    directory.record.write_text("{")
    with pytest.raises(TokenizerError, match=r"record\.json is damaged"):
        load_own_tokenizer(directory)
