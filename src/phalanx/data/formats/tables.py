"""Read tables with a text column: Parquet by row groups, Arrow files and streams by record batches.

``pyarrow`` reads a few megabytes at a time. Rows are numbered through the file, so a document has the same name in any span.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.data.chat.messages import TOOLS, conversation_text
from phalanx.data.errors import FormatError, MissingPackageError, optional_package
from phalanx.data.formats.compressed import DamagedError
from phalanx.data.formats.document import BadDocument, Document, OnBytes, ReadOptions, Span
from phalanx.data.formats.json_lines import fields_in_words, in_pieces

if TYPE_CHECKING:
    import pyarrow

_BATCH_BYTES = 1 << 22
_BUFFER_BYTES = 1 << 20


def require_packages() -> None:
    """Raise ``MissingPackageError`` with the command that installs the packages for tables."""
    missing = "Parquet and Arrow files are read by the package pyarrow, which is not installed"
    remedy = "pip install 'phalanx-train[prepare]', or pip install pyarrow"
    optional_package("pyarrow.parquet", MissingPackageError(f"{missing}: {remedy}"))


def parquet_spans(path: Path, span_bytes: int) -> list[Span]:
    """Return spans of complete row groups, each of at least ``span_bytes`` as stored, except perhaps the last. Raises ``DamagedError``."""
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with _damage_named(), pq.ParquetFile(path, page_checksum_verification=True) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        # pyarrow also has the columns' stored sizes, but aborts the process if the footer is damaged.
        ends = list(itertools.accumulate((max(0, group.total_byte_size) for group in groups), initial=0))
        stored_ends = itertools.pairwise(size * end // max(1, ends[-1]) for end in ends)
        return _spans(
            ((group.num_rows, end - start) for group, (start, end) in zip(groups, stored_ends, strict=True)),
            span_bytes,
        )


def arrow_spans(path: Path, span_bytes: int) -> list[Span]:
    """Return spans of complete record batches, each of at least ``span_bytes``, except perhaps the last. Raises
    ``DamagedError``.

    The file is mapped, and little more than the headers of batches is read. Bytes are those of the batches' buffers.
    """
    with _damage_named(), _batches(path) as (_, batches):
        # `nbytes` reads through offsets, which may be damaged and point outside the file.
        return _spans(((batch.num_rows, batch.get_total_buffer_size()) for batch in batches), span_bytes)


def _spans(groups: Iterable[tuple[int, int]], span_bytes: int) -> list[Span]:
    """Return spans of consecutive groups (rows, bytes), each of at least ``span_bytes``, except perhaps the last."""
    spans: list[Span] = []
    start = first = rows = stored = number = 0
    for number, (group_rows, nbytes) in enumerate(groups, 1):
        rows += group_rows
        stored += nbytes
        if stored >= span_bytes:
            spans.append(Span(start, number, first, stored))
            start, first, stored = number, rows, 0
    if number > start:
        spans.append(Span(start, number, first, stored))
    return spans


def require_column(path: Path, options: ReadOptions, *, parquet: bool) -> None:
    """Raise ``FormatError`` if the table does not have exactly one column with the name in the options, or if it is not
    of text.

    With ``options.chat`` the column may have any type. Raises ``DamagedError`` for a broken file.
    """
    import pyarrow.parquet as pq

    with _damage_named():
        if parquet:
            schema = pq.read_schema(path)
        else:
            with _batches(path) as (schema, _):
                pass
    if options.field not in schema.names:
        raise missing_field(path, options.field, schema.names)
    if (count := schema.names.count(options.field)) > 1:
        raise FormatError(path, f"has {count} columns called {options.field!r}", "rename one")
    kind = schema.field(options.field).type
    if options.chat:
        return
    if not _is_text(kind):
        texts = [field.name for field in schema if _is_text(field.type)]
        raise FormatError(
            path,
            f"holds {kind}, not text, in its column {options.field!r}",
            f"name a column of text with --text-field: {fields_in_words(texts)}"
            if texts
            else "no column of it is text; leave it out",
        )


def missing_field(path: Path, field: str, available: list[str]) -> FormatError:
    """Return the error for a file without the text field.

    Its remedy explains how to use a field within an object, if ``field`` is "outer.inner".
    """
    remedy, outer = "name it with --text-field", field.partition(".")[0]
    if outer != field and outer in available:
        remedy = f"a field within {outer!r} is not read: write it as one of its own, in JSON lines with jq -c '{{text: .{field}}}'"
    return FormatError(path, f"has no field {field!r}; it has: {fields_in_words(available)}", remedy)


def read_parquet(
    path: Path, name: str, span: Span, options: ReadOptions, on_bytes: OnBytes | None
) -> Iterator[Document | BadDocument]:
    """Yield the documents of the span's row groups, reading the columns in use in batches of bounded size.

    Null or invalid values become ``BadDocument``. ``on_bytes`` receives the span's stored bytes in proportion to its
    rows read. Raises ``DamagedError``. Nothing for groups without rows.
    """
    import pyarrow.parquet as pq

    with (
        _damage_named(),
        pq.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file,
    ):
        groups = [file.metadata.row_group(number) for number in range(span.start, span.stop)]
        rows = sum(group.num_rows for group in groups)
        if not rows:
            return
        row_bytes = max(1, sum(group.total_byte_size for group in groups) // rows)
        batches = file.iter_batches(
            batch_size=max(1, min(4096, _BATCH_BYTES // row_bytes)),
            row_groups=range(span.start, span.stop),
            columns=columns_read(options, file.schema_arrow.names),
            use_threads=False,
        )
        yield from _read_batches(path, name, batches, span, rows, options, on_bytes)


def read_arrow(
    path: Path, name: str, span: Span, options: ReadOptions, on_bytes: OnBytes | None
) -> Iterator[Document | BadDocument]:
    """Yield the documents of the span's record batches; the file is mapped into memory.

    Null or invalid values become ``BadDocument``. ``on_bytes`` receives the span's stored bytes in proportion to its
    rows read. Raises ``DamagedError``.
    """
    with _damage_named(), _batches(path) as (_, batches):
        chosen = list(itertools.islice(batches, span.start, span.stop))
        rows = sum(batch.num_rows for batch in chosen)
        yield from _read_batches(path, name, iter(chosen), span, rows, options, on_bytes)


def _read_batches(
    path: Path,
    name: str,
    batches: Iterator[pyarrow.RecordBatch],
    span: Span,
    rows: int,
    options: ReadOptions,
    on_bytes: OnBytes | None,
) -> Iterator[Document | BadDocument]:
    """Yield a document, or several pieces, for each row, and a ``BadDocument`` for a value that is null or invalid.
    Rows are numbered from ``span.first``; ``on_bytes`` gets the estimated bytes so far.
    """
    row = span.first
    for batch in batches:
        for slice_start in range(0, batch.num_rows, 1024):
            rows_here = batch.slice(slice_start, 1024)
            column = rows_here.column(batch.schema.get_field_index(options.field))
            for value in _conversations(rows_here, options) if options.chat else _values(column):
                if isinstance(value, ValueError) and not isinstance(value, UnicodeDecodeError):
                    yield BadDocument(path, f"row {row + 1:,}", str(value))
                elif isinstance(value, str):
                    yield from in_pieces(f"{name}#{row}", value, options)
                elif value is None:
                    yield BadDocument(path, f"row {row + 1:,}", f"its {options.field!r} is null")
                else:
                    yield BadDocument(
                        path,
                        f"row {row + 1:,}",
                        f"is not UTF-8 text (byte {value.object[value.start]:#04x}: {value.reason})",
                    )
                row += 1
            if on_bytes is not None:
                on_bytes(span.file_bytes * (row - span.first) // max(1, rows))


def columns_read(options: ReadOptions, available: Sequence[str]) -> list[str]:
    """Return the columns to read: the text, or the messages and, if present, the tools."""
    return [options.field, *([TOOLS] if options.chat and TOOLS in available else [])]


def _conversations(rows: pyarrow.RecordBatch, options: ReadOptions) -> Iterator[str | ValueError]:
    """Yield the conversation of each row as one line of JSON; a ``ValueError`` in place of one that is malformed.
    Raises ``ArrowInvalid`` for damaged columns.
    """
    chosen = rows.select(columns_read(options, rows.schema.names))
    chosen.validate(full=True)
    for row in chosen.to_pylist():
        try:
            yield conversation_text(row, options.field)
        except ValueError as error:
            yield error


def _values(column: pyarrow.Array) -> Iterator[str | UnicodeDecodeError | None]:
    """Yield each value of a column of text or bytes; None for null, and an error in place of a value that is not UTF-8.

    Raises ``ArrowInvalid`` for a damaged column: pyarrow would follow wrong offsets out of a mapped file and crash the
    process.
    """
    import pyarrow as pa

    if column.type == pa.string():
        column = column.view(pa.binary())
    elif column.type == pa.large_string():
        column = column.view(pa.large_binary())
    column.validate(full=True)
    values = None
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(column, row) for row in range(len(column))]
    for value in values:
        if isinstance(value, bytes):
            try:
                yield value.decode()
            except UnicodeDecodeError as error:
                yield error
        else:
            yield value


def _value(column: pyarrow.Array, row: int) -> str | UnicodeDecodeError | None:
    """Return a column's value in a row, or the error if it is not UTF-8."""
    try:
        value: str | None = column[row].as_py()
    except UnicodeDecodeError as error:
        return error
    return value


def _is_text(kind: pyarrow.DataType) -> bool:
    """Return True for a column of strings or bytes, or of a dictionary of these."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(test(kind) for test in tests)


@contextmanager
def _batches(path: Path) -> Iterator[tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]]:
    """Context with the schema and an iterator of record batches of an Arrow file or stream, mapped into memory."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        if mapped.read(8) == b"ARROW1\0\0":
            file = pa.ipc.open_file(mapped)
            yield file.schema, map(file.get_batch, range(file.num_record_batches))
        else:
            mapped.seek(0)
            stream = pa.ipc.open_stream(mapped)
            yield stream.schema, iter(functools.partial(next, stream, None), None)


@contextmanager
def _damage_named() -> Iterator[None]:
    """Context that converts pyarrow's errors for broken files to ``DamagedError`` with the first line. Errors of the
    file system, which have an errno, pass through.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DamagedError(str(error).partition("\n")[0]) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DamagedError(str(error).partition("\n")[0]) from error
