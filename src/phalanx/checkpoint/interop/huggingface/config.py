"""Hugging Face's ``config.json`` for this project's models, in both directions, with notes on fields that are not carried over.

The two sides differ in names, not in mathematics. Each direction is a pure function over the tables of ``families/``. A field that the
target cannot express, or that this project does not compute, is an error; the message lists all such fields.

Source: the configuration classes of transformers 4.51 to 5.x. Version 5 keeps the rotary embedding's numbers in ``rope_parameters``,
version 4 in ``rope_theta`` and ``rope_scaling``; both are written, either is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.huggingface.families.family import OPTIONAL, Family
from phalanx.checkpoint.interop.huggingface.families.known import (
    FAMILIES,
    MISSING_LAYERS,
    family_for,
    flat,
    in_family_terms,
    unsayable,
)
from phalanx.checkpoint.interop.huggingface.layers import LATENT_EPS
from phalanx.checkpoint.interop.huggingface.rotary import (
    LAYERS_BY_WINDOW,
    TEMPERATURE,
    rotary_fields,
    rotary_written,
    same_temperature,
    stretched_length,
)
from phalanx.run.fields import JsonObject
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import spec_from_table, to_table
from phalanx.run.spec import ModelSpec

Dtype = Literal["float32", "bfloat16", "float16"]
_DEFAULT_MAX_SEQ_LEN = 8192  # the model does not depend on it; readers size their buffers by it


# Further fields of a config.json, with the only value that this project's transformer supports.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
}
_ALIKE: Mapping[str, object] = {"swish": "silu"}
_TYPES: Mapping[type, str] = {dict: "table", list: "list", int: "whole number"}
_TYPED: Mapping[type, tuple[str, ...]] = {
    dict: ("rope_parameters", "rope_scaling", "quantization_config"),
    list: ("layer_types", "mlp_only_layers", "no_rope_layers", "attn_type_list"),
    int: ("max_window_layers", "decoder_sparse_step", "sliding_window_pattern"),
}
"""Fields that are read item by item; the run file's own checks validate all others."""


class HuggingFaceError(CheckpointError):
    """A model cannot be imported or exported; the message has the cause and the remedy."""


class UnsupportedModelError(HuggingFaceError):
    """The model computes something that the other format cannot express."""


@dataclass(frozen=True)
class Storage:
    """Storage format of a folder's weights."""

    interleaved: bool = True
    """True if the rotated rows of latent attention are stored in pairs, as published, and not in halves."""
    fp8_block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if matrices are stored in fp8."""
    mxfp4: bool = False
    """True if the experts' matrices are stored in mxfp4."""


# Writing


def hf_config_of(
    spec: ModelSpec,
    *,
    max_seq_len: int = 0,
    dtype: Dtype = "float32",
    end_token: int | None = None,
    model_type: str = "",
) -> dict[str, object]:
    """Return the ``config.json`` of a model, as a plain table, in the terms of the family that expresses it.

    ``max_seq_len`` is the context length for readers; 0 means the scaled one if the rotary embedding is scaled, else
    8192. ``end_token`` may be absent. ``model_type`` is the preferred family, used if it can express the model.
    Raises UnsupportedModelError if no family can express the model.
    """
    spec = resolve(spec)
    family = family_for(spec, model_type)
    _require_expressible(spec, family)
    values = flat(in_family_terms(spec, family))
    if spec.rope_scaling is not None:
        max_seq_len = max_seq_len or stretched_length(spec.rope_scaling)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: values[ours] for ours, theirs in family.fields.items()},
        **family.constants,
        **family.write(spec),
        **({} if "hidden_activation" in family.constants else {"hidden_act": "silu"}),
        "max_position_embeddings": max_seq_len or _DEFAULT_MAX_SEQ_LEN,
        **rotary_written(spec, family, max_seq_len),
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _require_expressible(spec: ModelSpec, family: Family) -> None:
    """Raise UnsupportedModelError for all fields that the family cannot express, an ambiguous rotary temperature, or ``vocab_size`` 0."""
    problems = unsayable(spec, family)
    if spec.rope_scaling is not None and not same_temperature(to_table(spec.rope_scaling)):
        problems.append(TEMPERATURE)
    if not spec.vocab_size:
        problems.append("vocab_size = 0: take the resolved model, with the vocabulary that it was trained on")
    if problems:
        raise UnsupportedModelError(
            "the model cannot be written in Hugging Face's format: " + "; ".join(problems)
        )


# Reading


