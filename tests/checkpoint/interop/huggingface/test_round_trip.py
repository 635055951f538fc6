"""Import from and export to Hugging Face's format, against ``transformers`` itself."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint.saved_models import restored, save_models
from checkpoint.shards import shards_of
from model.initialized import initialized
from parity.hf_models import CONFIGS, MIXTURES, hf_model, our_model, random_tokens
from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.format.errors import CheckpointError, MismatchError, NoSuchStepError, StorageFullError
from phalanx.checkpoint.format.image import Image, image_layout
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, UnsupportedModelError
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf, tensors_of, weight_files
from phalanx.checkpoint.interop.huggingface.names import parameter_name
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer, tokenizer_from_file, train_bpe
from phalanx.model.facts.presets import PRESETS
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import read_run
from phalanx.run.spec import ModelSpec

ODD = resolve(
    ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=40, vocab_size=300, attention_bias=True)
)
DENSE = {name: config for name, config in CONFIGS.items() if name not in MIXTURES}
each_dense_config = pytest.mark.parametrize("config", DENSE.values(), ids=DENSE.keys())
TEXT = ["def f(x):\n    return x + 1\n", "naïve 日本語 👩‍🚀", "the cat and the dog and the cat"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, DiskTier]:
    model = initialized(ODD)
    return model, save_models(tmp_path_factory.mktemp("odd"), {7: model})


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model folder as ``transformers`` saves it."""
    hf_model(CONFIGS["llama"]).save_pretrained(tmp_path / "published")
    return tmp_path / "published"


