"""A recipe is read with every mistake in it named."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data.portions.planning.recipe import differences, read_recipe, recipe_of, recipe_table
from phalanx.run.fields import RunFileError


def read(folder: Path, text: str) -> object:
    path = folder / "recipe.toml"
    path.write_text(text)
    return read_recipe(path)


def test_every_typo_is_named_with_the_word_that_was_meant(tmp_path: Path) -> None:
    text = '[[source]]\nurl = "raw"\non_bad = "skips"\n[output]\nheldout = 0.1\nseq_len = 1\n'
    with pytest.raises(RunFileError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert "source[0].on_bad" in message
    assert "did you mean 'skip'" in message
    assert "output.heldout" in message
    assert "did you mean held_out" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "source: is missing"),
        ("[[source]]\n", "source[0].url: is missing"),
        ('[[source]]\nurl = "a"\n[output]\nseq_len = 1', "output.seq_len: 1 holds no token"),
        ('[[source]]\nurl = "a"\n[output]\nheld_out = 1.0', "output.held_out: 1.0 is out of range"),
        ("[[source", "not valid TOML"),
        (
            '[[source]]\nurl = "a"\n[output]\nlength_classes = [64]',
            "output.length_classes: is about documents",
        ),
        (
            '[[source]]\nurl = "a"\n[output]\nseq_len = 64\nlength_classes = [32, 16]',
            "output.length_classes: [32, 16] are not rising",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_recipe_is_the_same_after_it_was_written_down_and_read(tmp_path: Path) -> None:
    recipe = read(tmp_path, '[[source]]\nurl = "a"\ntext_field = "content"\n[output]\nseq_len = 64\n')
    table = recipe_table(recipe)  # type: ignore[arg-type]
    assert recipe_of(table, []) == recipe
    assert differences(table, table) == []
    assert differences(table, {**table, "output": {**table["output"], "seq_len": 65}}) == ["output.seq_len"]
    other = {**table, "source": [{**table["source"][0], "on_bad": "skip"}]}
    assert differences(table, other) == ["source[0].on_bad"]
    assert differences(table, {**table, "source": []}) == ["source"]
