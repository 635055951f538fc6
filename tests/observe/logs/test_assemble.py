"""Records of the output of a process, for any cut of it into pieces."""

from __future__ import annotations

import itertools
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.logs.assemble import MOST, Assembler, Record, clean
from phalanx.observe.logs.line import level_of


def records(*pieces: str) -> list[Record]:
    """All records of a process that writes these pieces and ends."""
    assembler = Assembler()
    return [record for piece in pieces for record in assembler.add(piece)] + assembler.settle()


def traceback_of(raised: BaseException) -> str:
    return "".join(traceback.format_exception(raised))


def chained() -> str:
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        return traceback_of(error)


def test_a_traceback_is_one_record_and_complete_as_soon_as_its_exception_is_named() -> None:
    try:
        raise ValueError("bad luck")
    except ValueError as error:
        text = traceback_of(error)
    assembler = Assembler()
    assembled = assembler.add("before\n" + text)
    assert [record.text for record in assembled] == ["before", text.rstrip()]
    assert [record.level for record in assembled] == ["info", "error"]
    assert assembler.settle() == []


def test_a_chain_of_exceptions_goes_on() -> None:
    first, second = records(chained(), "after\n")[:2]
    assert first.text.endswith("KeyError: 'inner'")
    assert second.goes_on
    assert second.text.startswith("The above exception was the direct cause")
    assert second.text.endswith("ValueError: outer")
    assert records(chained(), "after\n")[2] == Record("after", "info")


@given(st.lists(st.integers(0, 400), max_size=8))
def test_it_does_not_matter_how_a_text_is_cut(cuts: list[int]) -> None:
    text = f"one\n[rank1]: WARN two\n{chained()}\x1b[31mthree\x1b[0m\n\rfour\rfive\nsix"
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    assert records(*pieces) == records(text)


def test_a_crash_report_is_one_record() -> None:
    text = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "a.py", line 1 in f\n\nExtension modules: numpy (total: 1)'
    assert records(text + "\n") == [Record(text, "error")]


def test_a_private_key_is_one_record_so_that_it_can_be_masked() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQE\n-----END PRIVATE KEY-----"
    assert [record.text for record in records(f"a\n{key}\nb\n")] == ["a", key, "b"]


def test_a_line_without_an_end_is_cut_and_bounded() -> None:
    assembled = records(*["x" * 100_000] * 50, "\nnext\n")
    assert sum(len(record.text) for record in assembled) < 4 * MOST
    assert assembled[-1].text == "next"


@pytest.mark.parametrize("text", ["\x1b]0;title\x07hi", "\x1b[2Jhi", "a\x00b\x9b31mhi", "\u202ehi"])
def test_no_record_can_command_a_terminal(text: str) -> None:
    (record,) = records(text + "\n")
    assert record.text.endswith("hi")
    assert record.text.isprintable()


def test_a_progress_bar_leaves_its_last_drawing() -> None:
    assert records("".join(f"\r{n}%" for n in range(101)), "\n") == [Record("100%", "info")]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Traceback (most recent call last):", "error"),
        ("RuntimeError: Connection closed by peer", "error"),
        ("[rank3]: torch.OutOfMemoryError: CUDA out of memory", "error"),
        ("host:12:34 [0] NCCL WARN Call to connect returned Connection refused", "warning"),
        ("host:12:34 [0] NCCL INFO Bootstrap : Using eth0", "info"),
        ("[W1125 07:20:37.1 socket.cpp:200] The server socket has failed", "warning"),
        ("E1125 07:20:37 1234 file.cc:12] could not", "error"),
        ("a.py:3: UserWarning: error: may be wrong", "warning"),
        ("loss 3.1, error bars of 0.2", "info"),
        ("DEBUG: x", "debug"),
        ("error: the disk is full", "error"),
        ("worker 0 ended with code -9", "warning"),
    ],
)
def test_the_level_of_a_line_is_read_from_its_words(text: str, level: str) -> None:
    assert level_of(text) == level


def test_a_line_of_a_million_control_characters_is_shortened_before_they_are_escaped() -> None:
    text = clean("\0" * 10**6 + "end")
    assert text.endswith("\\x00end")
    assert len(text) < 5 * MOST
