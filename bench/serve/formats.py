"""Measures what a pack's format costs in perplexity on held-out text: ``python -m bench.serve.formats RUN_DIR``.

The run's newest step is packed in every format, and each pack scores the same held-out sequences by the trainer's arithmetic, fp32 and bf16
packs in their own dtype, fp8 and int8 packs in bf16. Printed are bytes of the file, perplexity, and by how much the mean loss differs from that of
the bf16 pack, in nats a token, with the standard error of the differences of sequences: each sequence is compared with itself.

    python -m bench.serve.formats runs/quickstart-1f3a9c04 --sequences 64
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from bench.running import run_bench
from phalanx.checkpoint.pack.layout import PackFormat
from phalanx.checkpoint.pack.writer import pack
from phalanx.cli.weights.verify_export import held_out_prompts
from phalanx.serve.weights.scorer import scorer_of
from phalanx.train.score.score import Compute

_FORMATS: tuple[tuple[PackFormat, Compute], ...] = (
    ("bf16", "bf16"),
    ("fp32", "fp32"),
    ("fp8", "bf16"),
    ("int8", "bf16"),
)
"""Each format, and what is computed in; the first is what the others are compared with."""

_LONGEST = 1 << 30
"""Tokens of a sequence: all."""


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="a finished run")
    parser.add_argument("--sequences", type=int, default=64)
    arguments = parser.parse_args()
    texts = held_out_prompts(arguments.run_dir, arguments.sequences, _LONGEST)
    base: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for form, compute in _FORMATS:
            path, index = pack(arguments.run_dir, None, Path(folder) / f"{form}.pack", form)
            scores = scorer_of(path, None, compute, stream=False, memory_bytes=None).score(texts)
            losses = [-float(values.double().mean()) for values in scores]
            base = base or losses
            differences = [one - other for one, other in zip(losses, base, strict=True)]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            row = {
                "format": form,
                "computed_in": compute,
                "step": index.step,
                "MB": round(path.stat().st_size / 1e6, 2),
                "sequences": len(texts),
                "perplexity": round(math.exp(statistics.mean(losses)), 4),
                "nats_more_than_bf16": round(statistics.mean(differences), 6),
                "standard_error": round(error, 6),
                "rounding": round(index.rounding.relative_error, 6),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run_bench(main)
