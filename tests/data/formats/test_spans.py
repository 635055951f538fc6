"""Files in spans: the documents of all spans, in order, are those of the whole file."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.formats.document import BadDocument, Document, ReadOptions, Span
from phalanx.data.formats.read import FileFormat, Kind, documents, recognize, spans

texts = st.text(st.sampled_from('ab\n\r"\\é日👩 {}'), max_size=12)
short = ReadOptions(document_bytes=10, row_bytes=24)


def in_spans(path: Path, span_bytes: int, options: ReadOptions) -> list[Document | BadDocument]:
    form = recognize(path)
    return [
        document
        for span in spans(path, form, span_bytes, options)
        for document in documents(path, path.name, form, span, options)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@settings(max_examples=200)
@given(
    lines=st.lists(
        texts.map(lambda text: json.dumps({"n": 1, "text": text}, ensure_ascii=len(text) % 2 == 0))
        | st.sampled_from(["", "  ", "{", "[1]", '{"text": 3}'])
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    closed=st.booleans(),
    span_bytes=st.integers(1, 80),
)
def test_any_cut_of_json_lines_gives_each_line_once(
    folder: Path, lines: list[str], end: str, closed: bool, span_bytes: int
) -> None:
    path = folder / "cut.jsonl"
    path.write_bytes((end.join(lines) + (end if closed else "")).encode())
    uncut = in_spans(path, 1 << 30, short)
    assert in_spans(path, span_bytes, short) == uncut
    names = [document.name for document in uncut if isinstance(document, Document)]
    assert len(set(names)) == len(names)
    bad = [document for document in uncut if isinstance(document, BadDocument)]
    assert [document.place for document in bad] == [
        f"line {number}" for number, line in enumerate(lines, 1) if line in ("{", "[1]", '{"text": 3}')
    ]
    expected = [json.loads(line)["text"] for line in lines if line.startswith('{"n"')]
    assert "".join(d.text for d in uncut if isinstance(d, Document)) == "".join(expected)


@settings(max_examples=200)
@given(
    content=st.text(st.sampled_from("ab\né日👩"), max_size=60),
    span_bytes=st.integers(1, 80),
    document_bytes=st.integers(4, 12),
)
def test_any_cut_of_text_gives_each_byte_once(
    folder: Path, content: str, span_bytes: int, document_bytes: int
) -> None:
    path = folder / "cut.txt"
    path.write_bytes(content.encode())
    options = ReadOptions(document_bytes=document_bytes)
    form = FileFormat(Kind.TEXT)
    size = len(content.encode())
    uncut = list(documents(path, path.name, form, Span(0, size), options))
    assert in_spans(path, span_bytes, options) == (uncut if content else [])
    assert "".join(document.text for document in uncut if isinstance(document, Document)) == content


@settings(max_examples=60)
@given(rows=st.lists(texts | st.none(), max_size=20), group=st.integers(1, 6), span_bytes=st.integers(1, 600))
def test_any_cut_of_a_table_gives_each_row_once(
    folder: Path, rows: list[str | None], group: int, span_bytes: int
) -> None:
    table = pa.table({"text": pa.array(rows, pa.string()), "n": list(range(len(rows)))})
    pq.write_table(table, folder / "cut.parquet", row_group_size=group)
    with pa.ipc.new_file(folder / "file.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=group)
    with pa.ipc.new_stream(folder / "stream.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=group)
    for name in ("cut.parquet", "file.arrow", "stream.arrow"):
        path = folder / name
        uncut = in_spans(path, 1 << 30, short)
        assert in_spans(path, span_bytes, short) == uncut
        assert "".join(d.text for d in uncut if isinstance(d, Document)) == "".join(filter(None, rows))
        assert [d.place for d in uncut if isinstance(d, BadDocument)] == [
            f"row {number}" for number, row in enumerate(rows, 1) if row is None
        ]


def zstd_in_frames(content: bytes) -> bytes:
    """Several frames, one of them empty, and a skippable one between."""
    pack = zstandard.ZstdCompressor().compress
    half = len(content) // 2
    return pack(content[:half]) + pack(b"") + b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + pack(content[half:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd_in_frames,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_file_gives_the_documents_of_what_is_in_it(folder: Path, ending: str) -> None:
    content = "".join(json.dumps({"text": f"日 {n}\n" * n}) + "\n" for n in range(300)).encode()
    for name in ("a.jsonl", "a.txt"):
        (folder / name).write_bytes(content if name == "a.jsonl" else content.replace(b"{", b"<"))
        (folder / f"{name}.{ending}").write_bytes(PACKERS[ending]((folder / name).read_bytes()))
        options = ReadOptions(document_bytes=1000, row_bytes=200)
        plain, packed = (in_spans(folder / n, 500, options) for n in (name, f"{name}.{ending}"))
        assert len(plain) > 20
        assert [(d.name.replace(f".{ending}", ""), d.text) for d in packed if isinstance(d, Document)] == [
            (d.name, d.text) for d in plain if isinstance(d, Document)
        ]


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_file_that_ends_early_is_bad_where_it_ends(folder: Path, ending: str) -> None:
    # Random digits, which compress by half, so that the end is missing in all formats.
    content = b"".join(b'{"text": "%d"}\n' % (pow(7, n, 10**90 + 7)) for n in range(9000))
    path = folder / f"torn.jsonl.{ending}"
    path.write_bytes(PACKERS[ending](content)[:-3000])
    *good, bad = in_spans(path, 500, ReadOptions())
    assert isinstance(bad, BadDocument)
    assert "is damaged: it ends amid its compressed data" in str(bad)
    assert all(isinstance(document, Document) for document in good)
