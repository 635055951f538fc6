"""Read JSON lines: one object per line, with the text in one of its fields.

``msgspec`` decodes only that field. A line that it refuses, or in which the field's name occurs twice, is parsed again by Python's slower parser,
which accepts ``NaN``, refuses a repeated key and gives a better reason for errors. To parse every line so would read several times slower, and a
repeated key that is not read changes no text. A conversation is always parsed so, since all of a message is rendered.

A document is named by the uncompressed offset of its line, so a span can be read without counting the lines before it.
"""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.data.chat.messages import HALF_PAIR, conversation_text
from phalanx.data.formats.document import BadDocument, Document, ReadOptions, pieces
from phalanx.run.directory.files import RepeatedKeyError, unique_keys

BOM = b"\xef\xbb\xbf"
_MOST_FIELDS_NAMED = 12
_COUNT_BYTES = 1 << 20


def parse_object(line: bytes) -> object:
    """Return the JSON value on the line, with ``NaN`` and ``Infinity`` allowed.

    A line that is not JSON, is nested too deeply or has a key twice in an object raises nothing: its ``ValueError`` is returned.
    """
    try:
        return json.loads(line, object_pairs_hook=unique_keys)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("nested too deeply")


def read_lines(
    path: Path,
    name: str,
    stream: io.BufferedReader,
    start: int,
    stop: int | None,
    options: ReadOptions,
) -> Iterator[Document | BadDocument]:
    """Yield the documents of lines that start at offsets from ``start`` to ``stop`` (None: the end).

    ``stream`` is at ``start`` - 1, or at 0 if ``start`` is 0. Blank lines are skipped. A line that is too long, is no
    JSON object or has no text in the field becomes a ``BadDocument``.
    """
    offset = start
    if start > 0:
        offset = start - 1 + _skip_line(stream, options.line_bytes)
    text_of = _conversation_reader(options.field) if options.chat else _text_reader(options.field)
    count = _LineCounter(path, start)
    while stop is None or offset < stop:
        line = stream.readline(options.line_bytes)
        if not line:
            return
        line_start = offset
        offset += len(line)
        if len(line) == options.line_bytes and not line.endswith(b"\n"):
            offset += _skip_line(stream, options.line_bytes)
            count.passed(1)
            yield BadDocument(
                path, f"line {count.lines:,}", f"is longer than {options.line_bytes:,} bytes: no JSON lines?"
            )
            continue
        count.passed(1)
        line = (line.removeprefix(BOM) if line_start == 0 else line).strip()
        if not line:
            continue
        text = text_of(line)
        if isinstance(text, str):
            yield from in_pieces(f"{name}@{line_start}", text, options)
        else:
            yield BadDocument(path, f"line {count.lines:,}", text.reason)


def fields_of(stream: io.BufferedReader, lines: int, options: ReadOptions) -> list[str] | None:
    """Return the field names of the first ``lines`` objects in order of appearance, for a message about a missing
    field.

    None if an object has the text field, or if no line is an object. Blank lines do not count.
    """
    fields: dict[str, None] = {}
    at_start = True
    line_count = 0
    while line_count < lines and (line := stream.readline(options.line_bytes)):
        line = (line.removeprefix(BOM) if at_start else line).strip()
        at_start = False
        if not line:
            continue
        line_count += 1
        value = parse_object(line)
        if isinstance(value, dict):
            if options.field in value:
                return None
            fields |= dict.fromkeys(value)
    return list(fields) or None


