"""JSON lines: one object on each line, of which one field is the text.

``msgspec`` takes the one field out of a line without building the rest. What it refuses is looked at again by Python's own
parser, which is slower, takes ``NaN`` as Python writes it, and tells what is wrong. A document is named by the offset of its
line in the file, uncompressed, so that any span can be read without counting the lines before it.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.data.chat.messages import conversation_text
from phalanx.data.formats.document import BadDocument, Document, ReadOptions, pieces

BOM = b"\xef\xbb\xbf"
_MOST_FIELDS_NAMED = 12
_COUNT_BYTES = 1 << 20
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def parse_object(line: bytes) -> object:
    """What the line holds if it is JSON, ``NaN`` and ``Infinity`` included; a ``ValueError``, returned, if it is not."""
    try:
        return json.loads(line)
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
    """The documents of the lines that start at offsets from ``start`` up to ``stop`` (None: the end).

    ``stream`` is at ``start`` - 1, or at 0 if that is 0.
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
        place = offset
        offset += len(line)
        if len(line) == options.line_bytes and not line.endswith(b"\n"):
            offset += _skip_line(stream, options.line_bytes)
            count.passed(1)
            yield BadDocument(
                path, f"line {count.lines:,}", f"is longer than {options.line_bytes:,} bytes: no JSON lines?"
            )
            continue
        count.passed(1)
        line = (line.removeprefix(BOM) if place == 0 else line).strip()
        if not line:
            continue
        text = text_of(line)
        if isinstance(text, str):
            yield from in_pieces(f"{name}@{place}", text, options)
        else:
            yield BadDocument(path, f"line {count.lines:,}", text.reason)


def fields_of(stream: io.BufferedReader, lines: int, options: ReadOptions) -> list[str] | None:
    """The fields of the first ``lines`` objects, in order of appearance; None if one of them has the text field, or none is an object."""
    fields: dict[str, None] = {}
    at_start = True
    seen = 0
    while seen < lines and (line := stream.readline(options.line_bytes)):
        line = (line.removeprefix(BOM) if at_start else line).strip()
        at_start = False
        if not line:
            continue
        seen += 1
        found = parse_object(line)
        if isinstance(found, dict):
            if options.field in found:
                return None
            fields |= dict.fromkeys(found)
    return list(fields) or None


def fields_in_words(fields: list[str]) -> str:
    """Names of fields for a message, with an end to their number."""
    more = len(fields) - _MOST_FIELDS_NAMED
    return ", ".join(fields[:_MOST_FIELDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def in_pieces(name: str, text: str, options: ReadOptions) -> Iterator[Document]:
    """The text as one document, or as several of ``row_bytes`` at most, cut after lines: ``name.0``, ``name.1``, ..."""
    if options.chat or len(text) <= options.row_bytes // 4 or len(utf8 := text.encode()) <= options.row_bytes:
        yield Document(name, text)
        return
    for number, piece in enumerate(pieces(io.BytesIO(utf8), options.row_bytes)):
        yield Document(f"{name}.{number}", piece.decode())


class _Bad(msgspec.Struct):
    reason: str


def _text_reader(field: str) -> Callable[[bytes], str | _Bad]:
    row = msgspec.defstruct("Row", [("text", str)], rename={"text": field})
    decode = msgspec.json.Decoder(row).decode

    def text_of(line: bytes) -> str | _Bad:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            text: str = decode(line).text  # type: ignore[attr-defined]
            return text
        return _text_or_reason(line, field)

    return text_of


def _conversation_reader(field: str) -> Callable[[bytes], str | _Bad]:
    def text_of(line: bytes) -> str | _Bad:
        found = _object_or_reason(line, field)
        if isinstance(found, _Bad):
            return found
        try:
            return conversation_text(found, field)
        except ValueError as error:
            return _Bad(str(error))

    return text_of


def _object_or_reason(line: bytes, field: str) -> dict[str, object] | _Bad:
    """The object on the line, if it has the field."""
    found = parse_object(line)
    if isinstance(found, UnicodeDecodeError):
        return _Bad(f"is not UTF-8 text (byte {found.object[found.start]:#04x}: {found.reason})")
    if isinstance(found, ValueError):
        return _Bad(f"is not JSON ({found})")
    if not isinstance(found, dict):
        return _Bad(f"is no JSON object, but {_json_type(found)}")
    if field not in found:
        return _Bad(f"has no field {field!r}; it has: {fields_in_words(list(found))}")
    return found


def _text_or_reason(line: bytes, field: str) -> str | _Bad:
    found = _object_or_reason(line, field)
    if isinstance(found, _Bad):
        return found
    text = found[field]
    if not isinstance(text, str):
        return _Bad(f"its {field!r} is {_json_type(text)}, not text")
    if half := _HALF_PAIR.search(text):
        return _Bad(
            f"its {field!r} holds \\u{ord(half[0]):04x}, half of a pair of surrogates, which is no character"
        )
    return text


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "a string")


def _skip_line(stream: io.BufferedReader, block: int) -> int:
    """Read up to and with the next end of a line; the bytes that were read."""
    count = 0
    while piece := stream.readline(block):
        count += len(piece)
        if piece.endswith(b"\n"):
            break
    return count


class _LineCounter:
    """The number of the current line in the file, from 1; those before the span are counted only when it is asked for."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._before: int | None = None if start else 0
        self._here = 0

    def passed(self, lines: int) -> None:
        self._here += lines

    @property
    def lines(self) -> int:
        if self._before is None:
            self._before = _lines_started_before(self._path, self._start)
        return self._before + self._here


def _lines_started_before(path: Path, offset: int) -> int:
    count, left, last = 0, offset, b"\n"
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _COUNT_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return count + (last != b"\n")
