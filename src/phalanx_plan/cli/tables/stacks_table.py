"""The table of ``phalanx plan --stacks``: software that can be planned for, and the published runs that are known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.table import Table

from phalanx.cli.output import text_console
from phalanx_plan.evidence.learned import learned
from phalanx_plan.search.query import OWN
from phalanx_plan.workload.software import SOFTWARE, STACKS


def print_stacks(*, as_json: bool) -> None:
    """Prints every name that ``--stack`` takes, as a table or as a list of what is known of dense models and of mixtures."""
    names = tuple(dict.fromkeys((OWN, *SOFTWARE, *STACKS)))
    if as_json:
        known = {name: [asdict(one) for one in learned().software if one.software == name] for name in names}
        unseen = [asdict(one) for one in learned().kinds if one.kind == "never"]
        click.echo(json.dumps({"stacks": known, "without_runs": unseen}))
        return
    table = Table()
    for column in ("stack", "models", "accelerators, published runs of models", "left-out error", "P5-P95"):
        table.add_column(column, justify="left", overflow="fold")
    for name in names:
        for row in _rows(name):
            table.add_row(name, *row)
    text_console().print(table)


def _rows(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Kind of models, runs, error and band, of dense models and of mixtures; one row of a stack without runs."""
    known = [record for record in learned().software if record.software == name]
    for record in known:
        runs = ", ".join(f"{key} {on.runs} of {on.models}" for key, on in record.accelerators.items())
        low, high = record.ratios[0] - 1, record.ratios[-1] - 1
        kind = "mixtures" if record.mixture else "dense"
        yield kind, runs, f"{record.left_out_error:.0%}", f"{low:+.0%} to {high:+.0%}"
    if not known:
        unseen = learned().kind("never", mixture=False)
        low, high = unseen.ratios[0] - 1, unseen.ratios[-1] - 1
        yield (
            "any",
            "none: as software that was never seen",
            f"{unseen.left_out_error:.0%}",
            f"{low:+.0%} to {high:+.0%}",
        )
