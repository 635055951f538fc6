"""The data of a run with several sources: what is drawn, from where, and what is refused before a token is read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.making import write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.sources import (
    MixtureIndex,
    epoch_problems,
    mixture_of,
    read_data_index,
    source_uses,
)
from phalanx.run.read import found_again
from phalanx.run.spec import DataSpec, RunSpec, RuntimeSpec, SourceSpec, TrainSpec

SEQ_LEN = 7
BATCH = 8
FIRST_TOKENS = {"books": 10_000, "code": 20_000, "web": 30_000}
"""Tokens of a source begin here, so that a token shows its source and its place in it."""
TOKENS = {"books": 100, "code": 400, "web": 2000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    for name, first in FIRST_TOKENS.items():
        tokens = np.arange(first, first + TOKENS[name])
        write_dataset(root / name, tokens, held_out=tokens[: TOKENS[name] // 4], vocab_size=40_000)
    return {name: root / name for name in FIRST_TOKENS}


def run_of(folders: dict[str, Path], steps: int = 30, **changes: object) -> RunSpec:
    sources = (
        SourceSpec("web", str(folders["web"]), (6.0, 1.0)),
        SourceSpec("code", str(folders["code"]), (1.0, 1.0), use=(0.25, 1.0), epochs=0),
        SourceSpec("books", str(folders["books"]), (0.0, 2.0), epochs=0),
    )
    spec = RunSpec(
        data=DataSpec(stages=(0, 20), sources=sources),
        train=TrainSpec(steps=steps, batch_size=BATCH, seq_len=SEQ_LEN),
        runtime=RuntimeSpec(seed=3),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def index_of(spec: RunSpec) -> MixtureIndex:
    index = read_data_index(spec.data)
    assert isinstance(index, MixtureIndex)
    return index


def source_names(first_tokens: np.ndarray) -> list[str]:
    return [
        next(name for name, first in FIRST_TOKENS.items() if first <= token < first + 10_000)
        for token in first_tokens
    ]


def test_samples_come_from_the_sources_and_records_of_the_mixture(folders: dict[str, Path]) -> None:
    spec = run_of(folders)
    mixture, samples = mixture_of(spec, index_of(spec)), RunData.of_run(spec).train_samples(0, 30 * BATCH)
    assert samples.shape == (30 * BATCH, SEQ_LEN + 1)
    located = mixture.locate(np.arange(30 * BATCH))
    skipped = {"web": 0, "code": 57 // 4, "books": 0}
    for sample, number, record in zip(samples, located.source, located.record, strict=True):
        name = mixture.sources[number].name
        first = FIRST_TOKENS[name] + (skipped[name] + int(record)) * SEQ_LEN
        assert sample.tolist() == list(range(first, first + SEQ_LEN + 1))


def test_each_stage_has_the_shares_of_its_weights(folders: dict[str, Path]) -> None:
    names = source_names(RunData.of_run(run_of(folders)).train_samples(0, 30 * BATCH)[:, 0])
    first, second = names[: 20 * BATCH], names[20 * BATCH :]
    for name, share in {"web": 6 / 7, "code": 1 / 7, "books": 0}.items():
        assert abs(first.count(name) - share * len(first)) < 1
    for name, share in {"web": 0.25, "code": 0.25, "books": 0.5}.items():
        assert abs(second.count(name) - share * len(second)) < 1


@given(first=st.integers(0, 200), per_rank=st.integers(1, 20), ranks=st.integers(1, 5))
def test_ranks_together_read_what_one_rank_alone_reads(
    folders: dict[str, Path], first: int, per_rank: int, ranks: int
) -> None:
    data = RunData.of_run(run_of(folders))
    parts = [data.train_samples(first + rank * per_rank, per_rank) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), data.train_samples(first, ranks * per_rank))


def test_the_order_of_sources_in_the_run_file_changes_no_sample(folders: dict[str, Path]) -> None:
    spec = run_of(folders)
    turned = replace(spec, data=replace(spec.data, sources=spec.data.sources[::-1]))
    in_order, reversed_data = RunData.of_run(spec), RunData.of_run(turned)
    assert np.array_equal(in_order.train_samples(0, 240), reversed_data.train_samples(0, 240))
    assert in_order.fingerprint == reversed_data.fingerprint


def test_a_part_of_a_source_is_never_read_beyond(folders: dict[str, Path]) -> None:
    samples = RunData.of_run(run_of(folders, steps=60)).train_samples(0, 60 * BATCH)
    of_code = samples[(samples[:, 0] >= 20_000) & (samples[:, 0] < 30_000), 0]
    assert of_code.min() == 20_000 + 57 // 4 * SEQ_LEN


def test_two_parts_of_one_dataset_share_no_sample(folders: dict[str, Path]) -> None:
    path = str(folders["web"])
    parts = (SourceSpec("a", path, use=(0.0, 0.3), epochs=0), SourceSpec("b", path, use=(0.3, 1.0), epochs=0))
    spec = replace(run_of(folders), data=DataSpec(sources=parts))
    mixture = mixture_of(spec, index_of(spec))
    firsts = RunData.of_run(spec).train_samples(0, 200 * BATCH)[:, 0]
    drawn = mixture.locate(np.arange(200 * BATCH)).source
    assert not set(firsts[drawn == 0]) & set(firsts[drawn == 1])
    assert len(set(firsts)) == 285


def test_held_out_samples_are_those_of_each_source_in_turn(folders: dict[str, Path]) -> None:
    data = RunData.of_run(run_of(folders))
    assert {name: len(part) for name, part in data.held_out_parts.items()} == {
        "books": 3,
        "code": 14,
        "web": 71,
    }
    names = source_names(data.held_out_samples(0, data.held_out_len)[:, 0])
    for name, part in data.held_out_parts.items():
        assert names[part.start : part.stop] == [name] * len(part)
    with pytest.raises(IndexError, match=r"not all in \[0, 88\)"):
        data.held_out_samples(80, 9)


def test_a_fingerprint_is_another_for_other_tokens_or_another_name(folders: dict[str, Path]) -> None:
    spec = run_of(folders)
    web, code, books = spec.data.sources
    fingerprints = {
        RunData.of_run(replace(spec, data=replace(spec.data, sources=sources))).fingerprint
        for sources in (
            (web, code, books),
            (web, code),
            (replace(web, path=code.path), replace(code, path=web.path), books),
            (replace(web, name="crawl"), code, books),
        )
    }
    assert len(fingerprints) == 4


def test_what_a_run_reads_of_each_source_is_what_is_counted(folders: dict[str, Path]) -> None:
    spec = run_of(folders, steps=40)
    names = source_names(RunData.of_run(spec).train_samples(0, 40 * BATCH)[:, 0])
    for use in source_uses(spec, mixture_of(spec, index_of(spec))):
        places = [place for place, name in enumerate(names) if name == use.name]
        assert use.drawn == len(places)
        ends = places[use.records - 1] // BATCH + 1 if len(places) >= use.records else None
        # Within a batch the order is another, so that only the step is compared.
        assert use.first_end_step == ends


def test_a_source_that_would_be_read_too_often_is_refused_with_the_step_before(
    folders: dict[str, Path],
) -> None:
    spec = run_of(folders, steps=200)
    (problem,) = epoch_problems(spec, mixture_of(spec, index_of(spec)))
    assert problem.path == "data.sources.web.epochs"
    assert "source 'web' would be read 1.74 times by step 200, and 1 is allowed" in problem.finding
    last = int(problem.remedy.split()[-1])
    shorter, longer = (replace(spec, train=replace(spec.train, steps=steps)) for steps in (last, last + 1))
    assert not list(epoch_problems(shorter, mixture_of(shorter, index_of(spec))))
    assert list(epoch_problems(longer, mixture_of(longer, index_of(spec))))


def test_a_limit_below_one_epoch_holds(folders: dict[str, Path]) -> None:
    spec = replace(
        run_of(folders), data=DataSpec(sources=(SourceSpec("web", str(folders["web"]), epochs=0.1),))
    )
    (problem,) = epoch_problems(spec, mixture_of(spec, index_of(spec)))
    assert "end at step 3" in problem.remedy  # limit 28.5 of 285 samples, 8 a step


def test_sources_with_different_tokenizers_are_refused_with_the_command(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    index = (folders["code"] / "index.json").read_text()
    write_dataset(tmp_path / "other", np.arange(100), vocab_size=40_000)
    other = read_data_index(DataSpec(path=str(tmp_path / "other")))
    text = (tmp_path / "other/index.json").read_text()
    changed = replace(other, tokenizer_fingerprint="f" * 64)  # type: ignore[type-var]
    assert text != changed.to_json() != index
    (tmp_path / "other/index.json").write_text(changed.to_json())
    sources = (SourceSpec("code", str(folders["code"])), SourceSpec("other", str(tmp_path / "other")))
    with pytest.raises(
        DatasetError,
        match=r"source 'other' was prepared with another tokenizer than source 'code'.*--tokenizer",
    ):
        read_data_index(DataSpec(sources=sources))


def test_a_part_without_a_whole_sample_is_refused(folders: dict[str, Path]) -> None:
    sources = (SourceSpec("books", str(folders["books"]), use=(0.0, 0.01)),)
    spec = replace(run_of(folders), data=DataSpec(sources=sources))
    with pytest.raises(DatasetError, match=r"source 'books' has 100 training tokens.*not one sample of 8"):
        mixture_of(spec, index_of(spec))


def test_a_source_that_is_packed_for_another_length_is_refused_by_name(folders: dict[str, Path]) -> None:
    spec, index = run_of(folders), index_of(run_of(folders))
    code = index.sources["code"]
    packed = replace(code, recipe=replace(code.recipe, packed_seq_len=20))
    with pytest.raises(
        DatasetError,
        match=rf"source 'code': the dataset is packed for sequences of 20 tokens, and train\.seq_len is {SEQ_LEN}: set it to 20",
    ):
        mixture_of(spec, MixtureIndex({**index.sources, "code": packed}))


def test_folders_that_are_elsewhere_are_found_where_an_earlier_start_had_them() -> None:
    sources = (SourceSpec("a", "sets/a"), SourceSpec("b", "other"), SourceSpec("new", "sets/new"))
    record = {"data_folders": {"a": "/far/sets/a", "b": "/far/sets/b"}}
    data = found_again(DataSpec(sources=sources), record)
    assert [source.path for source in data.sources] == ["/far/sets/a", "other", "sets/new"]
