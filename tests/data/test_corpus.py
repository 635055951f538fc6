"""Corpora: the same documents in the same order, and nothing of a file lost."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.corpus import named_corpus, python_stdlib, text_files, without_bad_files
from phalanx.data.errors import CorpusError


def test_the_standard_library_is_found_in_order_and_without_tests() -> None:
    documents = python_stdlib()
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"python_stdlib/dataclasses.py", "python_stdlib/json/decoder.py"} <= set(names)
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert sum(len(document.text) for document in documents) > 5_000_000


def test_the_standard_library_is_the_same_twice() -> None:
    assert python_stdlib() == python_stdlib()


def test_a_mistyped_corpus_is_told_the_right_name() -> None:
    with pytest.raises(CorpusError, match="did you mean 'python-stdlib'"):
        named_corpus("python_stdlb")


def test_files_of_a_folder_are_named_by_their_path_below_it(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/b/d.md", ".hidden/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [(d.name, d.text) for d in text_files([tmp_path])] == [
        (n, n) for n in ("a/b/d.md", "a/c.txt", "b.txt")
    ]


def test_a_glob_names_files_below_its_first_wildcard(tmp_path: Path) -> None:
    for name in ("x/a.txt", "x/b.md", "y/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.name for d in text_files([tmp_path / "**/*.txt"])] == ["x/a.txt", "y/a.txt"]


def test_names_do_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    names = []
    for place in ("here", "over/there"):
        (tmp_path / place / "books").mkdir(parents=True)
        (tmp_path / place / "books/one.txt").write_text("one")
        names.append([d.name for d in text_files([tmp_path / place / "books"])])
    assert names[0] == names[1]


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert len(list(text_files([tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"]))) == 1


def test_line_ends_and_byte_order_marks_stay_as_they_are(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert [document.text for document in text_files([tmp_path])] == [text]


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("ab\né日👩")), document_bytes=st.integers(4, 20))
def test_pieces_of_a_long_file_join_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, document_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "long.txt"
    path.write_bytes(text.encode())
    documents = list(text_files([path], document_bytes=document_bytes))
    assert "".join(document.text for document in documents) == text
    assert all(len(document.text.encode()) <= document_bytes for document in documents)


def test_a_long_file_is_cut_after_lines(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("one\ntwo\nthree\n" * 20)
    documents = list(text_files([tmp_path], document_bytes=40))
    assert [document.name for document in documents[:2]] == ["long.txt#0", "long.txt#1"]
    assert all(document.text.endswith("\n") for document in documents)


def test_a_pattern_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file matches .*\*\.txt"):
        text_files([tmp_path / "*.txt"])


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin\.txt is not UTF-8 .*iconv"):
        list(text_files([tmp_path]))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    corpus = text_files([tmp_path])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*a\.txt"):
        list(corpus)


def test_files_that_are_no_text_are_left_out_whole_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("gut: äöü")
    (tmp_path / "latin.txt").write_bytes("äöü".encode("latin-1"))
    # Good for more than a block, cut in a character, and bad at its end.
    (tmp_path / "late.txt").write_bytes(("ä" * 600_000).encode() + b"\xff")
    (tmp_path / "torn.txt").write_bytes("ä".encode()[:1])
    told: list[tuple[int, int]] = []
    kept, bad = without_bad_files(text_files([tmp_path]), lambda done, total: told.append((done, total)))
    assert [document.name for document in kept] == ["good.txt"]
    assert [file.path.name for file in bad] == ["late.txt", "latin.txt", "torn.txt"]
    assert all("is not UTF-8 text" in file.reason for file in bad)
    assert told[-1] == (4, 4)


def test_where_no_file_is_text_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match=r"none of 1 files .*a\.bin"):
        without_bad_files(text_files([tmp_path]))
