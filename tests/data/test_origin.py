"""Samples of each step, and the steps that read a record, against the samples that a run really draws."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.making import write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.origin import (
    DataOrigin,
    mixture_facts,
    readings_of_step,
    records_of_document,
    steps_of_record,
)
from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.sources import open_place, read_data_index
from phalanx.run.spec import DataSpec, RunSpec, RuntimeSpec, SourceSpec, TrainSpec

SEQ_LEN, BATCH, STEPS = 7, 8, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets whose tokens are their places; the second's begin at 20,000."""
    root = tmp_path_factory.mktemp("where")
    write_dataset(root / "a", np.arange(1000), vocab_size=30_000)
    write_dataset(root / "b", np.arange(20_000, 20_300), vocab_size=30_000)
    return root


def alone(folder: Path) -> RunSpec:
    train = TrainSpec(steps=STEPS, batch_size=BATCH, seq_len=SEQ_LEN, slots=4)
    return RunSpec(data=DataSpec(path=str(folder / "a")), train=train, runtime=RuntimeSpec(seed=5))


def mixed(folder: Path) -> RunSpec:
    sources = (
        SourceSpec("a", str(folder / "a"), (2.0, 1.0), use=(0.1, 1.0), epochs=0),
        SourceSpec("b", str(folder / "b"), (1.0, 1.0), epochs=0),
    )
    return replace(alone(folder), data=DataSpec(stages=(0, 20), sources=sources))


RUNS = pytest.mark.parametrize("run", [alone, mixed])


@RUNS
def test_what_a_step_reads_is_what_its_slots_are_given(run: object, folder: Path) -> None:
    spec = run(folder)  # type: ignore[operator]
    data, index = RunData.of_run(spec), read_data_index(spec.data)
    for step in (1, 20, 21, STEPS):
        samples = data.train_samples((step - 1) * BATCH, BATCH)
        readings = readings_of_step(spec, index, step)
        assert [reading.slot for reading in readings] == [0, 0, 1, 1, 2, 2, 3, 3]
        for reading, sample in zip(readings, samples, strict=True):
            first = (20_000 if reading.source == "b" else 0) + reading.record * SEQ_LEN
            assert sample[0] == first
            stored = np.fromfile(folder / (reading.source or "a") / reading.file, dtype="<u2")
            assert stored[reading.offset_bytes // 2] == first


@RUNS
def test_the_steps_of_a_record_are_those_that_read_it(run: object, folder: Path) -> None:
    spec = run(folder)  # type: ignore[operator]
    index = read_data_index(spec.data)
    read: dict[tuple[str, int], list[int]] = {}
    for step in range(1, STEPS + 1):
        for reading in readings_of_step(spec, index, step):
            read.setdefault((reading.source, reading.record), []).append(step)
    sizes = {"": 142} if run is alone else {"a": 142, "b": 42}
    assert sum(map(len, read.values())) == STEPS * BATCH
    for source, records in sizes.items():
        for record in range(records):
            assert steps_of_record(spec, index, source, record) == read.get((source, record), [])


def test_a_child_run_with_another_batch_continues_where_its_parent_stopped(folder: Path) -> None:
    spec = alone(folder)
    spec = replace(spec, train=replace(spec.train, batch_size=4))
    data, index, origin = RunData.of_run(spec), read_data_index(spec.data), DataOrigin(step=10, sample=80)
    readings = readings_of_step(spec, index, 12, origin)
    assert [reading.record * SEQ_LEN for reading in readings] == data.train_samples(84, 4)[:, 0].tolist()
    assert 12 in steps_of_record(spec, index, "", readings[0].record, origin)
    with pytest.raises(DatasetError, match=r"first own step is 11.*directory of the parent"):
        readings_of_step(spec, index, 10, origin)


def test_a_document_is_found_in_the_records_that_hold_it(tmp_path: Path) -> None:
    lengths = [3, 1, 20, 7, 90, 2]
    tokens = np.concatenate([[*[65 + number] * (length - 1), 256] for number, length in enumerate(lengths)])
    write_dataset(tmp_path / "set", tokens)
    spec, place = alone(tmp_path), open_place(str(tmp_path / "set"))
    starts = np.cumsum([0, *lengths])
    for document, (start, stop) in enumerate(itertools.pairwise(starts)):
        records = records_of_document(spec, place, document, 256)
        assert list(records) == sorted({token // SEQ_LEN for token in range(start, stop)})
    with pytest.raises(DatasetError, match="no document 6"):
        records_of_document(spec, place, 6, 256)


@pytest.mark.parametrize(
    ("run", "source", "record", "says"),
    [
        (alone, "", 142, "no record 142: the dataset has 142 of 7 tokens"),
        (alone, "web", 0, "no source called 'web'"),
        (mixed, "web", 0, "no source is called 'web'; there are: a, b"),
        (mixed, "", 0, "name a source; there are"),
    ],
)
def test_what_is_not_there_is_refused(run: object, source: str, record: int, says: str, folder: Path) -> None:
    spec = run(folder)  # type: ignore[operator]
    with pytest.raises(DatasetError, match=says):
        steps_of_record(spec, read_data_index(spec.data), source, record)


def test_a_record_outside_the_part_that_is_used_is_never_read(folder: Path) -> None:
    spec = mixed(folder)
    assert steps_of_record(spec, read_data_index(spec.data), "a", 13) == []
    assert steps_of_record(spec, read_data_index(spec.data), "a", 14) != []


def test_shares_and_epochs_are_those_of_the_run(folder: Path) -> None:
    stages, uses = mixture_facts(mixed(folder), read_data_index(mixed(folder).data))
    assert [(stage.first_step, stage.last_step) for stage in stages] == [(1, 20), (21, None)]
    assert stages[0].achieved == stages[0].requested == {"a": 2 / 3, "b": 1 / 3}
    assert [(use.name, use.records) for use in uses] == [("a", 128), ("b", 42)]
    assert sum(use.drawn for use in uses) == STEPS * BATCH
    (use,) = mixture_facts(alone(folder), read_data_index(alone(folder).data))[1]
    assert (use.records, use.drawn, use.first_end_step) == (142, 480, 18)


def test_requested_shares_that_no_pattern_has_are_listed_beside_the_achieved_ones(folder: Path) -> None:
    spec = mixed(folder)
    odd = (replace(spec.data.sources[0], weights=(1e-9,)), replace(spec.data.sources[1], weights=(1.0,)))
    spec = replace(spec, data=DataSpec(sources=odd))
    (stage,), _ = mixture_facts(spec, read_data_index(spec.data))
    assert stage.requested["a"] == pytest.approx(1e-9)
    assert stage.achieved["a"] == 2**-20
