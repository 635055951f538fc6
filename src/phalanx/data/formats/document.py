"""Documents, the spans and options that select what to read, and plain text files."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DOCUMENT_BYTES = 1 << 20
"""Maximum size of a document; a larger text file becomes several documents."""


@dataclass(frozen=True)
class Document:
    """One document: a text that is trained on without a break."""

    name: str
    text: str


@dataclass(frozen=True)
class BadDocument:
    """A line, row or piece of a file without usable text, and the reason."""

    path: Path
    place: str
    """For example "line 17" or "row 17", counted from 1; empty for the file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.place}: {self.reason}" if self.place else f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Span:
    """A part of a file that can be read on its own, from ``start`` to ``stop``.

    The unit is bytes for plain text and JSON lines (a line belongs to the span in which it starts), row groups for Parquet, and record batches
    for Arrow. A compressed file is one span.
    """

    start: int
    stop: int
    first: int = 0
    """Number, from 0, of its first document (text) or row (tables) in the file; 0 for JSON lines, which are named by offset."""
    file_bytes: int = 0
    """Stored bytes that are read for the span; used for progress and to divide work."""


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading documents from files."""

    text_field: str | None = None
    """Field of JSON lines or column of tables with the text. None means "text", or "messages" for conversations."""
    chat: bool = False
    """True if rows are conversations, whose text is the result of ``conversation_text``."""
    document_bytes: int = DOCUMENT_BYTES
    """A larger text file becomes several documents, cut after a line."""
    row_bytes: int = 4 << 20
    """A larger text of a line or row becomes several documents in the same way, which bounds memory."""
    line_bytes: int = 1 << 28
    """A longer line of JSON is a bad document, because it would have to fit in memory."""

    @property
    def field(self) -> str:
        """The field that is read: the chosen one, or else "messages" of conversations and "text" of documents."""
        usual = "messages" if self.chat else "text"
        return usual if self.text_field is None else self.text_field


OnBytes = Callable[[int], None]
"""Called from time to time with the number of a span's stored bytes that have been read."""


# Plain text: a file is one document, or several that are cut after a line if it is large.
#
# Cuts depend only on the file, so spans end at document boundaries.


_TAIL_BYTES = 1 << 12


def text_spans(path: Path, size: int, span_bytes: int, options: ReadOptions) -> list[Span]:
    """Return spans of complete documents, each of ``span_bytes`` or up to a document more; the last may be shorter.

    Reads only the bytes around the cuts. A file of at most ``options.document_bytes`` is one document and one span;
    an empty one has none.
    """
    if size <= options.document_bytes:
        return [Span(0, size, 0, size)] if size else []
    spans: list[Span] = []
    start = position = first = number = 0
    with path.open("rb") as file:
        while position < size:
            position = _piece_end(file, position, size, options.document_bytes)
            number += 1
            if position - start >= span_bytes or position == size:
                spans.append(Span(start, position, first, position - start))
                start, first = position, number
    return spans


def read_text(
    path: Path, name: str, stream: io.BufferedReader, span: Span, options: ReadOptions, *, to_end: bool
) -> Iterator[Document | BadDocument]:
    """Yield the documents of ``stream``, which is positioned at the span's start.

    With ``to_end``, the stream is a file that is read to its end, whatever its length. A file that is read in full and
    has at most ``options.document_bytes`` is one document with the file's name. Others are cut into pieces
    ``name#NUMBER``. A piece that is not UTF-8 becomes a ``BadDocument``.
    """
    head = b""
    if to_end:
        while len(head) <= options.document_bytes and (
            block := stream.read(options.document_bytes + 1 - len(head))
        ):
            head += block
        if len(head) <= options.document_bytes:
            yield _decoded(path, name, head, "")
            return
    remaining = span.stop - span.start
    for number, piece in enumerate(pieces(_Rejoined(head, stream), options.document_bytes), span.first):
        yield _decoded(path, f"{name}#{number}", piece, f"piece {number + 1:,}")
        remaining -= len(piece)
        # A window that extends past the span is cut as in the full file.
        if not to_end and remaining <= 0:
            return


def pieces(file: "BinaryIO | _Rejoined", piece_bytes: int) -> Iterator[bytes]:
    """Yield the file in pieces of at most ``piece_bytes``, each cut after a line if it contains a line end.

    Without a line end, the cut is between two characters.
    """
    remainder = b""
    while block := file.read(piece_bytes - len(remainder)):
        block = remainder + block
        cut = len(block) if len(block) < piece_bytes else block.rfind(b"\n") + 1 or _character_end(block)
        yield block[:cut]
        remainder = block[cut:]
    if remainder:
        yield remainder


class _Rejoined:
    """A stream whose first bytes were already read."""

    def __init__(self, head: bytes, stream: io.BufferedReader) -> None:
        self._head = head
        self._stream = stream

    def read(self, count: int) -> bytes:
        """Read up to ``count`` bytes: first those that were read ahead, then the stream's."""
        begin, self._head = self._head[:count], self._head[count:]
        return begin + self._stream.read(count - len(begin)) if len(begin) < count else begin


def _decoded(path: Path, name: str, piece: bytes, place: str) -> Document | BadDocument:
    """Return the document called ``name`` in ``piece``; a ``BadDocument`` at ``place`` of the file if it is not UTF-8."""
    try:
        return Document(name, piece.decode())
    except UnicodeDecodeError as error:
        return BadDocument(path, place, f"is not UTF-8 text (byte {piece[error.start]:#04x}: {error.reason})")


def _piece_end(file: BinaryIO, start: int, size: int, piece_bytes: int) -> int:
    """Return the end of the piece that begins at ``start``, with the same cuts as ``pieces``.

    It is ``size`` if that is nearer than ``piece_bytes``; else after the last line end up to the limit, which is
    searched backward; without one, between two characters. Moves the file's position.
    """
    limit = start + piece_bytes
    if limit > size:
        return size
    tail, length = b"", _TAIL_BYTES
    while len(tail) < piece_bytes:
        length = min(length, piece_bytes)
        file.seek(limit - length)
        tail = file.read(length)
        if after_line := tail.rfind(b"\n") + 1:
            return limit - length + after_line
        length *= 4
    return start + _character_end(tail)


def _character_end(block: bytes) -> int:
    """Return the offset of the last, possibly incomplete, UTF-8 character: its first byte is not a continuation byte."""
    starts = (i for i in range(len(block) - 1, max(len(block) - 5, 0), -1) if block[i] & 0xC0 != 0x80)
    return next(starts, len(block))
