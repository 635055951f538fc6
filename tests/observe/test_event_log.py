"""The event file under kills, full disks and readers that come at the wrong moment."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.recorded import crashed_run
from phalanx.observe.event_log import EventLog, EventLogError, follow, newest_event, next_attempt, read_events
from phalanx.observe.events import Event, Message, Torn, encode


def texts(events: Iterator[Event]) -> list[str]:
    return [
        event.body.text if isinstance(event.body, Message) else type(event.body).__name__ for event in events
    ]


def write(path: Path, *words: str, attempt: int = 0) -> None:
    with EventLog(path, attempt) as log:
        for word in words:
            log.append(Message("info", word))


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=3, clock=lambda: 17.0) as log:
        written = [log.append(event.body) for event in crashed_run()]
    assert list(read_events(path)) == written
    assert {(event.t, event.attempt) for event in written} == {(17.0, 3)}


@settings(max_examples=40)
@given(cut=st.integers(1, 200))
def test_a_torn_line_costs_itself_and_nothing_written_after_it(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    write(path, "first", "second")
    content = path.read_bytes()
    kept = len(content) - 1 - cut % (len(content) - 1)
    path.write_bytes(content[:kept])
    write(path, "after", attempt=1)
    read = texts(read_events(path))
    assert read[-1] == "after"
    assert [word for word in read[:-1] if word != "Torn"] == ["first", "second"][
        : len(read) - 1 - read.count("Torn")
    ]


@settings(max_examples=100)
@given(st.lists(st.sampled_from("abc")), st.integers(0, 60), st.integers(1, 100), st.sampled_from("abcd"))
def test_the_newest_event_is_found_from_the_end_as_from_the_beginning(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], cut: int, block_bytes: int, sought: str
) -> None:
    path = tmp_path_factory.mktemp("newest") / "events.jsonl"
    write(path, *words)
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
    write(path, attempt=1)
    matches = [event for event in read_events(path) if event.body == Message("info", sought)]
    newest = newest_event(path, lambda event: event.body == Message("info", sought), block_bytes)
    assert newest == (matches[-1] if matches else None)


def test_a_torn_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "first")
    with path.open("ab") as file:
        file.write(b'{"t":1,"att')
    assert texts(read_events(path)) == ["first"]
    write(path, "after")
    assert [event.body for event in read_events(path)][1] == Torn(2, '{"t":1,"att')


def test_a_writer_killed_at_any_moment_leaves_every_line_but_the_last_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from phalanx.observe.event_log import EventLog\n"
        "from phalanx.observe.events import Message\n"
        f"log = EventLog(Path({str(path)!r}), 0); i = 0\n"
        "while True:\n    log.append(Message('info', str(i))); i += 1; i == 50 and print(flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    read = texts(read_events(path))
    assert len(read) >= 50
    assert read == [str(i) for i in range(len(read))]


def test_a_full_disk_is_an_error_with_a_remedy_and_loses_no_earlier_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with EventLog(path, 0) as log:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            for _ in range(2):  # first a write cut short, then one refused
                with pytest.raises(EventLogError, match="Free space"):
                    log.append(Message("info", "does not fit"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        log.append(Message("info", "after"))
    assert texts(read_events(path)) == ["first", "Torn", "after"]


def test_appending_from_several_threads_never_mixes_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, 0) as log:
        threads = [
            threading.Thread(
                target=lambda k=k: [log.append(Message("info", f"{k}" * 300)) for _ in range(100)]
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = texts(read_events(path))
    assert sorted(read) == sorted(f"{k}" * 300 for k in range(4) for _ in range(100))


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="nowhere"):
        EventLog(tmp_path / "nowhere" / "events.jsonl", 0)


def test_reading_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"no event file .*events\.jsonl"):
        list(read_events(tmp_path / "events.jsonl"))


def test_attempts_are_numbered_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert next_attempt(path) == 0
    write(path, "a", attempt=0)
    write(path, "b", attempt=1)
    assert next_attempt(path) == 2


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 6000), max_size=12))
def test_following_a_growing_file_gives_what_reading_it_whole_gives(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    """The file grows between polls, by pieces that end anywhere in a line."""
    path = tmp_path_factory.mktemp("follow") / "events.jsonl"
    events = crashed_run()
    content = b"".join(map(encode, events))
    ends = sorted({min(cut, len(content)) for cut in cuts} | {len(content)})

    def grow_then_stop() -> bool:
        if not ends:
            return True
        path.write_bytes(content[: ends.pop(0)])
        return False

    assert list(follow(path, grow_then_stop, poll_s=0.0)) == events


def test_following_waits_for_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    polls = 0

    def stop() -> bool:
        nonlocal polls
        polls += 1
        if polls == 3:
            write(path, "late")
        return polls >= 3

    assert texts(follow(path, stop, poll_s=0.0)) == ["late"]


def test_following_a_file_that_somebody_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "one", "two")
    following = follow(path, lambda: False, poll_s=0.0)
    assert texts(iter([next(following), next(following)])) == ["one", "two"]
    os.truncate(path, 10)
    with pytest.raises(EventLogError, match="shrank"):
        next(following)
