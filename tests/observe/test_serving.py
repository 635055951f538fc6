"""A server keeps a note on itself in the directory of the run that it serves, until it ends."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observe.served_runs import SERVED
from phalanx.observe.record.notes import MOST_NOTES, SILENT_S, Serving, ServingNote, read_serving
from phalanx.run.directory.paths import RunDirectory

COUNT = st.integers(0, 1 << 62)
SECONDS = st.none() | st.floats(0, 1e6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), COUNT, COUNT, SECONDS, st.floats(0, 9e9))
def test_the_note_of_a_server_is_read_as_it_was_written(
    tmp_path: Path, model: str, state: str, finished: int, tokens: int, first: float | None, seen: float
) -> None:
    serving = replace(
        SERVED,
        model=model,
        state=state,
        finished=finished,
        generated_tokens=tokens,
        first_token_s=first,
        seen_s=seen,
    )
    ServingNote(RunDirectory(tmp_path), "here", lambda: serving).once()
    assert read_serving(RunDirectory(tmp_path)) == [serving]


def test_servers_have_notes_of_their_own_and_one_that_ends_takes_its_note_away(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    notes = []
    for number in range(2):
        serving = replace(SERVED, url=f"http://127.0.0.1:{number}/v1", seen_s=float(number))
        notes.append(ServingNote(directory, f"../no de/{number}", lambda serving=serving: serving))
        notes[-1].once()
    assert [entry.url for entry in read_serving(directory)] == [
        "http://127.0.0.1:1/v1",
        "http://127.0.0.1:0/v1",
    ]
    notes[0].start().close()
    assert [entry.url for entry in read_serving(directory)] == ["http://127.0.0.1:1/v1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serving"]


def test_a_server_that_was_killed_is_silent_after_a_while() -> None:
    assert not SERVED.silent(SERVED.seen_s + SILENT_S)
    assert SERVED.silent(SERVED.seen_s + SILENT_S + 1)


def test_a_run_directory_that_cannot_be_written_and_a_look_that_fails_delay_no_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "serving").write_text("a file in the folder's place")

    def look() -> Serving:
        raise RuntimeError("the engine is busy")

    for wrong in (look, lambda: SERVED):
        ServingNote(RunDirectory(tmp_path), "here", wrong).start().close()
    assert read_serving(RunDirectory(tmp_path)) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"model": 7}', b'"' + b"a" * (1 << 17) + b'"', None],
    ids=["empty", "no text", "deep", "nothing", "of another type", "long", "of no time"],
)
def test_a_note_that_is_none_costs_no_other(tmp_path: Path, content: bytes | None) -> None:
    directory = RunDirectory(tmp_path)
    ServingNote(directory, "good", lambda: SERVED).once()
    if content is None:
        content = msgspec.json.encode(asdict(replace(SERVED, seen_s=1e300)))
    (directory.serving / "bad.json").write_bytes(content)
    assert read_serving(directory) == [SERVED]


def test_only_the_newest_notes_of_a_full_folder_are_read(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.serving.mkdir()
    for number in range(MOST_NOTES + 9):
        left = directory.serving / f"here-{number}.json"
        left.write_text(json.dumps(asdict(SERVED)))
        os.utime(left, (SERVED.seen_s, SERVED.seen_s))
    now = replace(SERVED, seen_s=SERVED.seen_s + 1e6)
    ServingNote(directory, "here-90", lambda: now).once()
    os.utime(directory.serving / "here-90.json", (now.seen_s, now.seen_s))
    entries = read_serving(directory)
    assert len(entries) == MOST_NOTES
    assert entries[0] == now
