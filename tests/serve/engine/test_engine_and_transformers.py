"""The engine's texts of published architectures are those of ``transformers.generate``, many requests at once and LongRoPE's switch included."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config

from parity.hf_models import CONFIGS, LONGROPE, PHI3, hf_model, our_model, random_tokens
from phalanx.model.transformer import Transformer
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import Request, Sampling, ServeError, Token

FAMILIES = ("llama", "qwen3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss")
NAMES = {
    config.model_type: name for name, config in reversed(CONFIGS.items()) if config.model_type in FAMILIES
}
TOKENS = 10


def engine(model: Transformer) -> Engine:
    model.requires_grad_(False).eval()
    options = {"pages": 16, "rows": 24, "weights_id": "w"}
    try:
        return Engine(model, model.spec, **options)  # type: ignore[arg-type]
    except (
        ServeError
    ):  # a cap of the scores, or heads of a width for which this machine's attention is refused
        return Engine(model, model.spec, numerics="fast", **options)  # type: ignore[arg-type]


def texts(served: Engine, prompts: list[list[int]], tokens: int = TOKENS) -> dict[str, list[Token]]:
    told: dict[str, list[Token]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        served.submit(Request(str(number), tuple(prompt), tokens, Sampling(temperature=0), top_logprobs=0))
        for one in served.step():
            if isinstance(one, Token):
                told[one.request].append(one)
    while served.busy:
        for one in served.step():
            if isinstance(one, Token):
                told[one.request].append(one)
    return told


def test_every_family_is_among_the_models() -> None:
    assert set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_texts_of_ragged_requests_are_those_of_transformers(family: str) -> None:
    theirs = hf_model(CONFIGS[NAMES[family]]).eval()
    ours = our_model(theirs)
    theirs.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=TOKENS)
    prompts = [random_tokens(ours.spec, 1, length, seed=length)[0].tolist() for length in (1, 5, 17)]
    told = texts(engine(ours), prompts)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids))
        tokens = told[str(number)]
        assert [token.id for token in tokens] == expected[0, len(prompt) :].tolist()
        scores = theirs(expected).logits.log_softmax(-1)[0]
        for place, token in enumerate(tokens, len(prompt) - 1):
            assert token.logprob == pytest.approx(float(scores[place, token.id]), abs=1e-4)


def test_a_text_that_outgrows_longropes_short_factors_beside_others_is_that_of_transformers() -> None:
    config = Phi3Config(
        **PHI3, max_position_embeddings=64, original_max_position_embeddings=12, rope_parameters=LONGROPE
    )
    theirs = hf_model(config).eval()
    theirs.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=TOKENS)
    ours = our_model(theirs)
    # One stays short, one outgrows the short factors, one is long from the beginning.
    prompts = [random_tokens(ours.spec, 1, length, seed=length)[0].tolist() for length in (2, 8, 20)]
    told = texts(engine(ours), prompts)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids))
        assert [token.id for token in told[str(number)]] == expected[0, len(prompt) :].tolist()
