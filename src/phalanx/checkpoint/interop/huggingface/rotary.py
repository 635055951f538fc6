"""The rotary embedding's parameters in ``config.json``: base, scaling, and differences by layer.

Version 5 of transformers keeps them in ``rope_parameters``, version 4 in ``rope_theta`` and ``rope_scaling``; both are written, either is
read. LongRoPE is Phi-3's. Its original context is outside these tables, and its factor follows from ``max_position_embeddings``, unless
the tables have the temperature itself.
"""

from collections.abc import Mapping

from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.model.facts.shape import rotary_temperature
from phalanx.run.fields import JsonObject
from phalanx.run.spec import ModelSpec, RopeScalingSpec

_ORIGINAL = "original_max_position_embeddings"
_MOST_TOKENS = 1 << 40  # larger numbers are not a context length
LAYERS_BY_WINDOW = ("full_attention", "sliding_attention")
_ONLY_ROPE: Mapping[str, object] = {"partial_rotary_factor": 1, "attention_factor": None}
_WITH_TEMPERATURE = ("yarn", "longrope")

_CONTEXT = {"original_max_seq_len": _ORIGINAL}
_TEMPERATURE = {"temperature": "attention_factor"}


def _same(*names: str) -> dict[str, str]:
    """Return fields that have the same names here and there."""
    return {name: name for name in names}


_STRETCHES: Mapping[str, Mapping[str, str]] = {
    "linear": _same("factor"),
    "llama3": _same("factor", "low_freq_factor", "high_freq_factor") | _CONTEXT,
    "yarn": _same("factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
    | _TEMPERATURE
    | _CONTEXT,
    "longrope": {"short_factors": "short_factor", "long_factors": "long_factor"}
    | _TEMPERATURE
    | _same("factor")
    | _CONTEXT,
}
# Optional parameters; the temperature's strengths are written only if they are set.
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "temperature")
TEMPERATURE = (
    "mscale without mscale_all_dim, or the reverse, means different things to different readers; supported: both "
    "or neither"
)


def stretched_length(scaling: RopeScalingSpec) -> int:
    """Return the number of tokens in the scaled context."""
    return round(scaling.factor * scaling.original_max_seq_len)


def rotary_written(spec: ModelSpec, family: Family, max_seq_len: int) -> dict[str, object]:
    """Return the fields of ``config.json`` for the rotary embedding of a model that ``family`` can express, in the
    newer and the older form. ``max_seq_len`` is the context, which only longrope uses.
    """
    scaling, partial = spec.rope_scaling, {}
    if "rope_fraction" in family.fields:
        partial["partial_rotary_factor"] = spec.rope_fraction
    if scaling is not None and scaling.kind == "longrope":
        return _longrope_written(spec, scaling, max_seq_len, partial)
    stretch = _stretch_of(scaling) | partial
    full = {**stretch, "rope_theta": spec.rope_theta}
    written: dict[str, object] = {"rope_parameters": full, "rope_theta": spec.rope_theta}
    if "window_rope_theta" in family.handled:
        theta = spec.window_rope_theta
        windowed = {"rope_type": "default", "rope_theta": theta} if theta else full
        written["rope_parameters"] = {"full_attention": full, "sliding_attention": windowed}
    return {**written, "rope_scaling": None if scaling is None else stretch}


