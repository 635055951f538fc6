"""All statements of a published model are followed, refused, or named: nothing is read past in silence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MistralConfig

from checkpoint.huggingface_models import CONFIGS as MIXTURES
from checkpoint.huggingface_models import edit_config, imported_model, saved_by_transformers
from parity.hf_models import CONFIGS, SMALL, random_tokens
from phalanx.checkpoint.interop.huggingface.config import (
    HuggingFaceError,
    UnsupportedModelError,
    export_notes,
    hf_config_of,
    import_notes,
    spec_of,
)
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.interop.huggingface.families.known import FAMILIES
from phalanx.checkpoint.interop.huggingface.folders import kept_by_export, note_lost_fields
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.paths import RunDirectory, read_resolved

ALL = {**CONFIGS, **MIXTURES}


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path)
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def assert_same_logits(published: Path, run: Path) -> tuple[str, ...]:
    """Import the folder, compare with ``transformers`` and return the notes."""
    imported = import_hf(published, run)
    tokens = random_tokens(imported.spec, 2, 40)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(imported_model(run, imported.spec)(tokens), theirs, rtol=1e-4, atol=1e-5)
    return imported.notes


@pytest.mark.parametrize("config", ALL.values(), ids=ALL.keys())
def test_nothing_that_transformers_writes_is_unknown(config: Any) -> None:
    table = config.to_dict()
    notes = import_notes(table)
    assert not [note for note in notes if "not known" in note]


@pytest.mark.parametrize("config", ALL.values(), ids=ALL.keys())
def test_nothing_that_transformers_writes_is_lost_on_the_way_back(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config.to_json_string())
    spec = spec_of(json.loads(config.to_json_string()))
    kept = kept_by_export(tmp_path, spec, None, 0, 0)
    assert (
        note_lost_fields(tmp_path, {**hf_config_of(spec, model_type=config.model_type), **kept.config}) == ()
    )


@pytest.mark.parametrize(
    ("family", "change", "note"),
    [
        (
            "llama",
            {"auto_map": {"AutoModel": "modeling_x.X"}},
            "auto_map: the publisher's own code is not run",
        ),
        (
            "llama",
            {"embedding_multiplier": 12.0, "no_rope_layers": [1]},
            "ignored: embedding_multiplier, no_rope_layers",
        ),
        (
            "llama, yarn",
            {"rope_parameters": {**CONFIGS["llama, yarn"].rope_parameters, "novel": 1}},
            "ignored: novel",
        ),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1: training here has no dropout"),
        ("qwen3 moe", {"router_aux_loss_coef": 0.01}, "router_aux_loss_coef = 0.01 weighs another loss"),
        ("minimax m2", {"sliding_window": 64}, "sliding_window = 64: minimax_m2 has no window"),
        ("deepseek v3", {"aux_loss_alpha": 0.001}, "aux_loss_alpha = 0.001 weighs another loss"),
    ],
)
def test_what_is_read_past_is_named(family: str, change: dict[str, Any], note: str) -> None:
    table = ALL[family].to_dict() | change
    notes = import_notes(table)
    assert len([text for text in notes if note in text]) == 1


def test_a_load_balancing_loss_is_not_switched_on_by_an_import() -> None:
    moe = spec_of(ALL["qwen3 moe"].to_dict() | {"router_aux_loss_coef": 0.5}).moe
    assert moe is not None
    assert moe.aux_loss == 0


def test_an_export_notes_that_latents_are_normalized_otherwise_elsewhere() -> None:
    spec = spec_of(ALL["deepseek v3"].to_dict())
    assert export_notes(spec) == ()
    (note,) = export_notes(dataclasses.replace(spec, norm_eps=1e-5))
    assert "an epsilon of 1e-05 here and 1e-06 in transformers" in note


@pytest.mark.parametrize("family", ["llama, yarn", "llama, stretched rotary", "deepseek v3, yarn"])
@pytest.mark.parametrize("inside", [None, 32])
def test_the_original_context_beside_the_rotary_parameters_has_priority(
    family: str, inside: int | None, tmp_path: Path
) -> None:
    published = saved_by_transformers(ALL[family], tmp_path / "published")
    rope = json.loads((published / "config.json").read_text())["rope_parameters"]
    del rope["original_max_position_embeddings"]
    rope |= {} if inside is None else {"original_max_position_embeddings": inside}
    edit_config(published, rope_parameters=rope, original_max_position_embeddings=16)
    assert assert_same_logits(published, tmp_path / "run") == ()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", {"sliding_window": 16, "use_sliding_window": False}),
        ("qwen3 moe", {"sliding_window": 16, "use_sliding_window": False}),
        ("llama", {"hidden_act": "swish"}),
    ],
)
def test_what_changes_nothing_is_imported(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    published = saved_by_transformers(ALL[family], tmp_path / "published")
    edit_config(published, **change)
    assert_same_logits(published, tmp_path / "run")


def changed(family: str, **changes: Any) -> Any:
    """A configuration of transformers' class with other values."""
    config = ALL[family]
    written = ("model_type", "architectures", "transformers_version")
    table = {key: value for key, value in config.to_dict().items() if key not in written}
    return type(config)(**table | changes)


