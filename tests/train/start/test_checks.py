"""Sentences at the start of a run on what its user may not have meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.data.reading.sources import MixtureIndex
from phalanx.data.stored.index import DatasetIndex, Recipe, ShardFile, Split
from phalanx.run.spec import ModelSpec, MoeSpec, RunSpec, TrainSpec
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


def test_a_run_that_goes_many_times_over_its_text_is_told_how_often() -> None:
    few = Split((ShardFile("0", 1010, ""),), 10, 1010, "")
    run = RunSpec(
        model=ModelSpec(vocab_size=300), train=TrainSpec(steps=200, batch_size=1, slots=1, seq_len=256)
    )
    told = [
        [note for note in start_notes(run, replace(INDEX, train=text)) if "times over" in note]
        for text in (few, ENOUGH)
    ]
    assert told[0][0].startswith("the run goes 51 times over its 1,010 training tokens")
    assert told[1] == []


def held_out(tokens: int, packed_seq_len: int = 0) -> DatasetIndex:
    recipe = replace(INDEX.recipe, packed_seq_len=packed_seq_len)
    return replace(INDEX, held_out=Split((ShardFile("1", tokens, ""),), 1, tokens, ""), recipe=recipe)


@pytest.mark.parametrize(
    ("index", "has_loss"),
    [
        (held_out(257), True),
        (held_out(256), False),
        (held_out(256, packed_seq_len=256), True),
        (held_out(0, packed_seq_len=256), False),
        (MixtureIndex({"a": held_out(200), "b": held_out(200)}), False),
        (MixtureIndex({"a": held_out(200), "b": held_out(257)}), True),
    ],
    ids=str,
)
def test_a_run_without_held_out_loss_is_told(index: DatasetIndex | MixtureIndex, has_loss: bool) -> None:
    run = RunSpec(model=ModelSpec(vocab_size=300), train=TrainSpec(seq_len=256))
    assert any("no held-out loss" in note for note in start_notes(run, index)) is not has_loss
