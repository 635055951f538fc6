"""Sentences at the start of a run on what its user may not have meant."""

from __future__ import annotations

import pytest

from phalanx.data.index import DatasetIndex, Recipe, ShardFile, Split
from phalanx.run.spec import ModelSpec, MoeSpec, RunSpec
from phalanx.train.start.checks import start_notes

ENOUGH = Split((ShardFile("0", 10**12, ""),), 10, 10**12, "")
INDEX = DatasetIndex(
    "uint16", 300, "bytes", "", ENOUGH, ENOUGH, None, Recipe("", "bytes", None, 0.05, 10**12)
)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ModelSpec(vocab_size=300), ""),
        (ModelSpec(vocab_size=300, ffn="gelu"), 'ffn = "gelu"'),
        (ModelSpec(vocab_size=300, moe=MoeSpec(every=2)), "moe.every = 2"),
    ],
)
def test_a_model_that_cannot_be_exported_is_told_before_it_is_trained(model: ModelSpec, says: str) -> None:
    notes = [note for note in start_notes(RunSpec(model=model), INDEX) if "cannot be exported" in note]
    assert len(notes) == bool(says)
    assert all(says in note for note in notes)
