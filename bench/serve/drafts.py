"""Worth of drafts by a run's predictions ahead: the share that is accepted, and tokens/s over the same engine without.

    phalanx train configs/quickstart.toml --set model.mtp_depth=1
    python -m bench.serve.drafts RUN_DIR [--batches 1,4,16] [--tokens 64] [--rounds 3]
    python -m bench.serve.drafts --made 768,12 --right 0.8

The second is a model of a width and a number of layers that needs no training: its weights count up, and its prediction ahead is wrong behind one token of five.
Prompts are beginnings of Python functions, which the quickstart has seen. Both engines run in turns in one process; a line for each batch, kind of sampling and number of drafts has
the accepted share, the medians of the paired ratios of tokens/s and their range, beside the goal of 1 + 0.7 times the tokens accepted in a step of a text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.running import run_bench
from phalanx.model.transformer import PredictionAhead, Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.train.score import restored_model
from phalanx_serve.engine.engine import Engine
from phalanx_serve.numerics import Numerics
from phalanx_serve.prompt import encode_prompt, load_run_tokenizer
from phalanx_serve.traffic.events import Request, Sampling, Token

PROMPT = "def "
COUNT = 256


def trained_model(run_dir: Path) -> tuple[Transformer, list[list[int]]]:
    """Return a run's newest model, and prompts."""
    model, _, _ = restored_model(run_dir, None, ahead=True)
    assert isinstance(model, Transformer), "drafts are those of [model]"
    tokenizer = load_run_tokenizer(run_dir)
    prompts = [encode_prompt(tokenizer, f"{PROMPT}{word}") for word in WORDS]
    return model, prompts


def counting_model(dim: int, layers: int, right: float) -> Transformer:
    """Return a model of full cost that predicts the next of 256 numbers, and whose draft is right for the share ``right`` of them."""
    spec = ModelSpec(
        layers=layers, dim=dim, heads=dim // 64, kv_heads=dim // 128, vocab_size=4096, mtp_depth=1
    )
    torch.manual_seed(0)
    model = Transformer(resolve(spec)).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        if "norm" in name:
            parameter.fill_(1)
        elif name.endswith(("output.weight", "down.weight")):
            parameter.zero_()  # blocks do not change the vectors
    assert model.embedding is not None
    assert model.head is not None
    count = COUNT
    one_hot = torch.eye(count)
    model.embedding.weight[:, :count] = 0
    model.embedding.weight[:count] = 0
    model.embedding.weight[:count, :count] = one_hot
    model.head.weight.zero_()
    model.head.weight[:count, :count] = one_hot.roll(1, 0)
    module = model.mtp[0]
    assert isinstance(module, PredictionAhead)
    ahead = module.projection.weight
    ahead.zero_()
    wrong = [n for n in range(count) if int((n + 1) * right) == int(n * right)]
    predictions = one_hot.clone()
    predictions[:, wrong] = one_hot[:, wrong].roll(7, 0)
    ahead[:count, :count] = predictions
    return model


@dataclass(frozen=True)
class Served:
    """Counts and seconds of one round."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int
    ids: tuple[tuple[str, int, int], ...]


def round_of(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Served:
    """Generate the texts of all prompts at once."""
    before = engine.drafts()
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), tokens, Sampling(temperature, seed=number)))
    ids: list[tuple[str, int, int]] = []
    steps, begin = 0, time.perf_counter()
    while engine.busy:
        steps += 1
        ids += [(event.request, event.index, event.id) for event in engine.step() if isinstance(event, Token)]
    seconds = time.perf_counter() - begin
    drafted, accepted = (now - then for now, then in zip(engine.drafts(), before, strict=True))
    return Served(seconds, len(ids), steps, drafted, accepted, tuple(sorted(ids)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument("--made", default="768,12", help="width and layers of a model made for the purpose")
    parser.add_argument("--right", type=float, default=0.8, help="share of its drafts that are right")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    options = parser.parse_args()
    numerics: Numerics = options.numerics
    if options.run_dir is None:
        dim, layers = map(int, options.made.split(","))
        model = counting_model(dim, layers, options.right)
        prompts = [list(range(start, start + 8)) for start in range(0, 240, 15)]
    else:
        model, prompts = trained_model(options.run_dir)
    spec = model.spec

    def engine(drafts: int) -> Engine:
        return Engine(
            model,
            spec,
            pages=256,
            numerics=numerics,
            prefix_cache=False,
            drafts=drafts,
            weights_id="bench",
        )

    print(
        f"{spec.layers} layers of width {spec.dim}, {spec.mtp_depth} predictions ahead, {numerics}, {torch.get_num_threads()} threads"
    )
    without, with_drafts = engine(0), engine(spec.mtp_depth)
    for batch in map(int, options.batches.split(",")):
        for temperature in (0.0, 1.0):
            texts = (prompts * -(-batch // len(prompts)))[:batch]
            pairs = [
                tuple(
                    round_of(engine_of, texts, options.tokens, temperature)
                    for engine_of in (without, with_drafts)
                )
                for _ in range(options.rounds + 1)
            ][1:]
            if numerics == "exact":
                assert all(plain.ids == drafted.ids for plain, drafted in pairs), "drafts changed a token"
            ratios = sorted(plain.seconds / drafted.seconds for plain, drafted in pairs)
            last = pairs[-1][1]
            share = last.accepted / max(1, last.drafted)
            # Tokens of a text in a step beyond the first.
            more = last.accepted / (last.tokens - last.accepted)
            print(
                f"B={batch} temperature {temperature:.0f}: {share:.2f} of {last.drafted} drafts accepted; tokens/s with over without "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), goal {1 + 0.7 * more:.2f}; "
                f"steps {last.steps} over {pairs[-1][0].steps}",
                flush=True,
            )


WORDS = (
    "read", "write(self", "__init__(self, name", "get", "_parse(data", "close", "test_", "main(", "set_", "is_", "to_bytes(", "encode(s",
    "update(self, other", "copy", "run(", "find(",
)  # fmt: skip

if __name__ == "__main__":
    run_bench(main)
