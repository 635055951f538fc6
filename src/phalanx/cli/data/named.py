"""``phalanx data prepare FILES`` in portions: files that are named, prepared as a recipe is, by any number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from phalanx.cli.data.notices import lines_of_links
from phalanx.cli.data.recipe import carried_out, report
from phalanx.cli.data.workers import ChosenWorkers
from phalanx.cli.errors import explained
from phalanx.data.errors import DataError
from phalanx.data.portions.drive import place_named_files
from phalanx.data.portions.planning.named_files import NamedFilesPlan, recipe_of_files
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.data.preparing.corpus import CORPORA
from phalanx.store.errors import StoreError


def prepare_in_portions(
    named: Sequence[str],
    out: str,
    output: OutputRecipe,
    workers: ChosenWorkers,
    *,
    text_field: str | None,
    on_bad: Literal["stop", "skip"],
    as_text: bool,
    as_json: bool,
) -> None:
    """Prepare what is named into ``out``, a folder or a URL, and say what was read as what and what was left out."""
    corpus = next((one for one in named if one in CORPORA and not Path(one).exists()), None)
    if corpus is not None:
        raise click.UsageError(
            f"{corpus} is a corpus of this machine that one process prepares in a moment: leave out --workers and the like, and for a store "
            f"bring the finished dataset there (phalanx data copy FOLDER {out if '://' in out else 'URL'})"
        )
    recipe = recipe_of_files(named, output, text_field=text_field, on_bad=on_bad, as_text=as_text)
    with explained(DataError, StoreError):
        place, found = place_named_files(named, recipe, out)
        _say_left_out(found)
        prepared = carried_out(place, workers, quiet=as_json)
    by_format = Counter(map(str, found.plan.formats))
    facts = {
        "xz_bits_per_byte": None,
        "read": {form: {"files": count} for form, count in sorted(by_format.items())},
        "not_read": [str(path) for path in (*found.aside, *found.linked)],
        "left_out": [str(bad.path) for bad in found.left_out],
        "left_out_count": len(found.left_out) + prepared.counts.get("dropped: bad", 0),
    }
    report(out, prepared, facts, as_json=as_json)
    if as_json:
        return
    files = ", ".join(f"{count:,} {form}" for form, count in sorted(by_format.items()))
    click.echo(f"  of {sum(by_format.values()):,} files: {files}")
    if found.aside:
        click.echo(
            f"  not read, since they describe data beside them: {', '.join(map(str, found.aside[:3]))}"
        )
    for line in lines_of_links(found.linked):
        click.echo(f"  {line}")


def _say_left_out(found: NamedFilesPlan) -> None:
    for bad in found.left_out:
        click.echo(f"left out: {bad}", err=True)
    for path in found.arrays:
        say_array(path)


def say_array(path: Path) -> None:
    """Say what to do with a file whose rows stand in one JSON array."""
    click.echo(
        f"note: {path} is one JSON array, read as the text that it is; for its rows: jq -c '.[]' {path} > rows.jsonl",
        err=True,
    )