def spec_of(hf_config: JsonObject) -> ModelSpec:
    """Return the resolved model of a ``config.json``.

    Raises UnsupportedModelError with every field that is missing or has a value that this transformer does not
    support; for an unknown family or fields of wrong types, with that alone.
    """
    _require_types(hf_config)
    family = family_of(hf_config)
    problems = [
        f"{field} = {hf_config[field]!r} is not supported; supported: {only!r}"
        for field, only in {**_ONLY, **family.constants}.items()
        if hf_config.get(field) is not None
        and field not in family.fields.values()
        and not (field == "use_sliding_window" and "window" in family.handled)
        and not (field == "hidden_act" and "hidden_activation" in family.constants)  # which is read instead
        and _ALIKE.get(str(hf_config[field]), hf_config[field]) != only
    ]
    problems += [
        f"{field} is missing, which means the family's default; supported: {family.constants[field]!r}"
        for field in family.stated
        if field not in hf_config
    ]
    if "window" not in family.handled and {*map(str, hf_config.get("layer_types") or ())} - {
        "full_attention"
    }:
        problems.append("layer_types: supported: 'full_attention' alone")
    problems += [problem] if (problem := _quantization_problem(hf_config)) else []
    stated = _stated_fields(hf_config, family)
    required = family.fields.keys() - OPTIONAL - family.absent.keys()
    problems += [f"{family.fields[ours]} is missing" for ours in sorted(required - stated.keys())]
    rope, rope_problems = rotary_fields(hf_config, family)
    layers, layer_problems = family.read(hf_config)
    table = _nested({**family.absent, **stated, **family.fixed, **rope, **layers})
    problems += rope_problems + layer_problems
    if _has_no_mixture(table):
        del table["moe"]
    mixture = table.get("moe", {})
    if mixture.get("per_token") == 1 and mixture.get("normalize") is True:
        problems.append(
            "num_experts_per_tok = 1 with scores that are scaled to sum to one (norm_topk_prob) is not supported: the only score "
            "is always one, and the router gets no gradient; supported: 2 or more, or norm_topk_prob = false"
        )
    if not table.get("window"):
        table.pop("window_rope_theta", None)
    spec, spec_problems = spec_from_table({"model": table}, {})
    problems += [str(problem) for problem in spec_problems if not problems]
    if problems or spec is None:
        raise UnsupportedModelError("the model cannot be imported: " + "; ".join(problems))
    return resolve(spec.model)


def storage_of(hf_config: JsonObject) -> Storage:
    """Return how a ``config.json`` declares its weights to be stored: rotary order, and FP8 or MXFP4 quantization.

    Raises UnsupportedModelError for an unsupported quantization.
    """
    _require_types(hf_config)
    problem = _quantization_problem(hf_config)
    if problem:
        raise UnsupportedModelError(problem)
    quantization = hf_config.get("quantization_config") or {}
    block = quantization.get("weight_block_size")
    interleaved = None if family_of(hf_config).in_pairs else hf_config.get("rope_interleave")
    return Storage(
        interleaved is None or bool(interleaved),
        (block[0], block[1]) if block else None,
        mxfp4=quantization.get("quant_method") == "mxfp4",
    )


def _require_types(hf_config: JsonObject) -> None:
    """Raise UnsupportedModelError if a list, table or number has another type, so that later code may rely on it."""
    problems = [
        f"{field} = {hf_config[field]!r} is no {_TYPES[kind]}"
        for kind, fields in _TYPED.items()
        for field in fields
        if hf_config.get(field) is not None and not isinstance(hf_config[field], kind)
    ]
    rope = hf_config.get("rope_parameters")
    if not problems and isinstance(rope, dict):
        problems += [
            f"rope_parameters of {layers!r} = {rope[layers]!r} are no table"
            for layers in LAYERS_BY_WINDOW
            if rope.get(layers) is not None and not isinstance(rope[layers], dict)
        ]
    if problems:
        raise UnsupportedModelError("config.json is damaged: " + "; ".join(problems))


def _quantization_problem(hf_config: JsonObject) -> str:
    """Return why the quantization is not supported; empty if it is, or if there is none."""
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return ""
    if quantization.get("quant_method") == "fp8" and len(quantization.get("weight_block_size") or ()) == 2:
        return ""
    if quantization.get("quant_method") == "mxfp4" and hf_config.get("model_type") == "gpt_oss":
        return ""
    return (
        f"quantization_config = {quantization!r} is not supported; supported: none, or quant_method 'fp8' with a "
        "weight_block_size (gpt-oss: 'mxfp4'); save the model unquantized (as bfloat16, say) and import that"
    )


def _has_no_mixture(table: JsonObject) -> bool:
    """Return True if all layers are dense, before the first mixture."""
    first, layers = table.get("moe", {}).get("first_dense"), table.get("layers")
    return isinstance(first, int) and isinstance(layers, int) and first >= layers > 0


