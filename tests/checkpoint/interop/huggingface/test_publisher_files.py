"""A publisher's statements beside the weights come through an import and an export, or are named where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from parity.llama3_folder import TEXT, save_llama3
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ModelSpec


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "llama3"
    save_llama3(folder)
    (folder / "LICENSE.txt").write_text("as you like")
    return folder


@pytest.fixture(scope="module")
def imported(published: Path) -> tuple[RunDirectory, ModelSpec]:
    run = published.parent / "run"
    return RunDirectory(run), import_hf(published, run).spec


def exported(run: RunDirectory, spec: ModelSpec, out: Path, **options: Any) -> tuple[str, ...]:
    tokenizer = options.pop("tokenizer", run.tokenizer)
    return export_hf(
        DiskTier(run.checkpoints), 0, spec, out, "float32", tokenizer, published_dir=run.published, **options
    )


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_a_round_trip_gives_the_same_files_with_the_same_statements(
    published: Path, imported: tuple[RunDirectory, ModelSpec], tmp_path: Path
) -> None:
    assert exported(*imported, tmp_path / "hf", trained_seq_len=64) == ()
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {path.name for path in published.iterdir()}
    for path in published.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert path.read_bytes() == (tmp_path / "hf" / path.name).read_bytes(), path.name
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "hf", published))
    message = [{"role": "user", "content": TEXT[1]}]
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.apply_chat_template(message) == theirs.apply_chat_template(message)
    assert GenerationConfig.from_pretrained(tmp_path / "hf") == GenerationConfig.from_pretrained(published)
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "hf", published)]
    for config in configs:
        del config["_name_or_path"]
    assert configs[0] == configs[1]


def test_a_run_with_another_tokenizer_writes_its_own_and_names_what_it_left_out(
    imported: tuple[RunDirectory, ModelSpec], tmp_path: Path
) -> None:
    (tmp_path / "bytes").mkdir()
    BytesTokenizer().save(tmp_path / "bytes")
    notes = exported(*imported, tmp_path / "hf", tokenizer=tmp_path / "bytes")
    assert "chat_template.jinja, generation_config.json, tokenizer.json, tokenizer_config.json" in notes[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template is None
    assert config_of(tmp_path / "hf")["eos_token_id"] == BytesTokenizer().end_of_document
    assert config_of(tmp_path / "hf")["bos_token_id"] is None
    assert (tmp_path / "hf" / "LICENSE.txt").exists()


def test_the_published_context_holds_while_the_rotary_embedding_does(
    imported: tuple[RunDirectory, ModelSpec], tmp_path: Path
) -> None:
    run, spec = imported
    shorter_notes = exported(run, spec, tmp_path / "shorter", max_seq_len=777)
    assert (config_of(tmp_path / "shorter")["max_position_embeddings"], shorter_notes) == (777, ())
    exported(run, spec, tmp_path / "longer", trained_seq_len=200_000)
    assert config_of(tmp_path / "longer")["max_position_embeddings"] == 200_000
    # The folder states another rotary embedding than the run's model has.
    config = config_of(run.published)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    )
    notes = export_hf(
        DiskTier(run.checkpoints), 0, spec, tmp_path / "hf", published_dir=other, trained_seq_len=96
    )
    assert config_of(tmp_path / "hf")["max_position_embeddings"] == 96
    assert "max_position_embeddings = 96, the run's train.seq_len" in notes[0]
    assert "131072" in notes[0]


def test_what_an_export_leaves_out_of_the_published_files_is_named(
    imported: tuple[RunDirectory, ModelSpec], tmp_path: Path
) -> None:
    run, spec = imported
    (run.published / "README.md").write_text("# Best model")
    config = config_of(run.published)
    try:
        (run.published / "config.json").write_text(json.dumps(config | {"novel_trick": 3}))
        notes = exported(run, spec, tmp_path / "hf")
    finally:
        (run.published / "README.md").unlink()
        (run.published / "config.json").write_text(json.dumps(config))
    assert notes == ("left out of what was published: README.md", "left out of config.json: novel_trick")


def in_download_cache(published: Path, root: Path) -> Path:
    """The folder of a model as Hugging Face's cache has it: links to blobs beside it."""
    blobs, folder = (
        root / "models--some--model" / "blobs",
        root / "models--some--model" / "snapshots" / "1a2b",
    )
    folder.mkdir(parents=True)
    shutil.copytree(published, blobs)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    return folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors", "README.md"])
def test_a_link_out_of_the_folder_of_a_model_is_refused_by_name(
    published: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(published, folder)
    (folder / name).unlink(missing_ok=True)
    private = tmp_path / "private"
    private.write_bytes((published / name).read_bytes() if (published / name).exists() else b"private")
    (folder / name).symlink_to(private)
    with pytest.raises((HuggingFaceError, OSError), match=f"{name}.*link|link.*{name}"):
        import_hf(folder, tmp_path / "run")


def test_an_import_copies_all_but_weights_and_names_what_it_did_not_copy(
    published: Path, tmp_path: Path
) -> None:
    folder = in_download_cache(published, tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / ".gitattributes").write_text("")
    (folder / "original").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    imported = import_hf(folder, tmp_path / "run")
    copied = RunDirectory(tmp_path / "run").published
    assert {path.name for path in copied.iterdir()} == {path.name for path in published.iterdir()} - {
        "model.safetensors"
    } | {"additional_chat_templates"}
    assert not any(path.is_symlink() for path in copied.iterdir())
    assert imported.notes == ("left out: the folder original",)
    exported(RunDirectory(tmp_path / "run"), imported.spec, tmp_path / "hf")
    templates = AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template
    assert templates["rag"] == "{{ documents }}"


def test_a_model_whose_tokenizer_cannot_be_used_here_keeps_it_for_others(
    published: Path, tmp_path: Path
) -> None:
    folder = in_download_cache(published, tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    imported = import_hf(folder, tmp_path / "run")
    assert imported.no_tokenizer_because
    exported(RunDirectory(tmp_path / "run"), imported.spec, tmp_path / "hf", tokenizer=None)
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"sentencepiece"
    assert (tmp_path / "hf" / "chat_template.jinja").exists()
