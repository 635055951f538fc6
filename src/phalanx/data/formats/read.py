"""The two functions that preparation needs of a file, whatever its format: its spans, and the documents of a span.

The documents of all spans, in order, are those of the whole file, for any ``span_bytes``; so spans may be read by different
processes, in any order, and again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.data.errors import CorpusError, FormatError
from phalanx.data.formats import tables
from phalanx.data.formats.compressed import Compression, DamagedError, open_stream
from phalanx.data.formats.document import BadDocument, Document, OnBytes, ReadOptions, Span
from phalanx.data.formats.json_lines import fields_of, read_lines
from phalanx.data.formats.recognize import Format, Kind
from phalanx.data.formats.text import read_text, text_spans

DEFAULTS = ReadOptions()
_LINES_LOOKED_AT = 20


def spans(path: Path, file_format: Format, span_bytes: int, options: ReadOptions = DEFAULTS) -> list[Span]:
    """The spans of a file, of ``span_bytes`` or a little more as stored, in order; none of an empty file.

    Plain text is cut where its documents are, with the same ``options.document_bytes`` as they are read with. Raises
    ``CorpusError`` if the file cannot be read or is damaged, or a package is missing.
    """
    if span_bytes < 1:
        raise ValueError(f"span_bytes = {span_bytes} is not positive")
    with _named(path):
        size = path.stat().st_size
        match file_format:
            case Format(Kind.PARQUET):
                tables.require_packages()
                return tables.parquet_spans(path, span_bytes)
            case Format(Kind.ARROW):
                tables.require_packages()
                return tables.arrow_spans(path, span_bytes)
            case Format(Kind.TEXT, Compression.NONE):
                return text_spans(path, size, span_bytes, options)
            case Format(Kind.JSONL, Compression.NONE):
                starts = range(0, size, span_bytes)
                ends = (min(start + span_bytes, size) for start in starts)
                return [Span(start, end, 0, end - start) for start, end in zip(starts, ends, strict=True)]
            case _:
                return [Span(0, size, 0, size)] if size else []


def documents(
    path: Path,
    name: str,
    file_format: Format,
    span: Span,
    options: ReadOptions = DEFAULTS,
    on_bytes: OnBytes | None = None,
) -> Iterator[Document | BadDocument]:
    """The documents of a span of the file, called ``name`` among its corpus, in order and in bounded memory.

    They are called ``name@OFFSET`` after the line of JSON, ``name#ROW`` (from 0) after the row of a table, and ``name`` or
    ``name#PIECE`` after a text file. What holds no text is a ``BadDocument`` in its place; documents may be empty. A file
    that is damaged is one where the damage shows, with nothing after it in the span.

    Raises ``CorpusError`` if the file cannot be read, or a package is missing.
    """
    try:
        with _file_errors_named(path):
            match file_format.kind:
                case Kind.PARQUET:
                    tables.require_packages()
                    yield from tables.read_parquet(path, name, span, options, on_bytes)
                case Kind.ARROW:
                    tables.require_packages()
                    yield from tables.read_arrow(path, name, span, options, on_bytes)
                case Kind.TEXT | Kind.JSONL:
                    yield from _stream_documents(path, name, file_format, span, options, on_bytes)
    except DamagedError as error:
        yield BadDocument(path, "", f"is damaged: {error}; nothing after that is read")


def require_text(path: Path, file_format: Format, options: ReadOptions = DEFAULTS) -> None:
    """Raises ``FormatError`` if the file is one of fields, and none of its first rows has the one that the options name.

    The message names the fields that it has.
    """
    with _named(path):
        match file_format.kind:
            case Kind.PARQUET | Kind.ARROW:
                tables.require_packages()
                tables.require_column(path, options, parquet=file_format.kind is Kind.PARQUET)
            case Kind.JSONL:
                with open_stream(path, file_format.compression) as stream:
                    there = fields_of(stream, _LINES_LOOKED_AT, options)
                if there is not None:
                    raise tables.missing_field(path, options.field, there)
            case Kind.TEXT if options.chat:
                raise FormatError(
                    path, "is text, not rows of conversations", "give JSON lines, Parquet or Arrow"
                )
            case Kind.TEXT:
                pass


def _stream_documents(
    path: Path,
    name: str,
    file_format: Format,
    span: Span,
    options: ReadOptions,
    on_bytes: OnBytes | None,
) -> Iterator[Document | BadDocument]:
    compressed = file_format.compression is not Compression.NONE
    with open_stream(path, file_format.compression, on_bytes) as stream:
        if file_format.kind is Kind.JSONL:
            if span.start:
                stream.seek(span.start - 1)
            yield from read_lines(path, name, stream, span.start, None if compressed else span.stop, options)
        else:
            if span.start:
                stream.seek(span.start)
            whole = compressed or (span.start == 0 and span.stop >= path.stat().st_size)
            yield from read_text(path, name, stream, span, options, whole=whole)


@contextmanager
def _file_errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    with _file_errors_named(path):
        try:
            yield
        except DamagedError as error:
            raise CorpusError(f"{path} is damaged: {error}; copy it again") from error
