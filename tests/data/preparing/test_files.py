"""Files as a corpus: all found, named by their place, read as what they are, and what is bad named and counted."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.preparing.files import Files, files_of

JSON_LINES = b'{"text": "one"}\nno json\n{"text": ""}\n{"text": null}\n{"text": "two"}\n'
PNG = b"\x89PNG\r\n\x1a\n\x00"


def test_files_of_a_folder_are_named_by_their_path_below_it(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/b/d.md", ".hidden/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [(d.name, d.text) for d in files_of([tmp_path])] == [
        (n, n) for n in ("a/b/d.md", "a/c.txt", "b.txt")
    ]


def test_a_glob_names_files_below_its_first_wildcard(tmp_path: Path) -> None:
    for name in ("x/a.txt", "x/b.md", "y/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.name for d in files_of([tmp_path / "**/*.txt"])] == ["x/a.txt", "y/a.txt"]


def test_names_do_not_depend_on_the_place_of_the_folder(tmp_path: Path) -> None:
    names = []
    for place in ("here", "over/there"):
        (tmp_path / place / "books").mkdir(parents=True)
        (tmp_path / place / "books/one.txt").write_text("one")
        names.append([d.name for d in files_of([tmp_path / place / "books"])])
    assert names[0] == names[1]


def test_a_file_that_two_patterns_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(
        CorpusError, match=r"a\.txt is named twice, by .* \(and 1 more\); name each file once"
    ):
        files_of([tmp_path, tmp_path / "*.txt"])
    with pytest.raises(CorpusError, match=r"a\.txt' is named more than once"):
        files_of([tmp_path / "a.txt", tmp_path / "a.txt"])


def test_a_link_to_a_file_in_the_same_folder_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "up").symlink_to(tmp_path)
    assert [document.name for document in files_of([tmp_path])] == ["a.txt"]


def test_line_ends_and_byte_order_marks_stay_as_they_are(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert [document.text for document in files_of([tmp_path])] == [text]


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("ab\né日👩")), document_bytes=st.integers(4, 20))
def test_pieces_of_a_long_file_join_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, document_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "long.txt"
    path.write_bytes(text.encode())
    documents = list(files_of([path], ReadOptions(document_bytes=document_bytes)))
    assert "".join(document.text for document in documents) == text
    assert all(len(document.text.encode()) <= document_bytes for document in documents)


def test_a_long_file_is_cut_after_lines(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("one\ntwo\nthree\n" * 20)
    documents = list(files_of([tmp_path], ReadOptions(document_bytes=40)))
    assert [document.name for document in documents[:2]] == ["long.txt#0", "long.txt#1"]
    assert all(document.text.endswith("\n") for document in documents)


def test_text_that_is_all_in_the_place_of_the_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match="where the dataset is to be"):
        files_of([tmp_path / "a.txt"], out=tmp_path)


def test_a_pattern_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file matches .*\*\.txt"):
        files_of([tmp_path / "*.txt"])


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin\.txt is not UTF-8 .*iconv"):
        list(files_of([tmp_path]))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    corpus = files_of([tmp_path])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*a\.txt"):
        list(corpus)


def test_a_file_that_changed_between_two_readings_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    corpus = files_of([tmp_path])
    assert len(list(corpus)) == 1
    (tmp_path / "a.txt").write_text("another")
    with pytest.raises(CorpusError, match=r"a\.txt changed while it was being prepared"):
        list(corpus)


def mixed(folder: Path) -> Path:
    """A folder of text, JSON lines with two bad and one empty, Parquet, a picture and an empty file."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "a.txt").write_text("prose")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(JSON_LINES))
    pq.write_table(pa.table({"text": ["three", "four"]}), folder / "c.parquet")
    (folder / "empty.txt").touch()
    (folder / "pictures/1.png").write_bytes(PNG)
    (folder / "pictures/2.png").write_bytes(PNG)
    return folder


def read(files: Files) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in files]