def fields_in_words(fields: list[str]) -> str:
    """Return a limited number of field names for a message."""
    more = len(fields) - _MOST_FIELDS_NAMED
    return ", ".join(fields[:_MOST_FIELDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def in_pieces(name: str, text: str, options: ReadOptions) -> Iterator[Document]:
    """Yield the text as one document, or as several of at most ``row_bytes``, cut after lines and named ``name.0``, ``name.1``, ...

    ``row_bytes`` counts bytes of UTF-8. A conversation (``options.chat``) is never cut.
    """
    if options.chat or len(text) <= options.row_bytes // 4 or len(utf8 := text.encode()) <= options.row_bytes:
        yield Document(name, text)
        return
    for number, piece in enumerate(pieces(io.BytesIO(utf8), options.row_bytes)):
        yield Document(f"{name}.{number}", piece.decode())


class _Bad(msgspec.Struct):
    reason: str


def _text_reader(field: str) -> Callable[[bytes], str | _Bad]:
    """Return a function from a line to the text in its ``field``, or to ``_Bad`` with the reason if it has none.
    Other fields are not decoded.
    """
    row = msgspec.defstruct("Row", [("text", str)], rename={"text": field})
    decode = msgspec.json.Decoder(row).decode
    name = f'"{field}"'.encode()

    def text_of(line: bytes) -> str | _Bad:
        if line.count(name) > 1:  # within a text it would be written with backslashes
            return _text_or_reason(line, field)
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            text: str = decode(line).text  # type: ignore[attr-defined]
            return text
        return _text_or_reason(line, field)

    return text_of


def _conversation_reader(field: str) -> Callable[[bytes], str | _Bad]:
    """Return a function from a line to the conversation in its ``field`` as one line of JSON, or to ``_Bad`` with the
    reason if it is malformed.
    """

    def text_of(line: bytes) -> str | _Bad:
        """Return the conversation in a line as text, or the reason why it is bad."""
        row = _object_or_reason(line, field)
        if isinstance(row, _Bad):
            return row
        try:
            return conversation_text(row, field)
        except ValueError as error:
            return _Bad(str(error))

    return text_of


def _object_or_reason(line: bytes, field: str) -> dict[str, object] | _Bad:
    """Return the object on the line if it has the field; otherwise the reason, as ``_Bad``."""
    value = parse_object(line)
    if isinstance(value, UnicodeDecodeError):
        return _Bad(f"is not UTF-8 text (byte {value.object[value.start]:#04x}: {value.reason})")
    if isinstance(value, RepeatedKeyError):
        return _Bad(str(value))
    if isinstance(value, ValueError):
        return _Bad(f"is not JSON ({value})")
    if not isinstance(value, dict):
        return _Bad(f"is no JSON object, but {_json_type(value)}")
    if field not in value:
        return _Bad(f"has no field {field!r}; it has: {fields_in_words(list(value))}")
    return value


def _text_or_reason(line: bytes, field: str) -> str | _Bad:
    """Return the text in the line's ``field``; if it is not valid JSON, no text, or has half of a surrogate pair, the
    reason, as ``_Bad``.
    """
    row = _object_or_reason(line, field)
    if isinstance(row, _Bad):
        return row
    text = row[field]
    if not isinstance(text, str):
        return _Bad(f"its {field!r} is {_json_type(text)}, not text")
    if half := HALF_PAIR.search(text):
        return _Bad(
            f"its {field!r} holds \\u{ord(half[0]):04x}, half of a pair of surrogates, which is no character"
        )
    return text


def _json_type(value: object) -> str:
    """Return a JSON value's type in words, for messages."""
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "a string")


def _skip_line(stream: io.BufferedReader, block: int) -> int:
    """Read to the end of the present line, ``block`` bytes at a time. Return the number of bytes skipped."""
    count = 0
    while piece := stream.readline(block):
        count += len(piece)
        if piece.endswith(b"\n"):
            break
    return count


class _LineCounter:
    """Counts lines to give the current line's number in the file, from 1. Lines before the span are counted only if the number is needed."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._before: int | None = None if start else 0
        self._span_lines = 0

    def passed(self, lines: int) -> None:
        self._span_lines += lines

    @property
    def lines(self) -> int:
        """Lines of the file up to here; those before the span are counted once, when needed."""
        if self._before is None:
            self._before = _lines_started_before(self._path, self._start)
        return self._before + self._span_lines


def _lines_started_before(path: Path, offset: int) -> int:
    """Return how many lines begin before ``offset``, the line that contains it included. Reads the file up to there."""
    count, remaining, last_byte = 0, offset, b"\n"
    with path.open("rb") as file:
        while remaining and (block := file.read(min(remaining, _COUNT_BYTES))):
            count += block.count(b"\n")
            remaining -= len(block)
            last_byte = block[-1:]
    return count + (last_byte != b"\n")
