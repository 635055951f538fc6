"""Where caches are, also of a user without a home."""

from __future__ import annotations

import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from phalanx.run.directory.files import home, user_cache
os.setuid(int(sys.argv[1]))
print(home(), user_cache(), sep="\\n")
"""


def home_of(uid: int, temporary: Path) -> Path:
    return home_and_cache_of(uid, temporary)[0]


def home_and_cache_of(uid: int, temporary: Path) -> list[Path]:
    """The home of a user without a name, and the folder of their caches, in a process of its own."""
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(uid)], env=environment, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture
def nameless() -> int:
    uid = 54_321
    if Path("/proc/self/uid_map").exists() and not can_change_user():
        pytest.skip("only root can become another user")
    assert uid not in {entry.pw_uid for entry in pwd.getpwall()}
    return uid


def can_change_user() -> bool:
    return subprocess.run([sys.executable, "-c", "import os; os.setuid(54321)"], check=False).returncode == 0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder that every user may write to, outside those of this user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_a_user_without_a_name_has_a_temporary_home_that_is_private_and_stays(
    nameless: int, temporary: Path
) -> None:
    first = home_of(nameless, temporary)
    assert first.parent == temporary
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert home_of(nameless, temporary) == first


def test_a_temporary_home_that_another_user_has_made_is_not_taken(nameless: int, temporary: Path) -> None:
    (temporary / f"phalanx-{nameless}").mkdir(mode=0o777)
    assert home_of(nameless, temporary) != temporary / f"phalanx-{nameless}"


def test_the_caches_of_a_user_without_a_name_are_in_their_temporary_home(
    nameless: int, temporary: Path
) -> None:
    home, cache = home_and_cache_of(nameless, temporary)
    assert cache == home / ".cache" / "phalanx"
