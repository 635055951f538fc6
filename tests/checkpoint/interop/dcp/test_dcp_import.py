"""Import from PyTorch's distributed checkpoints: PyTorch's own files from several ranks are read, and no code in them is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint.huggingface_models import ours_of, saved
from phalanx.api import load_weights
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.dcp import export_dcp, import_dcp
from phalanx.checkpoint.interop.dcp_metadata import _ALLOWED, DcpError, read_index
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from ranks import Ranks

LLAMA = resolve(ModelSpec(layers=2, dim=24, heads=4, kv_heads=2, ffn_dim=40, vocab_size=31))
TIED = replace(LLAMA, tie_embeddings=True)
MIXED = "ignore:torch.distributed is disabled"


def in_pairs(weight: Tensor) -> Tensor:
    """Rows of heads in halves as neighbors, by torchtitan's own reordering."""
    rows, columns = weight.shape
    heads = rows // LLAMA.head_dim
    return weight.view(heads, 2, LLAMA.head_dim // 2, columns).transpose(1, 2).reshape(rows, columns)


def titan_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    words = {"embedding": "tok_embeddings", "head": "output", "blocks": "layers", "query": "wq", "key": "wk"}
    words |= {"value": "wv", "ffn": "feed_forward", "gate": "w1", "down": "w2", "up": "w3"}
    state = {}
    for name, value in weights.items():
        parts = [words.get(part, part) for part in name.split(".")]
        if "attention.output" in name:
            parts[3] = "wo"
        turned = ".query." in name or ".key." in name
        state[".".join(parts)] = in_pairs(value) if turned else value
    return state


def save_as_torchtitan(folder: Path, ranks: int, spec: ModelSpec = LLAMA) -> None:
    """Save on a rank of several, weights and moments divided by rows, by columns, or not at all; a tied embedding twice."""
    mesh = DeviceMesh("cpu", list(range(ranks)))
    state = titan_state(dict(ours_of(spec).named_parameters()))
    if spec.tie_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"].clone()
    places = [Shard(0), Shard(1), Replicate()]
    divided: dict[str, Any] = {}
    for number, (name, value) in enumerate(state.items()):
        place = places[number % 3] if value.ndim == 2 else Shard(0)
        divided[name] = distribute_tensor(value, mesh, [place])
        divided[f"optimizer.state.{name}.exp_avg"] = distribute_tensor(torch.ones_like(value), mesh, [place])
    divided |= {"train_state": {"step": torch.tensor(7)}, "lr_scheduler": 0.1}
    torch_dcp.save(divided, checkpoint_id=folder)


def test_weights_that_torchtitan_saved_on_several_ranks_are_read_bit_by_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(3, save_as_torchtitan, tmp_path / "titan", 3)
    imported = import_dcp(tmp_path / "titan", tmp_path / "run", ModelSpec(**{**vars(LLAMA), "vocab_size": 0}))
    assert imported.spec == LLAMA
    assert [note.split(" (")[0] for note in imported.notes] == [
        "left out: the optimizer's state",
        "left out: lr_scheduler, train_state",
    ]
    read = load_weights(tmp_path / "run")
    for name, value in ours_of(LLAMA).named_parameters():
        assert torch.equal(read[name], value), name


def test_a_tied_embedding_that_torchtitan_saved_twice_in_different_pieces_is_read_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, save_as_torchtitan, tmp_path / "titan", 2, TIED)
    imported = import_dcp(tmp_path / "titan", tmp_path / "run", TIED)
    assert imported.notes[-1].startswith("left out: output.weight, which repeats tok_embeddings.weight")
    read = load_weights(tmp_path / "run")
    assert read.keys() == dict(ours_of(TIED).named_parameters()).keys()
    assert torch.equal(read["embedding.weight"], ours_of(TIED).embedding.weight)


@pytest.mark.filterwarnings(MIXED)
@pytest.mark.parametrize("prefix", ["", "model.", "model/"])
def test_an_output_projection_is_read_as_the_named_model_has_it_or_refused_with_the_field_to_set(
    prefix: str, tmp_path: Path
) -> None:
    weights = dict(ours_of(LLAMA).named_parameters())
    state = {
        prefix + name: value for name, value in (weights if "/" in prefix else titan_state(weights)).items()
    }
    embedding, head = ("embedding", "head") if "/" in prefix else ("tok_embeddings", "output")
    embedding, head = f"{prefix}{embedding}.weight", f"{prefix}{head}.weight"
    different = folder_of(state, tmp_path / "different")
    without = folder_of({name: value for name, value in state.items() if name != head}, tmp_path / "without")
    equal = folder_of(state | {head: state[embedding].clone()}, tmp_path / "equal")

    untied = import_dcp(different, tmp_path / "1", LLAMA)
    alone, twice = import_dcp(without, tmp_path / "2", TIED), import_dcp(equal, tmp_path / "3", TIED)
    assert alone.weights_sha256 == twice.weights_sha256 != untied.weights_sha256
    assert (alone.notes, len(twice.notes)) == ((), 1)
    with pytest.raises(DcpError, match=f"{head} differs from {embedding}.*with model.tie_embeddings = false"):
        import_dcp(different, tmp_path / "4", TIED)
    with pytest.raises(DcpError, match=f"{head} is missing .*with model.tie_embeddings = true"):
        import_dcp(without, tmp_path / "5", LLAMA)
    assert not any((tmp_path / name).exists() for name in "45")