def test_with_skip_all_that_is_bad_is_left_out_and_named_and_the_rest_counted_by_format(
    tmp_path: Path,
) -> None:
    files = files_of([mixed(tmp_path)], on_bad="skip")
    for _ in range(2):
        assert read(files) == [
            ("a.txt", "prose"),
            ("b.jsonl.gz@0", "one"),
            ("b.jsonl.gz@52", "two"),
            ("c.parquet#0", "three"),
            ("c.parquet#1", "four"),
        ]
        report = files.report
        assert report.documents == {"text": 1, "jsonl.gz": 2, "parquet": 2}
        assert report.without_text == 2
        assert [str(bad).removeprefix(f"{tmp_path}/") for bad in report.bad] == [
            "pictures/1.png: is a PNG picture",
            "pictures/2.png: is a PNG picture",
            "b.jsonl.gz, line 2: is not JSON (Expecting value: line 1 column 1 (char 0))",
            "b.jsonl.gz, line 4: its 'text' is null, not text",
        ]
        assert report.bad_count == 4
        assert report.bytes_done == files.bytes_in_all


def test_many_bad_lines_are_counted_and_the_first_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "bad\n" * 100)
    files = files_of([tmp_path], on_bad="skip")
    assert len(list(files)) == 1
    assert (files.report.bad_count, len(files.report.bad)) == (100, 20)


def test_without_skip_files_that_cannot_be_read_are_counted_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError,
        match=r"2 of 6 files cannot be read, of which the first: .*1\.png is a PNG picture; .*glob",
    ):
        files_of([mixed(tmp_path)])


def test_without_skip_the_first_bad_line_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 2: is not JSON .*; mend it, or .*--on-bad skip"):
        list(files_of([tmp_path]))


def test_a_long_text_loses_only_the_piece_that_is_bad(tmp_path: Path) -> None:
    lines = ["äöü\n" * 200_000, "gut\n"]
    (tmp_path / "late.txt").write_bytes("".join(lines).encode() + b"\xff\n")
    files = files_of([tmp_path], on_bad="skip")
    kept_text = "".join(document.text for document in files)
    assert "".join(lines).startswith(kept_text)
    assert len(kept_text) > 500_000
    assert [bad.place for bad in files.report.bad] == ["piece 2"]


def test_where_no_file_can_be_read_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match=r"none of 1 files .*a\.bin"):
        files_of([tmp_path], on_bad="skip")


def test_json_lines_are_read_as_text_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    assert read(files_of([tmp_path], json_as_text=True)) == [("a.jsonl", JSON_LINES.decode())]


def test_a_description_beside_data_is_not_read_but_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("# Data")
    (tmp_path / "data/train.jsonl").write_text('{"text": "a"}\n')
    files = files_of([tmp_path])
    assert [document.text for document in files] == ["a"]
    assert [path.name for path in files.aside] == ["README.md"]
    assert len(list(files_of([tmp_path / "README.md", tmp_path / "data"]))) == 2
    (tmp_path / "data/train.jsonl").unlink()
    assert [document.text for document in files_of([tmp_path])] == ["# Data"]


def saved(folder: Path, texts: list[str]) -> Path:
    """A folder as ``datasets.Dataset.save_to_disk`` writes it, in two files, with a cache file besides."""
    folder.mkdir(parents=True)
    table = pa.table({"text": texts})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 2), table.slice(2)), strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part, max_chunksize=1)
    (folder / "cache-1234.arrow").write_bytes((folder / names[0]).read_bytes())
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_that_datasets_saved_gives_the_rows_of_its_data_files(tmp_path: Path) -> None:
    texts = ["one", "two", "three", "four"]
    for folder in (saved(tmp_path / "alone", texts), saved(tmp_path / "within/deep/set", texts).parent):
        assert [document.text for document in files_of([folder])] == texts


