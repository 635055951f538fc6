"""Rotary embeddings against `transformers`, and the property they exist for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from phalanx.checkpoint.interop.huggingface.config import hf_config_of
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import rotary_temperature
from phalanx.model.layers.attention.rotary import inverse_frequencies, rotate, rotation
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, RopeScalingSpec

CPU = torch.device("cpu")

scalings = st.builds(
    RopeScalingSpec,
    factor=st.floats(1, 64),
    low_freq_factor=st.floats(0.1, 8),
    high_freq_factor=st.floats(0.2, 64),
    original_max_seq_len=st.integers(64, 65536),
)


def spec_with(head_dim: int, theta: float, scaling: RopeScalingSpec | None) -> ModelSpec:
    return resolve(ModelSpec(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, vocab_size=10))


@given(st.integers(1, 64), st.floats(100, 1e7), scalings, st.integers(0, 4))
def test_stretched_frequencies_are_those_of_transformers(
    pairs: int, theta: float, scaling: RopeScalingSpec, band: int
) -> None:
    assume(band == 0 or scaling.high_freq_factor > 1.01 * scaling.low_freq_factor)
    if band == 0:
        scaling = replace(scaling, high_freq_factor=scaling.low_freq_factor)
    spec = spec_with(2 * pairs, theta, scaling)
    config = LlamaConfig.from_dict(hf_config_of(spec))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert attention_factor == 1.0
    torch.testing.assert_close(inverse_frequencies(spec, CPU), expected, rtol=1e-4, atol=0)


yarns = st.builds(
    RopeScalingSpec,
    kind=st.just("yarn"),
    factor=st.floats(1, 64),
    beta_fast=st.floats(2, 64),
    beta_slow=st.floats(0.1, 2),
    original_max_seq_len=st.integers(1024, 65536),
    mscale=st.floats(0.1, 2),
    mscale_all_dim=st.floats(0.1, 2),
)


@given(st.integers(1, 64), st.floats(100, 1e7), yarns, st.booleans())
def test_yarns_frequencies_and_temperature_are_those_of_transformers(
    pairs: int, theta: float, scaling: RopeScalingSpec, plain: bool
) -> None:
    scaling = replace(scaling, mscale=0.0, mscale_all_dim=0.0, truncate=False) if plain else scaling
    spec = replace(spec_with(0, theta, scaling), mla=MlaSpec(rope_head_dim=2 * pairs))
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        "truncate": scaling.truncate,
        **({} if plain else {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}),
    }
    config = LlamaConfig(head_dim=2 * pairs, rope_parameters=parameters)
    expected, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    torch.testing.assert_close(inverse_frequencies(spec, CPU), expected, rtol=1e-4, atol=0)
    assert rotary_temperature(scaling) == pytest.approx(temperature)
    assert rotation(spec, torch.tensor([0]))[0][0, 0] == pytest.approx(temperature)


def test_llama_3s_frequencies_are_kept_blended_and_stretched() -> None:
    spec = resolve(PRESETS["llama3-8b"])
    plain = inverse_frequencies(spec_with(spec.head_dim, spec.rope_theta, None), CPU)
    ratio = inverse_frequencies(spec, CPU) / plain
    assert ratio[0] == 1
    assert ratio[-1] == 1 / 8
    assert int(((ratio > 1 / 8) & (ratio < 1)).sum()) > 3
    assert (ratio.diff() <= 0).all()


@given(st.integers(1, 64), st.floats(1.5, 1e7))
def test_unstretched_frequencies_fall_from_one_as_powers_of_theta(pairs: int, theta: float) -> None:
    spec = spec_with(2 * pairs, theta, None)
    expected = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    torch.testing.assert_close(inverse_frequencies(spec, CPU).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("preset", ["llama3-8b", "llama-1b"])
def test_cosines_and_sines_are_those_of_transformers_far_along_the_sequence(preset: str) -> None:
    spec = resolve(PRESETS[preset])
    positions = torch.tensor([0, 1, 17, 4095, 8192, 131_071])
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(hf_config_of(spec)))
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = rotation(spec, positions)
    # An ulp of a frequency, times the position, is an angle.
    torch.testing.assert_close(ours[0], cos[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(ours[1], sin[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(ours[0][:3], cos[0][:3], rtol=0, atol=1e-5)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 2**31))
def test_the_product_of_a_query_and_a_key_depends_on_their_distance_alone(
    first: int, second: int, shift: int, seed: int
) -> None:
    spec = spec_with(16, 10_000.0, None)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(seed)).unbind()

    def product(at: int, other: int) -> torch.Tensor:
        rotated = [
            rotate(x, *rotation(spec, torch.tensor([position])))
            for x, position in ((query, at), (key, other))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(
        product(first, second), product(first + shift, second + shift), rtol=1e-3, atol=2e-3
    )


def test_a_rotation_keeps_lengths_and_leaves_position_zero_as_it_is() -> None:
    spec = spec_with(8, 10_000.0, None)
    x = torch.randn(2, 3, 5, 8)
    turned = rotate(x, *rotation(spec, torch.arange(5)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_keeps_the_format(dtype: torch.dtype) -> None:
    spec = spec_with(8, 10_000.0, None)
    assert rotate(torch.ones(1, 1, 2, 8, dtype=dtype), *rotation(spec, torch.arange(2))).dtype == dtype
