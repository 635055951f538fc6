"""Plain text: a file is one document, or, above a length, several that are cut after a line.

Where a file is cut follows from the file alone, so that spans end where documents do.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx.data.formats.document import BadDocument, Document, ReadOptions, Span

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
