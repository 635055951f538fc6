"""``config.json`` of mixtures of experts and of latent attention: read, written, and refused field by field."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.hf_models import SMALL
from phalanx.checkpoint.interop.huggingface.config import (
    Storage,
    UnsupportedModelError,
    hf_config_of,
    spec_of,
    storage_of,
)
from phalanx.checkpoint.interop.huggingface.layers import LATENT_EPS
from phalanx.checkpoint.interop.huggingface.names import RotaryRows, hf_name, published, shared_copies
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec

MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},  # type: ignore[dict-item]
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("config", "preset", "differing"),
    [
        (MIXTRAL_8X7B, "mixtral-8x7b", {}),
        (QWEN3_30B_A3B, "qwen3-30b-a3b", {}),
        (DEEPSEEK_V3, "deepseek-v3", {"mtp_depth": 1, "init_std": 0.02}),
        (KIMI_K2, "kimi-k2", {}),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B", "DeepSeek-V3", "Kimi K2"],
)
def test_a_published_config_is_read_as_the_preset(
    config: dict[str, Any], preset: str, differing: dict[str, Any]
) -> None:
    expected = resolve(PRESETS[preset])
    assert expected.moe is not None
    # The published weight is that of another loss.
    moe = dataclasses.replace(expected.moe, aux_loss=0.0)
    assert spec_of(config) == dataclasses.replace(expected, preset="", moe=moe, **differing)


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, QWEN3_30B_A3B, DEEPSEEK_V3, KIMI_K2])
def test_the_written_config_has_the_values_of_the_published_one(config: dict[str, Any]) -> None:
    written = hf_config_of(spec_of(config), max_seq_len=config["max_position_embeddings"])
    ignored = {"model_type", "quantization_config", "ep_size", "max_window_layers", "output_router_logits"}
    ignored |= {"aux_loss_alpha", "seq_aux", "rope_scaling", "router_aux_loss_coef"}
    for field in config.keys() - ignored:
        assert written[field] == config[field], field


def test_deepseek_v3_is_stored_in_pairs_and_in_blocks_of_fp8() -> None:
    assert storage_of(DEEPSEEK_V3) == Storage(interleaved=True, fp8_block=(128, 128))
    assert storage_of(MIXTRAL_8X7B | {"rope_interleave": False}) == Storage(interleaved=False)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (PRESETS["mixtral-8x7b"], {"model.layers.31.block_sparse_moe.experts.7.w2.weight"}),
        (PRESETS["qwen3-30b-a3b"], {"model.layers.47.mlp.experts.127.gate_proj.weight"}),
        (
            dataclasses.replace(PRESETS["deepseek-v3"], mtp_depth=1),
            {
                "model.layers.2.mlp.gate_proj.weight",
                "model.layers.3.mlp.gate.e_score_correction_bias",
                "model.layers.3.mlp.shared_experts.down_proj.weight",
                "model.layers.61.eh_proj.weight",
                "model.layers.61.mlp.experts.255.up_proj.weight",
                "model.layers.61.shared_head.norm.weight",
            },
        ),
    ],
)
def test_a_large_model_is_published_under_its_known_names_each_once(spec: ModelSpec, names: set[str]) -> None:
    tensors = [tensor.name for tensor in (*published(resolve(spec)), *shared_copies(resolve(spec)))]
    assert len(tensors) == len(set(tensors))
    assert names < set(tensors)


def test_deepseek_v3_has_as_many_tensors_as_its_published_index() -> None:
    # 61 layers of latent attention (9 tensors with norms), 3 dense and 58 mixtures, embedding, norm and head.
    spec = resolve(PRESETS["deepseek-v3"])
    assert len(list(published(spec))) == 61 * 9 + 3 * 3 + 58 * (256 * 3 + 3 + 2) + 3


def test_a_prediction_ahead_has_no_name_without_its_model() -> None:
    with pytest.raises(KeyError):
        hf_name("mtp.0.projection.weight")
    assert hf_name("mtp.0.projection.weight", resolve(PRESETS["toy-moe"])) == "model.layers.4.eh_proj.weight"


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_order_of_rotated_rows_has_its_inverse(plain: int, pairs: int) -> None:
    rows = RotaryRows(plain + 2 * pairs, 2 * pairs)
    assert [rows.published_at[row] for row in rows.kept_at] == list(range(rows.group))
    assert rows.kept_at[plain:] == [plain + half * pairs + pair for pair in range(pairs) for half in (0, 1)]


# Both ways

_WIDTHS = st.integers(1, 8).map(lambda eighths: 8 * eighths)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Mixtures of experts that some family can express."""
    family = draw(st.sampled_from(["mixtral", "qwen3_moe", "deepseek_v3"]))
    layers, heads = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    groups = draw(st.integers(1, 4)) if family == "deepseek_v3" else 1
    open_groups = draw(st.integers(1, groups))
    moe = MoeSpec(
        experts=groups * draw(st.integers(2, 5)),
        per_token=2,
        groups=groups,
        groups_per_token=open_groups,
    )
    ffn_dim = draw(_WIDTHS)
    spec = ModelSpec(
        layers=layers,
        dim=draw(_WIDTHS),
        heads=heads,
        head_dim=2 * draw(st.integers(1, 8)),
        ffn_dim=ffn_dim,
        vocab_size=draw(st.integers(1, 100)),
        tie_embeddings=draw(st.booleans()),
        norm_eps=draw(st.floats(1e-8, 1e-3).filter(lambda eps: eps != LATENT_EPS)),
        rope_theta=draw(st.floats(2, 1e6)),
        moe=moe,
    )
    if family == "mixtral":
        return dataclasses.replace(spec, moe=dataclasses.replace(moe, ffn_dim=ffn_dim))
    first_dense = draw(st.integers(0, layers - 1))
    moe = dataclasses.replace(
        moe, ffn_dim=draw(_WIDTHS), normalize=draw(st.booleans()), first_dense=first_dense
    )
    if family == "qwen3_moe":
        moe = dataclasses.replace(moe, every=draw(st.integers(1, layers - first_dense)))
        return dataclasses.replace(spec, qk_norm=True, attention_bias=draw(st.booleans()), moe=moe)
    mla = MlaSpec(
        draw(st.integers(0, 9)),
        draw(_WIDTHS),
        draw(_WIDTHS),
        2 * draw(st.integers(1, 9)),
        draw(_WIDTHS),
        LATENT_EPS,
    )
    stretched = RopeScalingSpec(
        "yarn", draw(st.floats(1, 64)), 64, beta_fast=4, mscale=0.5, mscale_all_dim=0.7
    )
    return dataclasses.replace(
        spec,
        head_dim=0,
        rope_scaling=draw(st.sampled_from([None, stretched])),
        mla=mla,
        moe=dataclasses.replace(
            moe,
            shared=draw(st.integers(1, 3)),
            score="sigmoid",
            scale=draw(st.floats(0.1, 9)),
            balance_bias=True,
        ),
        mtp_depth=draw(st.integers(0, 2)),
    )


