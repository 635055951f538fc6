"""The list of parameters is the module's own, and resolving fills in the documented values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import buffers, parameters
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec

SMALL = ModelSpec(layers=2, dim=24, heads=4, vocab_size=31)
ODD = {
    "plain": SMALL,
    "tied": replace(SMALL, tie_embeddings=True),
    "attention bias": replace(SMALL, attention_bias=True),
    "bias of queries, keys and values": replace(SMALL, qkv_bias=True),
    "norms after": replace(SMALL, norm_placement="after", qk_norm=True, qk_norm_width="all", kv_heads=2),
    "gated by a gelu": replace(SMALL, ffn="geglu", norm_offset=True, scale_embeddings=True),
    "sinks": replace(SMALL, sinks=True, attention_bias=True, kv_heads=2),
    "mixture, all biases": replace(
        SMALL, ffn="swiglu-clamped", ffn_bias=True, moe=MoeSpec(ffn_dim=16, shared=1, router_bias=True)
    ),
    "norms before and after": replace(SMALL, norm_placement="both"),
    "windows": replace(SMALL, attention_pattern=("window", "full"), window=6),
    "feed-forward bias": replace(SMALL, ffn_bias=True),
    "gelu": replace(SMALL, ffn="gelu"),
    "gelu, all biases": replace(SMALL, ffn="gelu", attention_bias=True, ffn_bias=True),
    "qk norm": replace(SMALL, qk_norm=True),
    "one key head": replace(SMALL, kv_heads=1),
    "wide heads": replace(SMALL, head_dim=20, kv_heads=2, qk_norm=True),
    "width no multiple of heads": replace(SMALL, dim=22, head_dim=8),
    "one layer": replace(SMALL, layers=1, ffn_dim=7),
    "stretched": replace(SMALL, rope_scaling=RopeScalingSpec()),
    "latent attention": replace(SMALL, mla=MlaSpec()),
    "latent attention, latent queries": replace(SMALL, mla=MlaSpec(query_rank=10)),
    "mixture": replace(SMALL, moe=MoeSpec()),
    "mixture, gelu": replace(SMALL, ffn="gelu", moe=MoeSpec(ffn_dim=16, shared=2)),
    "mixture, gated shared expert": replace(SMALL, moe=MoeSpec(ffn_dim=16, shared=2, shared_gate=True)),
    "mixture, some layers": replace(SMALL, layers=6, moe=MoeSpec(first_dense=1, every=2)),
    "balance bias, predictions ahead": replace(SMALL, moe=MoeSpec(balance_bias=True), mtp_depth=2),
    "predictions ahead": replace(SMALL, mla=MlaSpec(), mtp_depth=1),
}


def named_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = Transformer(spec)
    counted = {name for name, _ in model.named_buffers() if name.endswith("router.token_counts")}
    kept = [(name, tuple(value.shape)) for name, value in model.named_buffers() if name not in counted]
    assert [(buffer.name, buffer.shape) for buffer in buffers(spec)] == kept
    assert {name for name, _ in kept} <= set(model.state_dict())
    return [(name, tuple(value.shape)) for name, value in model.named_parameters()]


@pytest.mark.parametrize("spec", [*ODD.values(), *PRESETS.values()], ids=[*ODD, *PRESETS])
def test_the_list_is_that_of_the_module_in_its_order(spec: ModelSpec) -> None:
    spec = resolve(spec, vocab_size=4096)
    assert [(parameter.name, parameter.shape) for parameter in parameters(spec)] == named_shapes(spec)


def test_kinds_state_the_purpose_of_a_parameter() -> None:
    spec = resolve(replace(SMALL, layers=1, attention_bias=True, ffn_bias=True, qk_norm=True))
    kinds = {parameter.name: parameter.kind for parameter in parameters(spec)}
    assert kinds.pop("embedding.weight") == "embedding"
    written = {name for name, kind in kinds.items() if kind == "output"}
    assert written == {"blocks.0.attention.output.weight", "blocks.0.ffn.down.weight"}
    for name, kind in kinds.items():
        assert (kind == "norm") == ("norm" in name)
        assert (kind == "bias") == name.endswith("bias")


def test_a_stack_of_experts_is_marked_as_stacked() -> None:
    spec = resolve(replace(SMALL, layers=1, moe=MoeSpec(shared=1, balance_bias=True)))
    listed = {parameter.name.removeprefix("blocks.0.ffn."): parameter for parameter in parameters(spec)}
    assert {name for name, parameter in listed.items() if parameter.stacked} == {
        "experts.gate",
        "experts.up",
        "experts.down",
    }
    assert listed["router.weight"].kind == "router"
    assert (listed["experts.up"].kind, listed["experts.down"].kind) == ("matrix", "output")
    assert [(buffer.name, buffer.kind) for buffer in buffers(spec)] == [
        ("blocks.0.ffn.router.bias", "balance")
    ]


@pytest.mark.parametrize(
    ("first_dense", "every", "mixtures"),
    [(0, 1, [0, 1, 2, 3, 4, 5, 6]), (3, 1, [3, 4, 5, 6]), (0, 2, [1, 3, 5]), (1, 3, [3, 6])],
)
def test_of_the_layers_after_the_dense_ones_the_last_of_each_group_is_a_mixture(
    first_dense: int, every: int, mixtures: list[int]
) -> None:
    spec = replace(SMALL, layers=7, moe=MoeSpec(first_dense=first_dense, every=every))
    assert [layer for layer in range(7) if is_mixture(spec, layer)] == mixtures
    assert not any(is_mixture(SMALL, layer) for layer in range(7))


def test_resolving_reaches_into_sections() -> None:
    resolved = resolve(replace(SMALL, ffn_dim=48, mla=MlaSpec(), moe=MoeSpec()))
    assert resolved.moe is not None
    assert resolved.moe.ffn_dim == 48
    assert resolved.head_dim == 32 + 16
    assert resolve(resolved) == resolved


small_specs = st.builds(
    ModelSpec,
    layers=st.integers(1, 3),
    dim=st.integers(1, 8).map(lambda n: 24 * n),
    heads=st.sampled_from([1, 2, 3, 4, 6]),
    kv_heads=st.sampled_from([0, 1]),
    head_dim=st.sampled_from([0, 2, 16]),
    ffn_dim=st.integers(0, 50),
    ffn=st.sampled_from(["swiglu", "gelu", "geglu"]),
    vocab_size=st.integers(0, 50),
    tie_embeddings=st.booleans(),
    qk_norm=st.booleans(),
    attention_bias=st.booleans(),
    qkv_bias=st.booleans(),
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
