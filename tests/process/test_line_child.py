"""A child that replies to lines with lines, and what becomes of one that does not."""

from __future__ import annotations

import signal
import sys

import pytest

from phalanx.process.child import LineChild

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_each_request_has_its_reply() -> None:
    child = LineChild([sys.executable, "-c", ECHO])
    for number in range(3):
        assert child.exchange({"number": number, "text": "ä\n"}) == {"number": number, "text": "ä\n"}
    assert child.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("exit 3", 3),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("read line; echo no JSON; sleep 600", -signal.SIGKILL),
        ("read line; tr '\\0' ' ' < /dev/zero", -signal.SIGKILL),
        ("exec 0<&- 1>&-; sleep 600", -signal.SIGKILL),
        ("read line; printf half", 0),
    ],
)
def test_a_child_that_does_not_reply_has_ended(program: str, code: int) -> None:
    child = LineChild(["sh", "-c", program], quiet=True)
    assert child.exchange({}) is None
    assert child.end() == code