def test_the_splits_to_read_must_be_named_if_there_are_several(tmp_path: Path) -> None:
    saved(tmp_path / "train", ["a", "b", "c"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(list(files_of([tmp_path]))) == 3
    saved(tmp_path / "test", ["d", "e", "f"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    with pytest.raises(CorpusError, match=r"holds the splits test, train of a dataset; .*/train"):
        files_of([tmp_path])
    assert [document.text for document in files_of([tmp_path / "train"])] == ["a", "b", "c"]


def test_a_selection_of_rows_that_was_not_written_out_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "set", ["a", "b", "c"])
    state = json.loads((tmp_path / "set/state.json").read_text())
    (tmp_path / "set/state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(CorpusError, match="flatten_indices"):
        files_of([tmp_path / "set"])


def test_documents_are_as_they_were_before_other_formats_were_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "long.txt").write_text("line\n" * 300_000)
    names = list(files_of([tmp_path]))
    assert names[0] == Document("a.txt", "a")
    assert [document.name for document in names[1:]] == ["long.txt#0", "long.txt#1"]


def test_a_json_array_is_text_and_is_distinguished_from_other_json(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[\n  {"text": "a"}, {"text": "b"}]')
    (tmp_path / "settings.json").write_text('{"rows": [{}]}')
    files = files_of([tmp_path])
    assert len(list(files)) == 2
    assert [path.name for path in files.arrays()] == ["rows.json"]


def test_a_link_to_a_folder_is_not_followed_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "data" / "below").mkdir(parents=True)
    (tmp_path / "data" / "b.txt").write_text("b")
    (tmp_path / "data" / "below" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data")
    files = files_of([tmp_path / "data"])
    assert [d.name for d in files] == ["b.txt"]
    assert files.linked == (tmp_path / "data" / "below" / "link", tmp_path / "data" / "circle")


def test_one_object_of_json_beside_rows_alone_is_set_aside_and_beside_texts_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "stat.json").write_text('{\n "rows": 1\n}\n')
    files = files_of([tmp_path])
    assert [d.text for d in files] == ["one"]
    assert files.aside == (tmp_path / "stat.json",)
    assert len(list(files_of([tmp_path / "rows.jsonl", tmp_path / "stat.json"]))) == 2, "it was named"
    (tmp_path / "note.txt").write_text("a text")
    assert files_of([tmp_path]).aside == ()


def test_a_name_that_is_not_utf8_is_escaped_in_the_error_and_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with open(os.path.join(os.fsencode(tmp_path), b"\xff.txt"), "w") as file:
        file.write("b")
    with pytest.raises(
        CorpusError, match=r"udcff\.txt.*has a name that is not UTF-8; rename it.*--on-bad skip"
    ):
        files_of([tmp_path])
    files = files_of([tmp_path], on_bad="skip")
    assert [d.text for d in files] == ["a"]
    assert files.report.bad_count == 1


def test_a_zstd_file_that_needs_a_dictionary_is_not_called_cut_or_changed(tmp_path: Path) -> None:
    samples = [f'{{"text": "row {number} of many rows that are alike"}}\n'.encode() for number in range(2000)]
    dictionary = zstandard.train_dictionary(1024, samples)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(dict_data=dictionary).compress(b"".join(samples)))
    with pytest.raises(
        CorpusError, match=rf"needs the zstd dictionary {dictionary.dict_id()}, which is not read"
    ):
        files_of([path])


def test_a_bit_that_flipped_in_a_parquet_page_with_a_checksum_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    text = [f"row {number} " + "of plain text " * 20 for number in range(400)]
    table = pa.table({"text": text})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"row 200") + 30] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"rows\.parquet.*is damaged"):
        list(files_of([path]))


@pytest.mark.parametrize("damage", [b"", b"no gzip"])
def test_rows_before_the_damage_of_a_compressed_file_are_kept_with_skip(
    tmp_path: Path, damage: bytes
) -> None:
    rows = b"".join(b'{"text": "row %d"}\n' % number for number in range(2000))
    packed = gzip.compress(rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(packed + damage if damage else packed[:-9])
    with pytest.raises(CorpusError, match=r"rows\.jsonl\.gz is damaged"):
        files_of([tmp_path])
    files = files_of([tmp_path], on_bad="skip")
    kept = [document.text for document in files]
    assert kept == [f"row {number}" for number in range(len(kept))]
    assert len(kept) == 2000 if damage else len(kept) > 1900
    assert [bad.path.name for bad in files.report.bad] == ["rows.jsonl.gz"]


def test_a_row_that_is_still_being_written_is_called_a_change_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"te')
    rows = iter(files_of([path]))
    assert next(rows).text == "one"
    with path.open("a") as file:
        file.write('xt": "three"}\n')
    with pytest.raises(CorpusError, match=r"rows\.jsonl changed while it was being prepared"):
        list(rows)


def test_a_field_within_a_field_is_named_with_what_writes_it_as_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"doc": {"text": "one"}}\n' * 2)
    with pytest.raises(
        CorpusError, match=r"a field within 'doc' is not read: .*jq -c '\{text: \.doc\.text\}'"
    ):
        files_of([tmp_path], ReadOptions(text_field="doc.text"))
