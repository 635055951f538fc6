"""Recognition: content decides what a file is, and what cannot be read is refused by its name."""

import bz2
import gzip
import io
import lzma
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from phalanx.data.errors import FormatError, MissingPackageError
from phalanx.data.formats.compressed import Compression
from phalanx.data.formats.document import BadDocument, Document, ReadOptions, Span
from phalanx.data.formats.read import FileFormat, Kind, documents, recognize, require_text, spans

TWO_LINES = b'{"text": "a"}\n{"text": "b"}\n'
TABLE = pa.table({"content": ["a", "b"], "n": [1, 2]})


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a", b"", Kind.TEXT),
        ("a.txt", b"Roses\n", Kind.TEXT),
        ("a.parquet", b"PAR is golf\n", Kind.TEXT),
        ("mail", TWO_LINES, Kind.JSONL),
        ("mail.txt", b"\xef\xbb\xbf\r\n \n" + TWO_LINES, Kind.JSONL),
        ("mail", b'{"score": NaN}\n{"text": "b"}', Kind.JSONL),
        ("mail", b'{"text": "' + b"a" * (1 << 24) + b'"}\n', Kind.JSONL),
        ("one.jsonl", b'{"text": "a"}', Kind.JSONL),
        ("one.json", b'{"text": "a"}', Kind.TEXT),
        ("broken.NDJSON", b'"text": "a"}\n', Kind.JSONL),
        ("code.json", b'{\n"a": 1\n}\n', Kind.TEXT),
        ("array.json", b'[{"text": "a"},\n{"text": "b"}]\n', Kind.TEXT),
        ("set.py", b'{"a"}\n{"b"}\n', Kind.TEXT),
    ],
)
def test_text_and_json_lines_are_distinguished(tmp_path: Path, name: str, content: bytes, kind: Kind) -> None:
    assert recognize(written(tmp_path / name, content)) == FileFormat(kind)


def test_objects_with_a_repeated_key_are_bad_json_lines_and_no_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a", b'{"text": "a", "text": "b"}\n{"text": "c"}\n')
    assert recognize(path) == FileFormat(Kind.JSONL)


def test_the_content_of_a_compressed_file_decides_again(tmp_path: Path) -> None:
    for pack, compression in (
        (gzip.compress, Compression.GZIP),
        (bz2.compress, Compression.BZ2),
        (lzma.compress, Compression.XZ),
        (zstandard.compress, Compression.ZSTD),
    ):
        assert recognize(written(tmp_path / "a.dat", pack(TWO_LINES))) == FileFormat(Kind.JSONL, compression)
        assert recognize(written(tmp_path / "a.dat", pack(b"Roses"))) == FileFormat(Kind.TEXT, compression)
        assert recognize(written(tmp_path / f"a.jsonl.{compression.value}", pack(b"{"))) == FileFormat(
            Kind.JSONL, compression
        )


def test_tables_are_recognized_under_any_name(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.txt")
    assert recognize(tmp_path / "a.txt") == FileFormat(Kind.PARQUET)
    pa.feather.write_feather(TABLE, tmp_path / "b.txt")
    assert recognize(tmp_path / "b.txt") == FileFormat(Kind.ARROW)
    with pa.ipc.new_stream(tmp_path / "c.txt", TABLE.schema):
        pass
    assert recognize(tmp_path / "c.txt") == FileFormat(Kind.ARROW)


def a_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a.txt", "a")
    return out.getvalue()


def a_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (a_zip(), "is a zip archive .*; unpack it"),
        (b"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it"),
        (a_tar(), "is a tar archive; unpack it"),
        (gzip.compress(a_tar()), "is a tar archive; unpack it"),
        (b"\x04\x22\x4d\x18abc", "compressed by lz4; compress it with zstd or gzip instead"),
        (gzip.compress(gzip.compress(b"a")), "compressed itself .*; unpack it once"),
        (gzip.compress(b"a" * 100)[:-9], "is damaged: it ends amid its compressed data; copy it again"),
        (b"PAR1 and no end", "ends early; copy it again"),
        ("naïve".encode("utf-16"), "is UTF-16 text; convert it: iconv -f UTF-16"),
        ("naïve".encode("latin-1"), "is not UTF-8 text .*iconv"),
        (b"\x89PNG\r\n\x1a\n", "is a PNG picture; leave it out"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        recognize(written(tmp_path / "file", content))


def test_a_pipe_and_a_missing_file_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="is no regular file"):
        recognize(tmp_path / "pipe")
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        recognize(tmp_path / "missing")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz"])
def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    match path.suffix:
        case ".parquet":
            pq.write_table(TABLE, path)
        case ".arrow":
            pa.feather.write_feather(TABLE, path)
        case ".gz":
            path.write_bytes(gzip.compress(b'{"content": "a", "n": 1}\n'))
        case _:
            path.write_bytes(b'{"content": "a", "n": 1}\n')
    with pytest.raises(
        FormatError, match=f"{name} has no field 'text'; it has: content, n; name it with --text-field"
    ):
        require_text(path, recognize(path))
    require_text(path, recognize(path), ReadOptions(text_field="content"))
    read = documents(
        path, name, recognize(path), spans(path, recognize(path), 1)[0], ReadOptions(text_field="content")
    )
    first = next(read)
    assert isinstance(first, Document)
    assert first.text == "a"


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["é", "b", None, "b"], pa.large_string()),
        pa.array(["é", "b", None, "b"], pa.string_view()),
        pa.array(["é", "b", None, "b"]).dictionary_encode(),
        pa.array(["é".encode(), b"b", None, b"b"], pa.binary()),
    ],
    ids=lambda column: str(column.type)[:12],
)
def test_columns_of_text_of_any_sort_are_read(tmp_path: Path, column: pa.Array) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"meta": [{"a": 1}] * 4, "text": column}), path)
    require_text(path, FileFormat(Kind.PARQUET))
    (span,) = spans(path, FileFormat(Kind.PARQUET), 1)
    assert list(documents(path, "a", FileFormat(Kind.PARQUET), span)) == [
        Document("a#0", "é"),
        Document("a#1", "b"),
        BadDocument(path, "row 3", "its 'text' is null"),
        Document("a#3", "b"),
    ]


