"""Mixtures of experts and latent attention in Hugging Face's format, against ``transformers`` itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
)

from checkpoint.huggingface_models import (
    CONFIGS,
    edit_config,
    exported,
    imported_model,
    ours_of,
    saved,
    saved_by_transformers,
)
from parity.hf_models import DEEPSEEK, hf_model, random_tokens
from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.format.errors import NotCoveredError
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, spec_of
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.tiers.disk import DiskTier

# Rotated rows are always exported in pairs, as published models have them.
AS_PUBLISHED = {name: config for name, config in CONFIGS.items() if getattr(config, "rope_interleave", True)}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@each_config
def test_transformers_loads_an_exported_model_and_gives_the_same_logits(config: Any, tmp_path: Path) -> None:
    ours = ours_of(spec_of(config.to_dict()))
    loading: Any = AutoModelForCausalLM.from_pretrained(exported(ours, tmp_path), output_loading_info=True)
    theirs, report = loading
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = random_tokens(ours.spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@each_config
def test_an_imported_model_gives_the_logits_of_transformers(config: Any, tmp_path: Path) -> None:
    theirs = hf_model(config)
    theirs.save_pretrained(tmp_path / "published")
    imported = import_hf(tmp_path / "published", tmp_path / "run")
    ours = imported_model(tmp_path / "run", imported.spec)
    tokens = random_tokens(imported.spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@each_config
def test_a_round_trip_keeps_every_bit_the_digest_and_the_description(config: Any, tmp_path: Path) -> None:
    ours = ours_of(spec_of(config.to_dict()))
    imported = import_hf(exported(ours, tmp_path), tmp_path / "back")
    assert imported.spec == ours.spec
    assert imported.weights_sha256 == digest_checkpoint(DiskTier(tmp_path / "run"), 7)
    back = imported_model(tmp_path / "back", imported.spec).state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, back[name]), name


@pytest.mark.parametrize("config", AS_PUBLISHED.values(), ids=AS_PUBLISHED.keys())
def test_importing_and_exporting_gives_the_published_tensors_bit_for_bit(config: Any, tmp_path: Path) -> None:
    published = saved_by_transformers(config, tmp_path / "published")
    spec = import_hf(published, tmp_path / "run").spec
    tier, publisher_files = DiskTier(tmp_path / "run" / "checkpoints"), tmp_path / "run" / "published"
    export_hf(tier, 0, spec, tmp_path / "again", "float32", published_dir=publisher_files)
    before = load_file(published / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_each_expert_is_one_published_tensor_and_one_matrix_of_our_stack(tmp_path: Path) -> None:
    for family, names in {
        "mixtral": "model.layers.1.block_sparse_moe.experts.{}.{}.weight",
        "qwen3 moe": "model.layers.1.mlp.experts.{}.{}_proj.weight",
        "deepseek v3": "model.layers.1.mlp.experts.{}.{}_proj.weight",
    }.items():
        published = saved_by_transformers(CONFIGS[family], tmp_path / family)
        theirs = load_file(published / "model.safetensors")
        spec = import_hf(published, tmp_path / f"{family}-run").spec
        ours = imported_model(tmp_path / f"{family}-run", spec).state_dict()
        for part, other in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            stack = ours[f"blocks.1.ffn.experts.{part}"]
            for expert, matrix in enumerate(stack):
                name = names.format(expert, other if family == "mixtral" else part)
                assert torch.equal(matrix, theirs[name]), name


def test_rotated_rows_are_published_in_pairs_and_kept_in_halves(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["deepseek v3"], tmp_path / "published")
    theirs = load_file(published / "model.safetensors")
    ours = imported_model(tmp_path / "run", import_hf(published, tmp_path / "run").spec).state_dict()
    pairs = theirs["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    halves = ours["blocks.0.attention.kv_down.weight"]
    assert torch.equal(halves[:16], pairs[:16])
    assert torch.equal(halves[16:20], pairs[16::2])
    assert torch.equal(halves[20:], pairs[17::2])
    pairs = theirs["model.layers.0.self_attn.q_b_proj.weight"].view(4, 20, 24)
    halves = ours["blocks.0.attention.query_up.weight"].view(4, 20, 24)
    assert torch.equal(halves[:, :12], pairs[:, :12])
    assert torch.equal(halves[:, 12:16], pairs[:, 12::2])
    assert torch.equal(halves[:, 16:], pairs[:, 13::2])


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3"])
def test_the_size_of_images_changes_nothing_even_where_it_cuts_heads_and_experts(
    name: str, tmp_path: Path
) -> None:
    published = saved_by_transformers(CONFIGS[name], tmp_path / "published")
    uncut = import_hf(published, tmp_path / "whole")
    cut = import_hf(published, tmp_path / "cut", image_bytes=1000)
    assert cut == uncut
    assert digest_checkpoint(DiskTier(tmp_path / "cut" / "checkpoints"), 0) == uncut.weights_sha256


def test_a_model_that_transformers_saved_in_several_files_is_imported_with_the_same_weights(
    tmp_path: Path,
) -> None:
    model = hf_model(CONFIGS["deepseek v3"])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    single, several = (import_hf(tmp_path / name, tmp_path / f"{name}-run") for name in ("one", "several"))
    assert single.weights_sha256 == several.weights_sha256


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["deepseek v3"], tmp_path / "published")
    deepseek = import_hf(published, tmp_path / "deepseek")
    edit_config(published, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    assert import_hf(published, tmp_path / "kimi") == deepseek


# The bias that balances experts


def test_the_bias_is_exported_as_fp32_beside_weights_of_any_format(tmp_path: Path) -> None:
    ours = ours_of(spec_of(CONFIGS["deepseek v3"].to_dict()))
    export_hf(saved(tmp_path / "run", ours), 7, ours.spec, tmp_path / "hf", "bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, ours.state_dict()["blocks.1.ffn.router.bias"])
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_a_model_whose_routers_have_no_bias_is_exported_with_one_of_zeros(tmp_path: Path) -> None:
    spec = spec_of(CONFIGS["deepseek v3"].to_dict())
    assert spec.moe is not None
    ours = ours_of(dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, balance_bias=False)))
    theirs = AutoModelForCausalLM.from_pretrained(exported(ours, tmp_path))
    assert not theirs.model.layers[1].mlp.gate.e_score_correction_bias.any()
    tokens = random_tokens(spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


# Failures


def test_missing_and_foreign_experts_are_named(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["qwen3 moe"], tmp_path / "published")
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = torch.zeros(16, 32)
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(HuggingFaceError) as caught:
        import_hf(published, tmp_path / "run")
    for part in (
        "experts.2.up_proj.weight is missing",
        "experts.8.up_proj.weight is not a part",
        "sinks is not a part",
    ):
        assert part in str(caught.value)


def test_the_norms_of_latents_have_the_eps_of_transformers_beside_norms_of_another(tmp_path: Path) -> None:
    config = DeepseekV3Config(**DEEPSEEK, rms_norm_eps=1e-3)
    published = saved_by_transformers(config, tmp_path / "published")
    imported = import_hf(published, tmp_path / "run")
    assert imported.notes == ()
    assert imported.spec.mla is not None
    assert (imported.spec.norm_eps, imported.spec.mla.norm_eps) == (1e-3, 1e-6)
    ours, theirs = imported_model(tmp_path / "run", imported.spec), hf_model(config)
    tokens = random_tokens(imported.spec, 2, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_bias_that_the_checkpoint_lacks_is_not_taken_for_zeros(tmp_path: Path) -> None:
    spec = spec_of(CONFIGS["deepseek v3"].to_dict())
    assert spec.moe is not None
    without = ours_of(dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, balance_bias=False)))
    tier = saved(tmp_path / "run", without)
    with pytest.raises(NotCoveredError, match=r"router\.bias"):
        export_hf(tier, 7, spec, tmp_path / "hf")


def test_tensors_are_written_in_files_of_the_requested_size(tmp_path: Path) -> None:
    ours = ours_of(spec_of(CONFIGS["deepseek v3"].to_dict()))
    tier = saved(tmp_path / "run", ours)
    export_hf(tier, 7, ours.spec, tmp_path / "hf", "float32", file_bytes=30_000)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names |= dict.fromkeys(opened.keys(), file.name)
    assert names == index["weight_map"]
    assert len(files) > 3
    assert import_hf(tmp_path / "hf", tmp_path / "back").weights_sha256 == digest_checkpoint(tier, 7)