def rope_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": ALL[family].rope_parameters | changes}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3 moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3 moe", {"decoder_sparse_step": 99}),
        ("qwen2 moe", {"mlp_only_layers": [0, 1]}),
        ("deepseek v3", {"first_k_dense_replace": 99}),
        *(
            (family, {"layer_types": ["full_attention"] * ALL[family].num_hidden_layers})
            for family in ("gemma 2", "gemma3", "olmo3", "gpt-oss")
        ),
        ("llama, stretched rotary", rope_of("llama, stretched rotary", low_freq_factor=4.0)),
        ("llama, yarn", rope_of("llama, yarn", attention_factor=0.7)),
        ("deepseek v3, yarn", rope_of("deepseek v3, yarn", attention_factor=1.0)),
    ],
    ids=str,
)
def test_unusual_models_are_imported_and_exported_with_their_logits(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    published = saved_by_transformers(changed(family, **change), tmp_path / "published")
    assert_same_logits(published, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    spec = read_resolved(run).model
    export_hf(DiskTier(run.checkpoints), 0, spec, tmp_path / "hf", "float32", published_dir=run.published)
    assert_same_logits(tmp_path / "hf", tmp_path / "again")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("family", ["deepseek v3", "deepseek v2", "glm 4.5"])
def test_matrices_of_zero_shared_experts_are_passed_over(family: str, tmp_path: Path) -> None:
    published = saved_by_transformers(changed(family, n_shared_experts=0), tmp_path / "published")
    assert_same_logits(published, tmp_path / "run")


def test_weights_in_float64_are_rounded_as_in_transformers_with_a_note(tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    tensors = load_file(published / "model.safetensors")
    double = {name: value.double() * (1 + 1e-12) for name, value in tensors.items()}
    save_file(double, published / "model.safetensors")
    (note,) = assert_same_logits(published, tmp_path / "run")
    assert note == f"{len(tensors)} tensors are stored in float64, and rounded to float32"


def test_a_base_model_is_whole_where_the_output_projection_is_tied(tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["llama, tied"], tmp_path / "published")
    path = published / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(path).items()}, path)
    assert assert_same_logits(published, tmp_path / "run") == ()


def test_a_missing_output_projection_is_refused_since_transformers_would_draw_it_at_random(
    tmp_path: Path,
) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    edit_tensors(published, lm_head__weight=None)
    with pytest.raises(HuggingFaceError, match="where it is tied, set tie_word_embeddings to true"):
        import_hf(published, tmp_path / "run")
    edit_config(published, tie_word_embeddings=True)
    assert assert_same_logits(published, tmp_path / "run") == ()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3 moe",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok = 1 .* the router gets no gradient",
        ),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 .* the router gets no gradient"),
        ("qwen3 moe", {"num_hidden_layers": 4, "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] with"),
        (
            "llama, stretched rotary",
            rope_of("llama, stretched rotary", low_freq_factor=5.0),
            "high_freq_factor",
        ),
        ("llama, yarn", rope_of("llama, yarn", attention_factor=0), "attention_factor = 0 is not supported"),
        ("llama, yarn", rope_of("llama, yarn", mscale=0.7), "mscale without mscale_all_dim"),
    ],
)
def test_a_value_that_no_field_here_can_express_is_refused_by_the_name_of_the_published_field(
    family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(ALL[family].to_dict() | change)


def test_names_that_transformers_takes_for_others_are_taken_for_them_here() -> None:
    for model_type, family in FAMILIES.items():
        if model_type not in CONFIG_MAPPING:
            continue  # the publisher's own class
        pairs = {frozenset(pair) for pair in CONFIG_MAPPING[model_type].attribute_map.items()}
        for field in family.fields.values():
            others = {name for pair in pairs if field in pair for name in pair - {field}}
            assert others <= {family.aliases.get(field)}, (model_type, field)


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True, "head_dim": 24}])
def test_a_mistral_without_a_window_is_a_llama_and_written_as_it_was_published(
    change: dict[str, Any], tmp_path: Path
) -> None:
    published = saved_by_transformers(
        MistralConfig(**SMALL, sliding_window=None, **change), tmp_path / "published"
    )
    assert assert_same_logits(published, tmp_path / "run") == ()
    run = RunDirectory(tmp_path / "run")
    spec = read_resolved(run).model
    notes = export_hf(
        DiskTier(run.checkpoints), 0, spec, tmp_path / "hf", "float32", published_dir=run.published
    )
    assert notes == ()
    assert hf_config_of(spec)["model_type"] == "llama"
    tokens = random_tokens(spec, 2, 40)
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
            for folder in (published, tmp_path / "hf")
        )
    torch.testing.assert_close(before, after)


