"""Serving on a device: kernels that keep rows apart, a decode step against the memory's bandwidth, prefill, and vLLM if it is installed."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bench.gpu.rows import rows
from bench.gpu.setting import Report, attempt
from bench.gpu.speed import not_deterministic
from bench.serve.engine import decode_s, prefill_s
from bench.train.step import seconds_of
from phalanx.hardware.local.device import on_gpu, wait_for_device
from phalanx.model.facts.presets import PRESETS
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import ServeError


@dataclass(frozen=True)
class Serving:
    """Sizes of the served model and of its load."""

    model: ModelSpec
    dtype: torch.dtype
    batches: tuple[int, ...]
    prompt: int
    """Tokens of the prompt whose prefill is timed."""
    rows: int
    pages: int
    read_bytes: int
    """Bytes of the sum by which the memory's read bandwidth is measured."""
    steps: int


ON_GPU = Serving(
    model=resolve(PRESETS["llama3-8b"], 128_256),
    dtype=torch.bfloat16,
    batches=(1, 16, 64),
    prompt=8192,
    rows=2048,
    pages=512,
    read_bytes=8 << 30,
    steps=12,
)
STAND_IN = Serving(
    model=resolve(ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, vocab_size=128)),
    dtype=torch.float32,
    batches=(1, 4),
    prompt=96,
    rows=64,
    pages=24,
    read_bytes=1 << 22,
    steps=2,
)


def serve(device: torch.device, report: Report) -> None:
    """Run the parts in the order of their worth: rows, decode and prefill, exact over fast, vLLM."""
    sizes = ON_GPU if on_gpu(device) else STAND_IN
    with not_deterministic():  # as a server computes
        rows(device, report)
        attempt(report, "decode and prefill", device, partial(_rates, sizes, device, report))
        attempt(report, "exact", device, partial(_exact, sizes, device))
    if importlib.util.find_spec("vllm") is None:
        report("vLLM", "not installed here: not compared")
    else:
        attempt(report, "vLLM", device, partial(_vllm, sizes))


def _model(sizes: Serving, device: torch.device) -> Transformer:
    torch.manual_seed(0)
    with device:
        torch.set_default_dtype(sizes.dtype)
        try:
            model = Transformer(sizes.model)
        finally:
            torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False).eval()


def _rates(sizes: Serving, device: torch.device, report: Report) -> dict[str, float]:
    """Return the read bandwidth and prefill rate; report each decode step as soon as it is measured."""
    model = _model(sizes, device)
    embedding = model.embedding.weight.nbytes if model.embedding is not None and model.head is not None else 0
    nbytes = sum(parameter.nbytes for parameter in model.parameters()) - embedding
    words = torch.ones(sizes.read_bytes // 4, device=device)
    words.sum()
    bandwidth = sizes.read_bytes / min(seconds_of(words.sum, device) for _ in range(5))
    del words
    served = _engine(model, sizes)
    for batch in sizes.batches:
        step_s = decode_s(served, batch, sizes.steps)
        finding = {
            "step_ms": step_s * 1e3,
            "tokens_per_s": batch / step_s,
            "of_read_bandwidth": nbytes / step_s / bandwidth,
        }
        report(f"decode, {batch} texts", finding)
    prompt = tuple(number % sizes.model.vocab_size for number in range(sizes.prompt))
    prefill_s(served, prompt)
    wait_for_device(device)
    taken = statistics.median(prefill_s(served, prompt) for _ in range(3))
    return {
        "read_bytes_per_s": bandwidth,
        "weights_bytes": float(nbytes),
        "prefill_tokens_per_s": sizes.prompt / taken,
    }


def _engine(model: Transformer, sizes: Serving, numerics: str = "fast") -> Engine:
    return Engine(
        model,
        sizes.model,
        pages=sizes.pages,
        rows=sizes.rows,
        numerics="exact" if numerics == "exact" else "fast",
        prefix_cache=False,
        weights_id="bench",
    )


def _exact(sizes: Serving, device: torch.device) -> dict[str, object]:
    """Return fast over exact, or the reason if the device has no exact numerics."""
    model, batch = _model(sizes, device), sizes.batches[-1]
    fast_s = decode_s(_engine(model, sizes), batch, sizes.steps)
    try:
        exact = _engine(model, sizes, "exact")
    except ServeError as error:
        return {"batch": batch, "refused": str(error)}
    return {"batch": batch, "exact_over_fast": fast_s / decode_s(exact, batch, sizes.steps)}


def _vllm(sizes: Serving) -> dict[str, object]:
    """Return tokens/s of vLLM for the same shape, weights of its own, and the same texts."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]

    model, made = sizes.model, 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": 2 * sizes.prompt,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    rates: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        name = str(sizes.dtype).removeprefix("torch.")
        engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype=name)
        for batch in sizes.batches:
            prompts = [TokensPrompt(prompt_token_ids=list(range(2, 50))) for _ in range(batch)]
            seconds = []
            for tokens in (1, 1 + made):
                options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                engine.generate(prompts, options, use_tqdm=False)
                begin = time.perf_counter()
                engine.generate(prompts, options, use_tqdm=False)
                seconds.append(time.perf_counter() - begin)
            rates[f"decode_{batch}_tokens_per_s"] = batch * made / (seconds[1] - seconds[0])
    return rates
