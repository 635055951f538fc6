"""Phi-3 in Hugging Face's format: joined projections, and a rotary embedding with factors for short and for long sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Phi3Config

from checkpoint.huggingface_models import CONFIGS, imported_model, saved_by_transformers
from model.growing_cache import empty_cache
from parity.hf_models import LONGROPE, PHI3, hf_model, our_model, random_tokens
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, spec_of
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import rotary_temperature
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx_serve.generate import generate

# microsoft/Phi-4-mini-instruct, as published, without the fields that do not describe the model; its 2 x 48 factors shortened to their kind.
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.25, *[30.0] * 47]},
}


def test_the_published_configuration_of_phi_4_mini_is_read() -> None:
    spec = spec_of(PHI4_MINI)
    assert spec.rope_scaling is not None
    assert (spec.head_dim, spec.rope_fraction, spec.window) == (128, 0.75, 262144)
    assert (spec.rope_scaling.factor, spec.rope_scaling.original_max_seq_len) == (32.0, 4096)
    assert rotary_temperature(spec.rope_scaling) == pytest.approx(1.190238, rel=1e-6)


def test_the_preset_of_phi_4_is_its_published_configuration() -> None:
    published = {
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "rope_theta": 250000,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": None,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
    }
    assert spec_of(published) == resolve(type(spec_of(published))(**{**vars(PRESETS["phi-4"]), "preset": ""}))


def test_queries_keys_and_values_are_rows_of_one_tensor(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["phi 3"], tmp_path / "published")
    theirs = load_file(published / "model.safetensors")
    ours = imported_model(tmp_path / "run", import_hf(published, tmp_path / "run").spec).state_dict()
    rows = [ours[f"blocks.1.attention.{name}.weight"] for name in ("query", "key", "value")]
    assert torch.equal(torch.cat(rows), theirs["model.layers.1.self_attn.qkv_proj.weight"])


def short_until(tokens: int) -> Any:
    return hf_model(
        Phi3Config(
            **PHI3,
            max_position_embeddings=64,
            original_max_position_embeddings=tokens,
            rope_parameters=LONGROPE,
        )
    ).eval()


def test_a_text_that_grows_long_is_generated_as_by_transformers() -> None:
    theirs = short_until(12)
    ours, prompt = our_model(theirs), random_tokens(spec_of(theirs.config.to_dict()), 1, 8)
    theirs.generation_config.update(do_sample=False, eos_token_id=None, max_new_tokens=10)
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt))
    generated = generate(ours, prompt[0].tolist(), tokens=10, temperature=0)
    assert [*generated] == expected[0, 8:].tolist()


def test_a_cache_of_a_short_text_is_refused_for_a_long_one() -> None:
    ours = our_model(short_until(12))
    cache, text = empty_cache(ours.spec.layers), random_tokens(ours.spec, 1, 13)
    ours(text[:, :12], cache=cache)
    with pytest.raises(ValueError, match="fill a new cache with the full text"):
        ours(text[:, 12:], cache=cache)


def test_the_length_of_whole_sequences_decides_for_every_part_of_one() -> None:
    theirs = short_until(12)
    ours, text = our_model(theirs), random_tokens(spec_of(theirs.config.to_dict()), 1, 16)
    part = Transformer(ours.spec, seq_len=16)
    part.load_state_dict(ours.state_dict())
    positions = torch.arange(5)
    torch.testing.assert_close(
        part(text[:, :5], positions=positions), ours(text)[:, :5], rtol=1e-4, atol=1e-5
    )
    alone = ours(text[:, :5], positions=positions)
    assert not torch.allclose(alone, ours(text)[:, :5], rtol=1e-2)


def test_another_context_leaves_the_temperature_as_it_is(tmp_path: Path) -> None:
    theirs = short_until(12)
    theirs.save_pretrained(tmp_path / "published")
    spec = import_hf(tmp_path / "published", tmp_path / "run").spec
    tier, tokens = DiskTier(tmp_path / "run" / "checkpoints"), random_tokens(spec, 1, 20)
    for context in (0, 500):
        export_hf(tier, 0, spec, tmp_path / f"hf-{context}", "float32", max_seq_len=context)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{context}")
        assert again.config.max_position_embeddings == (context or 64)
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_other_ways_to_stretch_are_refused_by_name() -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    with pytest.raises(HuggingFaceError, match=r"rope_type 'yarn' .*'default', 'longrope'"):
        spec_of(PHI4_MINI | yarn)
    with pytest.raises(HuggingFaceError, match="short_factors"):
        spec_of(PHI4_MINI | {"partial_rotary_factor": 1.0})
