"""Detect a file's format from its first bytes, and read its spans and documents.

For any ``span_bytes``, the documents of all spans in order are those of the file. So different processes can read spans in any order and more
than once.
"""

import codecs
import io
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from phalanx.data.errors import CorpusError, FormatError
from phalanx.data.formats import tables
from phalanx.data.formats.compressed import Compression, DamagedError, open_stream, read_head
from phalanx.data.formats.document import (
    BadDocument,
    Document,
    OnBytes,
    ReadOptions,
    Span,
    read_text,
    text_spans,
)
from phalanx.data.formats.json_lines import BOM, fields_of, parse_object, read_lines
from phalanx.run.directory.files import RepeatedKeyError

# The format of a file by its first bytes: text, JSON lines, Parquet or Arrow. Text and JSON lines may be compressed.
#
# File names matter only if the content is ambiguous. A single line with a JSON object is JSON lines only in a file named so. A
# file named ``.jsonl`` is JSON lines even if its first line is broken, so that the line is reported instead of trained on as
# text. Known formats that cannot be read, such as pictures and archives, are refused with a remedy.

_HEAD_BYTES = 1 << 16
_LONGEST_FIRST_LINE = 1 << 24

_COMPRESSIONS = (
    (b"\x1f\x8b", Compression.GZIP),
    (b"\x28\xb5\x2f\xfd", Compression.ZSTD),
    (b"\xfd7zXZ\x00", Compression.XZ),
    (b"BZh", Compression.BZ2),
)
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_UNPACK = "unpack it and give the folder"
_CONVERT = "convert it to text, JSON lines or Parquet, or leave it out"
_REFUSED = (
    (0, b"PK\x03\x04", "a zip archive (so are .docx, .xlsx and .epub)", _UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", "leave it out"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", "compress it with zstd or gzip instead, or unpack it"),
    (0, b"\x1f\x9d", "compressed by compress (.Z)", "compress it with zstd or gzip instead, or unpack it"),
    (0, b"\xff\x06\x00\x00sNaPpY", "compressed by snappy", "compress it with zstd or gzip instead"),
    (0, b"LZIP", "compressed by lzip", "compress it with zstd, gzip or xz instead"),
    (0, b"%PDF-", "a PDF", "extract its text first, for example with pdftotext"),
    (0, b"\x89PNG", "a PNG picture", "leave it out"),
    (0, b"\xff\xd8\xff", "a JPEG picture", "leave it out"),
    (0, b"GIF8", "a GIF picture", "leave it out"),
    (8, b"WEBP", "a WebP picture", "leave it out"),
    (8, b"WAVE", "a sound file", "leave it out"),
    (4, b"ftyp", "a film or picture (MP4, HEIC)", "leave it out"),
    (0, b"OggS", "a sound file", "leave it out"),
    (0, b"\x7fELF", "a program", "leave it out"),
    (0, b"SQLite format 3\x00", "an SQLite database", "export the text as JSON lines"),
    (0, b"Obj\x01", "an Avro file", _CONVERT),
    (0, b"ORC", "an ORC file", _CONVERT),
    (0, b"FEA1", "a Feather file of version 1", _CONVERT),
    (0, b"\x89HDF\r\n", "an HDF5 file", _CONVERT),
    (0, b"\x93NUMPY", "a numpy array", _CONVERT),
    (0, b"PARE", "an encrypted Parquet file", "decrypt it first"),
    (
        0,
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the data",
        "fetch the data with `git lfs pull`",
    ),
    (0, b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (0, b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_JSON_LINES_NAMES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_COMPRESSED_NAMES = frozenset({".gz", ".zst", ".zstd", ".xz", ".bz2"})
_BEGINS_OBJECT = re.compile(rb'\s*\{\s*"')


class Kind(Enum):
    """Type of a file's uncompressed content."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"


@dataclass(frozen=True)
class FileFormat:
    """Content type and compression of a file."""

    kind: Kind
    compression: Compression = Compression.NONE

    def __str__(self) -> str:
        return self.kind.value + (f".{self.compression.value}" if self.compression.value else "")


def recognize(path: Path, *, may_be_damaged: bool = False) -> FileFormat:
    """Return the format of the file at ``path`` from its content; a name such as ``.jsonl`` makes a text JSON lines.

    An empty file is text. With ``may_be_damaged``, compressed JSON lines are accepted if only later lines are
    damaged. Raises ``FormatError`` for a file that is unsupported, unreadable, or damaged at its beginning, and
    ``MissingPackageError`` if a required package is not installed.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(path, "is no regular file", "write what it gives into a file first")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(0, io.SEEK_END)
            size = file.tell()
            file.seek(max(size - 4, 0))
            tail = file.read()
    except OSError as error:
        raise FormatError(
            path, f"cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error
    if head.startswith(b"PAR1"):
        if size < 12 or tail != b"PAR1":
            raise FormatError(path, "is a Parquet file that ends early", "copy it again")
        return FileFormat(Kind.PARQUET)
    if head.startswith(b"ARROW1\0\0") or _begins_arrow_stream(head, size):
        return FileFormat(Kind.ARROW)
    for magic, compression in _COMPRESSIONS:
        if head.startswith(magic):
            return _recognize_compressed(path, compression, may_be_damaged)
    if _ZSTD_SKIPPABLE.match(head):
        return _recognize_compressed(path, Compression.ZSTD, may_be_damaged)
    with path.open("rb") as file:
        return FileFormat(_kind_of_text(path, head, file))


def _recognize_compressed(path: Path, compression: Compression, may_be_damaged: bool) -> FileFormat:
    """Return the format of a compressed file; reads its beginning.

    Raises ``FormatError`` if its content is compressed again, a table or unsupported. Damage at the beginning is an
    error unless ``may_be_damaged`` and the content are JSON lines.
    """
    try:
        head = read_head(path, compression, _HEAD_BYTES)
        with open_stream(path, compression) as stream:
            inner = [magic for magic, _ in _COMPRESSIONS if head.startswith(magic)]
            if inner or head.startswith((b"PAR1", b"ARROW1\0\0")):
                raise FormatError(
                    path,
                    f"holds a file that is compressed itself or a table, within {compression.value}",
                    "unpack it once",
                )
            kind = _kind_of_text(path, head, stream)
        if kind is Kind.TEXT or not may_be_damaged:
            with open_stream(path, compression) as stream:
                stream.read(_HEAD_BYTES)
        return FileFormat(kind, compression)
    except DamagedError as error:
        raise FormatError(path, f"is damaged: {error}", "copy it again") from error


def _kind_of_text(path: Path, head: bytes, file: io.BufferedIOBase) -> Kind:
    """Return JSON lines or text for ``file``, which begins with ``head``.

    A name such as ``.jsonl`` makes it JSON lines; so do objects on the first two lines with content, or a first object
    on a very long line. A single JSON document is text. Raises ``FormatError`` for an archive, a picture or another
    refused format, and for text that is not UTF-8.
    """
    for offset, magic, description, remedy in _REFUSED:
        if head[offset : offset + len(magic)] == magic:
            raise FormatError(path, f"is {description}", remedy)
    if _named_json_lines(path):
        return Kind.JSONL
    _require_utf8(path, head)
    if not _BEGINS_OBJECT.match(head.removeprefix(BOM)):
        return Kind.TEXT
    lines: list[bytes] = []
    at_start = True
    while len(lines) < 2 and (line := file.readline(_LONGEST_FIRST_LINE)):
        if len(line) == _LONGEST_FIRST_LINE and not line.endswith(b"\n"):
            return Kind.JSONL
        stripped = (line.removeprefix(BOM) if at_start else line).strip()
        at_start = False
        if stripped:
            lines.append(stripped)
    # An object with a repeated key is a bad line of JSON lines, and no text.
    objects = [isinstance(parse_object(line), (dict, RepeatedKeyError)) for line in lines]
    return Kind.JSONL if objects == [True, True] else Kind.TEXT


def _require_utf8(path: Path, head: bytes) -> None:
    """Raise ``FormatError`` unless ``head``, the beginning of a file, is UTF-8; a character that is cut off at its end is no error."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        raise FormatError(
            path,
            f"is not UTF-8 text (byte {head[error.start]:#04x}: {error.reason})",
            "convert it, for example with iconv, or leave it out",
        ) from error


def _named_json_lines(path: Path) -> bool:
    """Return True if the file's name has a suffix of JSON lines, perhaps followed by one of compression; case does not matter."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED_NAMES:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _JSON_LINES_NAMES


def _begins_arrow_stream(head: bytes, size: int) -> bool:
    """Return True for an Arrow stream: a continuation mark, then the length of the first message, padded to 8 bytes."""
    length = int.from_bytes(head[4:8], "little")
    return head.startswith(b"\xff\xff\xff\xff") and 0 < length <= size - 8 and length % 8 == 0


DEFAULTS = ReadOptions()
_LINES_LOOKED_AT = 20


def spans(
    path: Path, file_format: FileFormat, span_bytes: int, options: ReadOptions = DEFAULTS
) -> list[Span]:
    """Return the spans of a file in order, each of about ``span_bytes`` as stored; none for an empty file.

    Spans of text and tables end with a document, row group or batch, so they may be larger; the last may be smaller.
    Compressed files are one span. Plain text is cut at document boundaries, so ``options.document_bytes`` must be the
    same as for reading. Raises ``CorpusError`` if the file cannot be read or is damaged, ``MissingPackageError`` for
    a table without pyarrow, and ``ValueError`` if ``span_bytes`` is not positive.
    """
    if span_bytes < 1:
        raise ValueError(f"span_bytes = {span_bytes} is not positive")
    with _named(path):
        size = path.stat().st_size
        match file_format:
            case FileFormat(Kind.PARQUET):
                tables.require_packages()
                return tables.parquet_spans(path, span_bytes)
            case FileFormat(Kind.ARROW):
                tables.require_packages()
                return tables.arrow_spans(path, span_bytes)
            case FileFormat(Kind.TEXT, Compression.NONE):
                return text_spans(path, size, span_bytes, options)
            case FileFormat(Kind.JSONL, Compression.NONE):
                starts = range(0, size, span_bytes)
                ends = (min(start + span_bytes, size) for start in starts)
                return [Span(start, end, 0, end - start) for start, end in zip(starts, ends, strict=True)]
            case _:
                return [Span(0, size, 0, size)] if size else []


def documents(
    path: Path,
    name: str,
    file_format: FileFormat,
    span: Span,
    options: ReadOptions = DEFAULTS,
    on_bytes: OnBytes | None = None,
) -> Iterator[Document | BadDocument]:
    """Yield the documents of a span in order and with bounded memory. ``name`` is the file's name in its corpus.

    Documents are named ``name@OFFSET`` for a line of JSON, ``name#ROW`` (from 0) for a row of a table, and ``name`` or ``name#PIECE`` for a text file.
    A ``BadDocument`` replaces content without text. Documents may be empty. A damaged file yields a ``BadDocument`` at the damage, and nothing after it.

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


def require_text(path: Path, file_format: FileFormat, options: ReadOptions = DEFAULTS) -> None:
    """Raise ``FormatError`` if none of the first rows has the field that the options name.

    The message lists the existing fields. Plain text has no fields and is accepted, unless the options want
    conversations. An empty file is accepted. Raises ``CorpusError`` for a damaged file, and ``MissingPackageError`` for
    a table without pyarrow.
    """
    with _named(path):
        match file_format.kind:
            case Kind.PARQUET | Kind.ARROW:
                tables.require_packages()
                tables.require_column(path, options, parquet=file_format.kind is Kind.PARQUET)
            case Kind.JSONL:
                with open_stream(path, file_format.compression) as stream:
                    fields = fields_of(stream, _LINES_LOOKED_AT, options)
                if fields is not None:
                    raise tables.missing_field(path, options.field, fields)
            case Kind.TEXT if options.chat:
                raise FormatError(
                    path, "is text, not rows of conversations", "give JSON lines, Parquet or Arrow"
                )
            case Kind.TEXT:
                pass


def _stream_documents(
    path: Path,
    name: str,
    file_format: FileFormat,
    span: Span,
    options: ReadOptions,
    on_bytes: OnBytes | None,
) -> Iterator[Document | BadDocument]:
    """Yield the documents of a span of text or JSON lines. A compressed file is read to its end, whatever the span's stop."""
    compressed = file_format.compression is not Compression.NONE
    with open_stream(path, file_format.compression, on_bytes) as stream:
        if file_format.kind is Kind.JSONL:
            if span.start:
                stream.seek(span.start - 1)
            yield from read_lines(path, name, stream, span.start, None if compressed else span.stop, options)
        else:
            if span.start:
                stream.seek(span.start)
            to_end = compressed or (span.start == 0 and span.stop >= path.stat().st_size)
            yield from read_text(path, name, stream, span, options, to_end=to_end)


@contextmanager
def _file_errors_named(path: Path) -> Iterator[None]:
    """Context that converts ``OSError`` to ``CorpusError`` with the path."""
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context that converts ``OSError`` and ``DamagedError`` to ``CorpusError`` with the path."""
    with _file_errors_named(path):
        try:
            yield
        except DamagedError as error:
            raise CorpusError(f"{path} is damaged: {error}; copy it again") from error
