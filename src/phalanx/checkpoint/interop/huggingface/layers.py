"""Fields of a family's ``config.json`` without a counterpart in ModelSpec, such as the kind of each layer.

A family has a pair of functions (``families/``): one reads fields of ``ModelSpec`` and returns problems, the other writes them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.run.fields import JsonObject
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.grouped_attention import attention_of
from phalanx.run.spec import ModelSpec, MoeSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of attention's latents in ``transformers``, for any ``rms_norm_eps``."""
_UNUSED_WINDOW = 4096
"""Window that is written if no layer has one: some classes make a mask of it anyway, and fail on null."""
_MOST_LAYERS = 1 << 16  # more are refused as model.layers; here they are not enumerated

Read = Callable[[JsonObject], tuple[dict[str, object], list[str]]]
"""Function from a ``config.json`` to fields of ModelSpec, and its problems."""
Write = Callable[[ModelSpec], Mapping[str, object]]
"""Function from a resolved model to fields of ``config.json``."""
Check = Callable[[ModelSpec], Iterator[str]]
"""Function that yields combinations of fields that a family cannot express, although it can express each field."""


def reads(*readers: Read) -> Read:
    """Return a reader that calls all ``readers`` and merges their fields and problems; a later reader's field replaces an earlier one's."""

    def read(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
        results = [reader(hf_config) for reader in readers]
        fields = {path: value for fields_of_reader, _ in results for path, value in fields_of_reader.items()}
        return fields, [problem for _, problems in results for problem in problems]

    return read


def writes(*writers: Write) -> Write:
    """Combine functions that write fields."""
    return lambda spec: {key: value for writer in writers for key, value in writer(spec).items()}


def checks(*all_checks: Check) -> Check:
    """Combine functions that yield problems."""
    return lambda spec: (problem for check in all_checks for problem in check(spec))


def whole_heads(spec: ModelSpec) -> Iterator[str]:
    """Check for families whose readers may use dim / heads as head width."""
    if spec.dim % spec.heads:
        yield f"dim = {spec.dim} with {spec.heads} heads: it must be a multiple of heads"


def heads_as_wide_as_the_model(spec: ModelSpec) -> Iterator[str]:
    """Check for families without a head width: it is dim / heads."""
    if spec.dim != spec.heads * spec.head_dim:
        yield f"head_dim = {spec.head_dim} with {spec.heads} heads: it must be dim / heads"


def read_window_everywhere(default: int | None) -> Read:
    """Return a reader of Mistral's window, which is in all layers or in none. ``default`` is used without ``sliding_window``.

    Null or ``use_sliding_window = false`` gives no fields. The value's type is not checked.
    """

    def read(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
        window = hf_config.get("sliding_window", default)
        if window is None or hf_config.get("use_sliding_window") is False:
            return {}, []
        return {"attention_pattern": ["window"], "window": window}, []

    return read


def read_only_window(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Phi-3's window, which has no switch: in all layers, or in none."""
    return read_window_everywhere(None)({**hf_config, "use_sliding_window": None})


def write_window(spec: ModelSpec) -> Mapping[str, object]:
    """Write the window, for families that state its layers in other fields."""
    return {"sliding_window": spec.window or None}


def window_everywhere(spec: ModelSpec) -> Iterator[str]:
    """Check for families with a window in all layers or in none."""
    if {*spec.attention_pattern} - {"window"}:
        yield f"attention_pattern = {json.dumps(spec.attention_pattern)}: all layers have a window, or none"


def read_switched_window(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Qwen's window: off unless ``use_sliding_window``; then in the layers of ``layer_types``, or in the last ones."""
    if not hf_config.get("use_sliding_window"):
        return _read_types(hf_config, ["full_attention"], 0)
    return read_layer_types(4096, _from_layer(hf_config, 28))(hf_config)


def read_window_if_switched_on(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Qwen3-MoE's window: off unless ``use_sliding_window``, and then in all layers."""
    return read_window_everywhere(4096)({"use_sliding_window": False, **hf_config})


def write_window_switch(spec: ModelSpec) -> Mapping[str, object]:
    """Inverse of ``read_window_if_switched_on``."""
    return {"use_sliding_window": spec.window > 0, "sliding_window": spec.window or None}


def read_last_windows(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """dots.llm1's window: in the layers of ``layer_types``, or in those from ``max_window_layers`` on."""
    return read_layer_types(4096, _from_layer(hf_config, 62))(hf_config)


def _from_layer(hf_config: JsonObject, default: int) -> Callable[[int], bool]:
    """Return a predicate for the layers from ``max_window_layers`` on; null counts as absent."""
    stated = hf_config.get("max_window_layers")
    first = default if stated is None else int(stated)
    return lambda layer: layer >= first


def read_layer_types(window: int, is_windowed: Callable[[int], bool]) -> Read:
    """Return a reader of ``layer_types`` with ``sliding_window``. If a config lacks them, ``window`` is the default
    width, and layers for which ``is_windowed(layer)`` is true have it. An implausible number of layers gives no
    fields.
    """

    def read(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
        """Return the fields and problems of ``layer_types``; nothing for an implausible number of layers.

        Without ``layer_types``, a window of 0 or null makes all layers full.
        """
        layers = hf_config.get("num_hidden_layers")
        if not isinstance(layers, int) or layers > _MOST_LAYERS:
            return {}, []
        stated = hf_config.get("sliding_window", window)
        kinds = [
            "sliding_attention" if stated and is_windowed(layer) else "full_attention"
            for layer in range(layers)
        ]
        return _read_types(hf_config, kinds, stated)

    return read


def _read_types(
    hf_config: JsonObject, default: Sequence[str], window: object
) -> tuple[dict[str, object], list[str]]:
    """Return the attention pattern and window; no fields if all layers have full attention.

    Unknown types are a problem, and so is a null ``window`` if a layer has one. The number of types is not checked.
    """
    kinds = [str(kind) for kind in hf_config.get("layer_types") or default]
    if unknown := {*kinds} - _LAYER_TYPES.keys():
        return {}, [f"layer_types: {', '.join(sorted(unknown))}; supported: {', '.join(_LAYER_TYPES)}"]
    pattern = shortest_pattern([_LAYER_TYPES[kind] for kind in kinds])
    if "window" not in pattern:
        return {}, []
    if window is None:
        return {}, ["layer_types has layers with a window, but sliding_window is null: set it to a number"]
    return {"attention_pattern": pattern, "window": window}, []


_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "window"}


def shortest_pattern(kinds: Sequence[str]) -> list[str]:
    """Return the shortest list that, repeated, begins with ``kinds``; empty if all layers are full."""
    if not {*kinds} - {"full"}:
        return []
    for length in range(1, len(kinds)):
        if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds)):
            return list(kinds[:length])
    return list(kinds)


def write_layer_types(spec: ModelSpec) -> Mapping[str, object]:
    """Return config.json's ``layer_types``, one name per layer, and ``sliding_window`` in tokens. ``read_layer_types`` reads them."""
    kinds = [attention_of(spec, layer) for layer in range(spec.layers)]
    names = ["sliding_attention" if kind == "window" else "full_attention" for kind in kinds]
    return {"layer_types": names, "sliding_window": spec.window or _UNUSED_WINDOW}


def write_switched_window(spec: ModelSpec) -> Mapping[str, object]:
    """Return config.json's sliding window as Qwen writes it, with the switch ``use_sliding_window``.

    ``max_window_layers`` is the first layer with a window; it is left out if full layers follow. ``read_switched_window`` reads these.
    """
    if not spec.window:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = [attention_of(spec, layer) for layer in range(spec.layers)]
    first = kinds.index("window")
    last_ones = {} if "full" in kinds[first:] else {"max_window_layers": first}
    return {"use_sliding_window": True, **write_layer_types(spec), **last_ones}


def all_rotated(spec: ModelSpec) -> Iterator[str]:
    """Check for families whose layers all have rotary positions."""
    if "no-position" in spec.attention_pattern:
        yield f"attention_pattern = {json.dumps(spec.attention_pattern)}: all layers have rotary positions"


def read_regular_windows(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Gemma 3's windows: in ``layer_types``, or in all layers except every ``sliding_window_pattern``-th."""
    period = hf_config.get("sliding_window_pattern") or 6
    return read_layer_types(4096, lambda layer: (layer + 1) % period != 0)(hf_config)


def read_score_width(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read Gemma's scale of attention scores."""
    width = hf_config.get("query_pre_attn_scalar", 256)
    return {"score_width": 0 if width == hf_config.get("head_dim", 256) else width}, []


def write_score_width(spec: ModelSpec) -> Mapping[str, object]:
    """Return config.json's ``query_pre_attn_scalar``: attention scores are divided by its square root. ``read_score_width`` reads it."""
    return {"query_pre_attn_scalar": spec.score_width or spec.head_dim}


def read_caps(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read Gemma 2's soft caps of logits, with the family's defaults; null means none (0). A cap of 0 is a problem."""
    caps = {ours: hf_config.get(theirs, own) for ours, (theirs, own) in _CAPS.items()}
    problems = [
        f"{_CAPS[ours][0]} = {cap} is not supported; supported: null"
        for ours, cap in caps.items()
        if cap == 0
    ]
    return {ours: 0.0 if cap is None else cap for ours, cap in caps.items()}, problems


def write_caps(spec: ModelSpec) -> Mapping[str, object]:
    """Return config.json's soft caps of attention scores and of logits, null for none. ``read_caps`` reads them."""
    return {theirs: getattr(spec, ours) or None for ours, (theirs, _) in _CAPS.items()}


_CAPS = {"score_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0)}


def read_unrotated_layers(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read SmolLM3's layers without rotary positions, by default every fourth, as an attention pattern.

    Return fields and problems; a sliding window is a problem.
    """
    layers = hf_config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return {}, []
    period = hf_config.get("no_rope_layer_interval", 4)
    rotated = hf_config.get("no_rope_layers") or [(layer + 1) % period != 0 for layer in range(layers)]
    window = hf_config.get("use_sliding_window") and hf_config.get("sliding_window")
    if window or "sliding_attention" in (hf_config.get("layer_types") or ()):
        return {}, ["a sliding window in layers without rotary positions is not supported; supported: none"]
    pattern = shortest_pattern(["full" if turned else "no-position" for turned in rotated])
    return {"attention_pattern": pattern}, []


def write_unrotated_layers(spec: ModelSpec) -> Mapping[str, object]:
    """Return SmolLM3's ``no_rope_layers``: for each layer 1 if it has rotary positions, else 0; its interval if it is
    regular; and no sliding window. ``read_unrotated_layers`` reads them.
    """
    rotated = [int(attention_of(spec, layer) != "no-position") for layer in range(spec.layers)]
    # Older readers use the interval only.
    regular = all(kind == "full" for kind in spec.attention_pattern[:-1])
    interval = {"no_rope_layer_interval": len(spec.attention_pattern)} if regular else {}
    return {"no_rope_layers": rotated, "use_sliding_window": False, "sliding_window": None, **interval}


def no_window(spec: ModelSpec) -> Iterator[str]:
    """Check for families without a window."""
    if spec.window:
        yield f"attention_pattern = {json.dumps(spec.attention_pattern)}: no layer has a window"


def read_sparse_step(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read which layers of Qwen's mixtures have experts: every ``decoder_sparse_step``-th, except those of
    ``mlp_only_layers``.

    Return fields and problems: only dense layers first, then every n-th layer a mixture, is supported.
    """
    layers = hf_config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return {}, []
    step, dense = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or []
    mixtures = sorted(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
    if not mixtures or hf_config.get("num_experts", hf_config.get("num_local_experts")) == 0:
        return {"moe.first_dense": layers}, []
    period = mixtures[1] - mixtures[0] if mixtures[1:] else layers - mixtures[0]
    first_dense = mixtures[0] - period + 1
    if _mixtures(MoeSpec(first_dense=first_dense, every=period), layers) == mixtures and first_dense >= 0:
        return {"moe.first_dense": first_dense, "moe.every": period}, []
    return {}, [
        f"mlp_only_layers = {dense} with decoder_sparse_step = {step} is not supported; supported: dense layers first, "
        "and then every n-th layer a mixture, or no mixture"
    ]


def write_sparse_step(spec: ModelSpec) -> Mapping[str, object]:
    """Return Qwen's fields for the layers with experts: ``decoder_sparse_step`` and ``mlp_only_layers``. ``read_sparse_step`` reads them."""
    assert spec.moe is not None, "of families with mixtures alone"
    dense = sorted({*range(spec.layers)} - {*_mixtures(spec.moe, spec.layers)})
    regular = not spec.moe.first_dense
    return {
        "decoder_sparse_step": spec.moe.every if regular else 1,
        "mlp_only_layers": [] if regular else dense,
    }


def read_shared_width(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read Qwen2-MoE's shared experts from their total width. Return fields and problems.

    A width that is no multiple of a routed expert's is a problem. Without a valid ``moe_intermediate_size``, nothing
    is read.
    """
    shared = hf_config.get("shared_expert_intermediate_size")
    expert_width = hf_config.get("moe_intermediate_size")
    if not isinstance(expert_width, int) or expert_width < 1:
        return {}, []  # refused as model.moe.ffn_dim
    if not isinstance(shared, int) or shared < 1 or shared % expert_width:
        problem = f"shared_expert_intermediate_size = {shared} is not supported"
        return {}, [f"{problem}; supported: multiples of moe_intermediate_size ({expert_width})"]
    return {"moe.shared": shared // expert_width}, []


def write_shared_width(spec: ModelSpec) -> Mapping[str, object]:
    """Return Qwen2-MoE's ``shared_expert_intermediate_size``: the shared experts' total width. ``read_shared_width`` reads it."""
    assert spec.moe is not None, "of families with mixtures alone"
    return {"shared_expert_intermediate_size": spec.moe.shared * spec.moe.ffn_dim}


def read_rotated_width(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read MiniMax-M2's ``rotary_dim`` if no fraction is stated; refuse layers with linear attention, which it no longer has."""
    kinds = hf_config.get("attn_type_list")
    problems = (
        [] if not kinds or kinds == [1] * len(kinds) else ["attn_type_list: supported: 1 in all layers"]
    )
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    rotated, width = hf_config.get("rotary_dim"), hf_config.get("head_dim") or 128
    stated_fractions = (hf_config.get("partial_rotary_factor"), rope.get("partial_rotary_factor"))
    if rotated is None or stated_fractions != (None, None):
        return {}, problems
    if not isinstance(rotated, int) or not isinstance(width, int) or not 0 < rotated <= width:
        return {}, [*problems, f"rotary_dim = {rotated} is no part of a head of {width} elements"]
    return {"rope_fraction": rotated / width}, problems


def read_early_windows(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read Qwen2-MoE's windows: off unless ``use_sliding_window``; by ``layer_types``, else in every other one of the
    first layers.
    """
    if not hf_config.get("use_sliding_window"):
        return _read_types(hf_config, ["full_attention"], 0)
    beyond = _from_layer(hf_config, 28)
    return read_layer_types(4096, lambda layer: layer % 2 == 0 and not beyond(layer))(hf_config)


def write_early_windows(spec: ModelSpec) -> Mapping[str, object]:
    """Return Qwen2-MoE's sliding window: ``use_sliding_window``, ``layer_types`` and ``sliding_window``. ``read_early_windows`` reads them."""
    return {"use_sliding_window": spec.window > 0, **write_layer_types(spec)}


def _mixtures(moe: MoeSpec, layers: int) -> list[int]:
    """Return the numbers of the layers with experts."""
    spec = ModelSpec(moe=moe)
    return [layer for layer in range(layers) if is_mixture(spec, layer)]


def read_latent(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Check the key heads of latent attention: another number than of heads is a problem.

    The only field is ``mla.norm_eps``, set if ``rms_norm_eps`` differs from the fixed epsilon of the latents' norms.
    """
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads")
    problems = [f"num_key_value_heads = {kv_heads} is not supported; supported: as many as heads ({heads})"]
    # transformers uses a fixed epsilon in the norms of latents, independent of config.json.
    eps = {} if hf_config.get("rms_norm_eps", LATENT_EPS) == LATENT_EPS else {"mla.norm_eps": LATENT_EPS}
    return {**eps}, [] if kv_heads in (None, heads) else problems


def write_latent(spec: ModelSpec) -> Mapping[str, object]:
    """Return three of DeepSeek's fields of latent attention: as many key heads as heads, the rank of queries (null if
    0), and rotated rows in pairs. Other ranks and widths are copied by name elsewhere.
    """
    assert spec.mla is not None, "of families with latent attention alone"
    return {
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.mla.query_rank or None,
        "rope_interleave": True,
    }


def read_greedy_groups(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read DeepSeek-V2's choice of experts: "greedy" (the default) among all, "group_limited_greedy" among the groups
    with the best expert. Other methods are a problem.
    """
    method = hf_config.get("topk_method") or "greedy"
    if method == "greedy":
        return {"moe.groups": 1, "moe.groups_per_token": 1}, []
    if method != "group_limited_greedy":
        supported = "'greedy', 'group_limited_greedy'"
        return {}, [f"topk_method = {method!r} is not supported; supported: {supported}"]
    groups, per_token = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
    return {"moe.groups": groups, "moe.groups_per_token": per_token, "moe.group_score": "best"}, []


def write_greedy_groups(spec: ModelSpec) -> Mapping[str, object]:
    """Return DeepSeek-V2's choice of experts: ``topk_method``, ``n_group`` and ``topk_group`` (both 1 without groups).

    ``read_greedy_groups`` reads them.
    """
    assert spec.moe is not None, "of families with mixtures alone"
    method = "group_limited_greedy" if spec.moe.groups > 1 else "greedy"
    return {
        "topk_method": method,
        "n_group": spec.moe.groups,
        "topk_group": spec.moe.groups_per_token,
    }


def best_of_groups(spec: ModelSpec) -> Iterator[str]:
    """Check that a group's score is its best expert's, as in DeepSeek-V2."""
    if spec.moe is not None and spec.moe.groups > 1 and spec.moe.group_score != "best":
        yield f'moe.group_score = "{spec.moe.group_score}": DeepseekV2 has only "best"'


def read_two_biases(hf_config: JsonObject) -> tuple[dict[str, object], list[str]]:
    """Read Seed-OSS's separate switches for the biases of queries, keys and values, and of the output projection.

    Return ModelSpec's ``attention_bias`` (all four) and ``qkv_bias`` (all but the output), and problems: a bias of the
    output projection without the others is one.
    """
    inner, output = hf_config.get("attention_bias", True), hf_config.get("attention_out_bias", False)
    if output and not inner:
        problem = (
            "attention_out_bias = True without attention_bias is not supported; supported: both, or neither"
        )
        return {}, [problem]
    return {"attention_bias": output, "qkv_bias": inner and not output}, []


def write_two_biases(spec: ModelSpec) -> Mapping[str, object]:
    """Return Seed-OSS's two switches of attention biases, and its ``residual_dropout`` of 0. ``read_two_biases`` reads them."""
    return {
        "attention_bias": spec.attention_bias or spec.qkv_bias,
        "attention_out_bias": spec.attention_bias,
        "residual_dropout": 0.0,
    }