@each_dense_config
def test_transformers_loads_an_exported_model_and_gives_the_same_logits(config: Any, tmp_path: Path) -> None:
    ours = our_model(hf_model(config))
    export_hf(save_models(tmp_path / "run", {7: ours}), 7, ours.spec, tmp_path / "hf", "float32")
    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    theirs, report = loading
    assert theirs.dtype == torch.float32
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = random_tokens(ours.spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@each_dense_config
def test_an_imported_model_gives_the_logits_of_transformers(config: Any, tmp_path: Path) -> None:
    theirs = hf_model(config)
    theirs.save_pretrained(tmp_path / "published")
    imported = import_hf(tmp_path / "published", tmp_path / "run")
    ours = restored(DiskTier(tmp_path / "run" / "checkpoints"), 0, imported.spec)
    tokens = random_tokens(imported.spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_model_that_transformers_saved_in_several_files_is_imported_with_the_same_weights(
    published: Path, tmp_path: Path
) -> None:
    hf_model(CONFIGS["llama"]).save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    several, single = import_hf(tmp_path / "several", tmp_path / "a"), import_hf(published, tmp_path / "b")
    assert several.weights_sha256 == single.weights_sha256


def test_a_round_trip_keeps_every_bit_and_the_digest(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    model, tier = odd
    export_hf(tier, 7, ODD, tmp_path / "hf", "float32")
    imported = import_hf(tmp_path / "hf", tmp_path / "run")
    back = restored(DiskTier(tmp_path / "run" / "checkpoints"), 0, imported.spec)
    for (name, before), (_, after) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(before, after), name
    assert imported.spec == ODD
    assert imported.weights_sha256 == digest_checkpoint(tier, 7)


def test_the_digest_in_the_record_is_that_of_the_checkpoint(published: Path, tmp_path: Path) -> None:
    imported = import_hf(published, tmp_path / "run")
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    assert tier.record(0).weights_sha256 == imported.weights_sha256 == digest_checkpoint(tier, 0)
    assert tier.extra(0) == {"step": 0, "imported_from": str(published)}
    assert verify(tier.root) == []


def test_the_size_of_images_changes_nothing_but_the_number_of_files(published: Path, tmp_path: Path) -> None:
    single = import_hf(published, tmp_path / "one")
    many = import_hf(published, tmp_path / "many", image_bytes=1000)  # less than a tensor has
    tier = DiskTier(tmp_path / "many" / "checkpoints")
    assert tier.record(0).world_size > 50
    assert single == many
    assert digest_checkpoint(tier, 0) == single.weights_sha256


def test_the_run_file_of_an_imported_model_describes_it(published: Path, tmp_path: Path) -> None:
    imported = import_hf(published, tmp_path / "run")
    run = read_run(tmp_path / "run" / "run.toml", PRESETS)
    assert (run.name, run.model) == ("run", imported.spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_become_the_same_numbers_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = hf_model(CONFIGS["llama"]).to(dtype)
    theirs.save_pretrained(tmp_path / "published")
    imported = import_hf(tmp_path / "published", tmp_path / "run")
    ours = dict(restored(DiskTier(tmp_path / "run" / "checkpoints"), 0, imported.spec).named_parameters())
    for name, value in theirs.named_parameters():
        assert torch.equal(ours[parameter_name(name)], value.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_in_half_precision_rounds_each_weight_once(
    dtype: Any, odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    model, tier = odd
    export_hf(tier, 7, ODD, tmp_path / "hf", dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == getattr(torch, dtype)
    ours = dict(model.named_parameters())
    for name, value in theirs.named_parameters():
        assert torch.equal(value, ours[parameter_name(name)].to(value.dtype))


def test_a_large_model_is_written_as_several_files_that_transformers_loads(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    model, tier = odd
    export_hf(tier, 7, ODD, tmp_path / "hf", "float32", file_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = random_tokens(ODD, 1, 10)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert import_hf(tmp_path / "hf", tmp_path / "run").weights_sha256 == digest_checkpoint(tier, 7)


def test_a_small_model_is_one_file_without_an_index(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    export_hf(odd[1], 7, ODD, tmp_path / "hf")
    written = {path.name for path in (tmp_path / "hf").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}


@given(st.integers(1, 60_000))
def test_files_hold_every_tensor_once_and_keep_to_the_requested_size(file_bytes: int) -> None:
    all_tensors = tensors_of(ODD)
    files = weight_files(all_tensors, "bfloat16", file_bytes)
    assert [tensor for file in files for tensor in file.tensors] == all_tensors
    for file in files:
        nbytes, fields = (
            sum(2 * tensor.parameter.numel for tensor in file.tensors),
            json.loads(file.header[8:]),
        )
        assert nbytes <= file_bytes or len(file.tensors) == 1
        assert max(fields[tensor.name]["data_offsets"][1] for tensor in file.tensors) == nbytes


def test_a_checkpoint_of_many_ranks_is_exported_as_the_same_files(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    model, tier = odd
    sharded = DiskTier(tmp_path / "sharded")
    tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    boxes = [shard.box for shard in shards_of(tensors)]
    for rank in range(3):
        layout = image_layout(
            [box.rows(box.shape[0] * rank // 3, box.shape[0] * (rank + 1) // 3) for box in boxes]
        )
        data = torch.zeros(layout.nbytes, dtype=torch.uint8).numpy()
        data[: len(layout.header)] = bytearray(layout.header)
        for entry in layout.entries:
            part = tensors[entry.box.name][
                entry.box.slices_in(boxes[[b.name for b in boxes].index(entry.box.name)])
            ]
            data[entry.start : entry.stop] = part.contiguous().reshape(-1).view(torch.uint8).numpy()
        sharded.write(Draft(7, 0), rank, Image(layout, data))
    sharded.commit(Draft(7, 0), StepRecord(7, 3, {}), timeout_s=1)
    export_hf(tier, 7, ODD, tmp_path / "one")
    export_hf(sharded, 7, ODD, tmp_path / "three")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()


# Tokenizers


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_transformers_reads_the_exported_tokenizer(
    kind: str, odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    tokenizer = train_bpe(TEXT, vocab_size=290) if kind == "bpe" else BytesTokenizer()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    export_hf(odd[1], 7, ODD, tmp_path / "hf", tokenizer_dir=tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXT:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_document
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.end_of_document


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer").mkdir()
    train_bpe([" ".join(map(str, range(2000)))], vocab_size=400).save(tmp_path / "tokenizer")
    with pytest.raises(HuggingFaceError, match="400 tokens, but the model embeds 300"):
        export_hf(odd[1], 7, ODD, tmp_path / "hf", tokenizer_dir=tmp_path / "tokenizer")


def test_an_imported_model_brings_its_tokenizer(published: Path, tmp_path: Path) -> None:
    train_bpe(TEXT, vocab_size=290).save(published)
    assert import_hf(published, tmp_path / "run").no_tokenizer_because == ""
    expected = tokenizer_from_file(published)
    assert load_tokenizer(tmp_path / "run" / "tokenizer").encode(TEXT[1]) == expected.encode(TEXT[1])


def test_a_model_without_a_usable_tokenizer_is_imported_with_the_reason(
    published: Path, tmp_path: Path
) -> None:
    assert (
        "has neither tokenizer.json nor tokenizer.model"
        in import_hf(published, tmp_path / "one").no_tokenizer_because
    )
    (published / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in import_hf(published, tmp_path / "two").no_tokenizer_because
    assert not (tmp_path / "two" / "tokenizer").exists()


# Failures, which lose nothing


def test_an_existing_folder_is_refused_and_left_alone(
    odd: tuple[Transformer, DiskTier], published: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("irreplaceable")
    for attempt in (
        lambda: export_hf(odd[1], 7, ODD, tmp_path / "there"),
        lambda: import_hf(published, tmp_path / "there"),
    ):
        with pytest.raises(HuggingFaceError, match="exists; name a new folder"):
            attempt()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["thesis.tex"]


def test_a_model_that_cannot_be_expressed_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="gelu"):
        export_hf(DiskTier(tmp_path / "none"), 0, PRESETS["gpt3-175b"], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_step_that_is_not_there_leaves_nothing_behind(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    with pytest.raises(NoSuchStepError):
        export_hf(odd[1], 8, ODD, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_model_of_other_shapes_than_the_checkpoint_is_refused(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    wrong = resolve(ModelSpec(layers=2, dim=64, heads=4, ffn_dim=40, vocab_size=300))
    with pytest.raises(MismatchError, match="embedding"):
        export_hf(odd[1], 7, wrong, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_corrupt_checkpoint_is_not_exported(tmp_path: Path) -> None:
    tier = save_models(tmp_path / "run", {7: initialized(ODD)})
    path = tier.folder(7) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        export_hf(tier, 7, ODD, tmp_path / "hf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_weight_beyond_the_range_of_fp16_is_refused(tmp_path: Path) -> None:
    model = initialized(ODD)
    model.norm.weight.data[3] = 70_000.0
    tier = save_models(tmp_path / "run", {7: model})
    with pytest.raises(HuggingFaceError, match=r"model/norm.weight: 70000 is beyond the range of float16"):
        export_hf(tier, 7, ODD, tmp_path / "hf", "float16")
    export_hf(tier, 7, ODD, tmp_path / "hf", "bfloat16")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HuggingFaceError, match="give the folder of a Hugging Face model"):
        import_hf(tmp_path, tmp_path / "run")
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(HuggingFaceError, match="not JSON"):
        import_hf(tmp_path, tmp_path / "run")


def test_a_missing_or_torn_weight_file_is_named(published: Path, tmp_path: Path) -> None:
    weights = published / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(HuggingFaceError, match=r"model.safetensors: damaged"):
        import_hf(published, tmp_path / "run")
    weights.unlink()
    with pytest.raises(HuggingFaceError, match=r"model.safetensors: is missing"):
        import_hf(published, tmp_path / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["published"]


def test_a_torn_generation_config_is_refused_at_import(published: Path, tmp_path: Path) -> None:
    (published / "generation_config.json").write_text('{"eos_token_id": [1')
    with pytest.raises(HuggingFaceError, match=r"published/generation_config.json: not JSON"):
        import_hf(published, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "eos_token_id", 61),
        ("config.json", "bos_token_id", -1),
        ("config.json", "pad_token_id", "0"),
        ("config.json", "eos_token_id", True),
        ("generation_config.json", "eos_token_id", [2, 128_009]),
        ("generation_config.json", "decoder_start_token_id", 1.5),
    ],
)
def test_a_token_id_that_the_model_lacks_is_refused_with_file_field_and_range(
    file: str, field: str, value: object, published: Path, tmp_path: Path
) -> None:
    content = json.loads((published / file).read_text()) | {field: value}
    (published / file).write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError) as refused:
        import_hf(published, tmp_path / "run")
    assert f"published/{file}: {field} = {value}: an id, or a list of ids, from 0 to 60" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_padding_of_minus_one_is_none_as_llama_was_published(published: Path, tmp_path: Path) -> None:
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | {"pad_token_id": -1, "eos_token_id": [1, 2]}))
    import_hf(published, tmp_path / "run")
    assert (tmp_path / "run").exists()


def test_missing_foreign_and_misshapen_tensors_are_all_named(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.vision.weight"] = torch.zeros(3)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(
        torch.int32
    )
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(HuggingFaceError) as caught:
        import_hf(published, tmp_path / "run")
    for part in (
        "model.norm.weight is missing",
        "model.vision.weight is not a part",
        "shape (3, 3)",
        "dtype I32",
    ):
        assert part in str(caught.value)


def test_a_tied_model_may_carry_its_output_projection_only_if_it_is_the_embedding(tmp_path: Path) -> None:
    hf_model(CONFIGS["llama, tied"]).save_pretrained(tmp_path / "tied")
    digest = import_hf(tmp_path / "tied", tmp_path / "run").weights_sha256
    weights = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(weights)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights)
    assert import_hf(tmp_path / "tied", tmp_path / "again").weights_sha256 == digest
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, weights)
    with pytest.raises(HuggingFaceError, match="tie_word_embeddings"):
        import_hf(tmp_path / "tied", tmp_path / "third")


def test_a_disk_that_cannot_be_written_is_named(odd: tuple[Transformer, DiskTier], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HuggingFaceError, match="file"):
        export_hf(odd[1], 7, ODD, tmp_path / "file" / "hf")


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file may grow beyond 20 kB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("no_room")
def test_a_full_disk_during_export_is_explained_and_leaves_nothing(
    odd: tuple[Transformer, DiskTier], tmp_path: Path
) -> None:
    with pytest.raises(HuggingFaceError, match=r"File too large. No files remain; free space"):
        export_hf(odd[1], 7, ODD, tmp_path / "hf", "float32")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_during_import_is_explained_and_leaves_nothing(
    published: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("no_room")
    with pytest.raises(StorageFullError, match=r"at most 20,000 \(ulimit -f\)"):
        import_hf(published, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [published]
