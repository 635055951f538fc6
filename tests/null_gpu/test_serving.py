"""The engine of `phalanx serve` decodes on a GPU, and the host waits for it once a step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.serve.engine import GREEDY, random_model
from null_gpu.steps import CUDA, waits
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import Ended, Request, Token

TEXTS, TOKENS = 3, 5


def decoding(dtype: torch.dtype) -> Engine:
    """Return an engine whose texts have all been read, and decode."""
    model = random_model(128, 2, dtype).to(CUDA)
    engine = Engine(model, model.spec, pages=64, rows=256, numerics="fast", weights_id="null")
    for number in range(TEXTS):
        engine.submit(Request(str(number), tuple(range(1, 40 + number)), TOKENS, GREEDY))
    while engine.statistics().rows_last_step != TEXTS:
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
