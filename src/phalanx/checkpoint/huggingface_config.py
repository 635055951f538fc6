"""Hugging Face's words for this project's models: names of parameters, and fields of `config.json`.

The transformer of `phalanx.model` is Llama's (with `qk_norm`, Qwen3's), so names are all that differs: each way is a
pure function here, and what the other side cannot say is an error that lists every field concerned.

Source: `LlamaConfig` and `Qwen3Config` of transformers 4.51 to 5.x. Version 5 keeps the rotary embedding's numbers in
`rope_parameters`, version 4 in `rope_theta` and `rope_scaling`; both are written, either is read.
"""

from collections.abc import Mapping
from typing import Any, Literal

from phalanx.checkpoint.errors import CheckpointError
from phalanx.model.shape import resolve
from phalanx.run.read import spec_from_table
from phalanx.run.spec import ModelSpec

Dtype = Literal["float32", "bfloat16", "float16"]
_DEFAULT_MAX_SEQ_LEN = 8192  # nothing in the model depends on it; readers size their buffers by it

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}
_IN_BLOCK_BACK = {theirs: ours for ours, theirs in _IN_BLOCK.items()}

# Field of ModelSpec, field of config.json. The first five have no default that would be right.
_FIELDS = {
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "ffn_bias": "mlp_bias",
    "init_std": "initializer_range",
}
_REQUIRED = ("layers", "dim", "heads", "ffn_dim", "vocab_size")
_ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
# What else a config.json can ask for, and the only value that this project's transformer computes.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1,
}


class HuggingFaceError(CheckpointError):
    """A model cannot be imported or exported; the message says why and what to do."""


class UnsupportedModelError(HuggingFaceError):
    """The model computes something that the other side has no way to say."""


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter: `blocks.3.attention.query.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises KeyError for a name that is not a parameter of the transformer.
    """
    if name in _OUTER:
        return _OUTER[name]
    part, layer, last = _split(name, "blocks.")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{last}"


def parameter_name(name: str) -> str:
    """The inverse of `hf_name`. Raises KeyError for a tensor that the transformer does not have."""
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    part, layer, last = _split(name, "model.layers.")
    return f"blocks.{layer}.{_IN_BLOCK_BACK[part]}.{last}"


def _split(name: str, prefix: str) -> tuple[str, str, str]:
    layer, _, rest = name.removeprefix(prefix).partition(".")
    part, _, last = rest.rpartition(".")
    if not name.startswith(prefix) or last not in ("weight", "bias") or not layer.isdecimal():
        raise KeyError(name)
    return part, layer, last


def hf_config_of(
    spec: ModelSpec, *, max_seq_len: int = 0, dtype: Dtype = "float32", end_token: int | None = None
) -> dict[str, Any]:
    """The `config.json` of a model, as a plain table.

    `max_seq_len` is the context that readers are told of; 0 means the stretched one where the rotary embedding is
    stretched, else 8192. Raises UnsupportedModelError for a model that neither Llama nor Qwen3 can express.
    """
    spec = resolve(spec)
    _require_expressible(spec)
    family, architecture = ("qwen3", "Qwen3ForCausalLM") if spec.qk_norm else ("llama", "LlamaForCausalLM")
    scaling = spec.rope_scaling
    stretch: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        stretch = {"rope_type": "llama3"}
        stretch |= {theirs: getattr(scaling, ours) for ours, theirs in _ROPE_FIELDS.items()}
        max_seq_len = max_seq_len or round(scaling.factor * scaling.original_max_seq_len)
    fields = {theirs: getattr(spec, ours) for ours, theirs in _FIELDS.items()}
    if spec.qk_norm:
        del fields["mlp_bias"]
        fields |= {"use_sliding_window": False, "sliding_window": None}
    return {
        "architectures": [architecture],
        "model_type": family,
        **fields,
        "hidden_act": "silu",
        "max_position_embeddings": max_seq_len or _DEFAULT_MAX_SEQ_LEN,
        "rope_parameters": {**stretch, "rope_theta": spec.rope_theta},
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if scaling is None else stretch,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _require_expressible(spec: ModelSpec) -> None:
    problems = []
    if spec.ffn != "swiglu":
        problems.append(f'ffn = "{spec.ffn}": Llama and Qwen3 have only "swiglu"')
    if spec.qk_norm and spec.ffn_bias:
        problems.append("ffn_bias = true with qk_norm = true: Qwen3 has no biases in its feed-forward layer")
    if not spec.qk_norm and spec.dim % spec.heads:
        problems.append(f"dim = {spec.dim} with {spec.heads} heads: Llama's dim is a multiple of its heads")
    if not spec.vocab_size:
        problems.append("vocab_size = 0: take the resolved model, with the vocabulary that it was trained on")
    if problems:
        raise UnsupportedModelError(
            "the model cannot be written in Hugging Face's format: " + "; ".join(problems)
        )


def spec_of(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The resolved model that a `config.json` describes.

    Raises UnsupportedModelError with every field that asks for something else than this transformer computes.
    """
    family = hf_config.get("model_type")
    if family not in ("llama", "qwen3"):
        raise UnsupportedModelError(f'model_type {family!r} is not supported; supported: "llama", "qwen3"')
    problems = [
        f"{field} = {hf_config[field]!r} is not supported; supported: {only!r}"
        for field, only in _ONLY.items()
        if field in hf_config and hf_config[field] is not None and hf_config[field] != only
    ]
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        problems.append("layer_types: supported: 'full_attention' alone")
    given = {ours: hf_config[theirs] for ours, theirs in _FIELDS.items() if hf_config.get(theirs) is not None}
    problems += [f"{_FIELDS[field]} is missing" for field in _REQUIRED if field not in given]
    rope, rope_problems = _rope_of(hf_config)
    defaults = {"norm_eps": 1e-6, "qk_norm": family == "qwen3"} | (
        {"head_dim": 128} if family == "qwen3" else {}
    )
    spec, mistakes = spec_from_table({"model": {**defaults, **given, **rope}}, {})
    problems += rope_problems or [str(mistake) for mistake in mistakes if not problems]
    if problems or spec is None:
        raise UnsupportedModelError("the model cannot be imported: " + "; ".join(problems))
    return resolve(spec.model)


def _rope_of(hf_config: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    """The rotary fields of ModelSpec, and what is wrong with them."""
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    fields: dict[str, object] = {
        "rope_theta": rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        return fields, [f"rope_type {kind!r} is not supported; supported: 'default', 'llama3'"]
    if any(isinstance(value, Mapping) for value in rope.values()):
        return fields, ["rope_parameters by layer type are not supported; supported: one set for all layers"]
    if rope.get("partial_rotary_factor", 1) != 1:
        return fields, [
            f"partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; supported: 1"
        ]
    if kind == "default":
        return fields, []
    known = {"original_max_position_embeddings": hf_config.get("max_position_embeddings"), **rope}
    missing = [theirs for theirs in _ROPE_FIELDS.values() if known.get(theirs) is None]
    fields["rope_scaling"] = {ours: known.get(theirs) for ours, theirs in _ROPE_FIELDS.items()}
    return fields, [f"the llama3 rotary embedding lacks {name}" for name in missing]
