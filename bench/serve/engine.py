"""The serving engine against the memory's bandwidth, its own fast mode and ``transformers.generate``, in one run.

    python -m bench.serve.engine [--dim 768 --layers 12] [--modules]

Rows: decode (bytes of the weights over seconds of a step, as a share of the measured read bandwidth, and operations a second), exact over fast in decode and prefill, a cached prefix over
computing its new rows alone, and tokens/s over ``transformers`` for a Llama of the same shape, with weights of its own, if that is installed.
``--modules`` measures only the processor time of a decoding step whose rows go through each layer in one call, over that of the model's modules, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from bench.running import run_bench
from phalanx.hardware.portable import operations
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import Ended, Request, Sampling

GREEDY = Sampling(temperature=0)


def read_bandwidth(nbytes: int = 1 << 30) -> float:
    """Return the bytes/s of a sum over memory, the best of five."""
    words = torch.ones(nbytes // 4)
    return nbytes / min(seconds(words.sum) for _ in range(5))


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def random_model(dim: int, layers: int, dtype: torch.dtype) -> Transformer:
    spec = resolve(ModelSpec(layers=layers, dim=dim, heads=dim // 64, kv_heads=dim // 128, vocab_size=4096))
    torch.manual_seed(0)
    model = Transformer(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype).requires_grad_(False).eval()


def engine(model: Transformer, numerics: Literal["exact", "fast"], rows: int = 512) -> Engine:
    """Return an engine of ``numerics``. Measure it before making one of other numerics: a process has one kind of kernels."""
    if numerics == "fast":
        operations.end()
    return Engine(model, model.spec, pages=512, rows=rows, numerics=numerics, weights_id="bench")


def decode_s(
    served: Engine, batch: int, steps: int = 12, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median seconds, by ``clock``, of a step in which ``batch`` requests decode.

    Raises ``RuntimeError`` with the engine's reason if they end before.
    """
    for number in range(batch):
        served.submit(Request(str(number), tuple(range(number, number + 48)), steps + 40, GREEDY))
    while served.statistics().rows_last_step != batch or served.statistics().running < batch:
        ended = [output for output in served.step() if isinstance(output, Ended)]
        if ended:
            raise RuntimeError(
                f"a request ended before all {batch} decoded: {ended[0].text or ended[0].outcome}"
            )
    taken = statistics.median(seconds(served.step, clock) for _ in range(steps))
    for number in range(batch):
        served.cancel(str(number))
    served.step()
    return taken


def finish(served: Engine) -> None:
    while served.busy:
        served.step()


def prefill_s(served: Engine, prompt: tuple[int, ...]) -> float:
    served.submit(Request("p", prompt, 1, GREEDY))
    return seconds(partial(finish, served))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--modules", action="store_true", help="one call a layer over modules, and nothing else"
    )
    parser.add_argument("--turns", type=int, default=5, help="pairs of exact and fast, or of --modules")
    options = parser.parse_args()
    if options.modules:
        over_modules(options.dim, options.layers, options.turns)
        return
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        # Fast numerics may give a model other products, so each has a model of its own, with the same weights.
        model, another = (random_model(options.dim, options.layers, dtype) for _ in range(2))
        embedding = model.embedding.weight.nbytes if model.embedding is not None else 0
        nbytes = sum(p.nbytes for p in model.parameters()) - embedding
        for batch in (1, 16):
            pairs = [
                (decode_s(engine(model, "exact"), batch), decode_s(engine(another, "fast"), batch))
                for _ in range(options.turns)
            ]
            exact = min(exact for exact, _ in pairs)
            print(
                f"{dtype} decode B={batch}: {exact * 1e3:.1f} ms; of bandwidth {nbytes / exact / bandwidth:.2f}; "
                f"{2 * batch * nbytes / dtype.itemsize / exact / 1e9:.0f} GFLOP/s; {exact_over_fast(pairs)}",
                flush=True,
            )
        prompt = tuple(range(512))
        pairs = [
            (prefill_s(engine(model, "exact"), prompt), prefill_s(engine(another, "fast"), prompt))
            for _ in range(options.turns)
        ]
        exact = min(exact for exact, _ in pairs)
        print(f"{dtype} prefill of {len(prompt)}: {exact * 1e3:.0f} ms; {exact_over_fast(pairs)}", flush=True)
        prefix(model)
        peer(model)


def exact_over_fast(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the speed of exact over fast numerics: the median and range of pairs of seconds, exact and fast, that were measured in turns."""
    ratios = [fast / exact for exact, fast in pairs]
    return f"exact over fast {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs)"


def over_modules(dim: int, layers: int, turns: int) -> None:
    """Print the processor time of a decoding step in one call a layer and by the model's modules, the least of ``turns``, on one thread: waiting threads would count too."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(dim, layers, dtype)
        in_one_call = engine(model, "fast")
        model.blocks["0"].register_forward_hook(
            lambda *_: None
        )  # layers with a hook are computed by their modules
        by_modules = engine(model, "fast")
        for batch in (1, 16):
            rows = [
                [decode_s(served, batch, clock=time.process_time) for served in (in_one_call, by_modules)]
                for _ in range(turns)
            ]
            few, modules = (min(column) * 1e3 for column in zip(*rows, strict=True))
            print(
                f"{dtype}, B={batch}: {few:.1f} ms in one call a layer, {modules:.1f} by modules: {few / modules:.2f}",
                flush=True,
            )


def prefix(model: Transformer, shared: int = 960, new: int = 40, rounds: int = 5) -> None:
    """Print the time of a prompt with a cached prefix over that of its new rows alone: behind a prefix computed just before, and without any."""
    served, other = engine(model, "exact"), engine(model, "exact", rows=shared)
    prefill_s(served, tuple(range(1000)))
    behind, alone = [], []
    for number in range(rounds):
        tail = tuple(range(1024 + number * new, 1024 + (number + 1) * new))
        cached_s = prefill_s(served, (*range(shared), *tail))
        other.submit(Request("p", (*range(number + 1, number + 1 + shared), *tail), 1, GREEDY))
        other.step()
        behind.append(cached_s / seconds(other.step))
        finish(other)
        alone.append(cached_s / prefill_s(other, tail))
    print(
        f"{next(model.parameters()).dtype} prefix of {shared} held, {new} new rows: {statistics.median(behind):.2f} of the same rows behind a "
        f"prefix computed just before, {statistics.median(alone):.2f} of as many rows by themselves",
        flush=True,
    )


def peer(model: Transformer) -> None:
    """Print tokens/s over those of ``transformers.generate``, greedy, for one prompt of 512 and 32 tokens of text."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        print("transformers is not installed: no peer")
        return
    spec, weight = model.spec, next(model.parameters())
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.dim,
        intermediate_size=spec.ffn_dim,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=4096,
    )
    theirs: Any = LlamaForCausalLM(config)
    theirs = theirs.to(weight.dtype).eval()
    prompt = tuple(range(512))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for name, tokens in (("prefill", 1), ("prefill and 32 tokens", 32)):
            ratios = []
            for _ in range(3):
                served = engine(model, "exact")
                served.submit(Request("a", prompt, tokens, GREEDY))
                ours = seconds(partial(finish, served))
                operations.end()
                options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
                peers = seconds(partial(theirs.generate, ids, **options))
                ratios.append(peers / ours)
            print(f"{weight.dtype} {name}: {statistics.median(ratios):.2f} of transformers.generate")


if __name__ == "__main__":
    run_bench(main)
