"""The table of one hash in ``docs/evidence/parallelism.md``: runs in lanes and context tiles on every legal layout of up to 8 ranks.

For each layout one step of a tiny model, four slots of two micro-batches, over real process groups: losses, gradient norm and weights
must have the bits of one rank.

    python -m bench.reproduce.one_hash                                 # prints the table
    python -m bench.reproduce.one_hash --write docs/evidence/parallelism.md     # and puts it into the document
    python -m bench.reproduce.one_hash --minutes 20                    # begins no layout after that, and prints the numbers of missing ones
    python -m bench.reproduce.one_hash --model "predictions ahead"     # computes no others; may be given several times

Layouts on few ranks come first, in random order. Computed bits are kept in ``--kept``, and computed again only if that file is removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from bench.running import run_bench
from layouts import DENSE, MIXTURE, Outcome, legal_layouts, merged, steps_on_this_rank, tiny
from phalanx.run.layout import layout_problems
from phalanx.run.spec import ModelSpec, ParallelSpec, PrecisionSpec, RunSpec
from ranks import Ranks

MODELS = {
    "dense": dataclasses.replace(DENSE, lanes=4, context_tiles=4),
    "mixture, latent attention": dataclasses.replace(MIXTURE, lanes=4, context_tiles=4),
    "predictions ahead": ModelSpec(
        layers=1,
        dim=32,
        heads=4,
        kv_heads=1,
        ffn_dim=64,
        vocab_size=61,
        mtp_depth=1,
        lanes=4,
        context_tiles=4,
    ),
}
Compute = Literal["fp32", "bf16"]
FORMATS: tuple[Compute, ...] = ("fp32", "bf16")
RANKS = (1, 2, 4, 8)
TOGETHER = 4
"""Layouts for which ranks meet once."""
BEGIN, END = "<!-- one hash: begin -->", "<!-- one hash: end -->"

Case = tuple[str, Compute, int, ParallelSpec]
"""A model, its format of compute, and a layout on so many ranks."""


def spec_of(model: ModelSpec, parallel: ParallelSpec, compute: Compute = "fp32") -> RunSpec:
    """Return a run of four slots of two micro-batches; slots are added apart for any number of expert ranks."""
    spec = tiny(model, parallel)
    train = dataclasses.replace(spec.train, batch_size=8, expert_sums="slot")
    return dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))


def cases() -> Iterator[Case]:
    """Yield every legal layout in both formats; a pipeline without other axes with every schedule."""
    for ranks in RANKS:
        for name, model in MODELS.items():
            for parallel, layout in legal_layouts(model, ranks, made=spec_of):
                others = ("gpipe", "interleaved", "zbv", "dualpipev") if ranks == layout.pipeline > 1 else ()
                for schedule in ("1f1b", *others):
                    scheduled = dataclasses.replace(parallel, pipeline_schedule=schedule)  # type: ignore[arg-type]
                    if not layout_problems(spec_of(model, scheduled), ranks):
                        yield from ((name, compute, ranks, scheduled) for compute in FORMATS)


def several(specs: Sequence[RunSpec]) -> list[Outcome]:
    """Compute a step of each of several runs, one after the other, as one rank of the process group."""
    return [steps_on_this_rank(spec, 1, piece_bytes=1 << 20) for spec in specs]


def bits(pool: Ranks, cases: Sequence[Case]) -> list[str]:
    """Return the hash of the weights of each of ``cases``, all on as many ranks, with the loss and the gradient norm."""
    specs = [spec_of(MODELS[name], parallel, compute) for name, compute, _, parallel in cases]
    by_rank = pool.run(cases[0][2], several, specs)
    runs = [merged(list(outcomes)) for outcomes in zip(*by_rank, strict=True)]
    return [f"{run.weights_sha256} {run.losses[0].hex()} {run.norms[0].hex()}" for run in runs]


def computed(bits_of: dict[str, str], kept: Path, until_s: float, models: Collection[str]) -> dict[str, str]:
    """Compute the bits of every case of ``models`` that ``bits_of`` lacks, and add them; begin no case after ``until_s``."""
    pool = Ranks(timeout_s=3600.0)
    try:
        # Few ranks first, then random order: a limited time gives a sample of all.
        order = random.Random(1).sample(every := list(cases()), len(every))
        left = [case for case in order if case[0] in models and str(case) not in bits_of]
        for ranks in RANKS:
            here = [case for case in left if case[2] == ranks]
            for first in range(0, len(here), TOGETHER):
                batch = here[first : first + TOGETHER]
                if time.monotonic() > until_s:
                    return bits_of
                for case, text in zip(batch, bits(pool, batch), strict=True):
                    bits_of[str(case)] = text
                    with kept.open("a") as file:
                        file.write(json.dumps({"case": str(case), "bits": text}) + "\n")
    finally:
        pool.close()
    return bits_of


def table(bits_of: dict[str, str]) -> tuple[str, bool]:
    """Return a table with a line for each model and format, and True if each has one hash."""
    lines = [
        "| model | lanes, tiles | format | layouts run of those legal on 1, 2, 4, 8 ranks | hashes | weights |",
        "|---|---|---|---|---|---|",
    ]
    every, good = list(cases()), True
    for name, model in MODELS.items():
        for compute in FORMATS:
            own = [case for case in every if case[:2] == (name, compute)]
            hashes = {bits_of[str(case)] for case in own if str(case) in bits_of}
            counts = []
            for ranks in RANKS:
                legal = [case for case in own if case[2] == ranks]
                counts.append(f"{sum(str(case) in bits_of for case in legal)} of {len(legal)}")
            good &= len(hashes) <= 1
            lines.append(
                f"| {name} | {model.lanes}, {model.context_tiles or 'none'} | {compute} | {', '.join(counts)} | {len(hashes)} | "
                f"`{min(hashes, default='')[:12]}` |"
            )
    run = sum(str(case) in bits_of for case in every)
    lines += ["", f"{run} of {len(every)} layouts run, {'' if good else 'NOT '}one hash in every line."]
    return "\n".join(lines), good


def main() -> int:
    """Print or write the table. Return 1 if a model has two hashes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kept", type=Path, default=Path(".cache/one_hash.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    kept: Path = arguments.kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    bits_of = {line["case"]: line["bits"] for line in map(json.loads, lines)}
    until_s = time.monotonic() + 60 * arguments.minutes
    text, good = table(computed(bits_of, kept, until_s, arguments.model or tuple(MODELS)))
    print(text)
    if arguments.write:
        document = arguments.write.read_text()
        before, _, rest = document.partition(BEGIN)
        arguments.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0 if good else 1


if __name__ == "__main__":
    run_bench(main)
