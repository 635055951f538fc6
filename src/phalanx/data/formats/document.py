"""What reading gives, a document or what is bad in its place, and the spans and options that say what to read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
