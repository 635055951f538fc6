"""Every operation of PyTorch that exact serving and scoring round with has bits that are stated, as those of a training step have."""

from __future__ import annotations

import pytest
import torch

from phalanx.model.transformer import Transformer
from phalanx_serve.engine.model_runner import few_rows
from phalanx_serve.kv_cache.memory import KVFormatName
from phalanx_serve.traffic.events import Request, Sampling
from serve.engine.test_engine import KINDS, built, engine, prompt, run
from serve.kv_cache.test_format import MODELS
from stated_operations import Recorder, not_stated
from train.score.test_score import KINDS as SCORED
from train.score.test_score import run_of, scorer, text

pytestmark = pytest.mark.usefixtures("portable_kernels")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=0.9, seed=2, top_k=20),
    Sampling(temperature=1.3, seed=3, top_p=0.8, min_p=0.05),
)
"""Each kind of choice among the tokens."""


def names_of_service(model: Transformer, kept: KVFormatName = "compute") -> set[str]:
    """Return the operations of texts that are read, continued and sampled, few rows at a time and many."""
    requests = [
        Request(f"r{n}", prompt(n, 5 + 31 * n), 4, sampling, top_logprobs=2, prompt_logprobs=True)
        for n, sampling in enumerate(SAMPLINGS)
    ]
    with Recorder() as recorder:
        run(engine(model, rows=33, kept=kept), requests, [0, 0, 2, 6])
    return recorder.names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_decode_and_sampling_round_with_stated_operations_alone(kind: str, dtype: str) -> None:
    model = built(kind, DTYPES[dtype])
    model.register_forward_hook(lambda *_: None)  # which has few rows, too, go through the modules
    assert " ".join(not_stated(names_of_service(model))) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_do_few_rows_that_pass_a_layer_by_one_kernel(dtype: str) -> None:
    model = built("dense", DTYPES[dtype])
    assert few_rows(model) is not None
    assert " ".join(not_stated(names_of_service(model))) == ""


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("kind", MODELS)
def test_so_do_keys_and_values_of_eight_bits(kind: str, kept: KVFormatName) -> None:
    assert " ".join(not_stated(names_of_service(MODELS[kind], kept))) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCORED)
def test_so_do_scores(kind: str, dtype: str) -> None:
    spec = run_of(kind, DTYPES[dtype])
    with Recorder() as recorder:
        scorer(spec, DTYPES[dtype]).score([text(1, 40), text(2, 9)])
    assert " ".join(not_stated(recorder.names)) == ""
