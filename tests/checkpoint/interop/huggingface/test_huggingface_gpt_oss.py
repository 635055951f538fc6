"""gpt-oss in Hugging Face's format: interleaved and transposed stacks of experts, also in mxfp4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint.huggingface_models import CONFIGS, edit_config, imported_model, saved_by_transformers
from parity.hf_models import GPT_OSS
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, spec_of
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.checkpoint.interop.huggingface.stored_weights import PackedStack, unpack
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve

# openai/gpt-oss-20b, as published, without the fields that do not describe the model.
PUBLISHED = """{
    "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": false},
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088
}"""
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 12}
STACKS = ("gate_up_proj", "down_proj")


def test_the_published_configuration_is_the_preset() -> None:
    spec = spec_of(json.loads(PUBLISHED) | LAYER_TYPES)
    assert spec == resolve(type(spec)(**{**vars(PRESETS["gpt-oss-20b"]), "preset": ""}))
    assert spec_of(json.loads(PUBLISHED)) == spec


def test_windows_of_no_length_are_refused_with_the_remedy() -> None:
    with pytest.raises(HuggingFaceError, match="sliding_window is null: set it to a number"):
        spec_of(json.loads(PUBLISHED) | LAYER_TYPES | {"sliding_window": None})


def test_without_rotary_parameters_they_are_those_that_transformers_takes() -> None:
    table = GptOssConfig(**{**GPT_OSS, "rope_parameters": None}).to_dict()
    expected = spec_of(table)
    del table["rope_parameters"]
    assert spec_of(table) == expected


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A small model whose experts are random blocks of mxfp4."""
    config = GptOssConfig(**{**GPT_OSS, "hidden_size": 64, "intermediate_size": 32})
    folder = saved_by_transformers(config, tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def test_experts_in_mxfp4_are_the_numbers_that_transformers_reads(packed: Path, tmp_path: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    unquantized = saved_by_transformers(
        GptOssConfig(**{**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}), tmp_path / "unquantized"
    )
    theirs = load_file(unquantized / "model.safetensors")
    for name in [name for name in theirs if name.endswith(STACKS)]:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        theirs[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(theirs, unquantized / "model.safetensors", metadata={"format": "pt"})
    expected = import_hf(unquantized, tmp_path / "expected").weights_sha256
    assert import_hf(packed, tmp_path / "run").weights_sha256 == expected
    # Images so small that they cut blocks.
    assert import_hf(packed, tmp_path / "cut", image_bytes=2900).weights_sha256 == expected


def test_any_part_of_a_packed_stack_is_that_part_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 6, 3), generator=generator, dtype=torch.uint8)
    full = unpack(blocks, scales).transpose(1, 2)

    class Stored:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def get_dtype(self) -> str:
            return "U8"

        def get_shape(self) -> list[int]:
            return list(self.tensor.shape)

        def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
            return self.tensor[part]

    stack = PackedStack(Stored(blocks), Stored(scales))
    assert stack.get_shape() == list(full.shape)
    for first, last in ((0, 96), (5, 33), (31, 32), (64, 65)):
        part = slice(1, 2), slice(first, last), slice(2, 5)
        assert torch.equal(stack[part], full[part])


def test_blocks_without_scales_or_of_another_shape_are_refused(packed: Path, tmp_path: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    save_file({**tensors, name: tensors[name][:1]}, packed / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="no stack in mxfp4"):
        import_hf(packed, tmp_path / "run")
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=f"{name} is missing"):
        import_hf(packed, tmp_path / "run")


def test_gates_and_values_are_interleaved(tmp_path: Path) -> None:
    published = saved_by_transformers(CONFIGS["gpt-oss"], tmp_path / "published")
    theirs = load_file(published / "model.safetensors")
    ours = imported_model(tmp_path / "run", import_hf(published, tmp_path / "run").spec).state_dict()
    both = theirs["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(ours["blocks.1.ffn.experts.gate"], both[:, :, 0::2].mT)
    assert torch.equal(ours["blocks.1.ffn.experts.up"], both[:, :, 1::2].mT)
    biases = theirs["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert torch.equal(ours["blocks.1.ffn.experts.up_bias"], biases[:, 1::2])


def test_other_quantization_is_refused_by_name() -> None:
    with pytest.raises(HuggingFaceError, match=r"bitsandbytes.*save the model unquantized"):
        spec_of(json.loads(PUBLISHED) | {"quantization_config": {"quant_method": "bitsandbytes"}})
