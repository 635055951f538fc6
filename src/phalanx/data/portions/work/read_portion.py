"""Reads the documents of a portion from its raw files, wherever these lie, and takes them through its steps.

Each file is compared with the listing before and after it is read, so that a file that is changed midway ends the task before its manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.formats.compressed import Compression
from phalanx.data.formats.document import BadDocument, Document, ReadOptions
from phalanx.data.formats.read import documents
from phalanx.data.formats.recognize import Format, Kind
from phalanx.data.formats.tables import columns_read
from phalanx.data.portions.planning.plan import Piece, PreparationPlan, bring_parquet_footer
from phalanx.data.portions.planning.raw_files import LocalBytes, require_unchanged
from phalanx.data.portions.planning.recipe import read_options
from phalanx.data.portions.scratch import scratch_folder
from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.steps.step import Dropped, through_steps


@dataclass(frozen=True)
class KeptDocument(Document):
    """A document of a portion."""

    piece: int
    """Number of the piece of the portion that it was read from."""


def read_portion(plan: PreparationPlan, number: int) -> Iterator[tuple[int, Document | None]]:
    """(number of the piece in the portion, document) in order; ``None`` in place of one that is bad and only counted.

    Raises ``PreparationError`` for a bad one whose source says so, and for a file that is not the one that was planned.
    """
    for at, piece in enumerate(plan.portions[number]):
        file = plan.files[piece.file]
        stops = plan.recipe.source[file.source].on_bad == "stop"
        require_unchanged(file)
        for document in _documents(plan, piece):
            if isinstance(document, Document):
                yield at, document
            elif stops:
                require_unchanged(file)
                where = f"{document.place} of {file.url}" if document.place else file.url
                raise PreparationError(
                    f'portion {number}: {where} {document.reason}; mend it and plan again, or write source.on_bad = "skip" and plan again'
                )
            else:
                yield at, None
        require_unchanged(file)


def _documents(plan: PreparationPlan, piece: Piece) -> Iterator[Document | BadDocument]:
    file, form = plan.files[piece.file], plan.formats[piece.file]
    options = read_options(plan.recipe, file.source)
    with scratch_folder("phalanx-portion-") as scratch:
        local = LocalBytes(file, scratch)
        try:
            _bring(local, piece, form, file.nbytes, options)
            for found in documents(local.path, file.name, form, piece.span, options):
                if (
                    isinstance(found, BadDocument)
                    and local.is_copy
                    and form.kind is Kind.JSONL
                    and piece.span.start
                ):
                    # Its line's number counts lines that are not here.
                    local.bring(0, piece.span.start)
                    again = documents(local.path, file.name, form, piece.span, options)
                    yield next((bad for bad in again if isinstance(bad, BadDocument)), found)
                else:
                    yield found
        except CorpusError as error:
            raise PreparationError(local.named(str(error))) from error


def _bring(local: LocalBytes, piece: Piece, form: Format, nbytes: int, options: ReadOptions) -> None:
    if not local.is_copy:
        return
    span = piece.span
    if form == Format(Kind.JSONL, Compression.NONE):
        local.bring(max(0, span.start - 1), span.stop)
        # The line that begins within the span may end behind it; and its last byte may be the end of a line.
        local.bring_line_end(span.stop - 1)
    elif form.kind is Kind.PARQUET:
        import pyarrow.parquet as pq

        local.bring(0, 4)
        local.bring(max(0, nbytes - 8), nbytes)
        bring_parquet_footer(local, nbytes)
        metadata = pq.read_metadata(local.path)
        wanted = {
            name.partition(".")[0] for name in columns_read(options, metadata.schema.to_arrow_schema().names)
        }
        for group in range(span.start, span.stop):
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(column)
                # Of messages, the columns of their fields: messages.list.element.role and the like.
                if chunk.path_in_schema.partition(".")[0] not in wanted:
                    continue
                start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                local.bring(start, start + chunk.total_compressed_size)
    else:
        local.bring(0, nbytes)


def stepped_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that its steps keep, in order. What was read and dropped is counted in ``manifest``, by reason."""
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts["documents read"] = 0
    for piece, document in read_portion(place.plan, number):
        counts["documents read"] += 1
        outcome = Dropped("bad") if document is None else through_steps(document, place.plan.recipe.step)
        if isinstance(outcome, Document) and not outcome.text:
            outcome = Dropped("empty")
        if isinstance(outcome, Document):
            _require_characters(outcome)
            yield KeptDocument(outcome.name, outcome.text, piece)
        else:
            counts[f"dropped: {outcome.reason}"] = counts.get(f"dropped: {outcome.reason}", 0) + 1


def _require_characters(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise PreparationError(
            f"document {document.name} cannot be written as UTF-8 after its steps: {error}"
        ) from error
