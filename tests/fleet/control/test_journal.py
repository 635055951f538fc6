"""The journal: what was synced is there again, a torn end is dropped, damaged lines are left out and named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.fleet.control.succession.journal import Journal, read_journal
from phalanx.fleet.core.invariants import JournalError

LINES = st.lists(st.binary(max_size=60).filter(lambda data: b"\n" not in data), min_size=1, max_size=8)


def written(folder: Path, lines: list[bytes]) -> Path:
    path = folder / "journal"
    path.unlink(missing_ok=True)
    journal = Journal(path)
    for line in lines:
        journal.append(line)
    journal.sync()
    journal.close()
    return path


def read(path: Path) -> list[bytes]:
    journal = Journal(path)
    journal.close()
    return journal.lines


@given(lines=LINES)
@settings(max_examples=20, deadline=None)
def test_what_was_appended_is_read_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    assert read(written(tmp_path_factory.mktemp("j"), lines)) == lines


@given(lines=LINES, data=st.data())
@settings(max_examples=30, deadline=None)
def test_cut_anywhere_it_keeps_the_whole_lines_before_the_cut_and_goes_on_behind_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("j"), lines)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    kept = content[:cut].count(b"\n")
    journal = Journal(path)
    assert journal.lines == lines[:kept]
    journal.append(b"after")
    journal.close()
    assert read(path) == [*lines[:kept], b"after"]


@given(lines=LINES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_one_flipped_bit_anywhere_costs_the_lines_that_it_is_in_and_is_reported(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("j"), lines)
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    hit = content[:where].count(b"\n")
    lost = (
        {hit, hit + 1} if content[where] == ord("\n") else {hit}
    )  # without its end a line runs into the next
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    journal = Journal(path)
    journal.close()
    assert journal.lines == [line for number, line in enumerate(lines) if number not in lost]
    assert journal.damaged[0] == hit + 1


def test_begun_anew_it_holds_only_the_new_first_line_and_what_follows(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(b"old")
    journal.replace_content(b"state")
    journal.append(b"next")
    journal.close()
    assert read(tmp_path / "journal") == [b"state", b"next"]
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_a_renewal_that_fails_at_any_call_loses_nothing_that_is_appended_then_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(1, 12):
        folder = tmp_path / str(call)
        folder.mkdir()
        journal = Journal(folder / "journal")
        journal.append(b"old")
        renewed = False
        with monkeypatch.context() as patched:
            fail_at(patched, call)
            with suppress(JournalError):
                journal.replace_content(b"state")
                renewed = True
            appended = False
            with suppress(JournalError):
                journal.append(b"next")
                appended = True
        if not appended:
            journal.append(b"next")
        journal.close()
        lines = read(folder / "journal")
        assert lines in ([b"state", b"next"], [b"old", b"next"])
        assert not renewed or lines[0] == b"state"


def fail_at(patched: pytest.MonkeyPatch, call: int) -> None:
    """Makes one call fail: number ``call`` of those of open, fsync and rename from here on."""
    count = 0

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def perhaps(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                raise OSError(errno.EIO, "the disk is not well")
            return real(*arguments)

        return perhaps

    for name in ("open", "fsync", "rename"):
        patched.setattr(os, name, failing(getattr(os, name)))


def test_where_the_disk_is_full_nothing_changes_and_the_same_append_succeeds_later(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.core.invariants import JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
journal.append(b"kept")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size_bytes + 10, hard))  # a disk with room for ten bytes
try:
    journal.append(b"too long for what is left")
except JournalError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(b"too long for what is left")
    journal.sync()
    print("refused once")
"""
    path = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused once\n", done.stderr
    assert read(path) == [b"kept", b"too long for what is left"]


def test_a_torn_line_that_cannot_be_cut_off_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal, write = Journal(path), os.pwrite
    journal.append(b"kept")

    def cut(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is not well")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:-5], at))
        patched.setattr(os, "ftruncate", cut)
        with pytest.raises(JournalError, match="cannot write the journal"):
            journal.append(b"a long line that is torn")
    assert read_journal(path) == [b"kept"]
    journal.append(b"short")
    journal.close()
    assert read(path) == [b"kept", b"short"]


def test_a_process_killed_while_it_appends_loses_at_most_what_it_had_not_appended(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from phalanx.fleet.control.succession.journal import Journal
journal = Journal(Path(sys.argv[1]))
for number in range(10**9):
    journal.append(str(number).encode())
    sys.stdout.write(f"{number}\\n"); sys.stdout.flush()
"""
    path = tmp_path / "journal"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    confirmed = [int(process.stdout.readline()) for _ in range(200)]
    process.kill()
    process.wait()
    appended = [int(line) for line in read(path)]
    assert appended == list(range(len(appended)))
    assert appended[-1] >= confirmed[-1]


def test_others_cannot_read_it(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    assert os.stat(tmp_path / "journal").st_mode & 0o077 == 0


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal(tmp_path / "missing" / "journal")