def family_of(hf_config: JsonObject) -> Family:
    """Return the family of a ``config.json`` by its ``model_type``; Mistral with ``layer_types`` is Ministral. Raises
    UnsupportedModelError for an unknown type.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type == "mistral" and hf_config.get("layer_types") is not None:
        model_type = "ministral"  # as AutoConfig of transformers reads it
    family = FAMILIES.get(model_type)
    if family is None and model_type in MISSING_LAYERS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported: its layers of {MISSING_LAYERS[model_type]} are not built here; supported are "
            "models all of whose layers are softmax attention (docs/train/imported-models.md)"
        )
    if family is None:
        supported = ", ".join(f'"{name}"' for name in FAMILIES)
        raise UnsupportedModelError(
            f"model_type {hf_config.get('model_type')!r} is not supported; supported: {supported}"
        )
    return family


def _stated_fields(hf_config: JsonObject, family: Family) -> dict[str, object]:
    """Return our fields with their values in ``config.json``; null counts as absent.

    A family's alias of a field counts if the field is absent.
    """
    stated: dict[str, object] = {}
    for ours, theirs in family.fields.items():
        for name in (theirs, family.aliases.get(theirs, theirs)):
            if hf_config.get(name) is not None:
                stated.setdefault(ours, hf_config[name])
    return stated


def _nested(flat: Mapping[str, object]) -> JsonObject:
    """Return a table with the fields ``section.field`` in tables of their sections; the inverse of ``flat``."""
    table: JsonObject = {}
    for name, value in flat.items():
        section, dot, field = name.partition(".")
        if dot:
            table.setdefault(section, {})[field] = value
        else:
            table[name] = value
    return table


# Notes on a ``config.json`` that is imported or written: one sentence for each field that has no effect in this project.
#
# Fields that change the logits are refused. Others are ignored, like unknown fields in ``transformers``, but with a note: the
# publisher's code might have used them.


_LAYER_CHOICE = ("decoder_sparse_step", "mlp_only_layers", "layer_types", "max_window_layers")
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rope_interleave", "partial_rotary_factor")
_CONTEXT = ("max_position_embeddings", "original_max_position_embeddings")
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_STORAGE = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    "architectures",
    "model_type",
)
# Fields that transformers writes into every config.json; they do not affect the mathematics.
_RUNNING = (
    *(
        "use_cache",
        "pretraining_tp",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
    ),
    *(
        "output_router_logits",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "ep_size",
    ),
    *("hidden_act", "use_sliding_window", "sliding_window", "attn_implementation", "tokenizer_class"),
)
_NOTED = (
    "auto_map",
    "attention_dropout",
    "residual_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
)
_KNOWN = frozenset((*_LAYER_CHOICE, *_ROTARY, *_CONTEXT, *TOKEN_FIELDS, *_STORAGE, *_RUNNING, *_NOTED))
_DERIVED = ("head_dim", "qk_head_dim", "num_key_value_heads", "num_local_experts", "num_mtp_layers")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_KNOWN_ROTARY = frozenset(
    (
        *(
            "rope_type",
            "type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "partial_rotary_factor",
        ),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate", "short_factor", "long_factor"),
    )
)


def import_notes(hf_config: JsonObject) -> tuple[str, ...]:
    """Return notes on the fields of a ``config.json`` that the imported model ignores: unknown ones, also of the
    rotary embedding, code of the publisher, windows, auxiliary losses, dropout.
    """
    family = FAMILIES[str(hf_config["model_type"])]
    handled = _KNOWN | {*family.fields.values(), *family.aliases.values(), *family.constants, *family.own}
    if "mla" in family.sections:
        handled |= {*_DERIVED}
    notes = []
    if hf_config.get("auto_map"):
        notes.append(
            f"auto_map: the publisher's own code is not run; the model is computed as {family.model_type}"
        )
    unknown = sorted(key for key in hf_config if key not in handled and not key.startswith("_"))
    if unknown:
        notes.append(f"unknown, and ignored: {', '.join(unknown)}")
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    by_layer = _LAYER_TYPES if "window_rope_theta" in family.handled else frozenset[str]()
    strange = sorted(rope.keys() - _KNOWN_ROTARY - by_layer)
    if strange:
        notes.append(f"unknown parameters of the rotary embedding, and ignored: {', '.join(strange)}")
    if (
        "window" not in family.handled
        and hf_config.get("sliding_window")
        and hf_config.get("use_sliding_window", True)
    ):
        notes.append(
            f"sliding_window = {hf_config['sliding_window']}: {family.model_type} has no window, also in transformers; ignored"
        )
    for key in ("router_aux_loss_coef", "aux_loss_alpha"):
        if hf_config.get(key):
            notes.append(
                f"{key} = {hf_config[key]} weighs another loss than model.moe.aux_loss, which is 0 in the imported run: set it "
                "to train with a load-balancing loss"
            )
    for key in ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"):
        if hf_config.get(key):
            notes.append(f"{key} = {hf_config[key]}: training here has no dropout")
    return tuple(notes)


def export_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Return notes on how readers of an exported model compute differently from this project. Empty if they do not."""
    eps = LATENT_EPS if spec.mla is None else spec.mla.norm_eps or spec.norm_eps
    if eps == LATENT_EPS:
        return ()
    return (
        f"the norms of attention's latents have an epsilon of {eps:g} here and {LATENT_EPS:g} in transformers: "
        "its logits differ a little, the more the smaller the latents are",
    )
