"""A dataset from a recipe, as a user prepares it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from data.portions.making_raw import raw_folder, recipe_file
from phalanx.cli.data.data_command import command
from phalanx.run.directory.files import files_below


def said(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    raw_folder(tmp_path)
    return recipe_file(tmp_path, '[[step]]\nuse = "length"\nmin_words = 3', output="seq_len = 64")


def test_a_recipe_is_planned_prepared_shown_traced_and_verified(tmp_path: Path, recipe: Path) -> None:
    out = str(tmp_path / "out")
    plan = json.loads(said("plan", str(recipe), "--json"))
    assert (plan["files"], plan["formats"]) == (10, {"jsonl": 3, "text": 7})
    first = json.loads(
        said("prepare", str(recipe), "--out", out, "--workers", "1", "--json").splitlines()[-1]
    )
    again = json.loads(
        said("prepare", str(recipe), "--out", out, "--workers", "1", "--json").splitlines()[-1]
    )
    assert (first["reused"], again["reused"]) == (False, True)
    shown = json.loads(said("show", out, "--json"))
    assert shown["fingerprint"] == first["fingerprint"] == again["fingerprint"]
    counts = shown["documents"]
    assert counts["documents kept"] + counts["dropped: too short"] == counts["documents read"] == 187
    assert str(tmp_path / "raw") in said("trace", out, "--record", "0")
    assert "as they were written" in said("verify", out)


@pytest.mark.parametrize("kind", ["in this process", "by workers", "by a recipe"])
def test_a_dataset_within_the_folder_that_is_read_is_not_read_itself(
    tmp_path: Path, recipe: Path, kind: str
) -> None:
    raw = tmp_path / "raw"
    words = {
        "in this process": [str(raw), "--tokenizer", "bytes"],
        "by workers": [str(raw), "--tokenizer", "bytes", "--workers", "1"],
        "by a recipe": [str(recipe), "--workers", "1"],
    }[kind]
    runs = [
        json.loads(said("prepare", *words, "--out", str(raw / "out"), "--json").splitlines()[-1])
        for _ in range(2)
    ]
    assert [run["reused"] for run in runs] == [False, True]
    assert runs[0]["fingerprint"] == runs[1]["fingerprint"]


def test_a_plan_that_is_written_is_worked_on_by_jobs(tmp_path: Path, recipe: Path) -> None:
    out = str(tmp_path / "out")
    assert "next: phalanx data work" in said("plan", str(recipe), "--out", out)
    assert "write: 0 of" in said("show", out)
    assert "sealed; fingerprint" in said("work", out, "--task", "1/1")
    assert "is not I/N" in said("work", out, "--task", "2/1", code=2)


def test_more_padding_than_a_hundredth_is_said_with_what_helps(tmp_path: Path, recipe: Path) -> None:
    few = "a larger output.portion_bytes, with another --out, helps"
    assert few in said("prepare", str(recipe), "--out", str(tmp_path / "out"), "--workers", "1")
    recipe.write_text(recipe.read_text().replace("portion_bytes = 4096", "portion_bytes = 10_000_000"))
    assert few not in said("prepare", str(recipe), "--out", str(tmp_path / "other"), "--workers", "1")


def test_a_typo_is_named_and_nothing_is_written(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("min_words", "min_word"))
    output = said("prepare", str(recipe), "--out", str(tmp_path / "out"), code=1)
    assert "step[0].min_word: there is no such field (did you mean min_words?)" in output
    assert not (tmp_path / "out").exists()


def test_the_example_is_prepared_as_it_says(tmp_path: Path) -> None:
    root, part = Path(__file__).parents[3], tmp_path / "part"
    example = root / "examples" / "recipe.toml"
    planned = json.loads(said("plan", str(example), "--json"))
    sources = [path for path in files_below(root / "src") if path.suffix == ".py"]
    assert planned["files"] == len(sources) + len(list((root / "docs").rglob("*.md")))
    # The tokenizer alone takes ten seconds for all sources.
    shutil.copytree(root / "docs", part / "docs", ignore=shutil.ignore_patterns("images"))
    shutil.copytree(
        root / "src" / "phalanx" / "run", part / "src", ignore=shutil.ignore_patterns("__pycache__")
    )
    copied = Path(shutil.copytree(root / "examples", part / "examples")) / "recipe.toml"
    out = str(tmp_path / "out")
    done = json.loads(said("prepare", str(copied), "--out", out, "--workers", "1", "--json").splitlines()[-1])
    assert done["train_tokens"] > 100_000
    assert done["held_out_tokens"] > 0
