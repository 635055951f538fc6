"""Documents of a portion, read from its raw files and processed by the steps.

Of a remote file, the bytes of a piece are copied first. Each file is compared with the listing before and after it is read, so a file that
changes during the read fails the task before it writes a manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.formats.compressed import Compression
from phalanx.data.formats.document import BadDocument, Document, ReadOptions
from phalanx.data.formats.read import FileFormat, Kind, documents
from phalanx.data.formats.tables import columns_read
from phalanx.data.portions.planning.plan import FileSpan, PreparationPlan, bring_parquet_footer
from phalanx.data.portions.planning.raw_files import LocalBytes, require_unchanged, scratch_folder
from phalanx.data.portions.planning.recipe import read_options
from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.steps.step import Dropped, through_steps


@dataclass(frozen=True)
class KeptDocument(Document):
    """A document of a portion that its steps keep."""

    piece: int
    """Number of its piece in the portion."""


def read_portion(plan: PreparationPlan, number: int) -> Iterator[tuple[int, Document | None]]:
    """Yield (number of the piece in the portion, document) in order; ``None`` for a bad document that is only counted.

    Raises ``PreparationError`` for a bad document if its source has ``on_bad = "stop"``, and for a file that differs from the plan.
    """
    for piece_number, piece in enumerate(plan.portions[number]):
        file = plan.files[piece.file]
        stops = plan.recipe.source[file.source].on_bad == "stop"
        require_unchanged(file)
        for document in _documents(plan, piece, stops=stops):
            if isinstance(document, Document):
                yield piece_number, document
            elif stops:
                require_unchanged(file)
                location = f"{document.place} of {file.url}" if document.place else file.url
                raise PreparationError(
                    f'portion {number}: {location} {document.reason}; mend it and plan again, or write source.on_bad = "skip" and plan again'
                )
            else:
                yield piece_number, None
        require_unchanged(file)


def _documents(plan: PreparationPlan, piece: FileSpan, *, stops: bool) -> Iterator[Document | BadDocument]:
    """Yield a piece's documents, from a temporary local copy of its bytes if the file is remote.

    If the caller ``stops`` at the first bad line, its number is that in the full file; otherwise a bad line's number
    in a copy has no meaning. Raises ``PreparationError``.
    """
    file, form = plan.files[piece.file], plan.formats[piece.file]
    options = read_options(plan.recipe, file.source)
    with scratch_folder("phalanx-portion-") as scratch:
        local = LocalBytes(file, scratch)
        try:
            _bring(local, piece, form, file.nbytes, options)
            for document in documents(local.path, file.name, form, piece.span, options):
                if (
                    stops
                    and isinstance(document, BadDocument)
                    and local.is_copy
                    and form.kind is Kind.JSONL
                    and piece.span.start
                ):
                    # Its line number needs the lines before the span, which are not in the copy yet.
                    local.bring(0, piece.span.start)
                    reread = documents(local.path, file.name, form, piece.span, options)
                    yield next((bad for bad in reread if isinstance(bad, BadDocument)), document)
                else:
                    yield document
        except CorpusError as error:
            raise PreparationError(local.named(str(error))) from error


def _bring(local: LocalBytes, piece: FileSpan, form: FileFormat, nbytes: int, options: ReadOptions) -> None:
    """Copy the bytes of a piece that reading needs from a remote file: its lines, or of Parquet the footer and columns
    in use. All bytes of other formats; nothing of a file that is local already.
    """
    if not local.is_copy:
        return
    span = piece.span
    if form == FileFormat(Kind.JSONL, Compression.NONE):
        local.bring(max(0, span.start - 1), span.stop)
        # The last line of the span may end after it, or exactly at its last byte.
        local.bring_line_end(span.stop - 1)
    elif form.kind is Kind.PARQUET:
        import pyarrow.parquet as pq

        local.bring(0, 4)
        local.bring(max(0, nbytes - 8), nbytes)
        bring_parquet_footer(local, nbytes)
        metadata = pq.read_metadata(local.path)
        columns = {
            name.partition(".")[0] for name in columns_read(options, metadata.schema.to_arrow_schema().names)
        }
        for group in range(span.start, span.stop):
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(column)
                # Nested columns of messages have names such as messages.list.element.role.
                if chunk.path_in_schema.partition(".")[0] not in columns:
                    continue
                start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                local.bring(start, start + chunk.total_compressed_size)
    else:
        local.bring(0, nbytes)


def stepped_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """Yield a portion's documents that its steps keep, in order.

    ``manifest`` counts the documents read and dropped, by reason. Empty documents are dropped. Raises as
    ``read_portion``, and for text that is not valid characters.
    """
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
    """Raise ``PreparationError`` for a text that UTF-8 cannot encode."""
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise PreparationError(
            f"document {document.name} cannot be written as UTF-8 after its steps: {error}"
        ) from error
