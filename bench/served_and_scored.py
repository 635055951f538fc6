"""Log-probabilities that the engine tells of its tokens, against those that ``phalanx score`` computes of the finished texts.

    python bench/served_and_scored.py RUN_DIR [--requests 8] [--tokens 24]

Requests with prompts of random tokens and lengths are computed together, in fp32 and in bf16; it prints how many log-probabilities have
other bits, and the first product whose rows depend on each other on this machine, if there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.serve.engine.engine import Engine
from phalanx.serve.engine.errors import EngineError
from phalanx.traffic.requests import Request, Sampling, Token
from phalanx.train.score.restored import restored_model
from phalanx.train.score.score import Compute, Scorer

_DTYPES: dict[Compute, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def differing(run_dir: Path, compute: Compute, count: int, tokens: int) -> tuple[int, int, str]:
    """How many of how many log-probabilities differ, and what of the machine's products is not exact."""
    sequence = read_resolved(RunDirectory(run_dir)).train.seq_len
    model, spec, _ = restored_model(run_dir, None, dtype=_DTYPES[compute])
    assert isinstance(model, Transformer), "a model of [model]"
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, sequence - tokens, (count,), generator=generator).tolist()
    options = {"pages": 64 * count, "sequence": sequence, "weights_id": "bench"}
    try:
        engine, inexact = Engine(model, spec, **options), ""
    except EngineError as error:
        engine, inexact = Engine(model, spec, numerics="fast", **options), str(error)
    texts: dict[str, list[int]] = {}
    told: dict[str, list[float]] = {}
    for number, length in enumerate(lengths):
        prompt = torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist()
        name = str(number)
        texts[name], told[name] = prompt, []
        engine.submit(Request(name, tuple(prompt), tokens, Sampling(seed=number), top_logprobs=0))
    while engine.busy:
        for one in engine.step():
            if isinstance(one, Token):
                texts[one.request].append(one.id)
                told[one.request].append(one.logprob)
    scores = Scorer.of_run(run_dir, None, compute).score(list(texts.values()))
    expected = [values[-tokens:].tolist() for values in scores]
    pairs = [
        pair
        for mine, theirs in zip(told.values(), expected, strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    return sum(a != b for a, b in pairs), len(pairs), inexact


def main() -> None:
    """Prints one line for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    for compute in _DTYPES:
        wrong, total, inexact = differing(given.run_dir, compute, given.requests, given.tokens)
        print(f"{compute}: {wrong} of {total} log-probabilities differ{'; ' + inexact if inexact else ''}")


if __name__ == "__main__":
    main()
