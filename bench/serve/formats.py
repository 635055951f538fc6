"""Cost of a pack's format in perplexity on held-out text: ``python -m bench.serve.formats RUN_DIR``.

The run's newest step is packed in every format, and each pack scores the same held-out sequences by the trainer's arithmetic, fp32 and bf16
packs in their own dtype, fp8 and int8 packs in bf16. The bench prints the bytes of the file, the perplexity, and the difference of the mean loss from that of
the bf16 pack, in nats a token, with the standard error of the differences of sequences: each sequence is compared with itself.

    python -m bench.serve.formats runs/quickstart-1f3a9c04 --sequences 64
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.common.small_run import SmallRun
from bench.running import run_bench
from phalanx.checkpoint.pack.layout import PackFormat
from phalanx.checkpoint.pack.writer import pack
from phalanx.train.score import Compute
from phalanx_serve.verify import held_out_prompts
from phalanx_serve.weights.open_model import scorer_of
from tiny_runs import make_dataset

_FORMATS: tuple[tuple[PackFormat, Compute], ...] = (
    ("bf16", "bf16"),
    ("fp32", "fp32"),
    ("fp8", "bf16"),
    ("int8", "bf16"),
)
"""Each format, and the format of computation; the others are compared with the first."""

_LONGEST = 1 << 30
"""Tokens of a sequence: all."""


def trained(folder: Path) -> Path:
    """Train a tiny model in ``folder``, and return its run directory."""
    run = SmallRun(
        "formats", str(make_dataset(folder / "data")), steps=4, seq_len=64, layers=2, dim=64, ffn_dim=128
    )
    subprocess.run(run.command(folder), check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_dir", type=Path, nargs="?", help="a finished run; by default a tiny one is trained first"
    )
    parser.add_argument("--sequences", type=int, default=64)
    arguments = parser.parse_args()
    base: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = arguments.run_dir or trained(Path(folder))
        texts = held_out_prompts(run_dir, arguments.sequences, _LONGEST)
        for form, compute in _FORMATS:
            path, index = pack(run_dir, None, Path(folder) / f"{form}.pack", form)
            scores = scorer_of(path, None, compute, stream=False, memory_bytes=None).score(texts)
            losses = [-float(values.double().mean()) for values in scores]
            base = base or losses
            differences = [loss - base_loss for loss, base_loss in zip(losses, base, strict=True)]
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
