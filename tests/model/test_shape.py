"""The list of parameters is the module's own, and resolving fills in what the documentation says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.presets import PRESETS
from phalanx.model.shape import parameters, resolve
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec, RopeScalingSpec

SMALL = ModelSpec(layers=2, dim=24, heads=4, vocab_size=31)
ODD = {
    "plain": SMALL,
    "tied": replace(SMALL, tie_embeddings=True),
    "attention bias": replace(SMALL, attention_bias=True),
    "feed-forward bias": replace(SMALL, ffn_bias=True),
    "gelu": replace(SMALL, ffn="gelu"),
    "gelu, all biases": replace(SMALL, ffn="gelu", attention_bias=True, ffn_bias=True),
    "qk norm": replace(SMALL, qk_norm=True),
    "one key head": replace(SMALL, kv_heads=1),
    "wide heads": replace(SMALL, head_dim=20, kv_heads=2, qk_norm=True),
    "width no multiple of heads": replace(SMALL, dim=22, head_dim=8),
    "one layer": replace(SMALL, layers=1, ffn_dim=7),
    "stretched": replace(SMALL, rope_scaling=RopeScalingSpec()),
}


def named_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = Transformer(spec)
    assert not list(model.buffers())
    return [(name, tuple(value.shape)) for name, value in model.named_parameters()]


@pytest.mark.parametrize("spec", [*ODD.values(), *PRESETS.values()], ids=[*ODD, *PRESETS])
def test_the_list_is_that_of_the_module_in_its_order(spec: ModelSpec) -> None:
    spec = resolve(spec, vocab_size=4096)
    assert [(parameter.name, parameter.shape) for parameter in parameters(spec)] == named_shapes(spec)


def test_kinds_say_what_a_parameter_is_for() -> None:
    spec = resolve(replace(SMALL, layers=1, attention_bias=True, ffn_bias=True, qk_norm=True))
    kinds = {parameter.name: parameter.kind for parameter in parameters(spec)}
    assert kinds.pop("embedding.weight") == "embedding"
    written = {name for name, kind in kinds.items() if kind == "output"}
    assert written == {"blocks.0.attention.output.weight", "blocks.0.ffn.down.weight"}
    for name, kind in kinds.items():
        assert (kind == "norm") == ("norm" in name)
        assert (kind == "bias") == name.endswith("bias")


small_specs = st.builds(
    ModelSpec,
    layers=st.integers(1, 3),
    dim=st.integers(1, 8).map(lambda n: 24 * n),
    heads=st.sampled_from([1, 2, 3, 4, 6]),
    kv_heads=st.sampled_from([0, 1]),
    head_dim=st.sampled_from([0, 2, 16]),
    ffn_dim=st.integers(0, 50),
    ffn=st.sampled_from(["swiglu", "gelu"]),
    vocab_size=st.integers(0, 50),
    tie_embeddings=st.booleans(),
    qk_norm=st.booleans(),
    attention_bias=st.booleans(),
    ffn_bias=st.booleans(),
)


@given(small_specs)
@settings(max_examples=30)
def test_any_module_is_listed(spec: ModelSpec) -> None:
    spec = resolve(spec, vocab_size=50)
    assert [(parameter.name, parameter.shape) for parameter in parameters(spec)] == named_shapes(spec)


@given(small_specs)
def test_resolving_leaves_nothing_open_and_changes_nothing_that_was_given(spec: ModelSpec) -> None:
    resolved = resolve(spec, vocab_size=50)
    assert min(resolved.kv_heads, resolved.head_dim, resolved.ffn_dim, resolved.vocab_size) > 0
    assert resolve(resolved, vocab_size=99) == resolved
    for name in ("kv_heads", "head_dim", "ffn_dim", "vocab_size"):
        assert getattr(spec, name) in (0, getattr(resolved, name))


@pytest.mark.parametrize(("dim", "swiglu", "gelu"), [(256, 704, 1024), (768, 2048, 3072), (100, 320, 448)])
def test_the_inner_width_is_eight_thirds_or_four_times_the_outer_rounded_up_to_64(
    dim: int, swiglu: int, gelu: int
) -> None:
    spec = ModelSpec(dim=dim, heads=1)
    assert resolve(spec).ffn_dim == swiglu
    assert resolve(replace(spec, ffn="gelu")).ffn_dim == gelu
