"""The tables of ``docs/evidence/parallelism.md``: a dense model and a mixture of experts on every legal layout of up to 8 ranks.

For each layout, two steps of a tiny model in fp32 over real process groups: the largest error of the loss and of all
gradients against one process, relative to the largest element of each, and the hash of the weights. Layouts that differ
only in choices of the fleet (copies, shards, stages, schedule) must have one hash.

    python -m bench.reproduce.layouts                                  # prints the tables
    python -m bench.reproduce.layouts --write docs/evidence/parallelism.md      # and puts them into the document
    python -m bench.reproduce.layouts --ranks 1 2 4 --model dense

With 8 ranks on few cores this takes a while. Computed rows are kept in ``--kept``, and computed again only if
that file is removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.running import run_bench
from layouts import DENSE, MIXTURE, Whole, legal_layouts, merged, steps_on_this_rank, tiny, worst_error
from phalanx.run.layout import Layout, layout_of, layout_problems
from phalanx.run.spec import ParallelSpec
from ranks import Ranks

MODELS = {"dense": DENSE, "mixture of experts": MIXTURE}
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
GOAL = 2e-6


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one layout."""

    model: str
    ranks: int
    layout: Layout
    sharding: str
    schedule: str
    mode: str
    error: float
    sha256: str

    @property
    def division(self) -> tuple[object, ...]:
        """The parts of a layout that may reach the bits."""
        layout = self.layout
        return self.model, layout.context, self.mode, layout.tensor, layout.expert, layout.expert_tensor


def cases(ranks: int, model: str) -> Iterator[ParallelSpec]:
    """Yield every legal layout, and on few ranks every schedule and both ways of attending over a divided sequence."""
    for parallel, layout in legal_layouts(MODELS[model], ranks):
        yield parallel
        if layout.ranks == layout.pipeline:
            for schedule in ("gpipe", "interleaved", "zbv", "dualpipev"):
                other = dataclasses.replace(parallel, pipeline_schedule=schedule)  # type: ignore[arg-type]
                if layout.pipeline > 1 and not layout_problems(tiny(MODELS[model], other), ranks):
                    yield other
        if layout.ranks == layout.context > 1:
            yield dataclasses.replace(parallel, context_mode="allgather")


def measure(pool: Ranks, model: str, ranks: int, parallel: ParallelSpec, reference: Whole) -> Row:
    """Measure the row of one layout."""
    outcome = merged(pool.run(ranks, steps_on_this_rank, tiny(MODELS[model], parallel)))
    return Row(
        model=model,
        ranks=ranks,
        layout=layout_of(parallel, ranks),
        sharding=parallel.sharding,
        schedule=parallel.pipeline_schedule if parallel.pipeline > 1 else "",
        mode=parallel.context_mode if parallel.context > 1 else "",
        error=worst_error(outcome, reference),
        sha256=outcome.weights_sha256,
    )


def measure_all(models: list[str], counts: list[int], kept: Path) -> list[Row]:
    """Return all rows; rows kept by a former run are not computed again."""
    kept_rows = (
        {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())}
        if kept.exists()
        else {}
    )
    pool, rows = Ranks(), []
    for model in models:
        reference = merged(pool.run(1, steps_on_this_rank, tiny(MODELS[model], ParallelSpec())))
        for ranks in counts:
            for parallel in cases(ranks, model):
                key = f"{model} {ranks} {parallel}"
                if key in kept_rows:
                    line = kept_rows[key]["row"]
                    rows.append(Row(**{**line, "layout": Layout(**line["layout"])}))
                    continue
                row = measure(pool, model, ranks, parallel, reference)
                rows.append(row)
                with kept.open("a") as file:
                    file.write(json.dumps({"key": key, "row": dataclasses.asdict(row)}) + "\n")
                print(f"{model}, {ranks} ranks, {row.layout.degrees}: {row.error:.1e}", file=sys.stderr)
    pool.close()
    return rows


def summary(rows: list[Row]) -> str:
    """Return a table with a line for each division of the sums: number of layouts, their worst error, their hash."""
    by_division: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_division[row.division].append(row)
    lines = [
        "| model | context | tensor | expert | expert tensor | layouts | ranks | worst error | hashes | weights |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, context, mode, tensor, expert, expert_tensor), same in by_division.items():
        hashes = {row.sha256 for row in same}
        ranks = ", ".join(map(str, sorted({row.ranks for row in same})))
        lines.append(
            f"| {model} | {context} {mode} | {tensor} | {expert} | {expert_tensor} | {len(same)} | {ranks} | "
            f"{max(row.error for row in same):.1e} | {len(hashes)} | `{min(hashes)[:12]}` |"
        )
    worst = max(row.error for row in rows)
    is_reproduced = all(len({row.sha256 for row in same}) == 1 for same in by_division.values())
    verdict = "one hash in every line" if is_reproduced else "NOT one hash in every line"
    lines.append("")
    lines.append(f"{len(rows)} layouts, worst error {worst:.1e} (goal {GOAL:.0e}), {verdict}.")
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    """Return a table of every layout."""
    lines = [
        "| model | ranks | pipeline | replicate | shard | context | tensor | expert | expert tensor | sharding | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        layout = row.layout
        lines.append(
            f"| {row.model} | {row.ranks} | {layout.pipeline} {row.schedule} | {layout.replicate} | {layout.shard} | "
            f"{layout.context} {row.mode} | {layout.tensor} | {layout.expert} | {layout.expert_tensor} | {row.sharding} | "
            f"{row.error:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print or write the tables. Return 1 if an error is above the goal or hashes differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--kept", type=Path, default=Path(".cache/layouts.jsonl"))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    arguments.kept.parent.mkdir(parents=True, exist_ok=True)
    rows = measure_all(arguments.model or list(MODELS), arguments.ranks, arguments.kept)
    text = f'{summary(rows)}\n\n<details markdown="1"><summary>Every layout</summary>\n\n{details(rows)}\n\n</details>'
    print(summary(rows))
    if arguments.write:
        document = arguments.write.read_text()
        before, _, rest = document.partition(BEGIN)
        arguments.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    hashes = {row.division: row.sha256 for row in rows}
    good = all(row.error <= GOAL and hashes[row.division] == row.sha256 for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    run_bench(main)
