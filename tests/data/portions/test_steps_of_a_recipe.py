"""Steps in a recipe: read, written into the plan, done by any worker, and counted."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file, texts, write_lines
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import Processes
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.run.fields import RunFileError

FILTER = """
from phalanx.data.steps.step import Document, Dropped

def clean(document):
    print("printing disturbs nobody")
    if "word7" in document.text.split():
        return Dropped("seven")
    return Document(document.name, document.text.upper())
"""


def test_a_function_of_the_users_own_is_the_same_in_every_process(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    (tmp_path / "filters.py").write_text(FILTER)
    recipe = recipe_file(tmp_path, '[[step]]\nuse = "filters.py:clean"')
    alone = prepared(recipe, tmp_path / "alone")
    executor = Processes(2)
    try:
        prepared(recipe, tmp_path / "out", executor)
    finally:
        executor.close()
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")
    assert b"WORD" in (tmp_path / "out" / "train-00000.bin").read_bytes()[::2]
    counts = alone.counts
    assert counts["documents kept"] + counts["dropped: seven"] == counts["documents read"] == 187
    (tmp_path / "filters.py").write_text(FILTER + "\n")
    with pytest.raises(PreparationError, match=r"has another recipe.*step\[0\].code differs"):
        prepared(recipe, tmp_path / "out")


def test_parameters_of_a_step_go_to_the_users_function(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", ["one two three", "one", "one two", "four five six"])
    (tmp_path / "filters.py").write_text(
        "from phalanx.data.steps.step import Dropped\n"
        "def clean(document, least, never=()):\n"
        "    words = document.text.split()\n"
        "    return Dropped('short') if len(words) < least or set(words) & set(never) else document\n"
    )
    step = '[[step]]\nuse = "filters.py:clean"\nparameters = {least = 2, never = ["five"]}'
    recipe = recipe_file(tmp_path, step, output="held_out = 0.0")
    executor = Processes(2)
    try:
        done = prepared(recipe, tmp_path / "out", executor)
    finally:
        executor.close()
    assert (done.counts["documents kept"], done.counts["dropped: short"]) == (2, 2)
    wrong = recipe_file(tmp_path, step.replace("least", "last"), output="held_out = 0.0")
    with pytest.raises(
        PreparationError, match=r"step filters.py:clean: clean of a document and step.parameters"
    ):
        prepared(wrong, tmp_path / "other")


def test_a_filter_of_datatrove_decides_as_it_does_by_itself(tmp_path: Path) -> None:
    pytest.importorskip(
        "datatrove", reason="datatrove is not installed: pip install 'phalanx-train[datatrove]'"
    )
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.filters import RegexFilter

    lines = texts(80, seed=3)
    write_lines(tmp_path / "raw" / "a.jsonl", lines)
    step = '[[step]]\nuse = "datatrove:RegexFilter"\nparameters = {regex_exp = "word7"}'
    done = prepared(recipe_file(tmp_path, step), tmp_path / "out")
    theirs = RegexFilter("word7")
    kept = sum(bool(theirs.filter(TheirDocument(text=text, id=""))) for text in lines)
    assert 0 < kept < 80
    assert done.counts["documents kept"] == kept
    assert done.counts["dropped: RegexFilter"] == 80 - kept
    for use, parameters, message in (
        ("NoFilter", "{}", "has no filter NoFilter; it has: C4"),
        ("RegexFilter", '{expression = "a"}', "unexpected keyword argument 'expression'"),
    ):
        wrong = f'[[step]]\nuse = "datatrove:{use}"\nparameters = {parameters}'
        with pytest.raises(PreparationError, match=f"step datatrove:{use}: .*{message}"):
            prepared(recipe_file(tmp_path, wrong), tmp_path / "wrong")


def test_a_filter_of_datatrove_without_datatrove_is_refused_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    raw_folder(tmp_path)
    with pytest.raises(PreparationError, match=r"phalanx-train\[datatrove\]"):
        prepared(recipe_file(tmp_path, '[[step]]\nuse = "datatrove:C4QualityFilter"'), tmp_path / "out")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(document):\n  pass", "there is no function clean"),
        (
            "def clean(document):\n  return 1 / 0",
            r"on document .*: ZeroDivisionError: .* \(filters\.py, line 2\)",
        ),
        ("def clean(document):\n  exit('no')", r"on document .*: SystemExit: no \(filters\.py, line 2\)"),
        ("\nexit('no')", r"cannot be run: SystemExit: no \(filters\.py, line 2\)"),
        ("def clean(document):\n  return document.text", "gave str, not a Document or Dropped"),
        ("def clean(", "cannot be run: SyntaxError"),
    ],
)
def test_a_function_that_does_not_work_is_named(tmp_path: Path, code: str, message: str) -> None:
    raw_folder(tmp_path)
    (tmp_path / "filters.py").write_text(code)
    with pytest.raises(PreparationError, match=f"step filters.py:clean.* {message}"):
        prepared(recipe_file(tmp_path, '[[step]]\nuse = "filters.py:clean"'), tmp_path / "out")


def test_an_error_of_any_length_reaches_the_user_from_a_worker_process(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    (tmp_path / "filters.py").write_text("def clean(document):\n  raise ValueError('x' * (4 << 20))")
    executor = Processes(1)
    try:
        with pytest.raises(
            PreparationError, match=r"step filters.py:clean on document (.|\n)*mend it"
        ) as caught:
            prepared(recipe_file(tmp_path, '[[step]]\nuse = "filters.py:clean"'), tmp_path / "out", executor)
    finally:
        executor.close()
    assert len(str(caught.value)) < 1 << 20


def test_documents_that_share_an_ngram_with_an_evaluation_are_dropped(tmp_path: Path) -> None:
    questions = texts(20, seed=5)
    long = [text for text in questions if len(text.split()) > 20]
    planted = [f"before {text.upper()}, and after" for text in long]
    write_lines(tmp_path / "evaluation.jsonl", questions)
    write_lines(tmp_path / "raw" / "a.jsonl", [*texts(50, seed=6), *planted])
    recipe = recipe_file(tmp_path, '[[step]]\nuse = "decontaminate"\nagainst = ["evaluation.jsonl"]')
    done = prepared(recipe, tmp_path / "out")
    assert done.counts["dropped: contaminated"] == len(long) > 3
    assert done.counts["documents kept"] == 50


def test_typos_in_steps_are_named(tmp_path: Path) -> None:
    steps = '[[step]]\nuse = "lenght"\n[[step]]\nuse = "length"\nmin_chars = 3\n[[step]]\nmin_words = 2\n'
    more = '[[step]]\nuse = "characters"\nallowed = "[a"\n[[step]]\nuse = "decontaminate"\n'
    with pytest.raises(RunFileError) as caught:
        read_recipe(recipe_file(tmp_path, steps + more))
    for message in (
        "step[0].use: 'lenght' is not known",
        "did you mean 'length'",
        "step[1].min_chars: there is no such field (did you mean min_characters?)",
        "step[2].use: is missing",
        "step[3].allowed: is no class of characters",
        "step[4].against: is missing",
    ):
        assert message in str(caught.value)