def test_latent_attention_without_mixtures_is_a_model_whose_layers_are_all_dense() -> None:
    spec = resolve(ModelSpec(mla=MLA, layers=3, vocab_size=10, norm_eps=1e-6))
    written = hf_config_of(spec)
    assert written["first_k_dense_replace"] == 3
    assert spec_of(written) == spec


@given(models())
def test_a_model_that_is_written_is_read_back_as_itself(spec: ModelSpec) -> None:
    read = spec_of(json.loads(json.dumps(hf_config_of(spec))))
    assert dataclasses.replace(read, moe=None) == dataclasses.replace(resolve(spec), moe=None)
    assert [is_mixture(read, layer) for layer in range(spec.layers)] == [
        is_mixture(spec, layer) for layer in range(spec.layers)
    ]
    ours, theirs = resolve(spec).moe, read.moe
    assert ours is not None
    assert theirs is not None
    # The same layers can be described in more than one way, for instance where only one is a mixture.
    assert theirs == dataclasses.replace(ours, first_dense=theirs.first_dense, every=theirs.every)


# Refusals

MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {
    "model_type": "qwen3_moe",
    **SMALL,
    "num_hidden_layers": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "model.moe.per_token"),
        (QWEN, {"norm_topk_prob": None}, "norm_topk_prob is missing"),
        (QWEN, {"mlp_only_layers": [1, 2]}, "mlp_only_layers = [1, 2] with decoder_sparse_step = 1"),
        (QWEN, {"num_experts": "4"}, "model.moe.experts"),
        (
            DEEPSEEK_V3,
            {"scoring_func": "softmax"},
            "scoring_func = 'softmax' is not supported; supported: 'sigmoid'",
        ),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias = True is not supported; supported: False"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported"),
        (DEEPSEEK_V3, {"n_group": 7}, "model.moe.groups"),
        (
            DEEPSEEK_V3,
            {"kv_lora_rank": None, "v_head_dim": None},
            "kv_lora_rank is missing; v_head_dim is missing",
        ),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'fp8'"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "yarn"}}, "the yarn rotary embedding lacks factor"),
        *(
            (DEEPSEEK_V3, {"rope_scaling": {"type": "yarn", "factor": 2.0, **change}}, message)
            for change, message in (
                ({"truncate": 3}, "model.rope_scaling.truncate: 3 is not true or false"),
                ({"attention_factor": -1.2}, "model.rope_scaling.temperature"),
                ({"mscale": 0.7}, "mscale without mscale_all_dim"),
                ({"mscale_all_dim": 0.7}, "mscale without mscale_all_dim"),
            )
        ),
    ],
)
def test_a_config_with_an_unsupported_value_is_refused_by_field(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    spec_of(config)
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(config | change)
    assert message in str(caught.value)


MLA = MlaSpec()
MOE = MoeSpec(score="sigmoid", shared=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(moe=MoeSpec(shared=1)), "moe.shared = 1: Mixtral has only 0"),
        (ModelSpec(moe=MoeSpec(normalize=False)), "moe.normalize = false: Mixtral has only true"),
        (ModelSpec(moe=MoeSpec(first_dense=1)), "moe.first_dense = 1: Mixtral has only 0"),
        (ModelSpec(moe=MoeSpec(balance_bias=True)), "moe.balance_bias = true: Mixtral has only false"),
        (ModelSpec(moe=MoeSpec(), ffn="gelu"), 'ffn = "gelu": Mixtral has only "swiglu"'),
        (
            ModelSpec(moe=MoeSpec(score="sigmoid"), qk_norm=True),
            'moe.score = "sigmoid": Qwen3Moe has only "softmax"',
        ),
        (ModelSpec(mla=MLA, moe=MoeSpec(shared=1)), 'moe.score = "softmax": DeepseekV3 has only "sigmoid"'),
        (ModelSpec(mla=MLA, moe=dataclasses.replace(MOE, every=2)), "moe.every = 2: DeepseekV3 has only 1"),
        (ModelSpec(mla=MLA, moe=dataclasses.replace(MOE, shared=0)), "moe.shared = 0"),
        (ModelSpec(mtp_depth=1), "mtp_depth = 1: Llama has only 0"),
        (ModelSpec(mla=MLA, moe=MOE, rope_scaling=RopeScalingSpec("yarn", mscale=0.5)), "mscale without"),
    ],
)
def test_a_model_that_hugging_face_cannot_express_is_refused(spec: ModelSpec, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        hf_config_of(dataclasses.replace(spec, vocab_size=10))
    assert message in str(caught.value)
