"""The model against `transformers`: the same weights give the same logits and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from model.growing_cache import empty_cache
from parity.hf_models import (
    CONFIGS,
    DEEPSEEK,
    DENSE,
    hf_model,
    in_our_words,
    our_model,
    random_tokens,
)
from phalanx.checkpoint.interop.huggingface.config import hf_config_of, spec_of
from phalanx.checkpoint.interop.huggingface.families.known import FAMILIES
from phalanx.checkpoint.interop.huggingface.names import hf_name
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count, parameters
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.transformer import PredictionAhead
from phalanx.run.kinds.whole_model import resolve

TOLERANCE = 1e-5  # relative to the largest element

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
each_dense_config = pytest.mark.parametrize("config", DENSE.values(), ids=DENSE.keys())


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@each_config
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_those_of_transformers(config: Any, attention: str) -> None:
    theirs = hf_model(config, attention=attention)
    ours = our_model(theirs)
    tokens = random_tokens(ours.spec, batch=2, seq=96)
    with torch.no_grad():
        assert difference(ours(tokens), theirs(tokens).logits) < TOLERANCE


@each_config
def test_every_gradient_is_that_of_transformers(config: Any) -> None:
    theirs = hf_model(config)
    ours = our_model(theirs)
    tokens = random_tokens(ours.spec, batch=2, seq=33)
    cross_entropy(theirs(tokens[:, :-1]).logits, tokens[:, 1:]).backward()
    cross_entropy(ours(tokens[:, :-1]), tokens[:, 1:]).backward()
    expected = in_our_words([(name, value.grad) for name, value in theirs.named_parameters()], config)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        # A bias of the keys shifts every score by the same number: its gradient is rounding noise around zero.
        scale = expected[name.replace(".bias", ".weight")].abs().max()
        assert float((parameter.grad - expected[name]).abs().max() / scale) < TOLERANCE, name


@each_config
def test_decoding_with_the_cache_gives_the_logits_of_transformers(config: Any) -> None:
    theirs = hf_model(config)
    ours = our_model(theirs)
    tokens = random_tokens(ours.spec, batch=2, seq=24)
    cache = empty_cache(ours.spec.layers)
    with torch.no_grad():
        pieces = [ours(piece, cache=cache) for piece in tokens.split([13, 1, 1, 5, 4], dim=1)]
        assert difference(torch.cat(pieces, dim=1), theirs(tokens).logits) < TOLERANCE


@each_dense_config
def test_weights_go_there_and_back_bit_for_bit(config: Any) -> None:
    theirs = hf_model(config)
    ours = our_model(theirs)
    back = hf_model(config, seed=1)
    family = FAMILIES[config.model_type]
    named = {hf_name(name, ours.spec, family): value for name, value in ours.named_parameters()}
    back.load_state_dict(named, strict=False)
    for (name, first), (_, second) in zip(theirs.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(first, second), name


@each_config
def test_parameters_are_those_of_transformers_with_the_same_shapes(config: Any) -> None:
    theirs = in_our_words(hf_model(config).named_parameters(), config)
    spec = spec_of(config.to_dict())
    shapes = {name: tuple(value.shape) for name, value in theirs.items()}
    assert {parameter.name: parameter.shape for parameter in parameters(spec)} == shapes


@each_dense_config
def test_a_config_that_is_read_and_written_describes_the_same_model(config: Any) -> None:
    spec = spec_of(config.to_dict())
    written = partial(hf_config_of, spec, model_type=config.model_type)
    assert spec_of(written()) == spec
    again = type(config).from_dict(written(max_seq_len=config.max_position_embeddings)).to_dict()
    original = config.to_dict()
    # Keys of a model that was built, not of a configuration; tokens that begin, end and fill texts are no part of it.
    ignored = {"architectures", "dtype", "pad_token_id", "use_bidirectional_attention"}
    for key in original.keys() - ignored:
        assert again[key] == original[key], key


def test_a_prediction_ahead_is_that_of_transformers() -> None:
    config = DeepseekV3Config(**DEEPSEEK, attn_implementation="eager")
    theirs = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, config.num_hidden_layers)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    outer = {"hnorm": "hidden_norm", "enorm": "embedding_norm", "eh_proj": "projection", "post_norm": "norm"}
    block = in_our_words(
        (
            (name.replace("mtp_block", "model.layers.0"), value)
            for name, value in theirs.state_dict().items()
            if "mtp_block" in name
        ),
        config,
    )
    weights = {name.replace("blocks.0", "block"): value for name, value in block.items()}
    weights |= {f"{ours}.weight": theirs.get_submodule(name).weight for name, ours in outer.items()}
    spec = spec_of(config.to_dict())
    ours = PredictionAhead(spec)
    ours.load_state_dict(weights)
    hidden, embedded = torch.randn(2, 2, 16, spec.dim, generator=torch.Generator().manual_seed(0)).unbind()
    tables = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(16)[None])
    mask = torch.full((16, 16), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(embedded, hidden, tables, mask, None, None)
        assert difference(ours(hidden, embedded, *rotation(spec, torch.arange(16))), expected) < TOLERANCE


@pytest.mark.parametrize("preset", [name for name, spec in PRESETS.items() if spec.ffn != "gelu"])
def test_a_preset_is_a_model_of_transformers_with_as_many_parameters(preset: str) -> None:
    spec = resolve(PRESETS[preset], vocab_size=4096)
    config = AutoConfig.for_model(**hf_config_of(spec))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count(spec, 1).parameters
