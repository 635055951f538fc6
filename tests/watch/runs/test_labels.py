"""Tags and notes are in a file of the run, and only what can be kept is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_watch.runs.row import LabelError, RunLabels, read_labels, write_labels

TAGS = st.text(st.characters(categories=["L", "N", "P"], exclude_characters=","), min_size=1, max_size=20)


@given(tags=st.sets(TAGS, max_size=8), note=st.text(max_size=200))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, tags: set[str], note: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    labels = RunLabels(tuple(sorted(tags)), note)
    if "\ud800" <= max(note, default="") <= "\udfff":
        return
    write_labels(folder, labels)
    assert read_labels(folder) == labels


def test_tags_are_kept_once_and_in_order_and_can_be_taken_away() -> None:
    labels = RunLabels().tagged("good", "base", at_s=1.0).tagged("good", at_s=2.0)
    assert labels.tags == ("base", "good")
    assert labels.tagged_s == {"base": 1.0, "good": 2.0}
    assert labels.untagged("base", "never there").tags == ("good",)


@pytest.mark.parametrize("tag", ["", "two words", "a,b", "x" * 65, "line\nbreak", "\x1b[31m"])
def test_what_is_no_tag_is_refused_by_its_name(tag: str) -> None:
    with pytest.raises(LabelError, match="is no tag"):
        RunLabels().tagged(tag, at_s=1.0)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"tags": 3, "note": []}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_damaged_file_has_no_labels_and_harms_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "labels.json").write_bytes(content)
    assert read_labels(tmp_path) == RunLabels()
