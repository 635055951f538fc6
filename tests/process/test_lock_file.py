"""A lock file has one holder, which others can name, and is free again when the holder has ended."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from phalanx.process.lock_file import LockHeldError, holder_of, lock_file


def test_a_lock_that_is_held_is_refused_with_the_name_of_its_holder(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock")
    try:
        with pytest.raises(LockHeldError) as refused:
            lock_file(tmp_path / "lock")
        assert re.fullmatch(rf"process {os.getpid()} on .+", refused.value.holder)
        assert holder_of(tmp_path / "lock") == refused.value.holder
    finally:
        os.close(lock)


def test_a_lock_is_free_once_its_descriptor_is_closed_and_its_file_stays(tmp_path: Path) -> None:
    os.close(lock_file(tmp_path / "lock"))
    assert holder_of(tmp_path / "lock") == ""
    assert (tmp_path / "lock").exists()
    os.close(lock_file(tmp_path / "lock"))


def test_a_lock_without_a_file_is_held_by_nobody(tmp_path: Path) -> None:
    assert holder_of(tmp_path / "lock") == ""
