"""``phalanx data``: prepares token shards from text, inspects, copies and checks them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from phalanx.cli.data.order import mixture_command, order_command, show_step, where_command
from phalanx.cli.data.prepare import prepare_command
from phalanx.cli.data.recipe import plan_command, work_command
from phalanx.cli.errors import explained
from phalanx.cli.output import byte_progress
from phalanx.command_help import Command, CommandGroup
from phalanx.data.errors import DataError
from phalanx.data.portions.planning.plan import PLAN_KEY, get_if_stored, is_stored
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import Stage, Workplace, total
from phalanx.data.portions.write_portion import trace
from phalanx.data.stored.index import HELD_OUT, INDEX_FILE, SPLITS, TRAIN, DatasetIndex, parse_index
from phalanx.store.open_store import is_remote
from phalanx.store.store import StoreError

# ``phalanx data show`` and ``trace``: the origin of a dataset and of its records.

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_PLACE = click.argument("place", metavar="FOLDER_OR_URL")


@click.command("show", short_help="Contents of a dataset, or the samples of a run's step.", cls=Command)
@_PLACE
@click.option(
    "--record",
    type=click.IntRange(min=0),
    help="Show the text of this record (from 0), with its learned parts.",
)
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="With --record: its tokens; packed datasets have their own."
)
@click.option("--held-out", is_flag=True, help="With --record: of the held-out split.")
@click.option(
    "--step",
    type=click.IntRange(min=1),
    help="FOLDER_OR_URL is a run's directory: show the samples of this step, as text.",
)
@click.option("--slot", type=click.IntRange(min=0), help="With --step: those of this slot alone.")
@_JSON
def show_command(
    place: str,
    record: int | None,
    seq_len: int | None,
    held_out: bool,
    step: int | None,
    slot: int | None,
    as_json: bool,
) -> None:
    """Show the contents of a dataset and, if it was prepared from a recipe, the fate of each document; also
    while it is prepared.

    Or show the samples that a run trained on in a step, for example where its loss jumped.

    \b
      phalanx data show data/web
      phalanx data show s3://bucket/web --json
      phalanx data show data/chats --record 17       # learned parts are between ⟦ and ⟧
      phalanx data show runs/mix-1f3a9c04 --step 812 --slot 3
    """
    if step is not None:
        if record is not None or seq_len or held_out:
            raise click.UsageError(
                "--step shows samples of a run; --record, --seq-len and --held-out are about a dataset"
            )
        show_step(Path(place), step, slot, as_json=as_json)
        return
    if slot is not None:
        raise click.UsageError("--slot is a part of a step: add --step N")
    with explained(DataError, StoreError):
        if record is not None:
            _show_record(place, record, seq_len, HELD_OUT if held_out else TRAIN, as_json)
            return
        if seq_len or held_out:
            raise click.UsageError("--seq-len and --held-out are about one record: add --record I")
        facts = _facts(Workplace(place))
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            click.echo(f"{name}:")
            for key, inner in value.items():
                click.echo(f"  {key}: {inner:,}" if isinstance(inner, int) else f"  {key}: {inner}")
        else:
            click.echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


def _show_record(place: str, number: int, seq_len: int | None, split: str, as_json: bool) -> None:
    """Print the text of one record, and its numbers of tokens to standard error; or all as JSON.

    In a dataset of conversations, learned pieces are in brackets. Raises ``DatasetError`` if there is none, and
    ``click.UsageError`` for a joined dataset without ``seq_len``.
    """
    from phalanx.data.origin import show_record
    from phalanx.data.reading.sources import open_place

    dataset = open_place(place)
    length = seq_len or dataset.index.packed_seq_len
    if not length:
        raise click.UsageError("the dataset is joined, not packed: give the run's train.seq_len as --seq-len")
    record_text = show_record(dataset, split, number, length)
    if as_json:
        click.echo(json.dumps({"record": number, "split": split, **asdict(record_text)}))
        return
    chats = dataset.index.document_end is not None
    for piece in record_text.pieces:
        click.echo(
            click.style(f"⟦{piece.text}⟧", bold=True) if chats and piece.learned else piece.text, nl=False
        )
    click.echo(
        f"\n{record_text.tokens:,} tokens, and {record_text.padding:,} that fill the record up", err=True
    )


@click.command("trace", short_help="The documents and raw files that a record is made of.", cls=Command)
@_PLACE
@click.option(
    "--record",
    type=click.IntRange(min=0),
    required=True,
    help="Its number, from 0, in the order of the shards.",
)
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="Tokens of a record; packed datasets have their own."
)
@click.option("--held-out", is_flag=True, help="Of the held-out split.")
@_JSON
def trace_command(place: str, record: int, seq_len: int | None, held_out: bool, as_json: bool) -> None:
    """Name the documents and raw files of a record, in a dataset that was prepared from a recipe.

    \b
      phalanx data trace data/web-8k --record 4711
      phalanx data trace data/web --record 4711 --seq-len 2048
    """
    with explained(DataError, StoreError):
        work = Workplace(place)
        index = _index(work)
        if index is None:
            raise DataError(f"{place} holds no {INDEX_FILE}; give the folder or URL of a dataset")
        length = seq_len or index.packed_seq_len
        if not length:
            raise click.UsageError(
                "the dataset is joined, not packed: give the run's train.seq_len as --seq-len"
            )
        documents = trace(work, index, HELD_OUT if held_out else TRAIN, record, length)
    if as_json:
        click.echo(json.dumps({"documents": [asdict(document) for document in documents]}))
        return
    for document in documents:
        last = document.first + document.tokens - 1
        click.echo(f"{document.name}  tokens {document.first:,} to {last:,}  of {document.url}")


def _index(place: Workplace) -> DatasetIndex | None:
    """Return the index of the dataset at a place; None if there is none yet."""
    text = get_if_stored(place.store, INDEX_FILE)
    if text is None:
        return None
    return parse_index(text.decode(errors="replace"), Path(f"{place.url}/{INDEX_FILE}"))


def _facts(place: Workplace) -> dict[str, object]:
    """Return the facts of a dataset, or of a preparation under way, for printing: splits, sources, finished tasks,
    documents.

    Raises ``DataError`` if it is neither.
    """
    index = _index(place)
    facts: dict[str, Any] = {"path": place.url}
    if index is not None:
        facts |= {
            "fingerprint": index.fingerprint,
            "vocabulary": index.vocab_size,
            "packed_seq_len": index.packed_seq_len,
        }
        for name in SPLITS:
            split = index.split(name)
            facts[name] = {
                "tokens": split.tokens,
                "documents": split.documents,
                "text bytes": split.text_bytes,
                "shards": len(split.shards),
            }
            if index.recipe.chat is not None:
                facts[name] |= {"learned tokens": split.learned, "left out": split.left_out}
    if not is_stored(place.store, PLAN_KEY):
        if index is None:
            raise DataError(f"{place.url} holds neither a dataset nor the plan of one; correct the path")
        return facts
    plan = place.plan
    stages = {stage.name: (len(place.done(stage)), stage.tasks) for stage in stages_of(plan)}
    facts["sources"] = {
        source.url: sum(f.source == i for f in plan.files) for i, source in enumerate(plan.recipe.source)
    }
    facts["raw bytes"] = sum(file.nbytes for file in plan.files)
    facts["software"] = plan.software
    if index is None:
        facts["done"] = {name: f"{manifests} of {tasks}" for name, (manifests, tasks) in stages.items()}
    write = Stage("write", len(plan.portions))
    manifests = [
        manifest for task in sorted(place.done(write)) if (manifest := place.manifest("write", task))
    ]
    facts["documents"] = dict(sorted(total(manifests).items()))
    return facts


# ``phalanx data copy`` and ``phalanx data verify``: prepared datasets in folders and object stores.


@click.command("copy", short_help="Copy a dataset to another folder or object store.", cls=Command)
@click.argument("source")
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def copy_command(source: str, target: str, as_json: bool) -> None:
    """Copy the prepared dataset at SOURCE to TARGET: folders, s3://, gs:// or az://.

    All of it is compared with its checksums on the way. It becomes usable at TARGET once it is complete. Run
    the same command again to resume an interrupted copy.

    \b
      phalanx data copy data/books s3://corpora/books
      phalanx data copy s3://corpora/books data/books
    """
    from phalanx.data.stored.copies import copy_dataset

    with explained(DataError):
        copied = copy_dataset(
            source, target, (lambda _done, _of: None) if as_json else byte_progress("copied")
        )
    facts = {
        "path": target,
        "was_there": copied.was_there,
        "fingerprint": copied.index.fingerprint,
        "written_bytes": copied.written_bytes,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo(
            f"{target}: {'was there already' if copied.was_there else 'copied'}; fingerprint {copied.index.fingerprint[:16]}"
        )


@click.command("verify", short_help="Read a dataset whole and compare it with its checksums.", cls=Command)
@click.argument("place", metavar="FOLDER|URL")
@click.option(
    "--write-sums",
    is_flag=True,
    help="Write the block sums of intact shards in a folder that have none, so that training checks what it reads.",
)
def verify_command(place: str, write_sums: bool) -> None:
    """Read the tokenizer and every token shard in FOLDER, or at URL, and compare them with their checksums.

    \b
      phalanx data verify data/books
      phalanx data verify s3://corpora/books
      phalanx data verify data/books --write-sums     # prepared by 0.1.0, which wrote none
    """
    if is_remote(place):
        if write_sums:
            raise click.UsageError(
                "--write-sums is for folders: write them where the dataset was prepared, and copy it again"
            )
        from phalanx.data.stored.copies import verify_stored

        with explained(DataError):
            verify_stored(place, byte_progress("read"))
        without = 0
    else:
        from phalanx.data.reading.dataset import verify_dataset

        with explained(DataError):
            without = verify_dataset(Path(place), write_missing_sums=write_sums)
    click.echo("the tokenizer and every shard are as they were written")
    if without:
        shards = "1 shard has" if without == 1 else f"{without:,} shards have"
        click.echo(f"{shards} no block sums, which training checks each read by: --write-sums writes them")


@click.group("data", cls=CommandGroup)
def command() -> None:
    """Prepare and check token shards, and see which of them a run reads, and when.

    \b
      phalanx data show data/mine
      phalanx data prepare texts/*.txt --out data/mine --tokenizer bytes
      phalanx data verify data/mine
      phalanx data show runs/quickstart-1f3a9c04 --step 12    # what a run was trained on in a step
    """


command.add_command(copy_command)
command.add_command(verify_command)
command.add_command(prepare_command)
command.add_command(mixture_command)
command.add_command(order_command)
command.add_command(where_command)
command.add_command(plan_command)
command.add_command(work_command)
command.add_command(show_command)
command.add_command(trace_command)
