"""Measures what keys and values of eight bits cost: the change of perplexity on held-out text, of each token's log-probability, and the bytes of a token.

    python -m bench.serve_kept RUN_DIR [--sequences 16] [--tokens 256]

Each format reads the same held-out sequences as prompts (fast numerics, nothing cached), so the only difference is what attention reads.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.weights.verify_export import held_out_prompts
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.serve.engine.engine import Engine
from phalanx.serve.engine.pages.kept import KeptName
from phalanx.traffic.pages import PAGE
from phalanx.traffic.requests import PromptScored, Request
from phalanx.train.score.restored import restored_model

FORMATS: tuple[KeptName, ...] = ("compute", "int8", "fp8")


def scored(engine: Engine, texts: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability of every token of the texts after the first."""
    found: list[float] = []
    for number, text in enumerate(texts):
        engine.submit(Request(str(number), tuple(text), 1, prompt_logprobs=True))
        while engine.busy:
            found += [
                one for told in engine.step() if isinstance(told, PromptScored) for one in told.logprobs
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    model, spec, step = restored_model(given.run_dir, None)
    assert isinstance(model, Transformer), "pages are those of [model]"
    sequence = read_resolved(RunDirectory(given.run_dir)).train.seq_len
    texts = held_out_prompts(given.run_dir, given.sequences, given.tokens)
    exact: list[float] = []
    for form in FORMATS:
        engine = Engine(
            model,
            spec,
            pages=sequence // PAGE + 2,
            numerics="fast",
            prefix_cache=False,
            sequence=sequence,
            kept=form,
            weights_id="bench",
        )
        found = scored(engine, texts)
        exact = exact or found
        moved = sorted(abs(one - other) for one, other in zip(found, exact, strict=True))
        perplexity = math.exp(-statistics.fmean(found))
        print(
            f"{form}: {engine.page_bytes // PAGE:,} bytes a token; perplexity {perplexity:.4f} "
            f"({perplexity / math.exp(-statistics.fmean(exact)) - 1:+.3%}) over {len(found):,} tokens of step {step}; "
            f"log-probabilities moved by {statistics.fmean(moved):.1e} in the mean, {moved[-1]:.1e} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