def test_a_column_that_is_no_text_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [{"a": "b"}], "body": ["a"]}), path)
    with pytest.raises(FormatError, match=r"holds struct<.*, not text, in its column 'text'; name .*: body"):
        require_text(path, FileFormat(Kind.PARQUET))


def test_bytes_in_a_table_that_are_not_utf8_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    for column in (text, text.cast(pa.binary())):
        pq.write_table(pa.table({"text": column}), path)
        rows = list(documents(path, "a", FileFormat(Kind.PARQUET), Span(0, 1)))
        assert [str(document) for document in rows if isinstance(document, BadDocument)] == [
            f"{path}, row 2: is not UTF-8 text (byte 0xff: invalid start byte)"
        ]
        assert len(rows) == 3


def test_a_table_without_rows_has_no_documents(tmp_path: Path) -> None:
    for write in (pq.write_table, pa.feather.write_feather):
        write(TABLE.slice(0, 0), tmp_path / "empty")
        form = recognize(tmp_path / "empty")
        rows = [
            document
            for span in spans(tmp_path / "empty", form, 1)
            for document in documents(tmp_path / "empty", "empty", form, span)
        ]
        assert rows == []


def test_offsets_that_lead_out_of_a_table_are_damage_and_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    pa.feather.write_feather(pa.table({"text": ["a" * 301, "b" * 500]}), path, compression="uncompressed")
    offsets, wild = (np.array([0, 301, end], dtype=np.int32).tobytes() for end in (801, 1 << 30))
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, wild))
    (span,) = spans(path, FileFormat(Kind.ARROW), 1)
    (bad,) = documents(path, "a", FileFormat(Kind.ARROW), span)
    assert "is damaged" in str(bad)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "a"} {"text": "b"}', "is not JSON .*Extra data"),
        (b'{"text": "\xff"}', "is not UTF-8 text .byte 0xff"),
        (b'["a"]', "is no JSON object, but a list"),
        (b'{"txt": "a"}', "has no field 'text'; it has: txt"),
        (b'{"text": null}', "its 'text' is null, not text"),
        (b'{"text": ["a"]}', "its 'text' is a list, not text"),
        (b'{"text": NaN}', "its 'text' is a number, not text"),
        (b'{"text": "a", "text": "b"}', "key 'text' is there twice; keep one"),
        (b'{"text": "\\ud800"}', r"holds \\ud800, half of a pair of surrogates"),
        (b'{"text": ' + b"[" * 100_000, "is not JSON"),
        (b'{"text": "' + b"a" * 2_000_000 + b'"}', "is longer than 1,000,000 bytes"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, reason: str) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "before"}\n\n' + line + b'\r\n{"text": "after"}\n')
    options = ReadOptions(line_bytes=1_000_000)
    lines = list(documents(path, "a", FileFormat(Kind.JSONL), Span(0, path.stat().st_size), options))
    assert [document.text for document in lines if isinstance(document, Document)] == ["before", "after"]
    (bad,) = (document for document in lines if isinstance(document, BadDocument))
    assert bad.place == "line 3"
    assert re.search(reason, bad.reason)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a", "score": NaN, "x": -Infinity}', "a"),
        (b'{"text": "text", "type": "text", "as": "\\"text\\":"}', "text"),
        (b'{"text": "a", "id": 1, "id": 2}', "a"),
        (b'{"t\\u0065xt": "a"}', "a"),
        (b'\xef\xbb\xbf{"text": "a\\r\\n\\u0000"}', "a\r\n\0"),
        (b'{"text": "\\ud83d\\ude00"}', "😀"),
        ('{"text": "a\u2028b"}'.encode(), "a\u2028b"),
    ],
)
def test_lines_as_others_write_them_are_read(tmp_path: Path, line: bytes, text: str) -> None:
    path = written(tmp_path / "a.jsonl", line + b"\n")
    (document,) = documents(path, "a", FileFormat(Kind.JSONL), Span(0, len(line) + 1))
    assert document == Document("a@0", text)


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [], "messages": []}',
        b'{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}',
        b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "[{\\"content\\": 1, \\"content\\": 2}]"}',
    ],
)
def test_a_conversation_with_a_repeated_key_is_bad(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "a.jsonl", line + b"\n")
    options = ReadOptions(chat=True)
    (document,) = documents(path, "a", FileFormat(Kind.JSONL), Span(0, len(line) + 1), options)
    assert isinstance(document, BadDocument)
    assert re.search("key '(messages|content)' is there twice; keep one", document.reason)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    packed = written(tmp_path / "a.zst", zstandard.compress(TWO_LINES))
    for package in ("pyarrow.parquet", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'phalanx-train\[prepare\]'"):
        spans(tmp_path / "a.parquet", FileFormat(Kind.PARQUET), 1)
    with pytest.raises(MissingPackageError, match=r"pip install 'phalanx-train\[prepare\]'"):
        recognize(packed)
