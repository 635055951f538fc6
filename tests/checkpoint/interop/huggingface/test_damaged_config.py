"""Any ``config.json`` is imported or refused: no value of a field raises another error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from parity.hf_models import CONFIGS
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError, spec_of, storage_of

FAMILIES = {config.model_type: config for config in CONFIGS.values()}
READ_IN_PIECES = (
    *(
        "rope_parameters",
        "rope_scaling",
        "quantization_config",
        "layer_types",
        "mlp_only_layers",
        "no_rope_layers",
    ),
    *("max_window_layers", "decoder_sparse_step", "sliding_window_pattern", "sliding_window", "head_dim"),
    *("num_hidden_layers", "num_key_value_heads", "original_max_position_embeddings", "rope_local_base_freq"),
    *("shared_expert_intermediate_size", "moe_intermediate_size", "rotary_dim", "attn_type_list", "qkv_bias"),
    *("swiglu_limit", "attention_bias", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("max_position_embeddings", "partial_rotary_factor"),
)
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 10**40, 0.5, 1e300, float("nan"), True, "", "x", [], [1, 2], ["a"], [[]], {}, {"a": 1}),
    *(
        {"full_attention": 3},
        {"rope_type": [1]},
        {"rope_type": "yarn", "factor": "x"},
        {"rope_type": "longrope", "short_factor": "x", "long_factor": [1.0]},
        {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [None] * 3, "factor": "x"},
        {"quant_method": "fp8"},
    ),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", READ_IN_PIECES)
def test_a_field_of_any_value_is_read_or_refused(family: str, field: str) -> None:
    table = FAMILIES[family].to_dict()
    for value in VALUES:
        with suppress(HuggingFaceError):
            spec_of({**table, "use_sliding_window": True, field: value})
        with suppress(HuggingFaceError):
            storage_of({**table, field: value})


def test_a_field_that_is_no_table_is_named() -> None:
    with pytest.raises(HuggingFaceError, match="rope_scaling = 3 is no table"):
        spec_of({**FAMILIES["llama"].to_dict(), "rope_scaling": 3})


def test_rotary_parameters_of_all_layers_beside_those_of_some_are_refused() -> None:
    for_all = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    mixed = {**for_all, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(HuggingFaceError, match="rope_parameters by layer type"):
        spec_of({**FAMILIES["gemma3_text"].to_dict(), "rope_parameters": mixed})
