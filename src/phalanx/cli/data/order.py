"""The data that a run reads, and when, before or after it is trained.

The commands are ``phalanx data mixture``, ``order`` and ``where``, and ``phalanx data show RUN_DIR --step
N``.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click
import msgspec

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import demand_folder, explained
from phalanx.command_help import Command
from phalanx.data.errors import DataError
from phalanx.data.origin import (
    DataOrigin,
    ShownSample,
    index_of,
    mixture_facts,
    readings_of_step,
    records_of_document,
    show_batch,
    steps_of_record,
)
from phalanx.data.reading.sources import DataIndex, cache_options, open_place, read_data_index
from phalanx.data.stored.index import TRAIN
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Event, LossSpike, NonFinite, Step
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, is_committed, step_of
from phalanx.run.fields import Problem, RunFileError
from phalanx.run.read import ONLY, RUN_FILE, addresses, found_again, read_run
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import is_url
from phalanx.train.start.checks import remote_origin_problems
from phalanx.train.start.prepare import pinned_checkpoint

_SHOWN_STEPS = 20
_ROUNDED = 1e-12
_run = click.argument("run", type=click.Path(path_type=Path))
_set = click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field; may be repeated."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_ERRORS = (DataError, RunDirectoryError, CheckpointError)


@click.command("mixture", short_help="A run's draws from each of its sources, step by step.", cls=Command)
@_run
@_set
@_json
def mixture_command(run: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show a run's draws from each of its sources: shares by stage, epochs by its end, and the step at which
    a source was read once.

    \b
      phalanx data mixture run.toml
      phalanx data mixture run.toml --set data.sources.math.weights=[0.1,0.5]
    """
    with explained(*_ERRORS):
        spec, index = read_data_run(run, overrides)
        stages, uses = mixture_facts(spec, index)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "stages": [msgspec.to_builtins(stage) for stage in stages],
                    "sources": [dataclasses.asdict(use) | {"epochs": use.epochs} for use in uses],
                }
            )
        )
        return
    for stage in stages:
        click.echo(
            f"from step {stage.first_step:,}"
            if stage.last_step is None
            else f"steps {stage.first_step:,} to {stage.last_step:,}"
        )
        for name, share in stage.requested.items():
            # Shares that no pattern of this length has are printed beside the achieved ones.
            rounded = f" (requested: {share:.8%})" if abs(share - stage.achieved[name]) > _ROUNDED else ""
            click.echo(f"  {name:<20} {stage.achieved[name]:>10.4%}{rounded}")
    click.echo(f"by step {spec.train.steps:,}")
    for use in uses:
        once = f"; read once by step {use.first_end_step:,}" if use.first_end_step else ""
        limit = (
            f"; more than data.sources.{use.name}.epochs from step {use.limit_step:,}"
            if use.limit_step
            else ""
        )
        click.echo(
            f"  {use.name or 'the dataset':<20} {use.drawn:>12,} sequences of {use.records:,}: {use.epochs:.3f} epochs{once}{limit}"
        )


