"""vTrain's measured steps as blind rows: runs on which no part of the planner was fitted or based.

Bang et al. (arXiv 2312.12391) published with their simulator the measured iterations of Megatron-style training of GPT models on A100:
1,440 on one node and 109 on up to 512 GPUs. Their tables have no license for copies, so none is kept here: a checkout is read.

    git clone https://github.com/VIA-Research/vTrain
    python -m validation.vtrain vTrain                # every 20th single-node row, and all of several nodes
    python -m validation.vtrain vTrain --every 1      # all, so that the choices among layouts on one node are whole

Values that their tables leave open are those of their configurations (``config/validation``) and paper: fp16, full recomputation, 1F1B, a
vocabulary of 51,200, four times the width in the middle of a layer, no sequence parallelism.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from validation.compare import Outcome, Sweep, outcome_of, sweeps
from validation.runs import PublishedRun

TABLES = {"one node": "ground_truth_single.csv", "several nodes": "ground_truth_multi.csv"}
_VOCABULARY = 51_200


def runs_of(lines: Iterable[str], name: str) -> tuple[PublishedRun, ...]:
    """Return the rows of one of vTrain's tables. Raises ``KeyError`` with the column that is missing."""
    return tuple(_run(row, f"vtrain-{name}-{number}") for number, row in enumerate(csv.DictReader(lines)))


def _run(row: dict[str, str], name: str) -> PublishedRun:
    def whole(column: str) -> int:
        return int(row[column])

    layers, dim, seq_len = whole("# layers"), whole("hidden size"), whole("sequence length")
    return PublishedRun(
        id=name,
        source="VIA-Research/vTrain",
        # Narayanan et al., arXiv 2104.04473, equation 2; the output projection is the embedding.
        params_total_b=(layers * (12 * dim**2 + 13 * dim) + (_VOCABULARY + seq_len) * dim) / 1e9,
        layers=layers,
        hidden=dim,
        heads=whole("attention heads"),
        kv_heads=whole("attention heads"),
        ffn=4 * dim,
        mlp="plain",
        vocab=_VOCABULARY,
        learned_positions=True,
        seq_len=seq_len,
        gpu="A100-80GB",
        gpus=whole("# GPUs"),
        tp=whole("tensor parallelism"),
        pp=whole("pipeline parallelism"),
        dp=whole("data parallelism"),
        cp=1,
        vpp=1,
        zero=0,
        micro_batch=whole("micro batch"),
        global_batch_seqs=whole("global batch"),
        precision="fp16",
        recompute="full",
        seq_parallel="no",
        schedule="1f1b",
        step_time_s=float(row["iteration time (ms)"]) / 1e3,
        software="vtrain",
    )


def micro_batch_work(outcome: Outcome) -> str:
    """Return a class of rows by the multiply-adds of one layer on one rank of a micro-batch: small ones wait for the host."""
    run = outcome.run
    work = (run.micro_batch or 1) * (run.seq_len or 0) * 12 * (run.hidden or 0) ** 2 / (run.tp or 1)
    names = ("below 15 G", "15 to 60 G", "60 to 240 G", "above 240 G")
    return names[sum(work >= bound for bound in (15e9, 60e9, 240e9))]


def summary(
    outcomes: Sequence[Outcome], group: Callable[[Outcome], str]
) -> list[tuple[str, int, float, float, float, float]]:
    """Return for each group: rows, median and mean absolute error, median error, and the host's part of the predicted time."""
    table = []
    for name in sorted({group(outcome) for outcome in outcomes}):
        members = [outcome for outcome in outcomes if group(outcome) == name]
        times = [outcome.time for outcome in members if outcome.time is not None]
        if times:
            errors = [time.error for time in times]
            sizes = [abs(error) for error in errors]
            host = fmean(time.terms.get("host", 0.0) / time.predicted_s for time in times)
            table.append((name, len(times), median(sizes), fmean(sizes), median(errors), host))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of both tables, in total and by the work of a micro-batch, and the regret of choices among their layouts."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.vtrain", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("checkout", type=Path, help="a checkout of VIA-Research/vTrain")
    parser.add_argument("--every", type=int, default=20, help="of the rows of one node, every so many")
    chosen = parser.parse_args(arguments)
    for title, file in TABLES.items():
        with (chosen.checkout / "data" / file).open(encoding="utf-8-sig") as lines:
            runs = runs_of(lines, title.replace(" ", "-"))
        outcomes = [outcome_of(run) for run in runs[:: chosen.every if title == "one node" else 1]]
        left_out = {outcome.excluded for outcome in outcomes if outcome.excluded}
        print(f"{title}: {len(outcomes)} of {len(runs)} rows", *sorted(left_out), sep="\n  left out: ")
        groups: list[Callable[[Outcome], str]] = [lambda _: "all", micro_batch_work]
        groups.append(lambda outcome: f"tensor {outcome.run.tp}, micro-batch {outcome.run.micro_batch}")
        for group in groups:
            for name, count, middle, mean, bias, host in summary(outcomes, group):
                print(
                    f"  {name:28} {count:5}  median {middle:6.1%}  mean {mean:6.1%}  bias {bias:+6.1%}  host {host:5.1%}"
                )
        print(f"  {choices(sweeps(outcomes))}")
    return 0


def choices(compared: Sequence[Sweep]) -> str:
    """Return in words the regret of the layouts that the planner would have chosen among several measured ones."""
    if not compared:
        return "no model was measured in several layouts"
    regret, random, tau = (
        fmean(getattr(sweep, name) for sweep in compared) for name in ("regret", "mean_regret", "tau")
    )
    return f"{len(compared)} choices: mean regret {regret:.1%}, at random {random:.1%}, mean of Kendall's tau {tau:+.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
