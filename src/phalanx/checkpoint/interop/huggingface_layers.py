"""Fields of a family's ``config.json`` that are no field of ModelSpec under another name: which layers are of which kind.

A family names its pair of functions (``huggingface_families.py``): one reads fields of ``ModelSpec`` and says what is wrong with
them, the other writes them back.
"""

from collections.abc import Callable, Mapping

from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.section_reader import JsonObject
from phalanx.run.spec import ModelSpec, MoeSpec

_MOST_LAYERS = 1 << 16  # more are refused as model.layers; here they are not gone through

Read = Callable[[JsonObject], tuple[dict[str, object], list[str]]]
"""From a ``config.json`` to fields of ModelSpec, and what is wrong with it."""
Write = Callable[[ModelSpec], Mapping[str, object]]
"""From a resolved model to fields of ``config.json``."""


def nothing_read(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:  # noqa: ARG001
    """Reads no field."""
    return {}, []


def nothing_written(spec: ModelSpec) -> Mapping[str, object]:  # noqa: ARG001
    """Writes no field."""
    return {}


def read_sparse_step(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Qwen's mixtures: every so-many-th layer, but for some that stay dense."""
    layers = hf_config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return {}, []
    step, dense = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or []
    mixtures = sorted(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
    if mixtures:
        every = mixtures[1] - mixtures[0] if mixtures[1:] else layers - mixtures[0]
        first_dense = mixtures[0] - every + 1
        if _mixtures(MoeSpec(first_dense=first_dense, every=every), layers) == mixtures and first_dense >= 0:
            return {"moe.first_dense": first_dense, "moe.every": every}, []
    return {}, [
        f"mlp_only_layers = {dense} with decoder_sparse_step = {step} is not supported; supported: dense layers first, "
        "and then every so-many-th layer a mixture"
    ]


def write_sparse_step(spec: ModelSpec) -> Mapping[str, object]:
    """The inverse of ``read_sparse_step``."""
    assert spec.moe is not None, "of families with mixtures alone"
    dense = sorted({*range(spec.layers)} - {*_mixtures(spec.moe, spec.layers)})
    regular = not spec.moe.first_dense
    return {
        "decoder_sparse_step": spec.moe.every if regular else 1,
        "mlp_only_layers": [] if regular else dense,
    }


def _mixtures(moe: MoeSpec, layers: int) -> list[int]:
    spec = ModelSpec(moe=moe)
    return [layer for layer in range(layers) if is_mixture(spec, layer)]


def read_latent(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Latent attention has as many key heads as query heads, however a ``config.json`` says so."""
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads")
    problems = [f"num_key_value_heads = {kv_heads} is not supported; supported: as many as heads ({heads})"]
    return {}, [] if kv_heads in (None, heads) else problems


def write_latent(spec: ModelSpec) -> Mapping[str, object]:
    """Latent attention as DeepSeek publishes it: key heads by number, rotated rows in pairs."""
    assert spec.mla is not None, "of families with latent attention alone"
    return {
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.mla.query_rank or None,
        "rope_interleave": True,
    }


def read_two_biases(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Seed-OSS says apart whether queries, keys and values have biases, and whether the output projection has one."""
    inner, output = hf_config.get("attention_bias", True), hf_config.get("attention_out_bias", False)
    if output and not inner:
        problem = (
            "attention_out_bias = True without attention_bias is not supported; supported: both, or neither"
        )
        return {}, [problem]
    return {"attention_bias": output, "qkv_bias": inner and not output}, []


def write_two_biases(spec: ModelSpec) -> Mapping[str, object]:
    """The inverse of ``read_two_biases``."""
    return {
        "attention_bias": spec.attention_bias or spec.qkv_bias,
        "attention_out_bias": spec.attention_bias,
        "residual_dropout": 0.0,
    }
