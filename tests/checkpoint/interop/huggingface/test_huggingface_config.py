"""Hugging Face's names and configurations: read, written, and refused field by field."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from parity.hf_models import SMALL
from phalanx.checkpoint.interop.huggingface.config import UnsupportedModelError, hf_config_of, spec_of
from phalanx.checkpoint.interop.huggingface.families.known import MISSING_LAYERS, family_for, unsayable
from phalanx.checkpoint.interop.huggingface.names import hf_name, parameter_name
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.grouped_attention import attention_of
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec


@pytest.mark.parametrize(
    "name", ["", "blocks.0.attention", "blocks.x.ffn.up.weight", "head.bias", "a.b.c.weight"]
)
def test_a_name_that_is_no_parameter_has_no_translation(name: str) -> None:
    with pytest.raises(KeyError):
        hf_name(name)
    with pytest.raises(KeyError):
        parameter_name(name)


def test_the_config_is_the_same_in_the_words_of_version_4_and_of_version_5() -> None:
    config = hf_config_of(PRESETS["llama3-8b"])
    version_4 = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    version_5 = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert spec_of(version_4) == spec_of(version_5) == spec_of(config)
    assert "rope_theta" not in version_4["rope_scaling"]


def test_a_published_llama_config_is_read_as_the_preset() -> None:
    # The fields of the Llama 3.1 8B config.json that describe the model; head_dim and mlp_bias are left to defaults.
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    assert spec_of(config) == dataclasses.replace(resolve(PRESETS["llama3-8b"]), preset="")


def test_the_published_context_follows_the_stretched_rotary_embedding() -> None:
    assert hf_config_of(PRESETS["llama3-8b"])["max_position_embeddings"] == 8 * 8192
    assert hf_config_of(PRESETS["llama3-8b"], max_seq_len=4096)["max_position_embeddings"] == 4096


def test_a_mistral_with_layer_types_is_a_ministral_as_transformers_reads_it(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    table = {"model_type": "mistral", **SMALL, "head_dim": 8, "sliding_window": 11, "layer_types": types}
    (tmp_path / "config.json").write_text(json.dumps(table))
    theirs = AutoConfig.from_pretrained(tmp_path)
    spec = spec_of(table)
    assert [attention_of(spec, layer) for layer in range(2)] == ["window", "full"]
    assert spec_of(theirs.to_dict()) == spec
    written = hf_config_of(spec, model_type="mistral")
    assert (written["model_type"], written["layer_types"]) == (theirs.model_type, types)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            'model_type \'gpt2\' is not supported; supported: "llama", "qwen2", "seed_oss", "qwen3", "mistral"',
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: supported: 'full_attention'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "model.dim"),
        ({"num_key_value_heads": 3}, "model.kv_heads"),
        ({"rms_norm_eps": 0.0}, "model.norm_eps"),
    ],
)
def test_a_config_with_an_unsupported_value_is_refused_by_field(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of({"model_type": "llama", **SMALL, **change})
    assert message in str(caught.value)


def test_all_that_is_unsupported_is_named_at_once() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of({"model_type": "qwen3", "hidden_act": "relu", "layer_types": ["linear_attention"]})
    for field in ("hidden_act", "layer_types", "hidden_size", "num_hidden_layers", "vocab_size"):
        assert field in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(ffn="gelu", vocab_size=10), 'ffn = "gelu"'),
        (ModelSpec(qk_norm=True, ffn_bias=True, vocab_size=10), "ffn_bias = true: Qwen3 has only false"),
        (ModelSpec(), "vocab_size = 0"),
    ],
)
def test_a_model_that_hugging_face_cannot_express_is_refused(spec: ModelSpec, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        hf_config_of(spec)
    assert message in str(caught.value)


def test_names_and_configurations_do_without_torch() -> None:
    code = "import sys, phalanx.checkpoint.interop.huggingface.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("pieces", [{"lanes": 4}, {"context_tiles": 4}])
def test_neither_lanes_nor_context_tiles_keep_a_model_from_being_exported(pieces: dict[str, int]) -> None:
    spec = resolve(ModelSpec(layers=2, dim=32, heads=4, ffn_dim=64, vocab_size=64, **pieces))  # type: ignore[arg-type]
    assert not unsayable(spec, family_for(spec))


def test_a_model_that_attends_to_latents_is_exported_as_one_that_expands_them() -> None:
    mla = MlaSpec(kv_rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=8)
    spec = resolve(ModelSpec(layers=2, dim=32, heads=4, ffn_dim=64, vocab_size=64, mla=mla))
    absorbed = dataclasses.replace(spec, mla=dataclasses.replace(mla, absorbed=True))
    assert hf_config_of(absorbed) == hf_config_of(spec)


@pytest.mark.parametrize("model_type", MISSING_LAYERS)
def test_models_with_layers_that_are_not_attention_are_refused_by_these_layers_in_one_line(
    model_type: str,
) -> None:
    assert model_type in CONFIG_MAPPING
    with pytest.raises(UnsupportedModelError) as refused:
        spec_of({"model_type": model_type, **SMALL})
    message = f"model_type '{model_type}' is not supported: its layers of {MISSING_LAYERS[model_type]} are not built"
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