def _longrope_written(
    spec: ModelSpec, scaling: RopeScalingSpec, max_seq_len: int, partial: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields of a longrope embedding, in the newer and the older form. The temperature is stated if it
    does not follow from the lengths.
    """
    factors: dict[str, object] = {
        "short_factor": [*scaling.short_factors],
        "long_factor": [*scaling.long_factors],
    }
    if scaling.temperature or max_seq_len != stretched_length(scaling):
        factors["attention_factor"] = rotary_temperature(scaling)
    outside = {_ORIGINAL: scaling.original_max_seq_len}
    full = {"rope_type": "longrope", **factors, **outside, **partial, "rope_theta": spec.rope_theta}
    # Version 4 accepts only these fields.
    older = {"type": "longrope", **factors}
    return {
        "rope_parameters": full,
        "rope_theta": spec.rope_theta,
        "rope_scaling": older,
        **outside,
    }


def _stretch_of(scaling: RopeScalingSpec | None) -> dict[str, object]:
    """Return ``rope_type`` and a scaling's parameters by Hugging Face's names, for ``None`` the type "default".

    Optional values at their defaults are left out.
    """
    if scaling is None:
        return {"rope_type": "default"}
    values = {theirs: getattr(scaling, ours) for ours, theirs in _STRETCHES[scaling.kind].items()}
    omitted_values = {"truncate": True, "mscale": 0, "mscale_all_dim": 0, "attention_factor": 0}
    return {"rope_type": scaling.kind} | {
        key: value
        for key, value in values.items()
        if key not in omitted_values or value != omitted_values[key]
    }


def same_temperature(scaling: Mapping[str, object]) -> bool:
    """Return True if readers agree on YaRN's temperature: DeepSeek's code and transformers do if both strengths are set."""
    return bool(scaling.get("mscale")) == bool(scaling.get("mscale_all_dim"))


def _rope_by_layers(hf_config: JsonObject, family: Family) -> tuple[JsonObject, JsonObject | None]:
    """Return the rotary embedding's parameters, and those of layers with a window; None if the family does not
    distinguish them, or they do not differ.
    """
    by_layer: JsonObject = hf_config.get("rope_parameters") or dict(family.rope)
    if "window_rope_theta" not in family.handled:
        return hf_config.get("rope_scaling") or by_layer, None
    if by_layer and by_layer.keys() <= {*LAYERS_BY_WINDOW}:
        return by_layer.get("full_attention") or {}, by_layer.get("sliding_attention") or {
            "rope_type": "default"
        }
    stretched, local = hf_config.get("rope_scaling"), hf_config.get("rope_local_base_freq")
    if local or "window_rope_theta" in family.absent:
        theta = local or family.absent["window_rope_theta"]
        return stretched or by_layer, {"rope_type": "default", "rope_theta": theta}
    # In version 4 only full attention was scaled.
    return stretched or by_layer, {"rope_type": "default"} if stretched else None


def rotary_fields(hf_config: JsonObject, family: Family) -> tuple[dict[str, object], list[str]]:
    """Return the rotary fields of ModelSpec, read from a ``config.json``, and a sentence for each value that is not
    supported. After an unsupported kind, fields are incomplete.
    """
    rope, windowed = _rope_by_layers(hf_config, family)
    theta = rope.get("rope_theta") or hf_config.get("rope_theta") or family.absent.get("rope_theta", 10000.0)
    fields: dict[str, object] = {"rope_theta": theta}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    kind = "longrope" if kind == "su" else kind  # its first name
    if windowed is not None and windowed != rope:
        own_theta = family.absent.get("window_rope_theta", theta)
        fields["window_rope_theta"] = windowed.get("rope_theta", own_theta)
        if windowed.get("rope_type", "default") != "default":
            return fields, [
                "rope_parameters of 'sliding_attention': supported: rope_type 'default', or those of all layers"
            ]
    if any(isinstance(value, Mapping) for value in rope.values()):
        return fields, ["rope_parameters by layer type are not supported; supported: one set for all layers"]
    if "rope_fraction" in family.fields and rope.get("partial_rotary_factor") is not None:
        fields["rope_fraction"] = rope["partial_rotary_factor"]
    problems = [
        f"{key} = {rope[key]!r} in the rotary embedding's parameters is not supported; supported: {only!r}"
        for key, only in _ONLY_ROPE.items()
        if rope.get(key) is not None
        and rope[key] != only
        and not (key == "attention_factor" and kind in _WITH_TEMPERATURE)
        and not (key == "partial_rotary_factor" and "rope_fraction" in fields)
    ]
    if kind == "default":
        return fields, problems
    if kind not in family.stretches:
        supported = "', '".join(family.stretches)
        return fields, [f"rope_type {kind!r} is not supported; supported: 'default', '{supported}'"]
    values = {_ORIGINAL: hf_config.get("max_position_embeddings"), **rope}
    if hf_config.get(_ORIGINAL) is not None:  # Phi-3's habit; it has priority in transformers
        values[_ORIGINAL] = hf_config[_ORIGINAL]
    if kind == "longrope":
        values |= _longrope_context(hf_config, rope)
    stretch: dict[str, object] = {"kind": kind}
    for ours, theirs in _STRETCHES[kind].items():
        if values.get(theirs) is not None:
            stretch[ours] = values[theirs]
        elif ours not in _OPTIONAL:
            problems.append(f"the {kind} rotary embedding lacks {theirs}")
    problems += [] if same_temperature(stretch) else [TEMPERATURE]
    if windowed is not None and stretch.get("truncate") is False:
        # transformers reads it next to the parameters by layer, not among them.
        problems.append("truncate = False for some layers is not supported; supported: for all layers")
    if kind in _WITH_TEMPERATURE and rope.get("attention_factor") == 0:
        problems.append("attention_factor = 0 is not supported; supported: a number above 0")
    if kind != "yarn" and "mla" in family.sections and rope.get("mscale_all_dim"):
        problems.append(f"mscale_all_dim with rope_type {kind!r} is not supported; supported: with 'yarn'")
    return {**fields, "rope_scaling": stretch}, problems


def _longrope_context(hf_config: JsonObject, rope: JsonObject) -> dict[str, object]:
    """Return the original context, by default 4096, and the scaling factor: the stated one or the ratio of contexts,
    at least 1. Values of other types are passed on.
    """
    original, longest = hf_config.get(_ORIGINAL, 4096), hf_config.get("max_position_embeddings", 4096)
    factor = rope.get("factor")
    if factor is None and _is_length(original) and _is_length(longest):
        factor = longest / original
    # The temperature is 1 for all factors up to 1.
    return {_ORIGINAL: original, "factor": max(factor, 1.0) if isinstance(factor, int | float) else factor}


def _is_length(value: object) -> bool:
    return isinstance(value, int) and 0 < value < _MOST_TOKENS
