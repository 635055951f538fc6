"""Server-sent events that notify open pages of changed runs
(https://html.spec.whatwg.org/multipage/server-sent-events.html).

One task polls the files of all watched runs once a second, for all viewers together. It polls less often if notifying
viewers, and answering their requests, would take more than half a percent of a processor. A viewer has no queue, only
the newest change of each run. A slow viewer skips steps, is notified of the number, and uses no memory. A viewer that
reads nothing for half a minute is disconnected; its browser reconnects by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from anyio import to_thread
from starlette.types import Receive, Send

from phalanx.observe.record.notes import read_serving
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.page.runs import RunPlace

_LOG = logging.getLogger(__name__)
MOST_VIEWERS = 256
HEARTBEAT_S = 15.0
STALLED_S = 30.0
LOOK_S = 1.0
MOST_PAUSE_S = 15.0
_SHARE = 0.005
_NEWEST_COUNTS = 0.2
"""Weight of the newest poll in the mean."""
_FILES = ("events.jsonl", "ranks.bin", "fleet.json", "result.json", "serving")
"""The last one is the folder of servers' notes."""
_HEARTBEAT = b'data: {"kind":"heartbeat"}\n\n'
"""Heartbeat message. Scripts receive messages but not comments; a page that receives nothing for longer knows that
its server is down or hangs.
"""
News = dict[str, object]
Describe = Callable[[RunPlace], News]
"""Function that returns the notification of a changed run."""


class Viewer:
    """One open page: its runs, and the notifications that are not sent yet."""

    def __init__(self, places: Sequence[RunPlace]) -> None:
        self.places = {place.id: place for place in places}
        self._due: dict[str, News] = {}
        self._missed = 0
        self._woken = asyncio.Event()

    def note(self, place: RunPlace, news: News) -> None:
        """Store the newest change of a run until it is sent."""
        self._missed += place.id in self._due
        self._due[place.id] = news
        self._woken.set()

    async def next_lines(self, patience_s: float) -> bytes:
        """Return the pending notifications as lines of the protocol, and clear them; after ``patience_s`` without
        one, a heartbeat.

        The number of dropped ones follows, if there are some.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._woken.wait()
        self._woken.clear()
        due, missed = self._due, self._missed
        self._due, self._missed = {}, 0
        if not due:
            return _HEARTBEAT
        messages = [*due.values(), *([{"kind": "dropped", "count": missed}] if missed else [])]
        return b"".join(b"data: " + msgspec.json.encode(news) + b"\n\n" for news in messages)


class Pace:
    """Pause between two polls, from the processor time of the notifying thread since the last one.

    The time is averaged over some polls, so that opening a page, which costs as much as many notifications, delays
    nobody for long.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s, self._used_s, self._mean_s = least_s, math.inf, 0.0

    def pause_s(self, used_s: float) -> float:
        """Return the current pause, from the thread's total processor time."""
        since_s, self._used_s = max(0.0, used_s - self._used_s), used_s
        self._mean_s += _NEWEST_COUNTS * (since_s - self._mean_s)
        return min(max(self._least_s, self._mean_s / _SHARE), MOST_PAUSE_S)


class LiveUpdates:
    """All viewers, and the task that polls for them."""

    def __init__(
        self,
        describe: Describe,
        on_change: Callable[[RunPlace], None] = lambda _place: None,
        *,
        look_s: float = LOOK_S,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without viewers; nothing is polled before ``watch``.

        Args:
            describe: Called in a thread for a run that has changed.
            on_change: Called before its viewers are notified.
            look_s: Seconds between two polls, for a few viewers.
            stalled_s: Seconds without a read after which a viewer is disconnected.
            clock: Unix seconds, for the silence of servers.
        """
        self._describe, self._on_change = describe, on_change
        self._look_s, self._stalled_s, self._clock = look_s, stalled_s, clock
        self._viewers: set[Viewer] = set()
        self._signs: dict[str, object] = {}

    @property
    def full(self) -> bool:
        """True if there are as many viewers as one server has."""
        return len(self._viewers) >= MOST_VIEWERS

    async def watch(self) -> None:
        """Poll the viewers' runs until canceled; for each run that has changed, call ``on_change`` and notify its
        viewers.

        A poll that fails is skipped. An error other than ``OSError`` is a defect, which is logged, the same one in a row
        once.
        """
        pace, logged = Pace(self._look_s), ""
        while True:
            await asyncio.sleep(pace.pause_s(time.thread_time()))
            places = {place.id: place for viewer in self._viewers for place in viewer.places.values()}
            try:
                changed = await to_thread.run_sync(self._changed, list(places.values()))
            except OSError:  # a disk that is gone for a moment: the next poll retries
                continue
            except Exception as error:
                if repr(error) != logged:
                    logged = repr(error)
                    _LOG.exception("open pages miss news of the runs, by a defect; the next poll retries")
                continue
            for place, news in changed:
                self._on_change(place)
                for viewer in self._viewers:
                    if place.id in viewer.places:
                        viewer.note(place, news)

    def _changed(self, places: list[RunPlace]) -> list[tuple[RunPlace, News]]:
        """Return the runs whose files changed or whose servers went silent since the last poll, with their
        notifications. A newly watched run counts as unchanged.
        """
        changed, now = [], self._clock()
        signs: dict[str, object] = {}
        for place in places:
            sign = signs[place.id] = _sign(place, now)
            if place.id in self._signs and self._signs[place.id] != sign:
                changed.append((place, self._describe(place)))
        self._signs = signs
        return changed

    async def serve(self, places: Sequence[RunPlace], receive: Receive, send: Send) -> None:
        """Serve events to a viewer until it leaves, or does not read for ``stalled_s``. Its runs are polled
        meanwhile.

        Sends a heartbeat every ``HEARTBEAT_S`` without news.
        """
        viewer = Viewer(places)
        for place_id, sign in (await to_thread.run_sync(_signs_of, places, self._clock())).items():
            self._signs.setdefault(place_id, sign)  # the next poll detects changes since then
        self._viewers.add(viewer)
        leaving = asyncio.create_task(_until_left(receive))
        lines: asyncio.Task[bytes] | None = None
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"retry: 3000\n\n", "more_body": True})
            while not leaving.done():
                lines = asyncio.create_task(viewer.next_lines(HEARTBEAT_S))
                await asyncio.wait((lines, leaving), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    break
                body = {"type": "http.response.body", "body": lines.result(), "more_body": True}
                async with asyncio.timeout(self._stalled_s):
                    await send(body)
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return  # stalled, or gone: the connection is closed by the server
        finally:
            self._viewers.discard(viewer)
            leaving.cancel()
            if lines is not None:
                lines.cancel()


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _signs_of(places: Sequence[RunPlace], now: float) -> dict[str, object]:
    return {place.id: _sign(place, now) for place in places}


def _sign(place: RunPlace, now: float) -> object:
    """Return a value that changes with the run's files, and with the number of its servers that are silent."""
    stamps: list[tuple[int, int, int] | None] = []
    directory = RunDirectory(place.path)
    for name in _FILES:
        try:
            status = os.stat(directory.path / name)
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    # A killed server changes no file: only the time shows it.
    silent = sum(note.silent(now) for note in read_serving(directory)) if stamps[-1] else 0
    return (*stamps, silent)