def test_a_mistral_that_does_not_state_its_window_has_the_default_one() -> None:
    table = {"model_type": "mistral", **SMALL, "sliding_window": None}
    assert spec_of(table) == spec_of({"model_type": "llama", **SMALL})
    del table["sliding_window"]
    assert (spec_of(table).attention_pattern, spec_of(table).window) == (("window",), 4096)


def test_a_folder_in_pytorchs_distributed_format_is_distinguished_from_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    with pytest.raises(HuggingFaceError, match="PyTorch's distributed format"):
        import_hf(tmp_path, tmp_path / "run")


def test_routers_without_biases_have_zeros_as_in_transformers(tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["deepseek v3"], tmp_path / "published")
    names = [name for name in load_file(published / "model.safetensors") if name.endswith("correction_bias")]
    edit_tensors(published, **dict.fromkeys(names[:1]))
    with pytest.raises(HuggingFaceError, match="e_score_correction_bias is missing"):
        import_hf(published, tmp_path / "one")
    edit_tensors(published, **dict.fromkeys(names))
    (note,) = assert_same_logits(published, tmp_path / "run")
    assert "no e_score_correction_bias" in note


def test_a_temperature_of_the_softmax_where_none_is_computed_is_refused() -> None:
    rope = {**CONFIGS["llama, stretched rotary"].rope_parameters, "mscale_all_dim": 0.99}
    with pytest.raises(UnsupportedModelError, match="mscale_all_dim with rope_type 'llama3'"):
        spec_of(ALL["deepseek v3"].to_dict() | {"rope_parameters": rope, "rope_scaling": None})


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(broken: float, tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    norm = load_file(published / "model.safetensors")["model.norm.weight"]
    norm[3] = broken
    edit_tensors(published, model__norm__weight=norm)
    with pytest.raises(HuggingFaceError, match=r"model\.norm\.weight: has NaN or infinity"):
        import_hf(published, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("weight_map", [None, [], ["a"], {"model.norm.weight": 3}])
def test_a_damaged_index_is_named(weight_map: object, tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(HuggingFaceError, match=r"model\.safetensors\.index\.json: damaged"):
        import_hf(published, tmp_path / "run")


@pytest.mark.parametrize("file", ["../other.safetensors", "/other.safetensors", "a/../../b.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(file: str, tmp_path: Path) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(HuggingFaceError, match="a file outside the model's folder"):
        import_hf(published, tmp_path / "run")


def test_a_config_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(HuggingFaceError, match=r"config\.json: not JSON"):
        import_hf(tmp_path, tmp_path / "run")


def test_a_base_model_without_its_output_projection_is_distinguished_from_a_strange_one(
    tmp_path: Path,
) -> None:
    published = saved_by_transformers(ALL["llama"], tmp_path / "published")
    path = published / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, path)
    with pytest.raises(HuggingFaceError, match=r"lack the prefix 'model\.', as of a base model"):
        import_hf(published, tmp_path / "run")


def test_layers_beyond_number_are_refused_at_once() -> None:
    table = ALL["qwen3 moe"].to_dict() | {"num_hidden_layers": 10**12, "layer_types": None}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers|num_hidden_layers|mlp_only_layers"):
        spec_of(table)
