"""The planner for inference against published services: errors by family, raw and after one factor for each stack.

    python -m bench.serve.planner

The planner has no constant that was fitted to these rows. A row's factor is the median of measured / predicted of the *other* rows of its stack
that are not held out (of its family if its stack has no other). Held out is a quarter of the rows, by the first byte of the SHA-256
of a row's name: the rule is fixed, and no factor sees them. Rows whose batch or lengths nobody has published (GB200, GB300,
InferenceX, vLLM's 2.2 k tokens/s on H200) cannot be predicted and are left out.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from bench.running import run_bench
from phalanx.hardware.catalog import cluster
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx_plan.serving.step_cost import Division, ServingStep, step_s, tokens_per_s

ROWS = Path(__file__).parents[2] / "validation" / "data" / "published_serving.csv"
Row = dict[str, str]


def is_held_out(row: Row) -> bool:
    """Return True for a quarter of all names."""
    return hashlib.sha256(row["name"].encode()).digest()[0] % 4 == 0


def predicted(row: Row) -> float:
    """Return the planner's prediction, in the row's unit."""
    rows, kept_tokens = float(row["rows"]), float(row["held"])
    if row["family"] == "streaming":  # OPT-30B in 16 bits, over the host link that FlexGen's machine reached
        return tokens_per_s(rows, 60e9, 12e9)
    place = cluster(row["cluster"])
    step = ServingStep(
        resolve(PRESETS[row["model"]]),
        place,
        Division(1, int(row["ranks"])),
        row["format"],
        rows,
        kept_tokens,
        prefill=row["family"] == "prefill",
    )
    return place.per_node * rows / step_s(step, overlap=row["overlap"] == "yes")


def factor(row: Row, rows: Iterable[tuple[Row, float]]) -> float:
    """Return measured over predicted of the other rows that are not held out."""
    others = [
        (other, float(other["measured"]) / value)
        for other, value in rows
        if other is not row and not is_held_out(other) and other["family"] == row["family"]
    ]
    mine = [ratio for other, ratio in others if other["stack"] == row["stack"]]
    ratios = mine or [ratio for _, ratio in others]
    return median(ratios) if ratios else 1.0


def main() -> None:
    """Print all rows, medians by family, and the fleet of DeepSeek's day."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with ROWS.open(newline="") as file:
        rows = [(row, predicted(row)) for row in csv.DictReader(file)]
    errors: dict[str, list[tuple[float, float, bool]]] = {}
    print(f"{'row':24} {'measured':>10} {'predicted':>10} {'raw':>8} {'factored':>9}")
    for row, value in rows:
        measured = float(row["measured"])
        raw, after = value / measured - 1, value * factor(row, rows) / measured - 1
        is_unseen = is_held_out(row)
        errors.setdefault(row["family"], []).append((abs(raw), abs(after), is_unseen))
        print(
            f"{row['name']:24} {measured:10,.4g} {value:10,.4g} {raw:+8.1%} {after:+9.1%}{' held out' if is_unseen else ''}"
        )
    for family, family_errors in (
        *errors.items(),
        ("all", [each for some in errors.values() for each in some]),
    ):
        raw_median, after_median = (median(each[place] for each in family_errors) for place in (0, 1))
        print(
            f"{family}: median error raw {raw_median:.1%} (goal 25 %), after one factor {after_median:.1%} (goal 12 %)"
        )
    unseen = [each for some in errors.values() for each in some if each[2]]
    if unseen:
        print(
            f"held out ({len(unseen)}): raw {median(each[0] for each in unseen):.1%}, factored {median(each[1] for each in unseen):.1%}"
        )
    days = (608e9 / 73.7e3 + 168e9 / 14.8e3) / 86_400
    print(f"DeepSeek's fleet: {days:.1f} node-days, published 226.75: {days / 226.75 - 1:+.2%}")


if __name__ == "__main__":
    run_bench(main)
