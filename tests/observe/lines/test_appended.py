"""Appending whole lines: a line that a disk in trouble tore costs no other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from phalanx.observe.lines.appended import AppendedFile


def test_a_line_of_which_a_part_was_written_before_an_error_costs_none_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendedFile(tmp_path / "lines")
    whole = os.write

    def torn(descriptor: int, line: bytes) -> int:
        whole(descriptor, line[: len(line) // 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file.append(b"first\n")
    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(OSError, match="Input/output error"):
        file.append(b"second\n")
    monkeypatch.undo()
    offset = file.append(b"third\n")
    file.close()
    content = (tmp_path / "lines").read_bytes()
    assert content[offset:] == b"third\n"
    assert content.split(b"\n")[0] == b"first"
    assert content[offset - 1 : offset] == b"\n"
