"""Initial weights: the same on every layout, of the documented scales."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.facts.shape import buffers, parameters
from phalanx.model.init import deviation, fill, flat_indices
from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec

SPEC = resolve(
    ModelSpec(layers=8, dim=64, heads=4, vocab_size=100, qk_norm=True, attention_bias=True, ffn_bias=True)
)


def filled(
    parameter: Parameter, spec: ModelSpec = SPEC, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full(parameter.shape, math.nan, dtype=dtype)
    fill(out, parameter, (0,) * len(parameter.shape), spec, seed)
    return out


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and the offset and shape of a box in it, which may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True))
    return shape, starts, sizes


@given(boxes())
def test_flat_indices_are_those_of_the_whole(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, offset, size = box
    indices = torch.arange(math.prod(shape)).view(shape)
    part = indices[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
    assert torch.equal(flat_indices(shape, offset, size, torch.device("cpu")), part)


@given(boxes(), st.integers(0, 2**40), st.sampled_from(["matrix", "output", "embedding", "norm", "bias"]))
def test_a_box_is_filled_with_the_slice_of_the_whole(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], seed: int, kind: str
) -> None:
    shape, offset, size = box
    parameter = Parameter("some.weight", shape, kind)  # type: ignore[arg-type]
    out = torch.full(size, math.nan)
    fill(out, parameter, offset, SPEC, seed)
    part = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    assert torch.equal(out, filled(parameter, seed=seed)[part])


def test_a_tensor_that_is_filled_in_several_chunks_has_no_seams() -> None:
    parameter = Parameter("wide.weight", (5, 600_000), "matrix")
    full_tensor = filled(parameter)
    for row in range(5):
        out = torch.empty(1, 600_000)
        fill(out, parameter, (row, 0), SPEC, 0)
        assert torch.equal(out[0], full_tensor[row])


@given(st.integers(1, 7))
@settings(max_examples=7)
def test_rows_dealt_out_over_ranks_are_those_of_one_rank(ranks: int) -> None:
    for parameter in list(parameters(SPEC))[:20]:
        full_tensor = filled(parameter)
        cuts = [parameter.shape[0] * rank // ranks for rank in range(ranks + 1)]
        rest = (0,) * (len(parameter.shape) - 1)
        pieces = [torch.empty(stop - start, *parameter.shape[1:]) for start, stop in itertools.pairwise(cuts)]
        for start, piece in zip(cuts, pieces, strict=False):
            fill(piece, parameter, (start, *rest), SPEC, 0)
        assert torch.equal(torch.cat(pieces), full_tensor)


def test_each_expert_of_a_stack_is_filled_by_its_place_in_the_whole() -> None:
    # Larger than what is filled at once, so that both ways of cutting a box are taken.
    for shape in ((3, 40, 50), (2, 1100, 1000)):
        parameter = Parameter("blocks.0.ffn.experts.up", shape, "matrix", stacked=True)
        flat = Parameter(parameter.name, (shape[0] * shape[1], shape[2]), "matrix")
        assert torch.equal(filled(parameter).view(flat.shape), filled(flat))
        part = torch.empty(1, shape[1] - 7, 4)
        fill(part, parameter, (1, 7, 5), SPEC, 0)
        assert torch.equal(part, filled(parameter)[1:2, 7:, 5:9])


def test_gains_start_at_one_and_biases_at_zero() -> None:
    moe = replace(SPEC, ffn_bias=False, moe=MoeSpec(balance_bias=True))
    for parameter in (*parameters(SPEC), *buffers(moe)):
        if parameter.kind in ("norm", "bias", "balance"):
            expected = 1.0 if parameter.kind == "norm" else 0.0
            assert torch.equal(filled(parameter), torch.full(parameter.shape, expected))


@pytest.mark.parametrize("init_std", [0.02, 0.5])
def test_matrices_have_the_documented_deviation_and_outputs_a_smaller_one(init_std: float) -> None:
    spec = replace(SPEC, init_std=init_std)
    for kind, expected in {
        "matrix": init_std,
        "embedding": init_std,
        "router": init_std,
        "output": init_std / 4,  # sqrt(2 x 8 layers)
    }.items():
        parameter = Parameter("some.weight", (300, 300), kind)  # type: ignore[arg-type]
        assert deviation(parameter, spec) == pytest.approx(expected)
        assert float(filled(parameter, spec).std()) == pytest.approx(expected, rel=0.02)
        assert abs(float(filled(parameter, spec).mean())) < 0.02 * expected


def test_no_two_parameters_and_no_two_seeds_start_with_the_same_numbers() -> None:
    drawn = [p for p in parameters(SPEC) if p.kind in ("matrix", "output", "embedding")]
    firsts = {tuple(filled(parameter, seed=seed)[0, :8].tolist()) for parameter in drawn for seed in (0, 1)}
    assert len(firsts) == 2 * len(drawn)


def test_the_initial_weights_of_a_run_never_change() -> None:
    # Recorded on purpose: other bits here would make every published run irreproducible.
    digest = hashlib.sha256()
    for parameter in parameters(SPEC):
        digest.update(filled(parameter).numpy().tobytes())
    assert digest.hexdigest() == "f05e0a1f7a9e41a2db8aa20ffb5147207fad66cfe691a09908b93d52370b6e82"


def test_filling_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    filled(next(parameters(SPEC)))
    assert torch.equal(torch.get_rng_state(), before)
