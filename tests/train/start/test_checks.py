"""Sentences at the start of a run on what its user may not have meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.data.reading.sources import MixtureIndex
from phalanx.data.stored.index import DatasetIndex, Recipe, ShardFile, Split
from phalanx.run.spec import ModelSpec, MoeSpec, RunSpec, RuntimeSpec, ScheduleSpec, TrainSpec
from phalanx.train.start.checks import start_notes, thread_notes

ENOUGH = Split((ShardFile("0", 10**12, ""),), 10, 10**12, "")
INDEX = DatasetIndex(
    "uint16", 300, "bytes", "", ENOUGH, ENOUGH, None, Recipe("", "bytes", None, 0.05, 10**12)
)


@pytest.mark.parametrize(("warmup_steps", "is_noted"), [(99, False), (100, True), (200, True)])
def test_a_warmup_that_the_run_does_not_leave_is_noted(warmup_steps: int, is_noted: bool) -> None:
    run = RunSpec(train=TrainSpec(steps=100), schedule=ScheduleSpec(warmup_steps=warmup_steps))
    assert any("schedule.warmup_steps" in note for note in start_notes(run, INDEX)) is is_noted


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ModelSpec(vocab_size=300), ""),
        (ModelSpec(vocab_size=300, ffn="gelu"), 'ffn = "gelu"'),
        (ModelSpec(vocab_size=300, moe=MoeSpec(every=2)), "moe.every = 2"),
    ],
)
def test_a_model_that_cannot_be_exported_is_noted_before_it_is_trained(model: ModelSpec, says: str) -> None:
    notes = [note for note in start_notes(RunSpec(model=model), INDEX) if "cannot be exported" in note]
    assert len(notes) == bool(says)
    assert all(says in note for note in notes)


def test_a_run_that_goes_many_times_over_its_text_is_noted_with_the_number() -> None:
    few = Split((ShardFile("0", 1010, ""),), 10, 1010, "")
    run = RunSpec(
        model=ModelSpec(vocab_size=300), train=TrainSpec(steps=200, batch_size=1, slots=1, seq_len=256)
    )
    notes = [
        [note for note in start_notes(run, replace(INDEX, train=text)) if "times over" in note]
        for text in (few, ENOUGH)
    ]
    assert notes[0][0].startswith("the run goes 51 times over its 1,010 training tokens")
    assert notes[1] == []


def test_sources_that_are_one_dataset_are_named_at_the_start() -> None:
    other = replace(INDEX, train=Split((ShardFile("0", 10**12, ""),), 10, 10**12, "another text"))
    index = MixtureIndex({"web": INDEX, "code": other, "prose": INDEX})
    (note,) = [note for note in start_notes(RunSpec(), index) if "one dataset" in note]
    assert note.startswith("data.sources web and prose are one dataset")
    assert not any(
        "one dataset" in note for note in start_notes(RunSpec(), MixtureIndex({"a": INDEX, "b": other}))
    )


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
def test_a_run_without_held_out_loss_is_noted(index: DatasetIndex | MixtureIndex, has_loss: bool) -> None:
    run = RunSpec(model=ModelSpec(vocab_size=300), train=TrainSpec(seq_len=256))
    assert any("no held-out loss" in note for note in start_notes(run, index)) is not has_loss


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "is_named"),
    [(16, 2, 2, True), (8, 8, 16, True), (2, 2, 2, False), (4, 8, 32, False), (1, 64, 2, False)],
)
def test_ranks_with_far_more_threads_than_cores_are_named(
    threads: int, ranks: int, cores: int, is_named: bool
) -> None:
    spec = RunSpec(runtime=RuntimeSpec(threads=threads))
    assert bool(list(thread_notes(spec, ranks, cores))) is is_named
