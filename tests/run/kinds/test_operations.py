"""A kind's operations and its table of parts are of the same layer, and both of the model's size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count, outside_blocks
from phalanx.run.kinds import block
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.operations import AttentionCore, MatrixProduct, Norm, Operation, Parameter, Rotation
from phalanx.run.kinds.whole_model import resolve, shares_key_heads, tensor_sizes, tiny
from phalanx.run.layout import layout_problems
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, ParallelSpec, RunSpec

latent = st.builds(
    MlaSpec,
    query_rank=st.sampled_from([0, 12]),
    kv_rank=st.sampled_from([8, 20]),
    nope_head_dim=st.sampled_from([6, 16]),
    rope_head_dim=st.sampled_from([4, 8]),
    value_head_dim=st.sampled_from([6, 14]),
    absorbed=st.booleans(),
)
mixtures = st.builds(
    MoeSpec,
    experts=st.sampled_from([4, 6]),
    ffn_dim=st.sampled_from([0, 16]),
    shared=st.integers(1, 2),
    shared_gate=st.booleans(),
    first_dense=st.integers(0, 1),
    router_bias=st.booleans(),
    every=st.integers(1, 2),
)
models = st.builds(
    ModelSpec,
    layers=st.integers(3, 4),
    dim=st.sampled_from([24, 48]),
    heads=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([0, 1]),
    ffn_dim=st.sampled_from([0, 40]),
    ffn=st.sampled_from(["swiglu", "gelu", "geglu", "swiglu-clamped"]),
    ffn_bias=st.booleans(),
    sinks=st.booleans(),
    score_cap=st.sampled_from([0.0, 30.0]),
    logit_cap=st.sampled_from([0.0, 30.0]),
    vocab_size=st.just(50),
    tie_embeddings=st.booleans(),
    qk_norm=st.booleans(),
    attention_bias=st.booleans(),
    qkv_bias=st.booleans(),
    qk_norm_width=st.sampled_from(["head", "all"]),
    norm_placement=st.sampled_from(["before", "after", "both"]),
    rope_fraction=st.sampled_from([0.5, 1.0]),
    attention_pattern=st.sampled_from([(), ("full", "window"), ("window", "window", "no-position")]),
    window=st.integers(1, 60),
    mla=st.none() | latent,
    moe=st.none() | mixtures,
    mtp_depth=st.integers(0, 2),
).map(resolve)


def multiplied(operations: tuple[Operation, ...]) -> tuple[Parameter, ...]:
    return tuple(
        weight
        for operation in operations
        if isinstance(operation, MatrixProduct)
        for weight in operation.weights
    )


def multiply_adds(operations: tuple[Operation, ...], routed: int) -> int:
    """Multiply-adds of a token in products, from their sizes alone."""
    return sum(
        operation.columns * operation.inner * (routed if operation.rows == "routed" else 1)
        for operation in operations
        if isinstance(operation, MatrixProduct)
    )


def whole(model: ModelSpec) -> tuple[Operation, ...]:
    """Every operation of the model, layer by layer."""
    layers = (block.operations(model, mixed=is_mixture(model, layer)) for layer in range(model.layers))
    ahead = block.prediction_depths(model) * block.prediction_operations(model)
    return (*sum(layers, ()), *block.embedding_operations(model), *block.head_operations(model), *ahead)


@given(models, st.booleans())
@settings(max_examples=20)
def test_a_block_multiplies_once_with_each_of_its_matrices_and_no_other(
    model: ModelSpec, mixed: bool
) -> None:
    table = tuple(block.parts(model, mixed=mixed))
    for part in table:
        assert part.products == (part.kind in ("matrix", "output", "router", "gate"))
    weights = multiplied(block.operations(model, mixed=mixed))
    assert sorted((weight.shape, weight.kind, weight.tensor_dim or -1) for weight in weights) == sorted(
        (part.shape, part.kind, part.tensor_dim or -1) for part in table if part.products
    )


@given(models)
@settings(max_examples=20)
def test_attention_normalizes_with_each_of_its_norms(model: ModelSpec) -> None:
    kind = attention_kind(model)
    used = [
        weight
        for operation in kind.operations(model)
        if isinstance(operation, Norm | Rotation)
        for weight in (operation.weights if isinstance(operation, Norm) else operation.norms)
    ]
    assert used == [part for part in kind.parts(model) if part.kind == "norm"]


@given(models, st.integers(1, 100))
@settings(max_examples=20)
def test_operations_cost_what_is_counted_for_the_model(model: ModelSpec, seq_len: int) -> None:
    counts, operations = count(model, seq_len), whole(model)
    routed = model.moe.per_token if model.moe else 0
    assert multiply_adds(operations, routed) == counts.matmul_parameters
    cores = [core for core in operations if isinstance(core, AttentionCore)]
    full = 6 * sum(core.keys(seq_len) * core.heads * core.widths for core in cores)
    assert full == pytest.approx(counts.attention_flops_per_token_full, abs=0.5)
    assert counts.attention_flops_per_token_causal == counts.attention_flops_per_token_full // 2


@given(models)
@settings(max_examples=20)
def test_products_of_one_input_are_divided_in_the_same_way(model: ModelSpec) -> None:
    for operation in whole(model):
        if isinstance(operation, MatrixProduct):
            assert len({(weight.shape[-1], weight.tensor_dim) for weight in operation.weights}) == 1
            assert "none" in (operation.columns_over, operation.inner_over)


@given(models, st.sampled_from([2, 3, 4, 6, 8]))
@settings(max_examples=20)
def test_what_tensor_ranks_must_divide_is_enough_to_divide_every_matrix_by_heads(
    model: ModelSpec, tensor: int
) -> None:
    if any(size % tensor for _, size in tensor_sizes(model)) or not shares_key_heads(model, tensor):
        return
    for part in (*block.parts(model, mixed=True), *block.parts(model, mixed=False)):
        if part.tensor_dim is not None and not part.stacked:
            assert part.shape[part.tensor_dim] % part.parts_over(tensor) == 0, part


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_miniature_of_a_model_has_its_parameters_by_name_and_can_be_divided(
    preset: str, tensor: int
) -> None:
    model = resolve(PRESETS[preset], 1000)
    small = tiny(model, tensor)
    names = [part.name for part in outside_blocks(model)]
    assert [part.name for part in outside_blocks(small)] == names
    for mixed in (False, True):
        assert [part.name for part in block.parts(small, mixed=mixed)] == [
            part.name for part in block.parts(model, mixed=mixed)
        ]
    spec = replace(RunSpec(model=small), parallel=ParallelSpec(tensor=tensor))
    assert not [problem for problem in layout_problems(spec, 0) if problem.path == "parallel.tensor"]
