"""Generation: the same tokens as without a cache, reproducible, from a run directory."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.saved_models import save_models
from model.initialized import initialized
from phalanx.checkpoint.format.errors import MismatchError, NoSuchStepError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.layers.moe import routers
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx_serve.generate import generate, load_model

# Large weights, so that the likeliest token is likelier by far more than rounding.
SPEC = resolve(ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=50, qk_norm=True, init_std=0.5))


MODEL = initialized(SPEC, 0)


MIXTURE = resolve(
    ModelSpec(
        layers=2,
        dim=32,
        heads=4,
        vocab_size=50,
        init_std=0.5,
        mla=MlaSpec(kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=10),
        moe=MoeSpec(experts=4, ffn_dim=16, shared=1, first_dense=1, score="sigmoid", balance_bias=True),
        mtp_depth=1,
    )
)


def biased_mixture() -> Transformer:
    """A mixture of experts whose balance bias has moved."""
    model = initialized(MIXTURE)
    for number, (_, router) in enumerate(routers(model)):
        assert router.bias is not None
        # Not exact in bf16.
        router.bias.copy_(torch.tensor([0.1, -0.3, 0.7, 0.0]) + number / 3)
    return model


def make_run(run_dir: Path, steps: dict[int, Transformer], spec: ModelSpec = SPEC) -> Path:
    run_dir.mkdir()
    (run_dir / "run.toml").write_text(tomli_w.dumps({"model": to_table(spec)}))
    save_models(run_dir / "checkpoints", steps)
    return run_dir


def same(one: Transformer, other: Transformer) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def damage(run_dir: Path, step: int) -> None:
    path = DiskTier(run_dir / "checkpoints").folder(step) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


prompts = st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=1, max_size=12)


# Decoding


@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dense", "latent attention, mixture"])
@given(prompt=prompts, seed=st.integers(0, 3))
@settings(max_examples=20)
def test_greedy_generation_with_the_cache_is_that_of_recomputing_everything(
    spec: ModelSpec, prompt: list[int], seed: int
) -> None:
    model = initialized(spec, seed)
    text = list(prompt)
    with torch.no_grad():
        for _ in range(16):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert list(generate(model, prompt, tokens=16, temperature=0)) == text[len(prompt) :]


@given(prompts, st.integers(0, 2**63 - 1))
@settings(max_examples=20)
def test_a_seed_gives_the_same_text_again(prompt: list[int], seed: int) -> None:
    first, second = (list(generate(MODEL, prompt, tokens=10, seed=seed)) for _ in range(2))
    assert first == second


def test_other_seeds_give_other_texts() -> None:
    texts = {tuple(generate(MODEL, [1], tokens=20, temperature=2.0, seed=seed)) for seed in range(10)}
    assert len(texts) == 10


def test_a_longer_text_begins_as_a_shorter_one_with_the_same_seed() -> None:
    long = list(generate(MODEL, [1, 2], tokens=20, seed=3))
    assert list(generate(MODEL, [1, 2], tokens=7, seed=3)) == long[:7]


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(generate(MODEL, [1], tokens=5))
    assert torch.equal(torch.get_rng_state(), before)


@given(prompts)
@settings(max_examples=10)
def test_the_best_token_alone_is_greedy_at_any_temperature(prompt: list[int]) -> None:
    greedy = list(generate(MODEL, prompt, tokens=10, temperature=0))
    assert list(generate(MODEL, prompt, tokens=10, temperature=3.0, top_k=1)) == greedy
    assert list(generate(MODEL, prompt, tokens=10, temperature=3.0, top_p=1e-9)) == greedy
    assert list(generate(MODEL, prompt, tokens=10, temperature=1e-9)) == greedy


def test_generation_ends_before_a_stop_token() -> None:
    text = list(generate(MODEL, [1], tokens=20, seed=5))
    stop = text[8]
    assert list(generate(MODEL, [1], tokens=20, seed=5, stop={stop})) == text[: text.index(stop)]


def test_tokens_come_one_by_one() -> None:
    stream = generate(MODEL, [1], tokens=10**5, temperature=0)
    assert next(stream) == next(generate(MODEL, [1], tokens=1, temperature=0))


def test_whoever_takes_the_tokens_may_still_compute_gradients() -> None:
    stream = generate(MODEL, [1], tokens=3)
    next(stream)
    assert torch.is_grad_enabled()


# Requests that cannot be met


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 50], {}, "token id 50 is outside the model's vocabulary of 50"),
        ([-1], {}, "token id -1"),
        ([1], {"tokens": 0}, "tokens = 0"),
        ([1], {"temperature": -0.1}, "temperature = -0.1"),
        ([1], {"temperature": math.nan}, "temperature = nan"),
        ([1], {"top_k": -1}, "top_k = -1"),
        ([1], {"top_p": 0.0}, "top_p = 0.0"),
        ([1], {"top_p": 1.1}, "top_p = 1.1"),
        ([1] * 9, {"context": 12}, "a prompt of 9 tokens and 4 new ones do not fit into a context of 12"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_computed(
    prompt: list[int], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(MODEL, prompt, **{"tokens": 4, **options})  # type: ignore[arg-type]


def test_a_model_whose_latent_attention_is_absorbed_still_is_when_it_has_generated() -> None:
    # Generating takes the form with fewer operations, and the model is the caller's, to train on or to compare.
    assert MIXTURE.mla is not None
    model = initialized(replace(MIXTURE, mla=replace(MIXTURE.mla, absorbed=True))).requires_grad_(False)
    tokens = torch.arange(40)[None]
    before = model(tokens)
    assert len(list(generate(model, [1, 2, 3], tokens=2))) == 2
    assert torch.equal(model(tokens), before)


def test_a_text_may_fill_its_context_exactly() -> None:
    assert len(list(generate(MODEL, [1] * 8, tokens=4, context=12))) == 4


# Run directories


def test_the_newest_checkpoint_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", {1: initialized(SPEC, 1), 12: initialized(SPEC, 12), 3: initialized(SPEC, 3)}
    )
    model, spec = load_model(run)
    assert spec == SPEC
    assert same(model, initialized(SPEC, 12))


def test_a_step_may_be_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: initialized(SPEC, 1), 2: initialized(SPEC, 2)})
    assert same(load_model(run, 1)[0], initialized(SPEC, 1))
    with pytest.raises(NoSuchStepError, match="committed: "):
        load_model(run, 7)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", {1: initialized(SPEC, 1), 2: initialized(SPEC, 2)})
    damage(run, 2)
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(run)
    assert same(model, initialized(SPEC, 1))
    assert "step 2 cannot be read and is skipped" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: initialized(SPEC, 1)})
    damage(run, 1)
    with pytest.raises(RunDirectoryError, match=r"none of the steps \[1\] can be read"):
        load_model(run)


def test_weights_are_rounded_to_the_format_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: MODEL})
    model, _ = load_model(run, dtype=torch.bfloat16)
    for ours, loaded in zip(MODEL.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), loaded)
    assert len(list(generate(model, [1, 2, 3], tokens=5))) == 5


def test_a_loaded_model_asks_for_no_gradients(tmp_path: Path) -> None:
    model, _ = load_model(make_run(tmp_path / "run", {1: MODEL}))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_what_a_run_directory_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        load_model(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(RunDirectoryError, match=r"phalanx import .* --out RUN_DIR"):
        load_model(tmp_path)
    (tmp_path / "run.toml").write_text("[model]\nlayers = 2\n")
    with pytest.raises(RunDirectoryError, match="vocab_size is 0"):
        load_model(tmp_path)
    (tmp_path / "run.toml").write_text(tomli_w.dumps({"model": to_table(SPEC)}))
    with pytest.raises(RunDirectoryError, match="no folder checkpoints"):
        load_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunDirectoryError, match="no checkpoint is committed"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_comes_back_with_its_balance_and_without_predictions_ahead(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    original = biased_mixture()
    loaded, spec = load_model(make_run(tmp_path / "run", {3: original}, MIXTURE), dtype=dtype)
    assert spec.mtp_depth == len(loaded.mtp) == 0
    expected = original.state_dict()
    for name, value in loaded.state_dict().items():
        wanted = torch.float32 if name.endswith("router.bias") else dtype
        assert torch.equal(value, expected[name].to(wanted)), name
    assert list(generate(loaded, [1, 2], tokens=4))


def test_a_run_file_of_another_model_is_refused_not_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: MODEL})
    text = (run / "run.toml").read_text().replace("ffn_dim = 128", "ffn_dim = 64")
    (run / "run.toml").write_text(text)
    with pytest.raises(MismatchError, match="ffn"):
        load_model(run)
