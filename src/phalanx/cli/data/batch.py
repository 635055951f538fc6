"""``phalanx data show RUN_DIR --step N``: the samples of a step as text, cut to a screen."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.cli.data.order import data_origin, read_data_run
from phalanx.cli.errors import demand_folder, explained
from phalanx.data.errors import DataError
from phalanx.data.origin.show import ShownSample, show_batch
from phalanx.data.origin.where import DataOrigin
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Event, LossSpike, NonFinite, Step
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.spec import RunSpec

_NARROWEST = 20
_FAR_BEFORE = 1000
"""So many steps before the one that is asked for, nothing is looked for in the event stream any more: more are not rolled back."""


def show_step(run: Path, step: int, slot: int | None, *, as_json: bool) -> None:
    """Prints the samples of ``step``, a line of text each; of a child run's early steps, those of the parent that did them."""
    demand_folder(run)
    with explained(DataError, RunDirectoryError, CheckpointError):
        owner, spec, origin = _owner_of(run, step)
        _, index = read_data_run(owner, ())
        if step > spec.train.steps:
            raise click.ClickException(
                f"{owner} ends after step {spec.train.steps:,}; give a step up to that"
            )
        shown = show_batch(spec, index, step, slot, origin)
    fate = _fate(RunDirectory(owner), step)
    if as_json:
        samples = [_as_json(sample) for sample in shown]
        click.echo(json.dumps({"run": str(owner), "step": step, "fate": fate, "samples": samples}))
        return
    if owner != run:
        click.echo(f"step {step:,} was done by the run that this one goes on from: {owner}")
    if fate:
        click.echo(fate)
    width = shutil.get_terminal_size().columns
    for sample in shown:
        click.echo(_where(sample))
        click.echo(f"  {_cut(sample, max(width - 2, _NARROWEST))}")


def _owner_of(run: Path, step: int) -> tuple[Path, RunSpec, DataOrigin]:
    """The run that did ``step`` in the line that ends with ``run``, with its run file and its place in the data at its own beginning."""
    while True:
        if not RunDirectory(run).run_file.exists():
            raise RunDirectoryError(f"{run} is no run directory: --step is about one that has been started")
        spec, _ = read_data_run(run, ())
        origin = data_origin(spec)
        if step > origin.step:
            return run, spec, origin
        run = Path(spec.checkpoint.init_from).parent.parent


def _fate(directory: RunDirectory, step: int) -> str:
    """A sentence on what became of the step, if that was out of the ordinary; empty if not, or if there is no event stream."""

    def counts(event: Event) -> bool:
        body = event.body
        if isinstance(body, Step):
            return body.step < step - _FAR_BEFORE
        return isinstance(body, LossSpike | NonFinite) and body.step == step

    try:
        found = newest_event(directory.events, counts)
    except EventLogError:
        return ""
    body = None if found is None else found.body
    if isinstance(body, NonFinite):
        done = (
            "it was skipped, and these samples changed no weight"
            if body.skipped
            else "the run ended before it"
        )
        return f"step {step:,} was not finite; {done}: {body.what}"
    if not isinstance(body, LossSpike):
        return ""
    done = {
        "continue": "it was applied",
        "skip": "these samples were left out",
        "stop": "the run ended before it",
    }[body.action]
    worst = f"; the largest loss is that of slot {body.slot}, {body.slot_loss:.4g}" if body.slot_loss else ""
    return f"step {step:,} was a spike; {done}: loss {body.loss:.4g}, usual {body.typical_loss:.4g}{worst}"


def _where(sample: ShownSample) -> str:
    read, documents = sample.reading, sample.documents
    source = f"{read.source} " if read.source else ""
    of = ""
    if documents is not None:
        of = (
            f", document {documents[0]}"
            if len(documents) == 1
            else f", documents {documents[0]} to {documents[-1]}"
        )
    tokens = f"{sample.record.tokens:,} tokens"
    return click.style(
        f"slot {read.slot} sample {read.sample} {source}record {read.record} (epoch {read.epoch}){of}, {tokens}",
        bold=True,
    )


def _cut(sample: ShownSample, width: int) -> str:
    """The text in one line: line breaks and what a terminal would obey are spelled, and the middle of what is too long is left out."""
    text = "".join(piece.text for piece in sample.record.pieces)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 3]} … {text[-(kept // 3) :]}"


def _as_json(sample: ShownSample) -> dict[str, object]:
    documents = None if sample.documents is None else list(sample.documents)
    text = "".join(piece.text for piece in sample.record.pieces)
    return {
        **asdict(sample.reading),
        "documents": documents,
        "tokens": sample.record.tokens,
        "padding": sample.record.padding,
        "text": text,
    }
