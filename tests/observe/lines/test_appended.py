"""Appending whole lines: a line that a disk in trouble tore costs no other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from phalanx.observe.lines import AppendedFile


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_line_that_ended_in_an_error_costs_none_of_the_next_and_leaves_no_blank_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    file = AppendedFile(tmp_path / "lines")
    write = os.write

    def torn(descriptor: int, line: bytes) -> int:
        write(descriptor, line[: int(len(line) * part)])
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
    lines = content.split(b"\n")
    assert (lines[0], lines[-2:]) == (b"first", [b"third", b""])
    assert b"\n\n" not in content
