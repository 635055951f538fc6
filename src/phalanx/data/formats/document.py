"""Documents: what reading returns, spans and options that select what to read, and plain text."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DOCUMENT_BYTES = 1 << 20
"""Bytes above which a text file becomes several documents."""


@dataclass(frozen=True)
class Document:
    """One document: a text that is trained on as a whole."""

    name: str
    text: str


@dataclass(frozen=True)
class BadDocument:
    """A line, a row or a piece of a file that holds no text that can be trained on, and why."""

    path: Path
    place: str
    """Such as "line 17" or "row 17", both counted from 1; empty for the whole file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.place}: {self.reason}" if self.place else f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Span:
    """A part of a file that can be read by itself, from ``start`` up to ``stop``.

    Both are bytes of plain text and JSON lines (a line belongs to the span in which it starts), row groups of Parquet, and
    record batches of Arrow. A compressed file is one span of all its bytes.
    """

    start: int
    stop: int
    first: int = 0
    """Number, from 0, of its first document (text) or row (tables) in the file; 0 for JSON lines, which are named by offset."""
    file_bytes: int = 0
    """Bytes of the file that are read for it, as stored; for progress and for dividing work."""


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken from files."""

    text_field: str | None = None
    """Field of JSON lines or column of tables that holds the text; None for "text", of conversations "messages"."""
    chat: bool = False
    """Rows are conversations: the text of each is what ``conversation_text`` makes of it."""
    document_bytes: int = DOCUMENT_BYTES
    """A text file of more bytes becomes several documents, cut after a line."""
    row_bytes: int = 4 << 20
    """A line's or row's text of more bytes becomes several documents, likewise, which keeps memory bounded."""
    line_bytes: int = 1 << 28
    """A longer line of JSON is bad: it would have to be in memory whole."""

    @property
    def field(self) -> str:
        usual = "messages" if self.chat else "text"
        return usual if self.text_field is None else self.text_field


OnBytes = Callable[[int], None]
"""Called now and then with the bytes of the file, as stored, that have been read of a span so far."""


# Plain text: a file is one document, or, above a length, several that are cut after a line.
#
# Where a file is cut follows from the file alone, so that spans end where documents do.


_TAIL_BYTES = 1 << 12


def text_spans(path: Path, size: int, span_bytes: int, options: ReadOptions) -> list[Span]:
    """Spans of ``span_bytes`` or a little more, each of whole documents; only the bytes around the cuts are read."""
    if size <= options.document_bytes:
        return [Span(0, size, 0, size)] if size else []
    spans: list[Span] = []
    start = at = first = number = 0
    with path.open("rb") as file:
        while at < size:
            at = _piece_end(file, at, size, options.document_bytes)
            number += 1
            if at - start >= span_bytes or at == size:
                spans.append(Span(start, at, first, at - start))
                start, first = at, number
    return spans


def read_text(
    path: Path, name: str, stream: io.BufferedReader, span: Span, options: ReadOptions, *, whole: bool
) -> Iterator[Document | BadDocument]:
    """The documents of ``stream``, which stands at the span's start. ``whole``: the stream is the file to its end, read whatever its length."""
    head = b""
    if whole:
        while len(head) <= options.document_bytes and (
            block := stream.read(options.document_bytes + 1 - len(head))
        ):
            head += block
        if len(head) <= options.document_bytes:
            yield _decoded(path, name, head, "")
            return
    left = span.stop - span.start
    for number, piece in enumerate(pieces(_Rejoined(head, stream), options.document_bytes), span.first):
        yield _decoded(path, f"{name}#{number}", piece, f"piece {number + 1:,}")
        left -= len(piece)
        # A window that reaches beyond the span is cut as it would be in the whole file.
        if not whole and left <= 0:
            return


def pieces(file: "BinaryIO | _Rejoined", piece_bytes: int) -> Iterator[bytes]:
    """The file in pieces of at most ``piece_bytes``, each ending after a line where it holds a line's end at all."""
    rest = b""
    while block := file.read(piece_bytes - len(rest)):
        block = rest + block
        cut = len(block) if len(block) < piece_bytes else block.rfind(b"\n") + 1 or _character_end(block)
        yield block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


class _Rejoined:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: io.BufferedReader) -> None:
        self._head = head
        self._stream = stream

    def read(self, count: int) -> bytes:
        begin, self._head = self._head[:count], self._head[count:]
        return begin + self._stream.read(count - len(begin)) if len(begin) < count else begin


def _decoded(path: Path, name: str, piece: bytes, place: str) -> Document | BadDocument:
    try:
        return Document(name, piece.decode())
    except UnicodeDecodeError as error:
        return BadDocument(path, place, f"is not UTF-8 text (byte {piece[error.start]:#04x}: {error.reason})")


def _piece_end(file: BinaryIO, start: int, size: int, piece_bytes: int) -> int:
    """Where the piece that begins at ``start`` ends, as ``pieces`` cuts: looks for a line's end backward from the limit."""
    limit = start + piece_bytes
    if limit > size:
        return size
    tail, length = b"", _TAIL_BYTES
    while len(tail) < piece_bytes:
        length = min(length, piece_bytes)
        file.seek(limit - length)
        tail = file.read(length)
        if found := tail.rfind(b"\n") + 1:
            return limit - length + found
        length *= 4
    return start + _character_end(tail)


def _character_end(block: bytes) -> int:
    """The offset at which the last, perhaps incomplete, UTF-8 character begins: its first byte is no continuation byte."""
    starts = (i for i in range(len(block) - 1, max(len(block) - 5, 0), -1) if block[i] & 0xC0 != 0x80)
    return next(starts, len(block))
