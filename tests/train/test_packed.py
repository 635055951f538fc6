"""Training on packed records: documents count the same in any pack and on any number of ranks."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.sources import open_places
from phalanx.data.stored.index import read_index
from phalanx.model.transformer import Transformer
from phalanx.parallel.mesh import build_mesh
from phalanx.run.fields import RunFileError
from phalanx.run.identity import identity
from phalanx.run.kinds import whole_model
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.start.checks import start_notes
from phalanx.train.start.prepare import prepare_run, resolve
from phalanx.train.step.slot import Losses
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


def packed_run(
    dataset: Path, run_dir: Path, seq_len: int, *, mask: bool | None = True, lr: float = 1e-2
) -> RunSpec:
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
        for count, sharding in ((1, "none"), (3, "zero2"))
    ]
    for figure in ("weights_sha256", "loss", "held_out_loss", "bits_per_byte", "tokens"):
        assert len({result[figure] for result in results}) == 1


@pytest.mark.servers
def test_in_lanes_and_context_tiles_so_does_any_tensor_or_context_degree(
    ranks: Ranks, datasets: dict[int, Path], tmp_path: Path
) -> None:
    results = []
    for number, axes in enumerate(({}, {"tensor": 2, "context": 2})):
        spec = packed_run(datasets[64], tmp_path / str(number), 64)
        spec = replace(spec, model=replace(spec.model, lanes=2, context_tiles=2))
        parallel = ParallelSpec(context_mode="allgather", **axes)
        results.append(trained(ranks, parallel.tensor * parallel.context, replace(spec, parallel=parallel)))
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


def test_another_sequence_length_than_that_of_the_records_is_refused_by_name(
    datasets: dict[int, Path], tmp_path: Path
) -> None:
    spec = packed_run(datasets[64], tmp_path / "run", 64)
    spec = replace(spec, train=replace(spec.train, seq_len=32))
    with pytest.raises(RunFileError) as refused:
        prepare_run(spec, Path("packed.toml"), lambda _label, _done, _total: None)
    assert [problem.path for problem in refused.value.problems] == ["train.seq_len"]


def losses_ahead(depth: int) -> tuple[list[float], list[float]]:
    """The main loss and those of all depths, added over documents that are packed, and over each by itself."""
    end, lengths = 60, (9, 2, 14, 5, 1, 7)
    edges = list(itertools.accumulate(lengths, initial=0))
    tokens = torch.randint(0, end, (edges[-1] + 10 + 1,), generator=torch.Generator().manual_seed(3))
    tokens[[edge - 1 for edge in edges[1:]]] = end
    tokens[edges[-1] :] = end  # padding of a record
    spec = RunSpec(
        model=ModelSpec(vocab_size=64, layers=1, dim=16, heads=2, kv_heads=2, ffn_dim=16, mtp_depth=depth),
        train=TrainSpec(document_mask=True, targets_within_documents=True, end_of_document=end),
    )
    torch.manual_seed(0)
    model = Transformer(whole_model.resolve(spec.model))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    losses = Losses(spec, build_mesh(spec, 1, torch.device("cpu")), None, None)

    def loss(part: torch.Tensor) -> torch.Tensor:
        samples = part[None]
        batch = losses.cut(samples, samples[:, 1:])
        return losses.call(model, batch.tokens, batch, ahead=True).detach()

    # Behind a document by itself comes a token that must not matter.
    alone = [
        loss(torch.cat((tokens[a:b], torch.tensor([7]))))
        for a, b in itertools.pairwise(edges)
        if b - a > depth
    ]
    short = [
        loss(torch.cat((tokens[a:b], tokens[-depth:])))
        for a, b in itertools.pairwise(edges)
        if b - a <= depth
    ]
    return loss(tokens).tolist(), torch.stack([*alone, *short]).sum(0).tolist()


@pytest.mark.parametrize("depth", [1, 3])
def test_predictions_ahead_lose_on_packed_documents_what_they_lose_on_each_alone(
    ranks: Ranks, depth: int
) -> None:
    packed, alone = ranks.run(1, losses_ahead, depth)[0]
    assert len(packed) == 1 + depth
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("mask_field", "marked", "expected"),
    [
        (None, True, True),
        (False, True, False),
        (None, False, False),  # prepared before datasets recorded it: runs on it stay what they are
        (True, False, True),
    ],
)
def test_attention_stays_within_documents_by_default_if_the_dataset_records_it(
    datasets: dict[int, Path], tmp_path: Path, mask_field: bool | None, marked: bool, expected: bool
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(datasets[64], dataset)
    index = read_index(dataset)
    assert index.document_mask
    if not marked:
        old = replace(index, document_mask=False)
        assert "document_mask" not in old.to_json()
        assert old.fingerprint == index.fingerprint
        (dataset / "index.json").write_text(old.to_json())
    spec = packed_run(dataset, tmp_path / "run", 64, mask=mask_field)
    assert spec.train.document_mask is expected
    assert identity(spec) == identity(packed_run(datasets[64], tmp_path / "run", 64, mask=expected))
    notes = [note for note in start_notes(spec, read_index(dataset)) if "attention crosses" in note]
    assert bool(notes) is not expected


def test_a_joined_dataset_and_a_file_without_the_field_have_no_mask_and_the_identity_that_they_had(
    tmp_path: Path,
) -> None:
    dataset = tmp_path / "joined"
    prepare(DOCUMENTS, dataset, tokenizer="bytes", held_out_fraction=0.2)
    assert "document_mask" not in (dataset / "index.json").read_text()
    spec = tiny_run(dataset, tmp_path / "run")
    resolved = resolve(spec, open_places(spec.data), Path("joined.toml"))
    assert resolved.train.document_mask is False
    without = replace(resolved, train=replace(resolved.train, document_mask=None))
    assert identity(without) == identity(resolved)


def test_targets_within_documents_of_a_joined_stream_are_set_by_the_field(
    ranks: Ranks, tmp_path: Path
) -> None:
    dataset = tmp_path / "joined"
    prepare(DOCUMENTS, dataset, tokenizer="bytes", held_out_fraction=0.2)
    within = tiny_run(dataset, tmp_path / "within", steps=2, targets_within_documents=True)
    across = tiny_run(dataset, tmp_path / "across", steps=2)
    inside, crossing = (trained(ranks, 2, spec) for spec in (within, across))
    assert inside["weights_sha256"] != crossing["weights_sha256"]
    assert inside["tokens"] < crossing["tokens"] == 2 * 16 * 24
