"""Training on packed records: documents count alike wherever they were packed, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.formats.document import Document
from phalanx.data.places import open_places
from phalanx.data.prepare import prepare
from phalanx.run.problems import RunFileError
from phalanx.run.spec import RunSpec
from phalanx.train.start.prepare import prepare_run, resolve
from ranks import Ranks
from tiny_runs import on_layout, tiny_run, train_on_this_rank

DOCUMENTS = [
    Document(f"d{n}", "".join(chr(97 + (n * 31 + i * i * 7) % 26) for i in range(6 + n * 13 % 50)))
    for n in range(150)
]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same documents packed for sequences of 64 and of 96 tokens."""
    root = tmp_path_factory.mktemp("packed")
    for seq_len in (64, 96):
        prepare(
            DOCUMENTS, root / str(seq_len), tokenizer="bytes", held_out_fraction=0.2, packed_seq_len=seq_len
        )
    return {seq_len: root / str(seq_len) for seq_len in (64, 96)}


def packed_run(dataset: Path, run_dir: Path, seq_len: int, *, mask: bool = True, lr: float = 1e-2) -> RunSpec:
    spec = tiny_run(dataset, run_dir, steps=3, document_mask=mask)
    spec = replace(
        spec,
        train=replace(spec.train, seq_len=seq_len, micro_batch_size=2),
        optimizer=replace(spec.optimizer, lr=lr, weight_decay=0.0),
        evaluation=replace(spec.evaluation, sequences=0, final_sequences=0),
    )
    return resolve(spec, open_places(spec.data), Path("packed.toml"))


def trained(ranks: Ranks, count: int, spec: RunSpec) -> dict[str, Any]:
    result = ranks.run(count, train_on_this_rank, spec)[0]
    assert isinstance(result, dict)
    return result


def test_a_run_on_packed_records_counts_targets_within_documents_alone(
    datasets: dict[int, Path], tmp_path: Path
) -> None:
    train = packed_run(datasets[64], tmp_path / "run", 64).train
    assert train.targets_within_documents
    assert train.end_of_document == 256


def test_any_number_of_ranks_gives_the_same_weights(
    ranks: Ranks, datasets: dict[int, Path], tmp_path: Path
) -> None:
    results = [
        trained(ranks, count, on_layout(packed_run(datasets[64], tmp_path / str(count), 64), sharding, 0))
        for count, sharding in ((1, "none"), (2, "zero3"), (3, "zero2"))
    ]
    for figure in ("weights_sha256", "loss", "held_out_loss", "bits_per_byte", "tokens"):
        assert len({result[figure] for result in results}) == 1


def test_held_out_documents_have_the_loss_that_they_have_in_any_other_packing(
    ranks: Ranks, datasets: dict[int, Path], tmp_path: Path
) -> None:
    # The weights stay those of the beginning, so that only the packing differs.
    runs = [packed_run(datasets[seq_len], tmp_path / str(seq_len), seq_len, lr=1e-12) for seq_len in (64, 96)]
    narrow, wide = (trained(ranks, 1, spec) for spec in runs)
    assert narrow["held_out_loss"] == pytest.approx(wide["held_out_loss"], rel=1e-6)
    assert narrow["bits_per_byte"] == pytest.approx(wide["bits_per_byte"], rel=1e-6)
    across = packed_run(datasets[96], tmp_path / "across", 96, mask=False, lr=1e-12)
    assert trained(ranks, 1, across)["held_out_loss"] != pytest.approx(wide["held_out_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "path"), [({"seq_len": 32}, "train.seq_len"), ({"mtp_depth": 1}, "model.mtp_depth")]
)
def test_what_does_not_go_with_packed_records_is_refused_by_name(
    change: dict[str, int], path: str, datasets: dict[int, Path], tmp_path: Path
) -> None:
    spec = packed_run(datasets[64], tmp_path / "run", 64)
    if "seq_len" in change:
        spec = replace(spec, train=replace(spec.train, **change))
    else:
        spec = replace(spec, model=replace(spec.model, **change))
    with pytest.raises(RunFileError) as refused:
        prepare_run(spec, Path("packed.toml"), lambda _what, _done, _total: None)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_targets_within_documents_of_a_joined_stream_are_asked_for_by_the_field(
    ranks: Ranks, tmp_path: Path
) -> None:
    dataset = tmp_path / "joined"
    prepare(DOCUMENTS, dataset, tokenizer="bytes", held_out_fraction=0.2)
    within = tiny_run(dataset, tmp_path / "within", steps=2, targets_within_documents=True)
    across = tiny_run(dataset, tmp_path / "across", steps=2)
    one, other = (trained(ranks, 2, spec) for spec in (within, across))
    assert one["weights_sha256"] != other["weights_sha256"]
    assert one["tokens"] < other["tokens"] == 2 * 16 * 24
