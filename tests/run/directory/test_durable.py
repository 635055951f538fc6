"""Small files under crashes and failing disks: what a reader finds is the old content or the new one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.run.directory import files
from phalanx.run.directory.files import remove_temporaries, write_atomically

OLD, NEW = b"old " * 5000, b"new " * 7000

KILLED_AT_EACH_CALL = """
import os, signal, sys
from pathlib import Path
from phalanx.run.directory.files import write_atomically

calls, deadly = 0, 0

def dying(call):
    def wrapped(*args, **kwargs):
        global calls
        for after in (False, True):
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if not after:
                result = call(*args, **kwargs)
        return result
    return wrapped

os.open, os.fsync, os.rename, os.close = map(dying, (os.open, os.fsync, os.rename, os.close))
old, new, folder = sys.argv[1].encode(), sys.argv[2].encode(), Path(sys.argv[3])
survived = False
while not survived:
    deadly += 1
    (folder / str(deadly)).mkdir()
    path = folder / str(deadly) / "file"
    path.write_bytes(old)
    child = os.fork()
    if not child:
        calls = 0
        write_atomically(path, new)
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
"""


def test_whenever_its_process_is_killed_the_old_or_the_new_content_is_there(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_CALL, OLD.decode(), NEW.decode(), tmp_path], check=True
    )
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    contents = [(folder / "file").read_bytes() for folder in folders]
    turned = contents.index(NEW)
    # Two moments each around: open, fsync, rename; then open, fsync and close of the folder. Then one that survives.
    assert len(contents) == 13
    assert contents == [OLD] * turned + [NEW] * (len(contents) - turned)
    assert turned == 5  # the rename, and nothing but it, makes the new content visible
    for folder in folders:
        # Leftovers of a killed writer do not disturb the next one.
        write_atomically(folder / "file", NEW)
        remove_temporaries(folder)
        assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["open", "fsync", "rename"])
def test_where_the_disk_fails_the_old_content_stays_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, OLD)

    def failing(*_args: object, **_kwargs: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(files.os, call, failing)
        with pytest.raises(OSError, match="Input/output"):
            write_atomically(path, NEW)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_writers_of_one_file_do_not_mix_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + i]) * 50_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_atomically(path, content), contents * 4))
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_writers_with_one_number_of_a_thread_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Containers number their threads in the same way, and one number is given to thread after thread.
    path, names = tmp_path / "file", list[str]()
    opened = os.open

    def noted(name: Path, *flags: int) -> int:
        if str(name).endswith(".tmp"):
            names.append(Path(name).name)
            if len(names) == 1:
                write_atomically(path, NEW)  # the other one, in the middle of this one
        return opened(name, *flags)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "open", noted)
        write_atomically(path, OLD)
    assert len(set(names)) == 2
    assert path.read_bytes() == OLD
    for name in names:
        (tmp_path / name).touch()  # as if both had been killed
    assert remove_temporaries(tmp_path) == sorted(names)


def test_only_what_a_killed_writer_left_behind_is_removed(tmp_path: Path) -> None:
    for name in ("file", ".hidden", "note.tmp", ".file.4711.tmp"):
        (tmp_path / name).touch()
    assert remove_temporaries(tmp_path) == [".file.4711.tmp"]
    assert sorted(os.listdir(tmp_path)) == [".hidden", "file", "note.tmp"]


def test_a_secret_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    write_atomically(tmp_path / "journal", b"", mode=0o600)
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_status_is_replaced_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    synced: list[int] = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    write_atomically(path, OLD, durable=False)
    assert not synced
    write_atomically(path, NEW)
    assert len(synced) == 2  # the file and its folder
    assert path.read_bytes() == NEW


def test_the_error_of_a_full_disk_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    path, (soft, hard) = tmp_path / "status.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write_atomically(path, OLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(OLD), hard))
    try:
        with pytest.raises(OSError, match=r"status\.json") as raised:
            write_atomically(path, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["status.json"]