@click.command("order", short_help="Which sequences each slot reads in a step.", cls=Command)
@_run
@click.option(
    "--step", type=click.IntRange(min=1), required=True, help="The step, as the log counts: the first is 1."
)
@_set
@_json
def order_command(run: Path, step: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show which sequences each slot reads in a step, and where they are stored.

    RUN is a run file or a run directory; the run need not have started. A step after the run's end is shown
    as if the run had more steps, with a note.

    \b
      phalanx data order run.toml --step 1
      phalanx data order runs/quickstart-1f3a9c04 --step 120 --json
    """
    with explained(*_ERRORS):
        spec, index = read_data_run(run, overrides)
        readings = readings_of_step(spec, index, step, data_origin(spec, run))
    if step > spec.train.steps:
        click.echo(
            f"note: the run ends after step {spec.train.steps:,}; with more steps it would read this",
            err=True,
        )
    if as_json:
        click.echo(
            json.dumps({"step": step, "samples": [dataclasses.asdict(reading) for reading in readings]})
        )
        return
    for reading in readings:
        source = f"{reading.source} " if reading.source else ""
        click.echo(
            f"slot {reading.slot:<4} sample {reading.sample:<12} {source}record {reading.record} (epoch {reading.epoch}) at byte {reading.offset_bytes} of {reading.file}"
        )


@click.command("where", short_help="Which steps train on a sequence, or on a document.", cls=Command)
@_run
@click.option("--source", default=ONLY, help="Name of the source; of a run with one dataset, leave it out.")
@click.option(
    "--record", type=click.IntRange(min=0), help="Number of a sequence in the dataset, as `data order` shows."
)
@click.option(
    "--document", type=click.IntRange(min=0), help="Number of a document, from 0 in the order of the shards."
)
@_set
@_json
def where_command(
    run: Path,
    source: str,
    record: int | None,
    document: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show which steps of a run train on a stored sequence, or on a document.

    RUN is a run directory or a run file. Steps are counted from 1, up to the end of the run; a child run's
    are those after its parent's. To find a document, its dataset is read up to that place.

    \b
      phalanx data where runs/quickstart-1f3a9c04 --document 12
      phalanx data where runs/mix-1f3a9c04 --source web --record 81723
    """
    if (record is None) == (document is None):
        raise click.UsageError("give --record or --document")
    with explained(*_ERRORS):
        spec, index = read_data_run(run, overrides)
        origin = data_origin(spec, run)
        if document is None:
            assert record is not None
            records = [record]
        else:
            records = list(_of_document(spec, index, source, document))
        steps_by_record = {number: steps_of_record(spec, index, source, number, origin) for number in records}
    if as_json:
        click.echo(
            json.dumps(
                {
                    "source": source,
                    "records": [
                        {"record": number, "steps": steps} for number, steps in steps_by_record.items()
                    ],
                }
            )
        )
        return
    for line in where_lines(steps_by_record):
        click.echo(line)


def where_lines(steps_by_record: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yield a line for each record that steps train on, with at most 20 of them, and one for each range of unread
    records.

    Without records, one line that no step reads there.
    """
    if not steps_by_record:
        yield "no record: it is behind the last complete sequence of its dataset, where no step reads"
    for trained, stretch in groupby(steps_by_record, key=lambda number: bool(steps_by_record[number])):
        records = list(stretch)
        if not trained:
            names = f"record {records[0]}" if len(records) == 1 else f"records {records[0]} to {records[-1]}"
            yield f"{names}: no step of this run"
            continue
        for number in records:
            steps = steps_by_record[number]
            shown = ", ".join(f"{step:,}" for step in steps[:_SHOWN_STEPS])
            more = f" and {len(steps) - _SHOWN_STEPS:,} more" if len(steps) > _SHOWN_STEPS else ""
            yield f"record {number}: step{'s' if len(steps) > 1 else ''} {shown}{more}"


def _of_document(spec: RunSpec, index: DataIndex, source: str, document: int) -> Iterator[int]:
    """Yield the complete records of a document. The incomplete one at the end of a dataset is never read. Raises
    ``DatasetError``.
    """
    dataset = index_of(index, source)
    place = open_place(addresses(spec.data)[source], cache_options(spec.data))
    records = records_of_document(spec, place, document, load_tokenizer(place.folder).end_of_document)
    complete = dataset.samples(TRAIN, spec.train.seq_len)
    yield from (record for record in records if record < complete)


def read_data_run(run: Path, overrides: tuple[str, ...]) -> tuple[RunSpec, DataIndex]:
    """Return the run of a run file or directory with ``overrides``, and the index of its data.

    For a directory, data that moved are looked up where an earlier start had them. Raises ``RunFileError`` and
    ``DatasetError``.
    """
    spec = read_run(run / RUN_FILE if run.is_dir() else run, PRESETS, overrides)
    if run.is_dir():
        record = RunDirectory(run).read_record()
        spec = dataclasses.replace(spec, data=found_again(spec.data, record, same_end=False))
    return spec, read_data_index(spec.data)


def data_origin(spec: RunSpec, run: Path) -> DataOrigin:
    """Return the run's starting place in the data: step and next sample of the checkpoint that it continues
    training from.

    Step 0 for a run that continues none. Reads the checkpoint on disk, the newest if ``checkpoint.init_from`` names a
    run. Raises ``RunFileError`` if it is in a store, is missing or has no training state; ``run`` is the run file or
    directory.
    """
    source = spec.checkpoint.init_from
    if spec.checkpoint.init_with != "training":
        return DataOrigin()
    path = run / RUN_FILE if run.is_dir() else run
    if is_url(source):
        raise RunFileError(path, list(remote_origin_problems(spec, source)))
    start = Path(pinned_checkpoint(source, path))
    step = step_of(start)
    assert step is not None
    # A tier would create the folder of a parent that is gone.
    sample = DiskTier(start.parent).extra(step).get("next_sample") if is_committed(start) else None
    if not isinstance(sample, int):
        remedy = 'bring it back, or name a checkpoint that a run has saved; or set checkpoint.init_with to "weights"'
        problem = Problem(
            "checkpoint.init_from", f"{start} is not there, or holds no state of a training", remedy
        )
        raise RunFileError(path, [problem])
    return DataOrigin(step, sample)


# The samples of a step as text, cut to a screen.


_NARROWEST = 20
_FAR_BEFORE = 1000
"""The search in the event stream ends this many steps before the requested one: a rollback never goes
further."""


def show_step(run: Path, step: int, slot: int | None, *, as_json: bool) -> None:
    """Print the samples of ``step``, of one slot or of all (None), a line of text each cut to the terminal; or as
    JSON.

    A child run's early steps are its parent's. A line reports a step that was skipped or a spike. Raises
    ``click.ClickException`` if there is no such run or step.
    """

    demand_folder(run)
    with explained(*_ERRORS):
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
        click.echo(f"step {step:,} was trained by the run that this one continues: {owner}")
    if fate:
        click.echo(fate)
    width = shutil.get_terminal_size().columns
    for sample in shown:
        click.echo(_where(sample))
        click.echo(f"  {_cut(sample, max(width - 2, _NARROWEST))}")


def _owner_of(run: Path, step: int) -> tuple[Path, RunSpec, DataOrigin]:
    """Return the run that trained ``step``, ``run`` or an ancestor, with its run file and its starting place in the
    data.

    Raises ``RunDirectoryError`` if a run directory of the lineage is missing.
    """
    while True:
        if not RunDirectory(run).run_file.exists():
            raise RunDirectoryError(f"{run} is no run directory: --step is about one that has been started")
        spec, _ = read_data_run(run, ())
        origin = data_origin(spec, run)
        if step > origin.step:
            return run, spec, origin
        run = Path(spec.checkpoint.init_from).parent.parent


def _fate(directory: RunDirectory, step: int) -> str:
    """Return a sentence on what became of a step that was a spike or not finite; empty for other steps, or without
    an event stream.
    """

    def counts(event: Event) -> bool:
        body = event.body
        if isinstance(body, Step):
            return body.step < step - _FAR_BEFORE
        return isinstance(body, LossSpike | NonFinite) and body.step == step

    try:
        event = newest_event(directory.events, counts)
    except EventLogError:
        return ""
    body = None if event is None else event.body
    if isinstance(body, NonFinite):
        outcome = (
            "it was skipped, and these samples changed no weight"
            if body.skipped
            else "the run ended before it"
        )
        return f"step {step:,} was not finite; {outcome}: {body.problem}"
    if not isinstance(body, LossSpike):
        return ""
    outcome = {
        "continue": "it was applied",
        "skip": "these samples were left out",
        "fork": "the run forked at it, and went on as one of its children",
        "stop": "the run ended before it",
    }[body.action]
    worst = f"; the largest loss is that of slot {body.slot}, {body.slot_loss:.4g}" if body.slot_loss else ""
    return f"step {step:,} was a spike; {outcome}: loss {body.loss:.4g}, usual {body.typical_loss:.4g}{worst}"


def _where(sample: ShownSample) -> str:
    """Return the heading of a sample: slot, sample, source, record, epoch, documents and tokens."""
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
    """Return the text of a sample in one line of at most ``width`` characters: the middle of a long text is cut
    out.

    Line breaks and control characters become escapes.
    """
    text = "".join(piece.text for piece in sample.record.pieces)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 3]} … {text[-(kept // 3) :]}"


def _as_json(sample: ShownSample) -> dict[str, object]:
    """Return a sample's place in the data, documents, tokens and text, as JSON fields."""
    documents = None if sample.documents is None else list(sample.documents)
    text = "".join(piece.text for piece in sample.record.pieces)
    return {
        **asdict(sample.reading),
        "documents": documents,
        "tokens": sample.record.tokens,
        "padding": sample.record.padding,
        "text": text,
    }
