"""Continued pretraining from two paths: an imported model's directory, and text or a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data.tokenizers.tokenizer import train_bpe
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.read import ONLY, read_table
from phalanx.run.spec import RunSpec
from phalanx.train.start.origins import fields_from_model
from phalanx.train.start.prepare import ready_data


@pytest.fixture
def model(tmp_path: Path) -> RunDirectory:
    """The directory of an imported model, without its weights."""
    directory = RunDirectory(tmp_path / "imported" / "wise")
    directory.tokenizer.mkdir(parents=True)
    directory.run_file.write_text("[model]\nlayers = 3\nvocab_size = 300\n")
    train_bpe(["a b c"], vocab_size=257).save(directory.tokenizer)
    return directory


def described(model: Path, data: Path, *overrides: str) -> RunSpec:
    return read_table({}, {}, [*fields_from_model(model, data, bare=True), *overrides], Path("train"))


def test_text_is_prepared_with_the_models_tokenizer_and_shape_and_weights_are_the_models(
    model: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("some words of mine\n" * 200)
    spec = described(model.path, text)
    assert (spec.model.layers, spec.model.vocab_size) == (3, 300)
    assert spec.checkpoint.init_from == str(model.path)
    index = ready_data(spec.data, lambda _label, _done, _total: None)[ONLY].index
    assert index.tokenizer_fingerprint == train_bpe(["a b c"], vocab_size=257).fingerprint


def test_another_text_is_never_taken_for_one_of_the_same_name(model: RunDirectory, tmp_path: Path) -> None:
    places = set()
    for folder in ("mine", "yours"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text("words")
        places.add(described(model.path, tmp_path / folder / "notes.txt").data.path)
    assert len(places) == 2


def test_a_folder_of_text_that_has_grown_is_another_text(model: RunDirectory, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "1.txt").write_text("words")
    before = described(model.path, notes).data.path
    assert described(model.path, notes).data.path == before
    (notes / "2.txt").write_text("more words")
    assert described(model.path, notes).data.path != before


def test_a_prepared_dataset_is_taken_as_it_is(model: RunDirectory, dataset: Path) -> None:
    spec = described(model.path, dataset, "optimizer.lr=3e-6")
    assert (spec.data.path, spec.data.corpus) == (str(dataset), ())
    assert spec.optimizer.lr == 3e-6


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda model: model.run_file.unlink(), "phalanx import FOLDER"),
        (lambda model: model.run_file.rename(model.path / "config.json"), "phalanx import .*wise"),
        (lambda model: (model.tokenizer / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    break_it: object, message: str, model: RunDirectory, tmp_path: Path
) -> None:
    assert callable(break_it)
    break_it(model)
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(RunDirectoryError, match=message):
        fields_from_model(model.path, tmp_path / "notes.txt", bare=True)
