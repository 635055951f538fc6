"""Training on several sources: the bits are the run's too, and a child run shares its parent's past in each source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.reading.sources import open_places, read_data_index
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Evaluated
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.fields import RunFileError
from phalanx.run.spec import RunSpec
from phalanx.train.start.origins import child_run
from phalanx.train.start.prepare import prepare_run, resolve
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import make_dataset, on_layout, tiny_mixture, train_on_this_rank


@pytest.fixture(scope="module")
def datasets(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {
        "words": dataset,
        "names": make_dataset(root / "names", "n"),
        "places": make_dataset(root / "places", "p"),
    }


def mixture(datasets: dict[str, Path], run_dir: Path, steps: int = 6) -> RunSpec:
    spec = replace_at(tiny_mixture(datasets, run_dir, steps), "train.micro_batch_size", 2)
    return replace_at(spec, "schedule.kind", "constant")


def prepared(spec: RunSpec) -> None:
    import os

    os.close(prepare_run(spec, Path("child.toml"), lambda _label, _done, _total: None).lock_fd)


def child_of(parent: Path, run_dir: Path, *overrides: str, step: int | None = None) -> RunSpec:
    spec = child_run(parent, step, [*overrides, f"run_dir={json.dumps(str(run_dir))}"])
    return resolve(spec, open_places(spec.data), Path("child.toml"))


@pytest.fixture(scope="module")
def reference(
    ranks: Ranks, datasets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The undisturbed run on one rank: its directory and its result."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    result = ranks.run(1, train_on_this_rank, mixture(datasets, run_dir))[0]
    assert isinstance(result, dict)
    return run_dir, result


FIGURES = ("weights_sha256", "loss", "held_out_loss", "bits_per_byte")


@pytest.mark.parametrize(
    ("count", "sharding"),
    quick([(2, "zero3"), (3, "zero2"), (5, "none")], of_the_suite=[(3, "zero2")]),
)
def test_any_number_of_ranks_gives_the_same_weights(
    count: int,
    sharding: str,
    ranks: Ranks,
    datasets: dict[str, Path],
    reference: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    spec = on_layout(mixture(datasets, tmp_path / "run"), sharding, 0)
    for result in ranks.run(count, train_on_this_rank, spec):
        assert [result[figure] for figure in FIGURES] == [reference[1][figure] for figure in FIGURES]


@pytest.mark.parametrize("broken_off_at", quick([3, 5], of_the_suite=[3]))
def test_a_run_broken_off_goes_on_with_the_same_weights_on_another_fleet(
    broken_off_at: int,
    ranks: Ranks,
    datasets: dict[str, Path],
    reference: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    spec = mixture(datasets, tmp_path / "run")
    ranks.run(3, train_on_this_rank, spec, broken_off_at)
    # On the next start the run file has its sources in another order.
    turned = replace(spec, data=replace(spec.data, sources=spec.data.sources[::-1]))
    result = ranks.run(2, train_on_this_rank, turned)[0]
    assert [result[figure] for figure in FIGURES] == [reference[1][figure] for figure in FIGURES]


def test_an_evaluation_has_the_loss_of_each_source(reference: tuple[Path, dict[str, Any]]) -> None:
    events = read_events(reference[0] / "events.jsonl")
    last = [event.body for event in events if isinstance(event.body, Evaluated)][-1]
    assert sorted(last.sources) == ["names", "places", "words"]
    assert min(last.sources.values()) < last.loss < max(last.sources.values())


def test_other_weights_give_other_bits(
    ranks: Ranks, datasets: dict[str, Path], reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    spec = mixture(datasets, tmp_path / "run")
    words, *others = spec.data.sources
    changed = replace(spec, data=replace(spec.data, sources=(replace(words, weights=(0.5, 4.0)), *others)))
    result = ranks.run(2, train_on_this_rank, changed)[0]
    assert result["weights_sha256"] != reference[1]["weights_sha256"]


def test_a_child_run_whose_stages_were_added_is_the_run_that_had_them_from_the_start(
    ranks: Ranks, datasets: dict[str, Path], reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    from_start = mixture(datasets, tmp_path / "whole", steps=8)
    sources = tuple(
        replace(source, weights=(*source.weights, float(number)))
        for number, source in enumerate(from_start.data.sources)
    )
    from_start = replace(from_start, data=replace(from_start.data, stages=(0, 3, 6), sources=sources))
    undisturbed = ranks.run(2, train_on_this_rank, from_start)[0]
    added = [f"data.sources.{source.name}.weights={list(source.weights)}" for source in sources]
    child = child_of(
        reference[0], tmp_path / "child", "train.steps=8", "data.stages=[0, 3, 6]", *added, step=6
    )
    result = ranks.run(3, train_on_this_rank, child)[0]
    assert [result[figure] for figure in FIGURES] == [undisturbed[figure] for figure in FIGURES]


def test_a_child_run_with_a_new_source_is_the_run_that_had_it_without_weight_from_the_start(
    ranks: Ranks, datasets: dict[str, Path], reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    more = {**datasets, "more": make_dataset(tmp_path / "more", "m")}
    from_start = mixture(more, tmp_path / "whole", steps=8)
    weights = {
        "words": (0.5, 1.0, 1.0),
        "names": (1.5, 1.0, 0.0),
        "places": (2.5, 1.0, 1.0),
        "more": (0.0, 0.0, 2.0),
    }
    sources = tuple(replace(source, weights=weights[source.name]) for source in from_start.data.sources)
    from_start = replace(from_start, data=replace(from_start.data, stages=(0, 3, 6), sources=sources))
    undisturbed = ranks.run(2, train_on_this_rank, from_start)[0]
    listed = ", ".join(
        f'{{name="{source.name}", path="{source.path}", weights={list(source.weights)}, epochs=0}}'
        for source in sources
    )
    changes = ["train.steps=8", "data.stages=[0, 3, 6]", f"data.sources=[{listed}]"]
    child = child_of(reference[0], tmp_path / "child", *changes, step=6)
    result = ranks.run(1, train_on_this_rank, child)[0]
    assert [result[figure] for figure in FIGURES] == [undisturbed[figure] for figure in FIGURES]


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (
            ["data.sources.words.weights=[0.4, 1.0]"],
            "data.sources",
            "other samples would have been drawn in the first 4",
        ),
        (["data.stages=[0, 2]"], "data.sources", "other samples would have been drawn"),
        (["data.sources.names.use=[0.0, 0.5]"], "data.sources", "other samples would have been drawn"),
        (["train.batch_size=32"], "train.batch_size", "by which its samples were drawn"),
    ],
)
def test_a_child_run_with_another_past_is_refused(
    overrides: list[str],
    path: str,
    says: str,
    reference: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    with pytest.raises(RunFileError) as refused:
        prepared(child_of(reference[0], tmp_path / "child", "train.steps=8", *overrides, step=4))
    (problem,) = refused.value.problems
    assert problem.path == path
    assert says in problem.finding


def test_a_child_run_of_other_tokens_in_a_source_is_refused_by_its_name(
    reference: tuple[Path, dict[str, Any]], datasets: dict[str, Path], tmp_path: Path
) -> None:
    start, record = mixture(datasets, tmp_path / "run"), reference[0] / "record.json"
    fingerprints = {name: index.fingerprint for name, index in read_data_index(start.data).sources.items()}  # type: ignore[union-attr]
    record.write_text(json.dumps(json.loads(record.read_text()) | {"data_sources": fingerprints}))
    other = make_dataset(tmp_path / "other", "o")
    with pytest.raises(RunFileError, match=r"data.sources.names.path: .*other holds other tokens"):
        prepared(
            child_of(
                reference[0], tmp_path / "child", "train.steps=8", f"data.sources.names.path={other}", step=4
            )
        )


def test_other_weights_in_the_same_directory_are_refused_with_the_command_that_goes_on(
    ranks: Ranks, datasets: dict[str, Path], tmp_path: Path
) -> None:
    spec = mixture(datasets, tmp_path / "run", steps=4)
    ranks.run(2, train_on_this_rank, spec)  # saves steps 2 and 4; its second stage begins after step 3
    words, *others = spec.data.sources
    later, always = (
        replace(spec, data=replace(spec.data, sources=(replace(words, weights=weights), *others)))
        for weights in ((0.5, 4.0), (0.7, 1.0))
    )
    with pytest.raises(RunDirectoryError, match=r"--from 2 --set 'data.sources.words.weights=\[0.5, 4.0\]'"):
        prepared(replace_at(later, "train.steps", 6))
    with pytest.raises(RunDirectoryError, match="belongs to another run") as refused:
        prepared(always)
    assert "--from" not in str(refused.value)


def test_a_run_on_sources_records_where_each_was(datasets: dict[str, Path], tmp_path: Path) -> None:
    prepared(mixture(datasets, tmp_path / "run"))
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert record["data_folders"] == {name: str(folder) for name, folder in datasets.items()}
    assert record["data_sources"].keys() == datasets.keys()


def test_a_run_that_reads_a_source_too_often_is_not_started(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    spec = mixture(datasets, tmp_path / "run", steps=2000)
    words, *others = spec.data.sources
    limited = replace(spec, data=replace(spec.data, sources=(replace(words, epochs=2.0), *others)))
    with pytest.raises(
        RunFileError, match=r"source 'words' would be read [0-9.]+ times by step 2,000, and 2 is allowed"
    ):
        prepared(limited)
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_not_there_is_named_with_the_command_that_makes_it(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    from phalanx.data.errors import DataError

    spec = mixture({**datasets, "gone": tmp_path / "gone"}, tmp_path / "run")
    with pytest.raises(DataError, match=r"no dataset at data.sources.gone.path = .*data prepare TEXT"):
        prepared(spec)
