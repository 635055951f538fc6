"""Temporary folders of a preparation."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.raw_files import LocalBytes, RawFile, scratch_folder
from small_disks import small_disk


def test_a_full_temporary_disk_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", "64k") as mount:
        monkeypatch.setenv("TMPDIR", str(mount))
        monkeypatch.setattr(tempfile, "tempdir", None)
        with (
            pytest.raises(PreparationError, match=rf"no room in {mount} .*set TMPDIR"),
            scratch_folder("test-") as folder,
        ):
            (folder / "large").write_bytes(bytes(1 << 20))


def test_a_copy_that_cannot_be_written_is_named_with_its_cause(tmp_path: Path) -> None:
    local = LocalBytes(RawFile("s3://bucket/a.jsonl", "a.jsonl", 9, "etag", 0), tmp_path)
    local.path.unlink()
    local.path.mkdir()
    with pytest.raises(
        PreparationError, match=r"^cannot copy pieces of s3://bucket/a.jsonl .*Is a directory"
    ):
        local.bring(0, 9)
