"""The engine of `phalanx serve` decodes on a GPU: the host waits for it once a step, and launches do not grow with the texts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.serve.engine import GREEDY, random_model
from null_gpu import counters
from null_gpu.steps import CUDA, waits
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.model_runner import batched_attention
from phalanx_serve.traffic.events import Ended, Request, Token
from phalanx_serve.traffic.scheduler import PAGE

TEXTS, TOKENS, LAYERS = 3, 5, 2


def decoding(dtype: torch.dtype, texts: int = TEXTS, prompt: int = 39) -> Engine:
    """Return an engine whose texts have all been read, and decode."""
    model = random_model(128, LAYERS, dtype).to(CUDA)
    engine = Engine(model, model.spec, pages=64, rows=1024, numerics="fast", weights_id="null")
    for number in range(texts):
        tokens = tuple(token % model.spec.vocab_size for token in range(1, prompt + 1 + number % 3))
        engine.submit(Request(str(number), tokens, TOKENS, GREEDY))
    while engine.statistics().rows_last_step != texts:
        engine.step()
    return engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_texts_decode_to_their_lengths_and_the_host_waits_once_a_step(dtype: torch.dtype) -> None:
    engine = decoding(dtype)
    places: Counter[str] = Counter()
    with waits(places):
        engine.step()
    assert places.total() == 1, places
    outputs = [output for _ in range(TOKENS) for output in engine.step()]
    assert {output.outcome for output in outputs if isinstance(output, Ended)} == {"length"}
    assert sum(isinstance(output, Ended) for output in outputs) == TEXTS
    assert {output.id for output in outputs if isinstance(output, Token)} == {1}


def launches(engine: Engine) -> Counter[str]:
    """Return the kernels and copies of the next step, by name."""
    counters.reset()
    engine.step()
    return counters.kernels() + Counter({"all": counters.on_device()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoding_step_of_many_texts_has_the_launches_of_one_of_a_few(dtype: torch.dtype) -> None:
    few, many = (launches(decoding(dtype, texts)) for texts in (2, 24))
    assert many["all"] == few["all"]
    assert many["triton:_attend_program"] == many["triton:_store_program"] == LAYERS
    assert many["triton:_combine_program"] == 0


def test_the_splits_of_long_texts_are_combined_in_one_launch_a_layer() -> None:
    assert launches(decoding(torch.bfloat16, prompt=700))["triton:_combine_program"] == LAYERS


def test_a_full_page_is_copied_out_of_all_layers_in_a_launch_for_keys_and_one_for_values() -> None:
    engine = decoding(torch.bfloat16, texts=1, prompt=PAGE - 2)
    full, other = launches(engine), launches(engine)
    assert full["all"] == other["all"] + 2


def test_texts_are_attended_one_by_one_with_a_warning_where_the_programs_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("phalanx_serve.kv_cache.decode_attention.differences", lambda *_: ["attention"])
    batched_attention.cache_clear()
    try:
        kernels = launches(decoding(torch.bfloat16))
    finally:
        batched_attention.cache_clear()
    assert kernels["triton:_attend_program"] == kernels["triton:_store_program"] == 0
    assert "other results than PyTorch's: attention" in caplog.text


def launches_of_admission(pages: int) -> int:
    """Return the kernels and copies of the step that admits a text whose prefix of ``pages`` pages is cached."""
    engine = decoding(torch.bfloat16, texts=1, prompt=pages * PAGE + 5)
    while engine.busy:
        engine.step()
    prompt = tuple(range(1, pages * PAGE + 6))
    engine.submit(Request("again", prompt, TOKENS, GREEDY))
    before = engine.statistics().cached_tokens
    kernels = launches(engine)
    assert engine.statistics().cached_tokens - before == pages * PAGE
    return kernels["all"]


def test_a_cached_prefix_of_many_pages_is_copied_in_by_the_launches_of_one_of_a_few() -> None:
    assert launches_of_admission(7) == launches_of_admission(2)