@pytest.mark.filterwarnings(MIXED)
def test_what_was_exported_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    model = ours_of(LLAMA)
    export_dcp(saved(tmp_path / "ours", model), 7, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "run", LLAMA)
    read = load_weights(tmp_path / "run")
    assert all(torch.equal(read[name], value) for name, value in model.named_parameters())


def folder_of(state: dict[str, Any], folder: Path) -> Path:
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def edit_metadata(folder: Path, edit: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(edit(metadata) or metadata))


class Runs:
    """A pickle that has a command run when it is loaded."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self._reduced = call, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


@pytest.mark.filterwarnings(MIXED)
@pytest.mark.parametrize("where", ["as a whole", "within"])
@pytest.mark.parametrize("call", [os.system, eval, getattr, torch.load, torch.hub.load])
def test_a_metadata_that_would_run_anything_is_refused_and_nothing_is_run(
    call: Callable[..., object], where: str, tmp_path: Path
) -> None:
    folder, marker = folder_of({"model/w": torch.zeros(2)}, tmp_path / "dcp"), tmp_path / "ran"
    hostile = Runs(call, f"touch {marker}")

    def edit(metadata: Metadata) -> object:
        metadata.planner_data = hostile
        return hostile if where == "as a whole" else metadata

    edit_metadata(folder, edit)
    with pytest.raises(DcpError, match=f"names .*{call.__name__}, which is no part of PyTorch's metadata"):
        read_index(folder)
    assert not marker.exists()


@pytest.mark.parametrize("named", _ALLOWED, ids=".".join)
@pytest.mark.parametrize("state", [{"name": "../x"}, (None, {"name": "../x"})], ids=["fields", "slots"])
def test_a_metadata_that_sets_attributes_of_what_it_may_name_changes_nothing_in_this_process(
    tmp_path: Path, named: tuple[str, str], state: object
) -> None:
    module, name = named
    state_ops = pickle.dumps(state, protocol=2)[2:-1]  # without its begin and end
    before = dict(vars(_ALLOWED[named])) if isinstance(_ALLOWED[named], type) else None
    (tmp_path / ".metadata").write_bytes(b"\x80\x02c" + f"{module}\n{name}\n".encode() + state_ops + b"b.")
    with pytest.raises(DcpError):
        read_index(tmp_path)
    assert before is None or before == dict(vars(_ALLOWED[named]))
    assert Path("/a/b").name == "b"


@pytest.mark.filterwarnings(MIXED)
def test_a_piece_with_fewer_bytes_than_its_elements_need_is_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    state = {"model/embedding.weight": torch.zeros(8, 4)}
    torch_dcp.save(state, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model/embedding.weight"]
    described.size = described.chunks[0].sizes = torch.Size((10**13, 4))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DcpError, match="bytes cannot hold"):
        read_index(tmp_path)


@pytest.mark.filterwarnings(MIXED)
def test_a_piece_that_would_run_anything_is_refused_and_nothing_is_run(tmp_path: Path) -> None:
    state = {f"model/{name}": value for name, value in ours_of(LLAMA).named_parameters()}
    folder, marker = folder_of(state, tmp_path / "dcp"), tmp_path / "ran"
    (file,) = folder.glob("*.distcp")
    torch.save([Runs(os.system, f"touch {marker}"), torch.zeros(10_000)], file)

    def edit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(offset=0, length=file.stat().st_size)

    edit_metadata(folder, edit)
    with pytest.raises(DcpError, match="cannot be read"):
        import_dcp(folder, tmp_path / "run", LLAMA)
    assert not marker.exists()


@pytest.mark.filterwarnings(MIXED)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../secret"}, "not a file of the folder"),
        ({"relative_path": ".."}, "not a file of the folder"),
        ({"offset": 10**9}, "is shorter than"),
        ({"length": -1}, "is shorter than"),
        ({"offset": "x"}, "damaged"),
        ({"transform_descriptors": ["zstd"]}, "stored transformed"),
    ],
)
def test_a_place_that_is_not_in_the_folder_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 10_000)
    folder = folder_of({"model/w": torch.zeros(2)}, tmp_path / "dcp")

    def edit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(change)

    edit_metadata(folder, edit)
    with pytest.raises(DcpError, match=message):
        read_index(folder)


@pytest.mark.filterwarnings(MIXED)
def test_a_metadata_with_any_byte_wrong_is_read_or_refused(tmp_path: Path) -> None:
    folder = folder_of({"model/w": torch.zeros(2)}, tmp_path / "dcp")
    path = folder / ".metadata"
    content = path.read_bytes()
    for at in range(0, len(content), 3):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :]):
            path.write_bytes(damaged)
            with suppress(DcpError):
                read_index(folder)


@pytest.mark.filterwarnings(MIXED)
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"tok_embeddings.weight": torch.zeros(31, 24)}, "layers.0.attention.wq.weight is missing"),
        ({"model/embedding.weight": torch.zeros(30, 20)}, r"has shape \(30, 20\)"),
        (
            {"model/embedding.weight": torch.zeros(31, 24), "model/norm.weight": torch.zeros(24).double()},
            "model/norm.weight is no tensor of float32",
        ),
        ({"something.else": torch.zeros(3)}, "neither this project's names"),
    ],
)
def test_a_folder_of_another_model_is_refused_by_name(
    state: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_dcp(folder_of(state, tmp_path / "dcp"), tmp_path / "run", LLAMA)
    assert not (tmp_path / "run").exists()
