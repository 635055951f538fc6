"""A published model is read in place, as the run that an import would make of it, and no copy is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.huggingface_models import CONFIGS, edit_config, saved_by_transformers
from parity.llama3_folder import save_llama3
from phalanx.api import load_weights, weights_sha256
from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.committed.restore import Rows
from phalanx.checkpoint.format.errors import NoSuchStepError, StorageError
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.checkpoint.interop.huggingface.stored_folder import FolderTier, stand_in
from phalanx.checkpoint.pack.layout import PackError
from phalanx.checkpoint.pack.writer import pack
from phalanx.model.transformer import Transformer
from phalanx.run.directory.files import files_below
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.train.score import restored_model


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with a tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "llama3"
    save_llama3(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_has_the_hash_of_the_run_that_is_imported_from_it(name: str, tmp_path: Path) -> None:
    folder = saved_by_transformers(CONFIGS[name], tmp_path / "hf")
    assert digest_checkpoint(FolderTier(folder), 0) == import_hf(folder, tmp_path / "run").weights_sha256


def test_what_stands_in_has_the_files_of_an_imported_run_but_its_weights_and_goes(
    llama3: Path, tmp_path: Path
) -> None:
    import_hf(llama3, tmp_path / "llama3")
    imported = _small_files(tmp_path / "llama3")
    with stand_in(llama3) as substitute:
        own = _small_files(substitute.path)
        assert own.pop("weights.json") == json.dumps({"folder": str(llama3.resolve())}).encode()
        assert (own, substitute.path.name) == (imported, "llama3")
    assert not substitute.path.parent.exists()


@pytest.mark.parametrize(
    ("name", "stands_in"),
    [
        ('it\'s "odd"\n\x1b[1m 日本', 'it\'s "odd"__[1m 日本'),
        ("x" * 120, "x" * 100),
    ],
)
def test_a_folder_whose_name_no_run_may_have_is_read(
    name: str, stands_in: str, llama3: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama3, tmp_path / name)
    with stand_in(tmp_path / name) as substitute:
        assert (substitute.path.name, read_resolved(RunDirectory(substitute.path)).name) == (
            stands_in,
            stands_in,
        )
        restored_model(substitute.path, None)


def test_temporary_files_without_room_are_named_with_what_would_help(
    llama3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))  # as shutil.copyfile does

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(StorageError, match=rf"^{tmp_path}: No space .*TMPDIR"), stand_in(llama3):
        raise AssertionError("nothing has room to stand in")
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_while_it_is_used_is_not_taken_for_the_copy_s(llama3: Path) -> None:
    with pytest.raises(FileNotFoundError), stand_in(llama3) as substitute:
        (substitute.path / "none").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_what_stands_in_has_the_bits_of_an_imported_one(
    dtype: torch.dtype, llama3: Path, tmp_path: Path
) -> None:
    import_hf(llama3, tmp_path / "run")
    with stand_in(llama3) as substitute:
        model, spec, step = restored_model(substitute.path, None, dtype=dtype)
    other, other_spec, other_step = restored_model(tmp_path / "run", None, dtype=dtype)
    assert (spec, step) == (other_spec, other_step)
    state = other.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_part_of_a_model_reads_its_own_rows(llama3: Path) -> None:
    name = "blocks.0.attention.query.weight"
    with stand_in(llama3) as substitute:
        full, _, _ = restored_model(substitute.path, 0)

        def halved(model: Transformer) -> Mapping[str, Rows]:
            layer: Any = model.get_submodule(name.rpartition(".")[0])
            rows = layer.weight.shape[0]
            layer.weight = torch.nn.Parameter(layer.weight[rows // 2 :], requires_grad=False)
            return {name: Rows(rows // 2, rows)}

        part, _, _ = restored_model(substitute.path, 0, cut=halved)
    of_whole, of_part = full.state_dict()[name], part.state_dict()[name]
    assert torch.equal(of_part, of_whole[len(of_whole) // 2 :])


def test_a_text_that_is_scored_is_as_long_as_the_publisher_allows(llama3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    shutil.copytree(llama3, folder)
    lengths = {}
    for allowed in (64, 100_000):
        edit_config(folder, max_position_embeddings=allowed)
        with stand_in(folder) as substitute:
            lengths[allowed] = read_resolved(RunDirectory(substitute.path)).train.seq_len
    assert lengths == {64: 64, 100_000: 2048}


def test_a_step_that_no_published_model_has_is_refused(llama3: Path) -> None:
    with stand_in(llama3) as substitute, pytest.raises(NoSuchStepError, match="omit the step"):
        restored_model(substitute.path, 7)
    for read in (load_weights, weights_sha256):
        with pytest.raises(RunDirectoryError, match=r"there is no step 7 in .*llama3, a published model"):
            read(llama3, 7)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save_llama3(tmp_path / "llama3")
    file = tmp_path / "llama3" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with (
        stand_in(tmp_path / "llama3") as substitute,
        pytest.raises(HuggingFaceError, match=r"model\.norm\.weight"),
    ):
        restored_model(substitute.path, 0)


def test_a_folder_without_its_weights_is_refused_before_anything_stands_in(tmp_path: Path) -> None:
    save_llama3(tmp_path / "llama3")
    (tmp_path / "llama3" / "model.safetensors").unlink()
    with (
        pytest.raises(HuggingFaceError, match=r"model\.safetensors: is missing"),
        stand_in(tmp_path / "llama3"),
    ):
        raise AssertionError("nothing is there to stand in")


def test_a_copy_of_the_embedding_that_differs_is_refused_however_the_folder_is_opened(tmp_path: Path) -> None:
    save_llama3(tmp_path / "llama3")
    file = tmp_path / "llama3" / "model.safetensors"
    edit_config(tmp_path / "llama3", tie_word_embeddings=True)
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    with stand_in(tmp_path / "llama3") as substitute:
        restored_model(substitute.path, 0)

    weights["lm_head.weight"][-1, -1] += 1
    save_file(weights, file, {"format": "pt"})
    refused = r"lm_head\.weight differs from model\.embed_tokens\.weight"
    with pytest.raises(HuggingFaceError, match=refused):
        FolderTier(tmp_path / "llama3")
    with pytest.raises(HuggingFaceError, match=refused), stand_in(tmp_path / "llama3"):
        raise AssertionError("nothing stands in for it")
    with pytest.raises(HuggingFaceError, match=refused):
        import_hf(tmp_path / "llama3", tmp_path / "run")


def test_weights_that_may_not_be_read_are_refused_by_name(
    llama3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def forbidden(path: Path, *how: Any, **named: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **named)

    def not_there(path: Path, framework: str) -> None:  # noqa: ARG001
        raise FileNotFoundError(f"No such file or directory: {path}")  # as safetensors does then

    monkeypatch.setattr("pathlib.Path.open", forbidden)
    monkeypatch.setattr("phalanx.checkpoint.interop.huggingface.stored_weights.safe_open", not_there)
    with pytest.raises(HuggingFaceError, match=r"model\.safetensors: Permission denied"):
        FolderTier(llama3)


def test_a_pack_of_a_folder_is_that_of_the_imported_run_and_is_written_to_the_named_path(
    llama3: Path, tmp_path: Path
) -> None:
    import_hf(llama3, tmp_path / "run")
    _, imported = pack(tmp_path / "run", form="bf16")
    with stand_in(llama3) as substitute:
        with pytest.raises(PackError, match="--out"):
            pack(substitute.path)
        path, index = pack(substitute.path, path=tmp_path / "llama.pack", form="bf16")
    assert path == tmp_path / "llama.pack"
    assert (index.weights_sha256, index.checksums) == (imported.weights_sha256, imported.checksums)
    assert str(llama3.resolve()) in index.run


def _small_files(run: Path) -> dict[str, bytes]:
    checkpoints = RunDirectory(run).checkpoints
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in files_below(run)
        if path.is_file() and not path.is_relative_to(checkpoints)
    }
