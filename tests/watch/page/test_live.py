"""Changes of runs are sent to open pages, also beside pages that do not read."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from observe.recorded import step
from observe.served_runs import SERVED
from phalanx.observe.events import Event
from phalanx.observe.record.notes import SILENT_S, ServingNote
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.page.live import MOST_PAUSE_S, MOST_VIEWERS, LiveUpdates, Pace, Viewer
from phalanx_watch.page.runs import PageRuns, RunPlace
from watch.made_runs import crashed, write_events


def _news(lines: bytes) -> list[dict[str, Any]]:
    messages = [json.loads(line[6:]) for line in lines.split(b"\n") if line.startswith(b"data: ")]
    return [
        message for message in messages if message["kind"] != "heartbeat"
    ]  # a poll that came late adds heartbeats


def test_a_viewer_that_reads_slowly_gets_the_newest_and_the_number_that_it_missed(tmp_path: Path) -> None:
    async def scene() -> None:
        (place,) = PageRuns([crashed(tmp_path / "run")]).places()
        viewer = Viewer([place])
        for number in range(1000):
            viewer.note(place, {"id": place.id, "kind": "changed", "step": number})
        assert len(viewer._due) == 1
        changed, dropped = _news(await viewer.next_lines(1.0))
        assert changed["step"] == 999
        assert dropped == {"kind": "dropped", "count": 999}

    asyncio.run(scene())


def test_without_news_a_heartbeat_keeps_the_connection(tmp_path: Path) -> None:
    async def scene() -> bytes:
        return await Viewer(PageRuns([crashed(tmp_path / "run")]).places()).next_lines(0.01)

    assert json.loads(asyncio.run(scene()).removeprefix(b"data: ")) == {"kind": "heartbeat"}


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def _served(
    tmp_path: Path, send: Callable[[Any], Awaitable[None]], during: Callable[[LiveUpdates], Awaitable[None]]
) -> None:
    async def scene() -> None:
        runs = PageRuns([crashed(tmp_path / "run")])
        live = LiveUpdates(runs.news, look_s=0.02, stalled_s=0.2)
        watching = asyncio.create_task(live.watch())
        serving = asyncio.create_task(live.serve(runs.places(), _never, send))
        await during(live)
        serving.cancel()
        watching.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)
        assert live._viewers == set()

    asyncio.run(scene())


def test_a_change_of_a_run_reaches_its_viewers(tmp_path: Path) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def during(_live: LiveUpdates) -> None:
        for number in itertools.count(41):  # content at the first look is no news
            write_events(tmp_path / "run", [Event(1.9e9, 1, step(number, 100_000))])
            await asyncio.sleep(0.05)
            if _news(b"".join(sent)):
                return

    _served(tmp_path, send, during)
    (news,) = _news(b"".join(sent))[:1]
    assert news["kind"] == "changed"
    assert news["step"] >= 41


def test_a_defect_in_a_description_of_a_run_is_logged_and_ends_no_later_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, failed = PageRuns([crashed(tmp_path / "run")]), threading.Event()
    sent: list[bytes] = []

    def describe(place: RunPlace) -> dict[str, object]:
        if not failed.is_set():
            failed.set()
            raise KeyError("a defect")
        return runs.news(place)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def scene() -> None:
        live = LiveUpdates(describe, look_s=0.02)
        watching = asyncio.create_task(live.watch())
        serving = asyncio.create_task(live.serve(runs.places(), _never, send))
        number = 41
        async with asyncio.timeout(100):
            while not any(_news(lines) for lines in sent):
                write_events(tmp_path / "run", [Event(1.9e9, 1, step(number, 10_000))])
                number += 1
                await asyncio.sleep(0.05)
        serving.cancel()
        watching.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)

    asyncio.run(scene())
    assert failed.is_set()
    assert "KeyError: 'a defect'" in caplog.text


def test_a_viewer_that_is_canceled_as_a_message_was_sent_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async def send(message: Any) -> None:
            if message.get("body", b"").startswith(b"data"):
                # Runs after this call has returned, before its caller resumes.
                asyncio.get_running_loop().call_soon(serving.cancel)

        runs = PageRuns([crashed(tmp_path / "run")])
        live = LiveUpdates(runs.news, look_s=0.02)
        watching = asyncio.create_task(live.watch())
        serving = asyncio.create_task(live.serve(runs.places(), _never, send))
        for number in itertools.count(41):
            write_events(tmp_path / "run", [Event(1.9e9, 1, step(number, 100_000))])
            if (await asyncio.wait((serving,), timeout=0.05))[0]:
                break
        watching.cancel()
        assert serving.cancelled()

    asyncio.run(scene())


def test_a_viewer_that_takes_nothing_is_disconnected(tmp_path: Path) -> None:
    async def send(message: Any) -> None:
        if message.get("body", b"").startswith(b"data"):
            await asyncio.Event().wait()

    async def during(live: LiveUpdates) -> None:
        while not live._viewers:  # it looks at the run's files first, in a thread
            await asyncio.sleep(0.01)
        for number in itertools.count(41):
            write_events(tmp_path / "run", [Event(1.9e9, 1, step(number, 100_000))])
            await asyncio.sleep(0.05)
            if not live._viewers:
                return

    _served(tmp_path, send, during)


def test_updates_take_half_a_percent_of_a_processor_and_are_never_silent_for_long() -> None:
    pace, used = Pace(1.0), 70.0
    assert pace.pause_s(used) == 1.0, "what was used before the first look is not its cost"
    used += 0.06
    assert pace.pause_s(used) < 3.0, "a page that is opened delays nobody for long"
    for _ in range(60):
        used += 0.05
        pause_s = pace.pause_s(used)
    assert pause_s == pytest.approx(10.0, rel=1e-3)
    for _ in range(60):
        used += 1.0
        pause_s = pace.pause_s(used)
    assert pause_s == MOST_PAUSE_S
    for _ in range(60):
        pause_s = pace.pause_s(used)
    assert pause_s == 1.0


def test_there_are_only_so_many_viewers() -> None:
    live = LiveUpdates(lambda _place: {})
    live._viewers = {Viewer([]) for _ in range(MOST_VIEWERS)}
    assert live.full


def test_viewers_of_a_run_get_the_silence_of_its_server_which_changes_no_file(tmp_path: Path) -> None:
    runs = PageRuns([crashed(tmp_path / "run")])
    ServingNote(RunDirectory(tmp_path / "run"), "killed", lambda: SERVED).once()
    now = [SERVED.seen_s]
    live, places = LiveUpdates(runs.news, clock=lambda: now[0]), runs.places()
    live._changed(places)  # content at the first look is no news
    now[0] += SILENT_S
    assert live._changed(places) == []
    now[0] += 1.0
    assert [place.id for place, _ in live._changed(places)] == [places[0].id]
    assert live._changed(places) == []
