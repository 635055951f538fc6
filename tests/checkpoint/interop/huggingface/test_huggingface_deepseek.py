"""DeepSeek-V3's parts beside its layers: predictions further ahead, and weights in fp8."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3PreTrainedModel,
)

from checkpoint.huggingface_models import (
    CONFIGS,
    edit_config,
    exported,
    ours_of,
    saved_by_transformers,
)
from parity.hf_models import random_tokens
from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, spec_of
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer

# Multi-token prediction


@pytest.fixture
def ahead(tmp_path: Path) -> tuple[Transformer, Path]:
    """A model that predicts two tokens further ahead, and its export."""
    spec = dataclasses.replace(spec_of(CONFIGS["deepseek v3"].to_dict()), mtp_depth=2)
    model = ours_of(spec)
    return model, exported(model, tmp_path)


def test_predictions_ahead_are_published_as_layers_behind_the_last(ahead: tuple[Transformer, Path]) -> None:
    model, folder = ahead
    ours, theirs = model.state_dict(), load_file(folder / "model.safetensors")
    for depth in (0, 1):
        for part, other in {
            "projection": "eh_proj",
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "norm": "shared_head.norm",
            "block.attention.kv_up": "self_attn.kv_b_proj",
            "block.ffn.router": "mlp.gate",
        }.items():
            published = theirs[f"model.layers.{3 + depth}.{other}.weight"]
            assert torch.equal(published, ours[f"mtp.{depth}.{part}.weight"]), part
        assert torch.equal(theirs[f"model.layers.{3 + depth}.embed_tokens.weight"], ours["embedding.weight"])
        assert torch.equal(theirs[f"model.layers.{3 + depth}.shared_head.head.weight"], ours["head.weight"])
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2


def test_transformers_predicts_ahead_with_the_same_logits(
    ahead: tuple[Transformer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers does not predict ahead")
    model, folder = ahead
    # It knows the layers to predict ahead with by their number in the published model.
    patterns = [r"model\.layers\.3\..*", r"model\.layers\.4\..*"]
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", patterns)
    main = AutoModelForCausalLM.from_pretrained(folder)
    theirs = layers.MtpModel.from_pretrained(main)
    tokens = random_tokens(model.spec, 1, 20)
    ours: dict[int, Tensor] = {}

    def keep(hidden: Tensor, weight: Tensor, depth: int) -> Tensor:
        ours[depth] = hidden @ weight.T
        return torch.zeros(())

    model(tokens, lambda *_: torch.zeros(()), ahead=keep)
    hidden = main.model(tokens).last_hidden_state
    for depth in (1, 2):
        further = tokens.roll(-depth, dims=1)
        hidden = theirs.forward_layer(depth - 1, hidden, torch.arange(20)[None], None, input_ids=further)
        torch.testing.assert_close(ours[depth], main.lm_head(hidden), rtol=1e-4, atol=1e-5)


def test_predictions_ahead_survive_the_round_trip(ahead: tuple[Transformer, Path], tmp_path: Path) -> None:
    model, folder = ahead
    imported = import_hf(folder, tmp_path / "back")
    assert (imported.spec, imported.notes) == (model.spec, ())
    assert imported.weights_sha256 == digest_checkpoint(DiskTier(tmp_path / "run"), 7)


def test_predictions_ahead_that_the_config_does_not_state_are_left_out_with_a_note(
    ahead: tuple[Transformer, Path], tmp_path: Path
) -> None:
    model, folder = ahead
    edit_config(folder, num_nextn_predict_layers=0)
    imported = import_hf(folder, tmp_path / "back")
    assert imported.spec == dataclasses.replace(model.spec, mtp_depth=0)
    assert "layers after the last" in imported.notes[0]


def test_predictions_ahead_that_the_files_lack_are_left_out_with_a_note(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["deepseek v3"], tmp_path / "published")
    before = import_hf(published, tmp_path / "before")
    edit_config(published, num_nextn_predict_layers=1)
    imported = import_hf(published, tmp_path / "run")
    assert (imported.spec, imported.weights_sha256) == (before.spec, before.weights_sha256)
    assert "the files have none" in imported.notes[0]


def test_shared_tensors_may_be_left_out_but_not_differ(
    ahead: tuple[Transformer, Path], tmp_path: Path
) -> None:
    _, folder = ahead
    tensors = load_file(folder / "model.safetensors")
    before = import_hf(folder, tmp_path / "before")
    head = tensors.pop("model.layers.4.shared_head.head.weight")
    save_file(tensors, folder / "model.safetensors")
    assert import_hf(folder, tmp_path / "without") == before
    save_file(tensors | {"model.layers.4.shared_head.head.weight": head + 1}, folder / "model.safetensors")
    with pytest.raises(
        HuggingFaceError, match=r"layers.4.shared_head.head.weight differs from lm_head.weight"
    ):
        import_hf(folder, tmp_path / "other")


# Weights in fp8

BLOCK = (16, 12)
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Each block's scale at each element of the block."""
    rows, columns = BLOCK
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The linear layers of blocks in fp8 with random scales, as DeepSeek publishes them."""
    generator = torch.Generator().manual_seed(3)
    stored = dict(tensors)
    for name, value in tensors.items():
        if "_proj" in name:
            blocks = [-(-size // of) for size, of in zip(value.shape, BLOCK, strict=True)]
            scale = torch.rand(blocks, generator=generator) + 0.1
            stored[name] = (value / spread(scale, value.shape)).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    return stored


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A model in fp8 whose matrices are no multiples of the blocks."""
    folder = saved_by_transformers(CONFIGS["deepseek v3"], tmp_path / "fp8")
    save_file(quantized(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    edit_config(folder, quantization_config=QUANTIZATION)
    return folder


@pytest.mark.parametrize("image_bytes", [1 << 20, 3000])
def test_weights_in_fp8_become_the_products_with_their_blocks_scales(
    fp8: Path, image_bytes: int, tmp_path: Path
) -> None:
    tensors = load_file(fp8 / "model.safetensors")
    wide = {
        name: value.float() * spread(tensors[f"{name}_scale_inv"], value.shape)
        if value.dtype == torch.float8_e4m3fn
        else value
        for name, value in tensors.items()
        if not name.endswith("_scale_inv")
    }
    plain = saved_by_transformers(CONFIGS["deepseek v3"], tmp_path / "plain")
    save_file(wide, plain / "model.safetensors")
    expected = import_hf(plain, tmp_path / "plain-run")
    imported = import_hf(fp8, tmp_path / "run", image_bytes=image_bytes)
    assert (imported.spec, imported.weights_sha256) == (expected.spec, expected.weights_sha256)


def test_weights_in_fp8_without_scales_or_blocks_are_refused(fp8: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(fp8 / "model.safetensors")
    scale = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, fp8 / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=r"o_proj\.weight_scale_inv is missing"):
        import_hf(fp8, tmp_path / "a")
    save_file(tensors | {f"{name}_scale_inv": scale[:1]}, fp8 / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=r"o_proj.weight_scale_inv has shape \(1, 4\)"):
        import_hf(fp8, tmp_path / "b")
    edit_config(fp8, quantization_config=None)
    with pytest.raises(HuggingFaceError, match="no quantization_config with a weight_block_size"):
        import_hf(fp8, tmp_path / "c")
